"""The second run of programs that are timed: how their numbers differ, what memory they need, and how long they took."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tracefuse.device.clocks import Clock
from tracefuse.device.near_runtime import NOISE, TOLERANCE, distances, is_near, magnitude
from tracefuse.errors import MeasureError
from tracefuse.execution.agreement import max_abs_difference
from tracefuse.execution.program import Replays
from tracefuse.measure.timing import Difference, Rounding


@dataclass(frozen=True)
class Outputs:
    """What one replay gave, by name."""

    results: Mapping[str, Any]
    gradients: Mapping[str, Any]
    updated: Mapping[str, Any] = field(default_factory=dict)


Run = Callable[[str, Replays], Outputs]
"""Runs the program of that name once; a reference that is none of the programs is called ""."""


def phases_of(program: Replays) -> list[str]:
    """The phases that a program has, in their order."""
    found = {"forward": program.forward, "backward": program.backward, "update": program.update}
    return [phase for phase, run in found.items() if run is not None]


class SecondRun:
    """The run of each program that follows its first: what it gives, the time that it takes by phase, and the memory that a
    replay needs, which is what it adds at its peak and what it holds anyway (None where torch keeps no count).

    `run_whole` calls what runs each, once more where it was disturbed. Between two runs only what was made in between is
    searched for garbage, which is all that is new where Python collects none by itself (`uncollected`).
    """

    def __init__(
        self, clock: Clock, device: str | torch.device, run_whole: Callable[[Callable[[], Outputs]], Outputs]
    ) -> None:
        self.clock, self.run_whole = clock, run_whole
        self.counts_memory = torch.device(device).type == "cuda"
        self.samples: dict[str, dict[str, list[float]]] = {}
        self.peaks: dict[str, int | None] = {}

    def __call__(self, name: str, program: Replays) -> Outputs:
        return self.run_whole(lambda: self._run(name, program))

    def _run(self, name: str, program: Replays) -> Outputs:
        if program.reset is not None:
            program.reset()
        before = self._allocated()
        self.clock.wait()
        marks = [self.clock.mark()]
        state: Sequence[Any] = ((),) if program.forward is None else program.forward()
        # Before the backward runs: it may take the state apart.
        results = {f"result {i}": r.detach() if isinstance(r, torch.Tensor) else r for i, r in enumerate(state[0])}
        marks += [] if program.forward is None else [self.clock.mark()]
        gradients = [] if program.backward is None else list(program.backward(state))
        marks += [] if program.backward is None else [self.clock.mark()]
        updated = () if program.update is None else program.update(gradients)
        marks += [] if program.update is None else [self.clock.mark()]
        self.clock.wait()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # a copy into pinned memory may be under way
        if name:
            spans = zip(phases_of(program), itertools.pairwise(marks), strict=True)
            times = {phase: [self.clock.between_ms(*span)] for phase, span in spans}
            self.samples[name] = times | {"step": [self.clock.between_ms(marks[0], marks[-1])]}
            peak = torch.cuda.max_memory_allocated() - before + program.held_nbytes if self.counts_memory else None
            self.peaks[name] = peak
        names = program.gradients or tuple(f"gradient {i}" for i in range(len(gradients)))
        new = {
            f"new value {i}": tensor.clone() for i, tensor in enumerate(updated)
        }  # the next program writes there, too
        return Outputs(results, dict(zip(names, gradients, strict=True)), new)

    def _allocated(self) -> int:
        if not self.counts_memory:
            return 0
        torch.cuda.synchronize()
        gc.collect(1)  # what the run before dropped would count as memory that this one gives back
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()


def compare(programs: Mapping[str, Replays], reference: Replays | None, run: Run) -> dict[str, Difference | None]:
    """The difference of each program from `reference` (default: the first); None for the reference and what is not compared.

    Each is run once, the reference first. Raises `MeasureError` for outputs that do not match in number or shape.
    """
    chosen = reference or next(iter(programs.values()))
    first = next((name for name, program in programs.items() if program is chosen), "")
    expected = run(first, chosen)
    coarsest = chosen.coarsest
    return {
        name: None if name == first else _difference(name, one, run, expected, coarsest)
        for name, one in programs.items()
    }


def _difference(
    name: str, program: Replays, run: Run, expected: Outputs, coarsest: torch.dtype | None
) -> Difference | None:
    mine = run(name, program)
    if not program.compared:
        return None
    if program.gradients is None and len(mine.gradients) != len(expected.gradients):
        raise MeasureError(
            f"{name} returns {len(mine.gradients)} gradients where the reference returns {len(expected.gradients)}: name "
            "them with Replays(gradients=...) to compare those that both have"
        )
    if len(mine.results) != len(expected.results):
        raise MeasureError(
            f"{name} returns {len(mine.results)} results where the reference returns {len(expected.results)}: compare "
            "programs with the same results"
        )
    results = _apart(name, mine.results, expected.results)
    gradients = _apart(name, mine.gradients, expected.gradients, "gradient of ")
    updated = _apart(name, mine.updated, expected.updated) if program.update is not None else []
    judged = [*results, *gradients]
    return Difference(
        _largest(results),
        _largest(gradients),
        _largest(updated) if program.update is not None else None,
        _rounding(judged, coarsest) if 0 < _largest(judged) < math.inf else None,
        _are_near(updated, coarsest) if program.update is not None else None,
    )


@dataclass(frozen=True)
class _Apart:
    """An output of two programs, and its largest difference."""

    of: str
    mine: Any
    expected: Any
    delta: float

    @property
    def is_gradient(self) -> bool:
        return self.of.startswith("gradient ")


def _apart(name: str, mine: Mapping[str, Any], expected: Mapping[str, Any], kind: str = "") -> list[_Apart]:
    unknown = sorted(mine.keys() - expected.keys())
    if unknown:
        raise MeasureError(f"{name} has {unknown[0]}, which the reference has not: compare the same outputs")
    return [
        # A gradient may be called by its place alone, and what is computed from gradients is a result.
        _Apart(
            key if key.startswith(("result ", "gradient ")) else f"{kind}{key}",
            value,
            expected[key],
            max_abs_difference(f"{key} of {name}", value, expected[key]),
        )
        for key, value in mine.items()
    ]


def _largest(outputs: Sequence[_Apart]) -> float:
    """The largest difference of any output; NaN if any is, which `max` alone would lose."""
    deltas = [one.delta for one in outputs]
    return math.nan if any(map(math.isnan, deltas)) else max(deltas, default=0.0)


# --- in words ---------------------------------------------------------------------------------------------------------


def _rounding(outputs: Sequence[_Apart], coarsest: torch.dtype | None) -> Rounding:
    """How far the worst output is: one that is not near if any is, else the most rounding steps away."""
    largest = max((_size(one.expected) for one in outputs if one.is_gradient and one.expected is not None), default=0.0)
    found = [_of_one(one, largest if one.is_gradient else 0.0, coarsest) for one in outputs if one.delta > 0]
    return max(found, key=lambda one: (not one.is_near, one.steps or 0.0, one.delta))


def _are_near(updated: Sequence[_Apart], coarsest: torch.dtype | None) -> bool:
    """Whether the new values, taken as one vector, are within the tolerance. Not each by itself: of a gradient that is nothing
    but rounding, as that of the bias of a key, Adam makes a step as large as of any other."""
    apart, whole, allowed = 0.0, 0.0, TOLERANCE.get(coarsest, 0.0)
    for one in updated if any(one.delta != 0 for one in updated) else ():
        if one.mine is None:
            continue
        mine, expected = one.mine.detach(), one.expected.detach().to(one.mine.device)
        size, allowed = _norm(expected), max(allowed, TOLERANCE.get(mine.dtype, 0.0))
        whole = math.hypot(whole, size)
        if one.delta != 0:
            apart = math.hypot(apart, distances(mine, expected)[0] * max(size, 1e-30))
    return math.isfinite(apart) and apart <= allowed * whole


def _of_one(output: _Apart, largest: float, coarsest: torch.dtype | None) -> Rounding:
    mine, expected = output.mine.detach(), output.expected.detach().to(output.mine.device)
    dtypes = [mine.dtype] if coarsest is None else [mine.dtype, coarsest]
    size, noise, allowed = _size(expected), 0.0, 0.0  # Of whole numbers none is rounded.
    if _rounds(mine.dtype):
        noise = largest * max(NOISE.get(dtype, 0.0) for dtype in dtypes)
        allowed = max(TOLERANCE.get(dtype, 0.0) for dtype in dtypes)
    is_noise = max(output.delta, size) <= noise
    # By the most that the distance can be first: that of all outputs takes several times as long as what is told before.
    near = is_near(_at_most(output.delta, expected), output.delta, size, allowed, noise)
    near = near or is_near(*distances(mine, expected), size, allowed, noise)
    step, dtype = max((_step(size or _size(mine), dtype), str(dtype).removeprefix("torch.")) for dtype in dtypes)
    is_counted = _rounds(mine.dtype) and not is_noise
    return Rounding(output.of, output.delta, output.delta / step if is_counted else None, dtype, allowed, near)


def _norm(tensor: torch.Tensor) -> float:
    """In float64, of what is finite."""
    wide = tensor if _rounds(tensor.dtype) and tensor.element_size() > 1 else tensor.double()
    found = torch.linalg.vector_norm(wide, dtype=torch.complex128 if wide.is_complex() else torch.float64).item()
    return found if math.isfinite(found) else torch.where(wide.isfinite(), wide, 0).double().norm().item()


def _rounds(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _size(tensor: torch.Tensor) -> float:
    """`magnitude`, without memory for all of it where it has no other numbers."""
    if not _rounds(tensor.dtype) or tensor.element_size() == 1:
        tensor = tensor.double()
    if tensor.is_complex() or not tensor.numel():
        return magnitude(tensor)
    low, high = tensor.aminmax()
    found = max(-low.item(), high.item())
    return found if math.isfinite(found) else magnitude(tensor)


def _at_most(delta: float, expected: torch.Tensor) -> float:
    """What the norm of a difference is at most, over the norm of what is expected; NaN where that has no number."""
    if not expected.is_floating_point() or expected.element_size() == 1:
        return math.nan
    norm = torch.linalg.vector_norm(expected, dtype=torch.float64).item()
    return delta * math.sqrt(expected.numel()) / norm if 0 < norm < math.inf else math.nan


def _step(size: float, dtype: torch.dtype) -> float:
    """From `size` to the next number of `dtype`, which is 1 of integers."""
    if not _rounds(dtype):
        return 1.0
    info = torch.finfo(dtype)
    return info.eps * 2.0 ** (math.frexp(max(size, info.smallest_normal))[1] - 1)
