"""Cat: ranges of concatenations (R1), concatenations of ranges (R2), and any program of the algebra."""

from __future__ import annotations

from itertools import pairwise

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from cat_cells import left, pad, x, y
from torch import Tensor
from traces import captured, ops, tried

from tracefuse.optimizers.cat import Cat

f64 = torch.float64


def kept(fn, *inputs: Tensor) -> list[str]:
    """The reasons, where the pass must change nothing."""
    result = tried(Cat(), captured(fn, *inputs))
    assert result.ops == ops(result.captured.trace)
    return result.reasons("kept")


# --- names ------------------------------------------------------------------------------------------------------------


def test_what_is_returned_keeps_the_name_that_the_user_knows():
    def halves(x: Tensor) -> None:
        (x[..., :2].sin() * x[..., 2:]).sum().backward()

    result = tried(Cat(), captured(halves, x.clone().requires_grad_()))
    (before,) = [n for n in result.captured.trace.returned if n.name == "grad_x"]
    (after,) = [n for n in result.after.returned if n.name == "grad_x"]
    assert (before.target, after.target) == (torch.ops.aten.add.Tensor, torch.ops.aten.cat.default)
    assert [d.value for d in result.decisions if d.action == "cat of pieces"] == ["grad_x"]


def test_a_value_that_is_there_already_keeps_its_own_name():
    result = tried(Cat(), captured(lambda x: x.exp() + torch.zeros_like(x), x))
    assert [n.name for n in result.captured.trace.returned] == ["result"]
    assert [n.name for n in result.after.returned] == ["exp"]


def test_why_a_value_stayed_is_forgotten_once_it_is_replaced_under_its_name():
    """`whole` stays while the range of `both` is read from it; once that is one of `x.exp()`, it is a cat of three."""

    def cell(x, y):
        both = torch.cat([x.exp(), y])
        whole = torch.cat([both, y])
        return whole, both[:2]

    result = tried(Cat(), captured(cell, x, y))
    told = [d for d in result.decisions if d.value == result.captured.trace.returned[0].name]
    assert [d.action for d in told] == ["cat of cats", "kept"]
    assert "reads it too" not in told[1].reason


# --- R1: a range of a concatenation ------------------------------------------------------------------------------------


def parts_of(axis: int):
    return lambda x, y: torch.cat([x, y], axis).split([x.shape[axis], y.shape[axis]], axis)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_the_parts_of_a_cat_are_its_operands(axis):
    def cell(x, y):
        first, second = parts_of(axis)(x.exp(), y.exp())
        return first.sin() + second.cos()

    assert left(cell, x, y) == ["exp", "exp", "sin", "cos", "add"]


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x, y: torch.cat([x, y])[2:5].exp(), ["slice", "exp"]),
        (lambda x, y: torch.cat([x, y])[6:].exp(), ["exp"]),
        (lambda x, y: torch.cat([x, y])[9].exp(), ["select", "exp"]),
        (lambda x, y: torch.cat([x, y], 1).unbind(1)[10].exp(), ["select", "exp"]),
        (lambda x, y: torch.cat([x, y], 1).chunk(4, 1)[3].exp(), ["slice", "exp"]),
        (lambda x, y: torch.cat([x, y, x])[4:8].exp(), ["slice", "slice", "cat", "exp"]),
        (lambda x, y: torch.cat([x[:0], x, y])[:6].exp(), ["exp"]),
    ],
)
def test_a_range_of_a_cat(fn, expected):
    assert left(fn, x, y) == expected


def test_a_range_over_several_operands_stays_while_the_cat_is_needed():
    def cell(x, y):
        both = torch.cat([x, y])
        return both.exp().sum() + both[4:8].sum()

    assert "a part of the cat both, but it spans 2 operands and exp still reads the whole" in kept(cell, x, y)


def test_smaller_cats_that_would_write_more_stay_views():
    def cell(x, y):
        both = torch.cat([x, y])
        return both[1:11].sum() + both[2:12].sum()

    assert any("the smaller cats would write" in reason for reason in kept(cell, x, y))


def test_a_range_along_another_axis_is_left_alone():
    assert "cat concatenates axis 0, this takes axis 1" in kept(lambda x, y: torch.cat([x, y])[:, 2:3].exp(), x, y)


