"""A budget on the peak: met by the program that leaves the pipeline, or refused with the least peak, and what is alive."""

from __future__ import annotations

import functools
import re

import programs
import pytest
import torch
from rematerialised import leaf, program
from traces import tried

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.liveness import lifetimes, live_bytes, peak_bytes, saved_bytes
from tracefuse.optimizers.passes import final, run_pipeline
from tracefuse.optimizers.remat import Remat
from tracefuse.optimizers.trace import human_bytes


@functools.cache
def gpt(vocab: int = 31) -> tracefuse.Capture:
    torch.manual_seed(0)
    model, data = GPT(layers=2, width=16, heads=2, vocab=vocab, length=32, dropout=0.1), batch(vocab, 4, 32)
    return tracefuse.capture(lambda: model(*data).backward())


def said(variant: tracefuse.Variant) -> dict[str, str]:
    (remat,) = (one for one in variant.passes if one.name == "remat")
    assert remat.error is None
    return {one.action: one.reason for one in remat.decisions if one.value == "peak_budget"}


@pytest.mark.parametrize("options", [{}, {"fuse": False}, {"cat": False, "decompose": False}, {"remat": 0.0}])
@pytest.mark.parametrize("vocab", [31, 997])
def test_the_program_that_leaves_the_pipeline_stays_within_it(vocab: int, options: dict[str, object]) -> None:
    free = gpt(vocab).optimize(**options)
    met = 0
    for share in (0.95, 0.85, 0.75, 0.65):
        budget = int(share * peak_bytes(free.trace))
        variant = gpt(vocab).optimize(peak_budget=budget, **options)
        if "meet" in said(variant):
            met += 1
            assert peak_bytes(variant.trace) <= budget
            assert saved_bytes(variant.trace) < saved_bytes(free.trace)
        else:
            assert peak_bytes(variant.trace) > budget
    assert met >= 1


def test_a_budget_that_is_kept_anyway_changes_nothing() -> None:
    free = gpt().optimize()
    variant = gpt().optimize(peak_budget=peak_bytes(free.trace))
    assert "changes nothing" in said(variant)["meet"]
    assert variant.trace.code == free.trace.code


@pytest.mark.parametrize("weight", [0.0, 0.5])
@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_a_generous_budget_changes_no_program(name: str, weight: float) -> None:
    """Not one whose factors are overruled either, since they would save more."""
    trace = program(name).trace
    free, bound = [], []
    without = Remat(producer_input_weight=weight).run(trace, free.append)
    generous = Remat(producer_input_weight=weight, peak_budget=10**15).run(trace, bound.append)
    assert generous.code == without.code
    assert [d for d in bound if d.value != "peak_budget"] == free


def test_a_program_whose_factors_are_overruled_says_so_of_its_budgets() -> None:
    trace = program("residual_chain").trace
    decisions = []
    after = Remat(memory_budget=10**12, peak_budget=10**15).run(trace, decisions.append)
    assert any(d.action == "overrule" for d in decisions)
    said = {d.value: (d.action, d.reason) for d in decisions if d.value.endswith("budget")}
    assert {value: action for value, (action, _) in said.items()} == {"memory_budget": "meet", "peak_budget": "meet"}
    assert saved_bytes(after) == saved_bytes(trace)


def test_what_cannot_be_met_says_the_least_peak_and_that_one_can() -> None:
    variant = gpt().optimize(peak_budget=1000)
    reason = said(variant)["miss"]
    told = r"cannot be met: the least static peak that was found is .*, at (\w+), .*pass peak_budget=(\d+) or more"
    named = re.search(told, reason)
    assert named is not None
    op, least = named[1], int(named[2])
    assert least == peak_bytes(variant.trace)
    live = live_bytes(variant.trace)
    at = live.index(least)
    assert variant.trace.ops[at].name == op
    alive = [life for life in lifetimes(variant.trace) if life.start <= at <= life.end and not life.is_input]
    largest = max(alive, key=lambda life: life.nbytes)
    assert largest.name in reason
    assert f"peak_budget: {reason}." in str(variant) or f"peak_budget: {reason}" in repr(variant)
    again = gpt().optimize(peak_budget=least)
    assert "meet" in said(again)
    assert peak_bytes(again.trace) <= least


