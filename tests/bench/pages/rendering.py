"""Rendering turns results into text: it picks the machine that counts, and writes numbers with units, tables and sources."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results import RESULTS

MACHINES = ("h200", "h100", "cpu")
Data = dict[str, Any]

COMPILED = ("torch.compile", "torch.compile reduce-overhead", "torch.compile max-autotune")
COLUMNS = ("eager", *COMPILED, "tracefuse", "tracefuse CUDA graph")
SHORT = ("eager", "`torch.compile`", "`reduce-overhead`", "`max-autotune`", "tracefuse", "CUDA graph")
"""What `steps.py` times, and the titles of these columns."""


@dataclass(frozen=True)
class Results:
    """The committed results, by benchmark, and notebooks with what they printed."""

    folder: Path = RESULTS
    notebooks: Path = Path(__file__).parents[3] / "notebooks"

    def get(self, name: str) -> Data | None:
        """The result of a benchmark on the first of `MACHINES` that has one."""
        return next(iter(self.on_each_machine(name)), None)

    def on_each_machine(self, name: str) -> list[Data]:
        paths = (self.folder / f"{name}_{machine}.json" for machine in MACHINES)
        return [json.loads(path.read_text()) for path in paths if path.exists()]


def ms(value: float) -> str:
    """Three significant digits, with the unit that suits."""
    return f"{three(value * 1e3)} µs" if value < 0.1 else f"{three(value)} ms"


def three(value: float) -> str:
    """Three significant digits; whole numbers above a hundred."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def mega(nbytes: float) -> str:
    return f"{nbytes / 1e6:.0f}"


def device_of(environment: Mapping[str, Any]) -> str:
    """ "H200": the GPU without its maker and memory."""
    return environment["device"].removeprefix("NVIDIA ").removesuffix(" 80GB HBM3")


def measured_on(environment: Mapping[str, Any], script: str) -> str:
    versions = f"torch {environment['torch']}, triton {environment['triton']}"
    return f"{device_of(environment)}, {versions}, {environment['date'].split()[0]}, `{script}`"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def step_ms(program: Data, phase: str = "step") -> float:
    return program["times_ms"][phase]["median"]


def by_name(timing: Data) -> dict[str, Data]:
    return {program["name"]: program for program in timing["programs"]}


def said(
    script: str, name: str, on_each: bool = False
) -> Callable[[Callable[[Data, str], str]], Callable[[Results], str]]:
    """A block that says something of one result, whose source it is given as text, or with `on_each` of that of each machine;
    or that there is none."""

    def block(write: Callable[[Data, str], str]) -> Callable[[Results], str]:
        def written(results: Results) -> str:
            found = results.on_each_machine(name)[: None if on_each else 1]
            if not found:
                return f"Not measured: no result of `{script}` is committed."
            return "\n\n".join(write(one, measured_on(one["environment"], script)) for one in found)

        return written

    return block
