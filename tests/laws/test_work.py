"""Work grows with a program, no faster: counted as calls, of Python and of what Python calls, so that no clock decides."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tracefuse
from tracefuse.optimizers.fakes import answers
from tracefuse.optimizers.fuse import carving
from tracefuse.optimizers.lowering.lowering import Lowering

sys.path.append(str(Path(__file__).parents[1] / "bench" / "overhead"))
from pipeline import FAMILIES, size_for

MOST_GROWTH = 1.1
"""Calls an op at 4,000 ops over those at 2,000. What only the first op of a kind pays makes it less than 1."""
MOST_ASKED = 0.1
"""Questions to torch, about the result of an op, for each op of the program."""


def calls_of(run: Callable[[], Any]) -> int:
    """How many functions run, those in C included; each step of a generator is one."""
    count = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.collect()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def work(family: str, ops: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Calls an op from the recording to the trace, and from there through all passes; questions that torch was asked."""
    asked = 0
    ask = answers._asked

    def counted(*args: Any) -> Any:
        nonlocal asked
        asked += 1
        return ask(*args)

    captured = tracefuse.capture(FAMILIES[family](size_for(family, ops)))
    carving._known.clear()
    assembly = calls_of(lambda: captured.trace)
    with monkeypatch.context() as patched:
        patched.setattr(answers, "_asked", counted)
        passes = calls_of(lambda: captured.optimize().trace)
    count = len(captured.trace.ops)
    assert 0.9 * ops < count < 1.1 * ops
    return {"assembly": assembly / count, "passes": passes / count, "asked": asked / captured.trace.op_count}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_calls_grow_no_faster_than_ops(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = (work(family, ops, monkeypatch) for ops in (2_000, 4_000))
    for stage in ("assembly", "passes"):
        assert large[stage] < MOST_GROWTH * small[stage], (stage, small, large)
    assert large["asked"] < MOST_ASKED, "passes ask torch what they could know"


def scan(steps: int) -> tuple[tracefuse.Capture, torch.Tensor, torch.Tensor]:
    """A scan unrolled over slices of one tensor, its capture, its result and its gradient."""
    w = torch.randn(4, steps + 2, dtype=torch.float64, requires_grad=True)

    def run() -> torch.Tensor:
        x = w * 1.5
        for at in range(steps):
            new = torch.tanh(x[:, at : at + 1] + x[:, at + 1 : at + 2])
            x = torch.cat([x[:, : at + 1], new, x[:, at + 2 :]], 1)
        loss = x.square().sum()
        loss.backward()
        return loss

    captured = tracefuse.capture(run)
    return captured, run().detach(), w.grad / 2


def test_an_unrolled_scan_is_lowered_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each concatenation reads the one before it at several places, which would double from step to step."""
    places = 0
    value = Lowering.value

    def counted(self: Lowering, *args: Any) -> Any:
        nonlocal places
        places += 1
        return value(self, *args)

    monkeypatch.setattr(Lowering, "value", counted)
    captured, loss, gradient = scan(8)
    carving._known.clear()
    variant = captured.optimize()
    assert variant.kernels
    assert places < 200_000, places
    found = tracefuse.replay(variant.trace, captured.example_inputs, captured.rng_states)
    torch.testing.assert_close(found, (loss, gradient))
