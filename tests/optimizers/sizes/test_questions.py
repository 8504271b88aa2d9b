"""What torch is asked of a program at a fourth size: it confirms what is so, and what only three sizes agree on it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from traces import OTHER_PROGRAMS, at_sizes, known_sizes

from tracefuse.optimizers.sizes.numbers import NotAlike
from tracefuse.optimizers.sizes.questions import check, check_numbers, questions


def square(n: int) -> Tensor:
    return torch.randn(n, n)


def rows(n: int) -> Tensor:
    return torch.randn(n, 4)


@pytest.mark.parametrize(
    ("function", "made"),
    [
        (lambda x: (x @ x.t()).softmax(-1).mean(), square),
        (lambda x: x.view(2, -1).sum(1), rows),
        (lambda x: torch.cat([x, x.sin()]).split(len(x)), rows),
        (lambda x: x.topk(3, dim=0), rows),
        (lambda x: x.new_zeros(2 * len(x)), rows),
    ],
    ids=["matmuls", "a view", "several results", "a list of results", "numbers alone"],
)
def test_what_is_so_at_every_size(function: Callable[[Tensor], Any], made: Callable[[int], Tensor]) -> None:
    asked = questions(at_sizes(function, made))
    assert asked
    for new in (4, 9, 64):
        check(asked, known_sizes(new), FakeTensorMode())


@pytest.mark.parametrize(
    ("function", "new"),
    [
        (lambda x: x[:12].sin(), 13),
        (lambda x: x[:5].sin(), 4),
        (lambda x: x[5].sin(), 4),
        (lambda x: x.sin().narrow(0, 2, 4), 5),
    ],
    ids=["all of three", "a part of three", "an index", "a part beyond the end"],
)
def test_what_three_sizes_agree_on_and_torch_denies(function: Callable[[Tensor], Tensor], new: int) -> None:
    """The numbers are those of a rule at `KNOWN`, and no number is told wrong by itself."""
    asked = questions(at_sizes(function, rows))
    check_numbers(asked, known_sizes(new))
    check(asked, known_sizes(9), FakeTensorMode())
    with pytest.raises(NotAlike):
        check(asked, known_sizes(new), FakeTensorMode())


def test_what_was_padded_to_a_multiple_is_refused_at_all_sizes() -> None:
    def padded(x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, -len(x) % 16))

    asked = questions(at_sizes(padded, rows))
    for new in (6, 9, 20):
        with pytest.raises(NotAlike, match="rounded"):
            check_numbers(asked, known_sizes(new))
        with pytest.raises(NotAlike, match="rounded"):
            check(asked, known_sizes(new), FakeTensorMode())
    check(asked, known_sizes(9, lambda n: 16 - n), FakeTensorMode())
    with pytest.raises(NotAlike, match="-4 at the size 20"):
        check(asked, known_sizes(20, lambda n: 16 - n), FakeTensorMode())


def test_equal_ops_are_asked_once_and_those_that_do_not_vary_never() -> None:
    weight = torch.randn(4, 4)

    def layers(x: Tensor) -> Tensor:
        for _ in range(3):
            x = (x @ weight.sin()).cos()
        return x

    targets = [one.target for one in questions(at_sizes(layers, rows))]
    assert targets == [torch.ops.aten.mm.default, torch.ops.aten.cos.default]


@pytest.mark.parametrize("function", OTHER_PROGRAMS.values(), ids=OTHER_PROGRAMS)
def test_other_programs_are_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(NotAlike):
        questions(at_sizes(function, rows))
