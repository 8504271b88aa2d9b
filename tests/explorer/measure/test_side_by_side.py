"""Variants beside each other: against a pinned one, and with all passes beside all but one."""

from __future__ import annotations

import pytest
import torch

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.errors import Cancelled, MeasureError


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
    mine, base = (p.times_ms["step"].median for p in (optimised, timing.baseline))
    assert optimised.ratios["step"].median == pytest.approx(mine / base, rel=0.3)  # by round, not of medians
    assert optimised.difference.gradients < 1e-4
    assert timing.baseline.difference.gradients < 1e-4


def test_each_pass_that_is_on_has_a_share_and_one_that_did_nothing_none_to_time(captured: tracefuse.Capture) -> None:
    variant = captured.optimize(cat=False)
    texts: list[str] = []
    found = variant.ablate(progress=lambda _, text: texts.append(text), budget_s=1)
    assert list(found.delta_ms) == ["simplify", "freeze", "decompose", "pad", "remat", "fuse"]
    assert "freeze" in found.same
    assert found.delta_ms["freeze"].samples == 0
    assert "first run of freeze" not in texts
    assert found.device.startswith("measured on CPU")
    fuse = found.delta_ms["fuse"]
    assert fuse.low <= fuse.median <= fuse.high
    assert fuse.samples == found.rounds


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
