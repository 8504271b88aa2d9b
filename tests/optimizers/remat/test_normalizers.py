"""Normalizers: what is recomputed through a matmul is normalized by what was recomputed with it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rematerialised import remat
from torch import Tensor, nn
from traces import captured

from tracefuse.optimizers.decompose import Decompose
from tracefuse.optimizers.trace import Trace, recomputes


def classifier() -> Trace:
    """Logits of two matmuls, decomposed: the last ones are most of what the forward saves."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 512)).to(torch.bfloat16)
    x, targets = torch.randn(32, 16, dtype=torch.bfloat16), torch.randint(512, (32,))

    def step() -> Tensor:
        loss = F.cross_entropy(model(x) * 2, targets)
        loss.backward()
        return loss

    return Decompose().run(captured(step).trace, lambda _: None)


def again(trace: Trace) -> set[str]:
    return {name for n in trace.ops if (name := recomputes(n)) is not None}


@pytest.mark.parametrize("budget", [0.9, 0.5, 0.2, 0.1, 0.0])
def test_with_a_matmul_its_normalizer_is_computed_again(budget: float) -> None:
    trace = classifier()
    (logits,) = [n for n in trace.ops if n.target is torch.ops.aten.addmm.default and n.meta["val"].shape[-1] == 512]
    found = again(remat(trace, memory_budget=budget, stop_at_lowest_peak=False)[0])
    assert ("logsumexp" in found) >= (logits.name in found)
    assert logits.name in found or budget > 0.2


def test_without_a_budget_neither_is() -> None:
    trace = classifier()
    after, decisions = remat(trace, recompute_classes=("pointwise", "reduction", "heavy"), producer_input_weight=1.0)
    assert not any(name.startswith(("addmm_1", "logsumexp")) for name in again(after))
    assert any("fits no other rounding" in d.reason for d in decisions)


def test_a_pin_on_the_logits_is_obeyed() -> None:
    trace = classifier()
    assert "addmm_1" in again(remat(trace, recompute=("addmm_1",))[0])
