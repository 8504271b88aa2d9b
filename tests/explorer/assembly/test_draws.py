"""Replays draw from the generators as they were; whoever draws next must not notice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import tracefuse
from tracefuse.assembly.draws import undisturbed


def test_draws_inside_are_not_noticed_outside() -> None:
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    with undisturbed([]):
        torch.rand(5)
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize(("is_in_use", "devices"), [(True, [1]), (False, [])])
def test_a_gpu_in_use_is_left_alone_too_where_no_input_lies_on_it(
    is_in_use: bool, devices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    forked = []

    @contextmanager
    def fork_rng(devices: list[int]) -> Iterator[None]:
        forked.append(devices)
        yield

    monkeypatch.setattr(torch.random, "fork_rng", fork_rng)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_in_use)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with undisturbed([torch.ones(2)]):
        pass
    assert forked == [devices]


class _Reversible(torch.autograd.Function):
    """Drops again in the backward what it computes again there, from its result and rounded otherwise, as Reformer does."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        dropped = torch.native_dropout(x, 0.4, True)[0]
        ctx.save_for_backward(x.exp())
        return dropped * x

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].log().detach().requires_grad_()
            torch.manual_seed(3)
            again = torch.native_dropout(x, 0.4, True)[0] * x
        return torch.autograd.grad(again, x, gradient)[0]


def test_a_dropout_of_numbers_that_were_computed_again_is_the_same_mask() -> None:
    x = torch.randn(40, requires_grad=True, dtype=torch.float64)
    c = tracefuse.capture(lambda: _Reversible.apply(x).sum().backward())
    assert sum("native_dropout.default" in str(op.target) for op in c.trace.ops) == 1
    agreement = c.check()
    assert agreement is not None
    assert (agreement.compared, agreement.differing) == (1, 0)
    program = c.optimize().compile()
    wanted, x.grad = x.grad, None
    torch.manual_seed(3)
    program().backward()
    torch.testing.assert_close(x.grad, wanted)


def test_dropouts_of_other_shapes_from_one_state_stay_apart() -> None:
    def run() -> torch.Tensor:
        torch.manual_seed(3)
        first = torch.native_dropout(torch.ones(8), 0.4, True)[0]
        torch.manual_seed(3)
        return first.sum() + torch.native_dropout(torch.ones(4, 2), 0.4, True)[0].sum()

    trace = tracefuse.capture(run).trace
    assert sum("native_dropout.default" in str(op.target) for op in trace.ops) == 2


def test_the_order_of_a_single_element_is_no_draw_that_another_one_repeats() -> None:
    model, x = nn.Linear(4, 3), torch.randn(5, 4)

    def run() -> None:
        first, order = torch.randperm(1), torch.randperm(5)
        (model(x[order]) + first).square().mean().backward()

    c = tracefuse.capture(run)
    c.optimize().compile()  # refused, two draws from one state would be
    assert sum("randperm" in str(op.target) for op in c.trace.ops) == 2
