"""The machine that prices are for: one GPU, by its datasheet, for roofline times, passes and findings alike.

    tracefuse.target("L4")      from here on; `--target L4` for one command
    tracefuse.target()          which one it is, and why
    tracefuse.target("here")    no choice: the GPU that is here again

Without a choice it is the GPU that a program ran on or that is here, by what was measured of it, else by its datasheet. Where
no GPU is here and none was chosen, an H100 stands for one, as every price says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tracefuse.errors import OptionError
from tracefuse.optimizers.costs.cost import Peaks
from tracefuse.optimizers.costs.datasheets import TARGETS, DataSheet, promised, sheet_of
from tracefuse.optimizers.errors import nearest

HERE = "here"
_chosen: dict[str, str] = {}


@dataclass(frozen=True)
class Target:
    """The GPU that is priced for: its `name`, `why` it is that one, and the datasheet (None: of a GPU without one here)."""

    name: str
    why: str
    sheet: DataSheet | None

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"

    __repr__ = __str__


def target(name: str | None = None) -> Target:
    """Choose the GPU that everything is priced for in this process, or without a name say which one it is.

    `name` is one of `tracefuse.optimizers.costs.datasheets.TARGETS`, or "here" to take a choice back. Raises `OptionError` for
    any other. What was measured stays what it is; passes and findings are made anew when they are asked for again.
    """
    if name == HERE:
        _chosen.clear()
    elif name is not None:
        _chosen["name"] = target_name(name)
    if "name" in _chosen:
        return Target(_chosen["name"], "chosen", TARGETS[_chosen["name"]])
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
        return Target(gpu.removeprefix("NVIDIA "), "the GPU that is here", sheet_of(gpu))
    return Target("H100", "an example, since no GPU is here and none was chosen", TARGETS["H100"])


@contextmanager
def priced_for(name: str | None) -> Iterator[Target]:
    """A block in which the target is `name`, and afterwards what it was; None leaves it. Raises `OptionError` as `target`."""
    before = dict(_chosen)
    try:
        yield target(name)
    finally:
        _chosen.clear()
        _chosen.update(before)


def target_name(text: str) -> str:
    """The target that `text` names, whatever its case and spaces. Raises `OptionError` for none."""
    known = {_plain(name): name for name in TARGETS}
    if _plain(text) in known:
        return known[_plain(text)]
    near = nearest(text, TARGETS)
    meant = f"did you mean {near}? " if near else ""
    raise OptionError(f"there is no target {text!r}: {meant}choose from {', '.join(TARGETS)}, or {HERE}")


def chosen() -> DataSheet | None:
    """The datasheet of the GPU that was chosen in this process; None where none was."""
    return TARGETS[_chosen["name"]] if "name" in _chosen else None


def promised_here(gpu: str | None, tf32: bool, convolutions: bool) -> Peaks:
    """The figures to model with: those of the chosen target, else `promised` ones of the GPU that torch calls `gpu`; with
    tensor cores for matmuls and for `convolutions` of float32, or without."""
    sheet = chosen()
    return promised(gpu, tf32, convolutions) if sheet is None else sheet.peaks(tf32, convolutions)


def memory_bytes(gpu: str | None) -> float:
    """How much memory the chosen target has, else the GPU that torch calls `gpu`, else an H100."""
    return (chosen() or (sheet_of(gpu) if gpu else None) or TARGETS["H100"]).memory_bytes


def float32_rates(gpu: str | None) -> tuple[Peaks, Peaks]:
    """The figures of the same machine with float32 matmuls beside tensor cores, and on them."""
    sheet = chosen() or (sheet_of(gpu) if gpu else None) or TARGETS["H100"]
    return sheet.peaks(tf32=False), sheet.peaks(tf32=True)


def _plain(text: str) -> str:
    return text.casefold().replace(" ", "").replace("-", "").replace("_", "")