def test_the_forward_does_not_keep_operands_for_a_cat_that_it_keeps_anyway():
    a, b = (torch.randn(3, 4, dtype=f64, requires_grad=True) for _ in range(2))

    class Op(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            both = torch.cat([a.exp(), b.exp()])
            ctx.save_for_backward(both)
            return both.sum()

        @staticmethod
        def backward(ctx, g):
            (both,) = ctx.saved_tensors
            return g * both[:3] + both.sum(), g * both[3:]

    reasons = kept(lambda: Op.apply(a, b).backward())
    assert any("the forward would have to keep its operands as well" in reason for reason in reasons)


# --- R2: a concatenation of ranges -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: torch.cat([x[:2], x[2:]]).exp(), ["exp"]),
        (lambda x: torch.cat(x.chunk(3, 1), 1).exp(), ["exp"]),
        (lambda x: torch.cat([x[1:2], x[2:5]]).exp(), ["slice", "exp"]),
        (lambda x: torch.cat([p.transpose(0, 1) for p in x.chunk(2)], 1).sum(), ["transpose", "sum"]),
        (lambda x: torch.cat([p.permute(2, 0, 1) for p in x.chunk(2, 1)], 2).sum(), ["permute", "sum"]),
        (lambda x: torch.cat([p.unsqueeze(0) for p in x.chunk(2)], 1).exp(), ["unsqueeze", "exp"]),
        (lambda x: torch.cat([p.unsqueeze(0).squeeze(0) for p in x.chunk(2)]).exp(), ["exp"]),
        (lambda x: torch.cat([-p * 2 for p in x.split(2)]), ["neg", "mul"]),
        (lambda x: torch.cat([F.gelu(p).to(torch.float32) for p in x.split(2)]), ["gelu", "_to_copy"]),
        (lambda x: torch.cat([p * p for p in x.split(2)]), ["mul"]),
        # Through a merge the axis goes as the outer factor.
        (lambda x: torch.cat([p.view(-1, 4) for p in x.chunk(2)]).exp(), ["view", "exp"]),
        (lambda x: torch.cat([p.view(-1) for p in x.chunk(2)]).exp(), ["view", "exp"]),
        # Through a split it goes if what varies is the outer part.
        (lambda x: torch.cat([p.view(-1, 2, 8, 4) for p in x.split([2, 4])]).exp(), ["view", "exp"]),
        (lambda x: torch.cat([p.reshape(6, -1, 2, 4) for p in x.split([2, 6], 1)], 1).exp(), ["view", "exp"]),
        # A run among other operands.
        (lambda x: torch.cat([x[:2], x[2:4], x[:3]]).exp(), ["slice", "slice", "cat", "exp"]),
    ],
)
def test_a_cat_of_ranges(fn, expected):
    assert left(fn, x) == expected


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x: torch.cat([x[2:], x[:2]]), "x[2:6] is followed by [0:2], not by what comes next"),
        (lambda x: torch.cat([x[:2], x[3:]]), "x[0:2] is followed by [3:6], not by what comes next"),
        (lambda x: torch.cat([x[:3], x[:, :, :].exp()[3:]]), "operands come from different bases, x and exp"),
        (lambda x: torch.cat([x[:3], x[3:].neg()]), "the slices of x go through different ops"),
        (lambda x: torch.cat([x[:3] * 2, x[3:] * 3]), "the slices of x go through different ops"),
        (
            lambda x: torch.cat([x[:, :4], x[:, 4:]], 0),
            "axis 1 of x does not arrive as the outer factor of the cat's axis 0",
        ),
        (
            lambda x: torch.cat([p.reshape(-1, 4) for p in x.chunk(2, 1)]),
            "axis 1 of x does not arrive as the outer factor of the cat's axis 0",
        ),
        (
            lambda x: torch.cat([p.view(2, 1, 8, 4) for p in x.split(2)], 1),
            "axis 0 of x does not arrive as the outer factor of the cat's axis 1",
        ),
        (
            lambda x: torch.cat([p.cumsum(0) for p in x.split(2)]),
            "cumsum comes from cumsum = aten.cumsum.default, no slice",
        ),
        (lambda x: torch.cat([x, x]), "x comes from the input x, no slice"),
        (lambda x: torch.cat([x[1:2].squeeze(0), x[2].exp()]), None),
    ],
)
def test_a_cat_of_ranges_that_stays(fn, reason):
    reasons = kept(fn, x)
    assert reason is None or any(reason in r for r in reasons), reasons


def test_an_elementwise_op_that_is_read_elsewhere_is_not_computed_twice():
    def cell(x):
        parts = [p.exp() for p in x.split(3)]
        return torch.cat(parts) * 2, parts[0].sum()

    assert "exp is read elsewhere too and would be computed twice" in kept(cell, x)


# --- any program of the algebra ----------------------------------------------------------------------------------------


@st.composite
def cells(draw):
    """cat of ranges of x or y, each through the same random chain, then a few ranges of it, padded and added up."""
    axis = draw(st.integers(0, 2))
    lengths = draw(st.lists(st.integers(1, 3), min_size=2, max_size=3))
    chain = draw(st.lists(st.sampled_from(["neg", "scale", "swap", "front", "flat"]), max_size=3))
    bases = draw(st.lists(st.sampled_from("xxxy"), min_size=len(lengths), max_size=len(lengths)))
    target = draw(st.integers(0, 2))
    cuts = sorted(draw(st.lists(st.integers(0, 9), min_size=2, max_size=3)))
    return axis, lengths, chain, bases, target, cuts


def through(p: Tensor, chain: list[str]) -> Tensor:
    for link in chain:
        p = {
            "neg": lambda p: -p,
            "scale": lambda p: p * 1.5,
            "swap": lambda p: p.transpose(0, -1),
            "front": lambda p: p.unsqueeze(0).squeeze(0),
            "flat": lambda p: p.reshape(p.shape[0], -1),
        }[link](p)
    return p


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(cells())
def test_numbers_are_kept_whatever_the_algebra_does(cell):
    axis, lengths, chain, bases, target, cuts = cell
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    sizes = [4, 4, 4]
    sizes[axis] = 9
    inputs = {name: torch.randn(sizes, dtype=f64) for name in "xy"}

    def run(x, y):
        named = {"x": x, "y": y}
        parts = [through(named[b].narrow(axis, e - n, n), chain) for b, n, e in zip(bases, lengths, ends, strict=True)]
        along = target % parts[0].dim()
        if len({p.shape[:along] + p.shape[along + 1 :] for p in parts}) > 1:
            along = next((a for a in range(parts[0].dim()) if _agree_but(parts, a)), None)
        if along is None:
            return parts[0] * 2
        whole = torch.cat(parts, along)
        length = whole.shape[along]
        spans = [(min(a, length), min(b, length)) for a, b in pairwise(cuts)]
        pieces = [pad(whole.narrow(along, a, b - a), list(whole.shape), along, a, b, 1) for a, b in spans]
        return sum(pieces[1:], pieces[0]) * 2

    tried(Cat(), captured(run, inputs["x"], inputs["y"]))


def _agree_but(parts: list[Tensor], axis: int) -> bool:
    return len({p.shape[:axis] + p.shape[axis + 1 :] for p in parts}) == 1
