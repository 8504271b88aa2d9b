"""Variants beside each other: against a pinned one, and with all passes beside all but one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.errors import Cancelled, ExportError, MeasureError
from tracefuse.measure.timing import Estimate, inverse, over


@pytest.fixture(scope="module")
def captured() -> tracefuse.Capture:
    torch.manual_seed(0)
    model, (tokens, targets) = GPT(layers=1, width=32, heads=2, vocab=61, length=16, dropout=0.1), batch(61, 2, 12)
    with tracefuse.capture() as c:
        loss = model(tokens, targets)
        loss.backward()
    return c


def test_ratios_are_over_the_pinned_one_and_differences_from_the_captured(captured: tracefuse.Capture) -> None:
    pinned = captured.optimize(freeze=["h.*"], fuse=False)
    timing = captured.optimize().measure(budget_s=0.5, against=pinned)
    assert [p.name for p in timing.programs] == ["pinned", "captured", "optimised"]
    optimised = timing.program("optimised")
    assert timing.baseline.ratios["step"].median == 1
    assert optimised.ratios["step"].low <= optimised.ratios["step"].median <= optimised.ratios["step"].high
    assert optimised.difference.gradients < 1e-4
    assert timing.baseline.difference.gradients < 1e-4


def test_each_pass_that_is_on_has_a_share_and_one_that_did_nothing_none_to_time(captured: tracefuse.Capture) -> None:
    variant = captured.optimize(cat=False)
    texts: list[str] = []
    found = variant.ablate(progress=lambda _, text: texts.append(text), budget_s=1)
    assert list(found.delta_ms) == [
        "simplify", "freeze", "merge_matmuls", "linear_cross_entropy", "decompose", "channels_last", "pad", "remat",
        "optimizer_step", "fuse",
    ]  # fmt: skip
    assert "freeze" in found.same
    assert found.delta_ms["freeze"].samples == 0
    assert "first run: freeze" not in texts
    assert found.device.startswith("measured on CPU")
    fuse = found.delta_ms["fuse"]
    assert fuse.low <= fuse.median <= fuse.high
    assert fuse.samples == found.rounds


def test_what_each_pass_is_worth_says_how_long_the_step_takes(captured: tracefuse.Capture) -> None:
    """The captured program is timed in the same rounds; what was measured before is kept."""
    variant = captured.optimize(pad=False)
    assert variant.timing is None
    found = variant.ablate(budget_s=0.5)
    timing = variant.timing
    assert timing is not None
    assert [one.name for one in timing.programs] == ["captured", "optimised"]
    assert timing.rounds == found.rounds
    assert [row.label for row in timing.rows] == ["forward", "backward", "step"]
    assert captured.measurements.timings[variant.config, None] is timing
    assert timing.program("optimised").difference.gradients < 1e-4
    variant.ablate(budget_s=0.1)
    assert variant.timing is timing


def test_of_one_program_over_another_in_other_rounds_the_interval_is_as_wide_as_both() -> None:
    mine, base = Estimate(0.5, 0.4, 0.6, 0.99, 9), Estimate(0.8, 0.7, 0.9, 0.99, 8)
    assert over(mine, base) == Estimate(0.625, 0.4 / 0.9, 0.6 / 0.7, 0.99**2, 8)
    assert inverse(mine) == Estimate(2.0, 1 / 0.6, 2.5, 0.99, 9)


@pytest.mark.parametrize("what", ["measure", "ablate"])
def test_it_leaves_the_generator_as_it_was_and_can_be_cancelled(captured: tracefuse.Capture, what: str) -> None:
    state = torch.get_rng_state()
    run = getattr(captured.optimize(), what)
    run(budget_s=0.2)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(Cancelled):
        run(is_cancelled=lambda: True)
    with pytest.raises(MeasureError, match="budget_s=0"):
        run(budget_s=0)


def test_where_the_kernels_do_not_run_the_table_says_what_its_times_are(captured: tracefuse.Capture) -> None:
    shown = str(captured.optimize().measure(budget_s=0.1))
    assert "On a CPU no Triton kernel runs" in shown
    without = captured.optimize(fuse=False)
    assert not without.kernels
    assert "Triton" not in str(without.measure(budget_s=0.1))


def test_a_step_that_cannot_be_compiled_is_measured_pass_by_pass() -> None:
    """An optimizer that computes with Python numbers, one tensor after another."""
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    optimizer = torch.optim.RAdam(model.parameters(), foreach=False)
    with tracefuse.capture_step(n=3) as c:
        for _ in range(4):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    variant = c.optimize()
    with pytest.raises(ExportError, match="capturable=True"):
        variant.compile()
    found = variant.ablate(budget_s=0.1)
    assert found.rounds > 0
    assert "optimizer_step" in found.delta_ms
