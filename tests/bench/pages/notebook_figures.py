"""Figures that a stored notebook printed on a GPU, with the machine and the day of the run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pages.rendering import Results, ms


@dataclass(frozen=True)
class Printed:
    """The texts that a stored notebook's cells printed, in order."""

    name: str
    texts: tuple[str, ...]

    @classmethod
    def by(cls, path: Path) -> Printed | None:
        """None where no outputs are stored."""
        if not path.exists():
            return None
        cells = json.loads(path.read_text())["cells"]
        outputs = [output for cell in cells for output in cell.get("outputs", ())]
        texts = tuple("".join(output["text"]) for output in outputs if output["output_type"] == "stream")
        return cls(path.stem, texts) if texts else None

    def find(self, pattern: str) -> tuple[str, ...]:
        """The groups of the last match of `pattern`, line by line, in any output. Raises `LookupError` if there is none."""
        matches = [match for text in self.texts for match in re.finditer(pattern, text, re.MULTILINE)]
        if not matches:
            raise LookupError(f"no output of {self.name} matches {pattern!r}")
        return matches[-1].groups()

    def ms(self, program: str, phase: str) -> str:
        """The median of the last table of times that has the program."""
        return ms(float(self.find(rf"^{re.escape(program)} +{phase} +([\d.]+)")[0]))

    @property
    def device(self) -> str:
        return self._machine[0]

    @property
    def _machine(self) -> tuple[str, ...]:
        return self.find(r"^NVIDIA (.*?), (torch [^,+]*)[^,]*, (triton [^,]*), .*\d$")

    @property
    def source(self) -> str:
        device, torch, triton = self._machine
        (day,) = self.find(r"(\d{4}-\d\d-\d\d)$")
        return f"{device}, {torch}, {triton}, {day}, `notebooks/{self.name}.ipynb`"


def of_notebook(name: str) -> Callable[[Callable[[Printed], str]], Callable[[Results], str]]:
    """A block that says what a notebook printed; or that it holds no outputs."""

    def block(write: Callable[[Printed], str]) -> Callable[[Results], str]:
        def written(results: Results) -> str:
            found = Printed.by(results.notebooks / f"{name}.ipynb")
            return f"Not measured: no result of `{name}.ipynb` is stored." if found is None else write(found)

        return written

    return block


@of_notebook("03_why_is_my_backward_slow")
def slow_layer(found: Printed) -> str:
    title, worth = found.find(r"^high: (.*)\n(?:  .*\n)*?  worth: (.*?) \(")
    (slowest,) = found.find(r"^(\w+ takes most of the backward, \d+ %)")
    times = {name: found.ms(name, "step") for name in ("captured", "optimised", "torch.compile")}
    return (
        f"In the GPT of the picture, {slowest}. The first finding is “{title}”: {worth}. With all passes a step takes "
        f"{times['optimised']} instead of {times['captured']}; {times['torch.compile']} under `torch.compile` "
        f"({found.source})."
    )


@of_notebook("06_paying_for_frozen_layers")
def lora(found: Printed) -> str:
    backward = {name: found.ms(name, "backward") for name in ("captured", "frozen", "eager", "optimised")}
    saved = {name: found.find(rf"^{name} +\d+ +\d+ +\d+ +([\d.]+ [KMG]iB)")[0] for name in ("all trained", "frozen")}
    return (
        f"Freezing all but LoRA adapters, in one capture of a GPT with everything trainable, takes its backward from "
        f"{backward['captured']} to {backward['frozen']}, as eager of the model frozen by hand ({backward['eager']}), and to "
        f"{backward['optimised']} with all passes; its forward saves {saved['frozen']} instead of {saved['all trained']} "
        f"({found.source})."
    )