def test_both_budgets_hold_together() -> None:
    free = gpt().optimize()
    saved, peak = int(0.6 * saved_bytes(gpt().trace)), int(0.8 * peak_bytes(free.trace))
    variant = gpt().optimize(memory_budget=saved, peak_budget=peak)
    assert peak_bytes(variant.trace) <= peak
    assert saved_bytes(variant.trace) <= saved


@pytest.mark.parametrize("share", [0.9, 0.3, 0.0])
@pytest.mark.parametrize("peak", [1.0, 0.7, 0.1])
def test_what_is_said_of_two_budgets_is_of_the_program_that_both_make(share: float, peak: float) -> None:
    bound = int(peak * peak_bytes(gpt().optimize().trace))
    variant = gpt().optimize(memory_budget=share, peak_budget=bound)
    (remat,) = (one for one in variant.passes if one.name == "remat")
    said = {d.value: d for d in remat.decisions if d.value in ("memory_budget", "peak_budget")}
    assert len(said) == 2
    saved = saved_bytes(remat.after)
    limit = int(share * saved_bytes(remat.before))
    memory = said["memory_budget"]
    assert (memory.action == "meet") == (saved <= limit)
    assert f"{human_bytes(saved)} saved" in memory.reason or "changes nothing" in memory.reason
    assert "a static peak of" not in memory.reason
    assert (said["peak_budget"].action == "meet") == (peak_bytes(variant.trace) <= bound)


def test_it_reckons_with_the_passes_behind_it() -> None:
    """Of one budget, what is followed by fuse recomputes less than what bounds the trace that fuse is given."""
    (record,) = (one for one in gpt(997).optimize().passes if one.name == "remat")
    trace = record.before
    budget = peak_bytes(final(trace, run_pipeline(trace, [Remat(), Fuse()])))
    followed, alone = (
        final(trace, run_pipeline(trace, [Remat(peak_budget=budget, then=one)])) for one in ((Fuse(),), ())
    )
    assert peak_bytes(final(followed, run_pipeline(followed, [Fuse()]))) <= budget
    assert peak_bytes(followed) > budget
    assert saved_bytes(alone) < saved_bytes(followed)


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_laws_of_passes(name: str) -> None:
    tried(Remat(peak_budget=2), program(name))


def test_a_program_without_a_backward_is_left_alone() -> None:
    x = leaf(4, 4)
    variant = tracefuse.capture(lambda: x.detach().exp().sum()).optimize(peak_budget=2)
    assert "miss" in said(variant)


@pytest.mark.parametrize("budget", [0, 1, -5, True, 0.5, "40%", "much"])
def test_what_is_no_number_of_bytes_is_refused(budget: object) -> None:
    with pytest.raises(tracefuse.TracefuseError, match=r"peak_budget=.*bytes"):
        gpt().optimize(peak_budget=budget)


def test_bytes_are_read_with_their_unit() -> None:
    config = tracefuse.Config.of(peak_budget="2GiB")
    assert config.peak_budget == 2 * 2**30
    assert config.as_code() == "c.optimize(peak_budget=2147483648)"
    assert tracefuse.Config.of(peak_budget=None) == tracefuse.Config()
    assert config.changed(remat=None).idle == ("peak_budget",)


def test_a_session_file_keeps_it(tmp_path) -> None:  # type: ignore[no-untyped-def]
    capture = simple_capture()
    capture.optimize(peak_budget=64).measure(budget_s=0.05)
    loaded = tracefuse.load(capture.save(tmp_path / "c.tfz"))
    assert any(config.peak_budget == 64 for config, _ in loaded.measurements.timings)


def simple_capture() -> tracefuse.Capture:
    x = torch.randn(4, 4, requires_grad=True)
    return tracefuse.capture(lambda: (x.sin() @ x).exp().sum().backward())
