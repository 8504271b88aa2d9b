"""A memory budget on a GPU: the measured peak is the static one, and gradients are eager's."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.optimizers.liveness import peak_bytes
from tracefuse.variant import Variant

pytestmark = pytest.mark.gpu

BUDGETS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.1)


def model_and_data(dropout: float) -> tuple[GPT, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = GPT(layers=12, width=512, heads=8, vocab=8192, length=512, dropout=dropout)
    return model.to("cuda", torch.bfloat16), batch(8192, 8, 512, "cuda")


def measured_peak(variant: Variant, model: GPT) -> int:
    """Bytes above what was allocated before the step, the second time that it runs: libraries have their workspaces."""
    step = variant.compile()
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step().backward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    return peak


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_measured_peak_falls_with_the_budget_and_is_the_static_one(
    dropout: float, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = model_and_data(dropout)
    capture = tracefuse.capture(lambda: model(*data).backward())
    inputs = sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in capture.example_inputs}.values()
    )
    variants = [capture.optimize(memory_budget=budget) for budget in BUDGETS]
    measured = [measured_peak(v, model) for v in variants]
    static = [peak_bytes(v.trace) - inputs for v in variants]
    with capsys.disabled():
        for row in zip(BUDGETS, static, measured, strict=True):
            print("\nbudget {:.0%}: static peak {:,} B, measured {:,} B above the inputs".format(*row))
    assert all(less <= more for more, less in itertools.pairwise(static))
    assert all(less <= more * 1.01 for more, less in itertools.pairwise(measured))
    assert measured == pytest.approx(static, rel=0.05)


@pytest.mark.parametrize("budget", BUDGETS)
def test_gradients_are_those_of_eager_with_dropout(budget: float) -> None:
    model, data = model_and_data(0.1)
    capture = tracefuse.capture(lambda: model(*data).backward())
    capture.optimize(memory_budget=budget).check()
