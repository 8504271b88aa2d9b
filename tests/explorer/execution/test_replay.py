"""Replay is an oracle: it frees what is dead, restores generators and names what fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from replayed import replayed
from torch import nn

import tracefuse
from tracefuse.errors import ReplayError


def test_an_op_that_raises_is_named_with_its_line():
    c = tracefuse.capture(lambda x: x.reshape(2, 3).sum(), torch.ones(6))
    with pytest.raises(ReplayError, match=r"view.*x\.reshape\(2, 3\)\.sum\(\)"):
        tracefuse.replay(c.trace, [torch.ones(5)])


def test_the_number_of_inputs_is_checked():
    c = tracefuse.capture(lambda x: x.sum(), torch.ones(6))
    with pytest.raises(ReplayError, match="takes 1 inputs, got 0"):
        tracefuse.replay(c.trace, [])


def test_without_states_random_ops_draw_anew():
    c = tracefuse.capture(torch.rand_like, torch.ones(50))
    assert torch.equal(c.replay()[0], c.replay()[0])
    assert not torch.equal(tracefuse.replay(c.trace, c.example_inputs)[0], c.replay()[0])


def test_inputs_are_not_written_to():
    buffer = torch.zeros(2)
    c = tracefuse.capture(lambda: buffer.add_(1) * 2)
    (before,) = (t.clone() for t in c.example_inputs)
    c.replay()
    assert torch.equal(before, c.example_inputs[0])


# --- in place, in a strided view --------------------------------------------------------------------------------------


def gates(x: torch.Tensor) -> torch.Tensor:
    """As `nn.GRU` computes them on a CPU."""
    reset, update, new = torch.chunk(x @ x.new_ones(12, 24).cumsum(1).cos(), 3, 1)
    return (new.mul_(reset.sigmoid_())).add_(x[:, :8]).tanh_() * update.sigmoid_()


def boxes(x: torch.Tensor) -> torch.Tensor:
    """As detectors compute centers and sizes."""
    head = x * 3
    head[..., :2].sigmoid_()
    head[..., 2:5].exp_()
    return head.square()


def in_steps(x: torch.Tensor) -> torch.Tensor:
    head = x * 3
    head[:, ::3].erf_().log1p_()
    return head * 2


def in_place_of_an_operand(x: torch.Tensor) -> torch.Tensor:
    head = (x * 3)[:, 1:8]
    torch.maximum(head, x[:, :7].exp(), out=head)
    return head * 2


@pytest.mark.parametrize("run", [gates, boxes, in_steps, in_place_of_an_operand])
@pytest.mark.parametrize("rows", [1, 3, 5, 16])
def test_what_was_written_in_place_is_replayed_bit_for_bit(run: Callable[..., torch.Tensor], rows: int) -> None:
    """Kernels of vector instructions round the last elements of each row of a view otherwise."""
    x = torch.randn(rows, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
    replayed(lambda: run(x))


@pytest.mark.parametrize("net", [nn.GRU, nn.LSTM, nn.RNN])
@pytest.mark.parametrize("hidden", [3, 8, 12, 16])
def test_recurrent_nets_are_replayed_bit_for_bit(net: Callable[..., nn.Module], hidden: int) -> None:
    torch.manual_seed(hidden)
    model, x = net(5, hidden, 2, bidirectional=True).double(), torch.randn(7, 3, 5, dtype=torch.float64)
    c = tracefuse.capture(lambda: model(x)[0].square().mean().backward())
    assert "bit for bit" in str(c.check())
