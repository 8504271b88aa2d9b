"""A trace at a fourth size is the one that is captured there, or is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from traces import OTHER_PROGRAMS, at_sizes, known_sizes

from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.passes import run_pipeline
from tracefuse.optimizers.sizes.numbers import NotAlike
from tracefuse.optimizers.sizes.traces import at_size
from tracefuse.optimizers.trace import Trace


def rows(n: int) -> Tensor:
    return torch.randn(n, 4, requires_grad=True)


def trained(x: Tensor) -> Tensor:
    scores = (x @ x.t()).softmax(-1)
    return (scores @ x).split(len(x) // len(x), dim=1)[0].mean()


def normed(x: Tensor) -> Tensor:
    return (x[1:] - x[:-1]).var(0).sum()


def fused(trace: Trace) -> Trace:
    return run_pipeline(trace, [Fuse()])[-1].after


@pytest.mark.parametrize("after", [lambda trace: trace, fused], ids=["as captured", "fused"])
@pytest.mark.parametrize("function", [trained, normed])
def test_it_is_what_is_captured_there(function: Callable[[Tensor], Tensor], after: Callable[[Trace], Trace]) -> None:
    known = list(map(after, at_sizes(function, rows)))
    for new in (4, 9, 64):
        (expected,) = map(after, at_sizes(function, rows, [new]))
        assert at_size(known_sizes(new, lambda n: n - 1), known).code == expected.code


@pytest.mark.parametrize(
    ("function", "new"),
    [
        (lambda x: x[:12].sin(), 13),
        (lambda x: x[:5].sin(), 4),
        (lambda x: (x.sin()[0], x.sin()[2:8])[1], 20),
    ],
    ids=["all of three", "a part of three", "a part of one"],
)
def test_what_three_sizes_agree_on_and_the_fourth_does_not(function: Callable[[Tensor], Tensor], new: int) -> None:
    with pytest.raises(NotAlike):
        at_size(known_sizes(new), at_sizes(function, rows))


def test_a_view_that_lies_elsewhere_in_its_memory() -> None:
    """Its layout is the same at all sizes."""
    (first, second, third) = at_sizes(lambda x: x.sin()[len(x) - 3], rows)
    at_size(known_sizes(9, lambda n: n - 3), [first, second, third])
    with pytest.raises(NotAlike):
        at_size(known_sizes(9), [first, second, third])


def test_inputs_in_one_memory_are_refused() -> None:
    def made(n: int) -> Tensor:
        return torch.randn(n + 1, 4)[1:]

    with pytest.raises(NotAlike, match="memory"):
        at_size(known_sizes(9), at_sizes(torch.sin, made))


@pytest.mark.parametrize("function", OTHER_PROGRAMS.values(), ids=OTHER_PROGRAMS)
def test_other_programs_are_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(NotAlike):
        at_size(known_sizes(9), at_sizes(function, rows))
