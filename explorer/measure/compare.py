"""The numbers of timed programs beside each other: largest absolute differences in float64, none of which can hide."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tracefuse.errors import MeasureError
from tracefuse.execution.difference import max_abs_difference
from tracefuse.execution.replays import Replays
from tracefuse.measure.timing import Difference

if TYPE_CHECKING:
    pass


def compare(programs: Mapping[str, Replays], reference: Replays | None) -> dict[str, Difference | None]:
    """The difference of each program from `reference` (default: the first); None for what is not compared.

    Raises `MeasureError` for outputs that do not match in number or shape.
    """
    baseline = next(iter(programs))
    expected = _outputs(reference or programs[baseline])
    is_reference = {name: not p.compared or (reference is None and name == baseline) for name, p in programs.items()}
    return {name: None if is_reference[name] else _difference(name, p, expected) for name, p in programs.items()}


@dataclass(frozen=True)
class _Outputs:
    results: dict[str, Any]
    gradients: dict[str, Any]


def _outputs(program: Replays) -> _Outputs:
    state = program.forward()
    # Before the backward runs: it may take the state apart.
    results = {f"result {i}": r.detach() if isinstance(r, torch.Tensor) else r for i, r in enumerate(state[0])}
    gradients = [] if program.backward is None else list(program.backward(state))
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # a copy into pinned memory may be under way
    names = program.gradients or tuple(f"gradient {i}" for i in range(len(gradients)))
    return _Outputs(results, dict(zip(names, gradients, strict=True)))


def _difference(name: str, program: Replays, expected: _Outputs) -> Difference:
    mine = _outputs(program)
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
    return Difference(
        _largest(name, mine.results, expected.results), _largest(name, mine.gradients, expected.gradients)
    )


def _largest(name: str, mine: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """The largest difference of any output; NaN if any is, which `max` alone would lose."""
    unknown = sorted(mine.keys() - expected.keys())
    if unknown:
        raise MeasureError(f"{name} has {unknown[0]}, which the reference has not: compare the same outputs")
    found = [max_abs_difference(f"{key} of {name}", value, expected[key]) for key, value in mine.items()]
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)
