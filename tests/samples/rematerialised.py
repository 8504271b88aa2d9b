"""What the tests of rematerialisation share: joint traces, the pass on them, and what it saves."""

from __future__ import annotations

import functools
from collections.abc import Callable

import programs
import torch
from torch import Tensor
from traces import captured

import tracefuse
from tracefuse.optimizers.liveness import saved_values
from tracefuse.optimizers.passes import Decision
from tracefuse.optimizers.remat import Remat
from tracefuse.optimizers.simplify import Simplify
from tracefuse.optimizers.trace import Trace
from tracefuse.optimizers.verify import verify


@functools.cache
def program(name: str) -> tracefuse.Capture:
    return captured(programs.PROGRAMS[name](torch.float64).run)


def remat(trace: Trace, **options: object) -> tuple[Trace, list[Decision]]:
    decisions: list[Decision] = []
    after = Remat(**options).run(trace, decisions.append)  # type: ignore[arg-type]
    verify(after)
    return after, decisions


def saved(trace: Trace) -> set[str]:
    return {s.name for s in saved_values(trace)}


def simple(fn: Callable[[], Tensor]) -> Trace:
    """The trace of `fn().sum().backward()`, simplified, so that the backward reads values and not their copies."""

    def step() -> Tensor:
        loss = fn().sum()
        loss.backward()
        return loss

    return Simplify().run(captured(step).trace, lambda _: None)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)
