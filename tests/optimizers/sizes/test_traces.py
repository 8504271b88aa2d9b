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
    def made(n: int) -> tuple[Tensor, Tensor]:
        both = torch.randn(2 * n, 4)
        return both[:n], both[n:]

    with pytest.raises(NotAlike, match="memory"):
        at_size(known_sizes(9), at_sizes(lambda pair: pair[0] + pair[1], made))


@pytest.mark.parametrize("is_moving", [False, True])
def test_an_input_begins_in_its_memory_where_three_sizes_tell(is_moving: bool) -> None:
    def made(n: int) -> Tensor:
        return torch.randn(2 * n, 4)[n if is_moving else 1 :][:n]

    def function(x: Tensor) -> Tensor:
        return x.view(-1, 2, 2).sin()

    found = at_size(known_sizes(9), at_sizes(function, made))
    (expected,) = at_sizes(function, made, [9])
    assert found.code == expected.code
    (old,), (new,) = expected.placeholders, found.placeholders
    assert old.meta["val"].storage_offset() == new.meta["val"].storage_offset() > 0


@pytest.mark.parametrize("function", OTHER_PROGRAMS.values(), ids=OTHER_PROGRAMS)
def test_other_programs_are_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(NotAlike):
        at_size(known_sizes(9), at_sizes(function, rows))
