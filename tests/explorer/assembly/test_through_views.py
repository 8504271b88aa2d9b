"""Writes through views whose layout counts: replay gives bit by bit what the run gave, or the capture is refused by line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from replayed import compiled_outputs, is_same, replayed
from torch import Tensor

import tracefuse
from tracefuse.errors import CaptureError

MATRIX = torch.arange(24.0).view(4, 6)
LEFT, RIGHT = torch.ones(6, 1), torch.arange(4.0).view(1, 4)


def beyond_its_parent() -> list[Tensor]:
    x = MATRIX * 1
    row = x[2]
    strided = row.as_strided((2, 2), (6, 2), 1)
    strided.mul_(3)
    return [x * 1, row * 1, strided * 1]


def from_where_its_parent_lies() -> list[Tensor]:
    x = MATRIX * 1
    row = x[2]
    strided = row.as_strided((2, 2), (2, 1))
    strided.mul_(3)
    return [x * 1, row * 1, strided * 1]


def of_a_written_row() -> list[Tensor]:
    x = MATRIX * 1
    row = x[1]
    row.mul_(3)
    return [row.as_strided((2,), (1,), 8) * 1]


def strided_after_a_product() -> list[Tensor]:
    x = MATRIX * 1
    x.t().addmm_(LEFT, RIGHT)
    return [x.as_strided((5,), (1,), 0) * 1, x * 1]


def strided_after_its_own_product() -> list[Tensor]:
    x = (MATRIX * 1).t() * 2
    x.addmm_(LEFT, RIGHT)
    return [x.as_strided((2, 2), (6, 1), 1) * 1]


def flat_after_a_product() -> list[Tensor]:
    x = MATRIX * 1
    flat = x.view(24)
    x.t().addmm_(LEFT, RIGHT)
    return [flat * 2, x.view(-1) * 1]


def flat_after_a_sum() -> list[Tensor]:
    x = MATRIX * 1
    x.t().cumsum_(0)
    return [x.view(-1) * 1]


def flat_after_out() -> list[Tensor]:
    x = MATRIX * 1
    torch.mm(LEFT, RIGHT, out=x.t())
    return [x.view(-1) * 1]


def conjugate() -> list[Tensor]:
    z = torch.tensor([1 + 2j, 3 - 1j])
    c = z.conj()
    c.mul_(2j)
    return [torch.view_as_real(z * 1), torch.view_as_real(c * 1)]


def of_a_conjugate() -> list[Tensor]:
    z = torch.tensor([1 + 2j, 3 - 1j]) * 1
    c = z.conj()
    z.mul_(2j)
    return [torch.view_as_real(c * 1)]


def negative() -> list[Tensor]:
    x = MATRIX * 1
    negated = torch._neg_view(x)
    negated[1].add_(1)
    x.mul_(2)
    return [x * 1, negated * 1]


def drawn_across() -> list[Tensor]:
    x = torch.rand(4, 6)
    row = x[0]
    x.t().bernoulli_(0.5)
    return [row * 1, x * 1]


def filled_across() -> list[Tensor]:
    x = MATRIX * 1
    row = x[0]
    x.t()[1:].uniform_()
    x.t()[2].normal_()
    return [row * 1, x * 1]


def drawn_into(view: Callable[[Tensor], Tensor], draw: Callable[[Tensor], Tensor], dtype: torch.dtype) -> list[Tensor]:
    whole, alone = (torch.zeros(9, 7, dtype=dtype) for _ in range(2))
    draw(view(whole))
    return [whole * 1, draw(view(alone)) * 1]


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": lambda x: x[:, :4],
    "every second row": lambda x: x[::2],
    "columns across": lambda x: x[:, :5].t(),
    "across": lambda x: x.t(),
    "an odd number": lambda x: x.view(-1)[1:59:3],
}
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal_": lambda x: x.normal_(1, 2),
    "uniform_": lambda x: x.uniform_(-1, 1),
    "bernoulli_": lambda x: x.bernoulli_(),
    "exponential_": lambda x: x.exponential_(),
    "random_": lambda x: x.random_(2, 9),
    "dropout": lambda x: torch.nn.functional.dropout(x.add_(1), 0.3, inplace=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("view", VIEWS)
def test_a_draw_into_a_view_fills_it_in_the_order_of_its_memory(view: str, draw: str, dtype: torch.dtype) -> None:
    """On a CPU `normal_` fills 16 or more contiguous numbers by another rule than others."""
    replayed(lambda: drawn_into(VIEWS[view], DRAWS[draw], dtype))


PROGRAMS: list[Callable[[], Any]] = [
    beyond_its_parent,
    from_where_its_parent_lies,
    of_a_written_row,
    strided_after_a_product,
    strided_after_its_own_product,
    flat_after_a_product,
    flat_after_a_sum,
    flat_after_out,
    conjugate,
    of_a_conjugate,
    negative,
    drawn_across,
    filled_across,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_write_is_read_where_it_lies(program: Callable[[], list[Tensor]]) -> None:
    captured = replayed(program)
    compiled = compiled_outputs(captured.optimize())
    assert all(map(is_same, compiled, captured.replay()))


def test_a_strided_view_of_an_input_that_lies_further_on_is_refused_where_it_is_written() -> None:
    given = torch.arange(10.0)[2:8]

    def run() -> Tensor:
        every_second = given.as_strided((2,), (2,), 3)
        every_second.mul_(10)
        return given * 1

    with pytest.raises(CaptureError, match=r"as_strided.*every_second"):
        tracefuse.capture(run).replay()


@pytest.mark.parametrize("program", [beyond_its_parent, strided_after_a_product])
def test_what_is_traced_again_is_refused_where_torch_would_lose_a_write(program: Callable[[], list[Tensor]]) -> None:
    """A draw into a view rules out renaming."""

    def run() -> list[Tensor]:
        drawn = MATRIX * 1
        drawn[0].normal_()
        return [*program(), drawn * 1]

    with pytest.raises(CaptureError, match="as_strided"):
        tracefuse.capture(run).replay()
