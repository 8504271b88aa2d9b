"""The pipeline records what passes do, and what they fail at, whatever that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from traces import captured

from tracefuse.errors import PassError
from tracefuse.optimizers.errors import PassDefect, UnknownValue
from tracefuse.optimizers.passes import Decide, Decision, run_pipeline
from tracefuse.optimizers.simplify import Simplify
from tracefuse.optimizers.trace import Trace


@dataclass(frozen=True)
class Raising:
    """A pass that decides something, then raises `error`."""

    error: Exception
    name: ClassVar[str] = "raising"

    def run(self, trace: Trace, decide: Decide) -> Trace:
        decide(Decision("x", "looked at", "before it went wrong"))
        raise self.error


@pytest.fixture
def trace() -> Trace:
    return captured(lambda x: x.sin().clone() * 2, torch.ones(3)).trace


def test_a_defect_is_a_step_with_a_message_and_the_next_pass_runs(trace):
    bug = ZeroDivisionError("division by zero")
    failed, after = run_pipeline(trace, [Raising(bug), Simplify()], on_error="record")
    assert failed.after is failed.before is after.before is trace
    assert failed.error.startswith("ZeroDivisionError: division by zero. ")
    assert "the pass raising: switch it off" in failed.error
    assert isinstance(failed.cause, PassDefect)
    assert failed.cause.__cause__ is bug
    assert [d.value for d in failed.decisions] == ["x"]
    assert after.error is None
    assert "clone" in after.removed


def test_a_defect_leaves_as_our_error_with_its_cause(trace):
    with pytest.raises(PassDefect, match="switch it off, and report it") as caught:
        run_pipeline(trace, [Raising(KeyError("y"))])
    assert isinstance(caught.value.__cause__, KeyError)


def test_steps_in_a_list_are_one_line_each(trace):
    failed, after = run_pipeline(
        trace, [Raising(ZeroDivisionError("division\nby zero")), Simplify()], on_error="record"
    )
    assert [repr(step) for step in (failed, after)] == [
        "<PassRecord raising: failed; print it>",
        "<PassRecord simplify: 3 -> 2 ops, 1 decision; print it>",
    ]
    assert str(after).count("\n") == 1


def test_what_a_pass_raises_on_purpose_stays_as_it_is(trace):
    error = UnknownValue("no such value: choose another")
    (failed,) = run_pipeline(trace, [Raising(error)], on_error="record")
    assert failed.error == "no such value: choose another"
    assert failed.cause is error


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_no_defect(trace, interrupt):
    with pytest.raises(interrupt):
        run_pipeline(trace, [Raising(interrupt())], on_error="record")


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_memory_that_is_short_is_no_defect(trace, error):
    for on_error in ("record", "raise"):
        with pytest.raises(error):
            run_pipeline(trace, [Raising(error("injected"))], on_error=on_error)


def test_optimize_raises_and_the_variant_shows_the_row(monkeypatch):
    def broken(self, trace, decide):
        raise IndexError("list index out of range")

    monkeypatch.setattr(Simplify, "run", broken)
    capture = captured(lambda x: x.sin() * 2, torch.ones(3))
    with pytest.raises(PassError, match="simplify: IndexError: list index out of range") as caught:
        capture.optimize()
    assert isinstance(caught.value.__cause__.__cause__, IndexError)
    errors = {
        step.name: step.error is not None for step in capture.optimize(simplify=False).with_config(simplify=True).passes
    }
    assert errors == {
        "simplify": True,
        "freeze": False,
        "merge_matmuls": False,
        "cat": False,
        "linear_cross_entropy": False,
        "decompose": False,
        "channels_last": False,
        "pad": False,
        "remat": False,
        "optimizer_step": False,
        "fuse": False,
    }


def test_a_step_prints_as_what_it_did_and_why(trace):
    (step,) = run_pipeline(trace, [Simplify()])
    assert str(step) == f"simplify: 3 -> 2 ops, 1 decision\n  {step.decisions[0]}"
    assert str(Decision("mul", "save", "it is small", 2048)) == "save mul (2 KiB): it is small"
    assert str(Decision("mul", "leave", "it is a view")) == "leave mul: it is a view"


def test_a_failed_step_prints_its_message(trace):
    (failed,) = run_pipeline(trace, [Raising(UnknownValue("no such value"))], on_error="record")
    assert str(failed) == "raising: failed: no such value\n  looked at x: before it went wrong"


@dataclass(frozen=True)
class Rescaling:
    """A pass that changes neither a name nor a count, only a number: `factor` for every factor in the trace."""

    factor: int
    name: ClassVar[str] = "rescaling"

    def run(self, trace: Trace, decide: Decide) -> Trace:
        new = trace.copy()
        for node in new.ops:
            if node.target is torch.ops.aten.mul.Tensor:
                node.args = (node.args[0], self.factor)
        return new


@pytest.mark.parametrize(("factor", "is_unchanged"), [(2, True), (3, False)])
def test_a_step_is_unchanged_only_if_no_argument_is_another(trace, factor, is_unchanged):
    (step,) = run_pipeline(trace, [Rescaling(factor)])
    assert step.after is not step.before
    assert step.is_unchanged is is_unchanged


def test_a_step_that_removed_or_refused_is_told_apart(trace):
    first, again, failed = run_pipeline(trace, [Simplify(), Simplify(), Raising(ValueError("no"))], on_error="record")
    assert not first.is_unchanged
    assert again.is_unchanged
    assert failed.is_unchanged
