"""R3 of cat: sums of zero-padded ranges, alone and in whole programs."""

from __future__ import annotations

import functools

import programs
import pytest
import torch
import torch.nn.functional as F
from cat_cells import left, pad, x
from torch import Tensor
from traces import captured, ops, tried

from tracefuse.optimizers.cat import Cat
from tracefuse.optimizers.simplify import Simplify

f64 = torch.float64


# --- R3: a sum of zero-padded ranges -----------------------------------------------------------------------------------


def padded(p: Tensor, start: int, stop: int, axis: int = 1) -> Tensor:
    return pad(p, [6, 8, 4], axis, start, stop, 1)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: padded(x[:, :2], 0, 2) + padded(x[:, 2:], 2, 8), ["slice", "slice", "cat"]),
        (lambda x: padded(x[:, 2:], 2, 8) + padded(x[:, :2], 0, 2), ["slice", "slice", "cat"]),
        # With something dense among the addends.
        (lambda x: (padded(x[:, 2:4], 0, 2) + x) + padded(x[:, 2:], 2, 8), ["slice", "slice", "cat", "add"]),
        (lambda x: (padded(x[:, :2], 0, 2) + x) + padded(x[:, 2:], 2, 8), ["add"]),  # and then R2
        # neg, casts and scaling act on the pieces.
        (lambda x: -padded(x[:, :2], 0, 2) * 3 + padded(x[:, 2:], 2, 8), ["slice", "slice", "neg", "mul", "cat"]),
        # The same range twice: a sum in the cat.
        (
            lambda x: padded(x[:, :2], 0, 2) + padded(x[:, 2:], 2, 8) + padded(x[:, 1:3], 0, 2),
            ["slice", "slice", "slice", "add", "cat"],
        ),
        # One range only: pad the sum.
        (lambda x: padded(x[:, :2], 0, 2) + padded(x[:, 1:3], 0, 2), ["slice", "slice", "add", "slice_backward"]),
        # A gap is zeros.
        (lambda x: padded(x[:, :2], 0, 2) + padded(x[:, 2:4], 6, 8), ["slice", "slice", "zeros", "cat"]),
        # Other ways to pad.
        (lambda x: F.pad(x, (0, 4)) + F.pad(x.exp(), (4, 0)), ["exp", "cat"]),
        (lambda x: F.pad(x, (0, 0, 3, 0)) + F.pad(x[:, :3], (0, 0, 0, 8)), ["slice", "cat"]),
        (
            lambda x: (
                torch.cat([x[:2], torch.zeros(4, 8, 4, dtype=f64)])
                + torch.cat([torch.zeros(2, 8, 4, dtype=f64), x[2:]])
            ),
            ["slice", "slice", "cat"],
        ),
        # Selected pieces get their axis back.
        (lambda x: selected(x, 0) + selected(x, 1), ["select", "select", "unsqueeze", "unsqueeze", "cat"]),
        # Padding within padding: x[:, :2, :3] and x[:, 2:, :3].
        (
            lambda x: padded(padded_last(x[:, :2, :3]), 0, 2) + padded(padded_last(x[:, 2:, 1:]), 2, 8),
            None,
        ),
    ],
)
def test_a_sum_of_padded_values(fn, expected):
    result = tried([Simplify(), Cat(), Simplify()], captured(fn, x))
    assert result.reasons("cat of pieces")
    assert expected is None or result.ops == expected


def test_an_addend_of_nothing_is_dropped():
    """As the remainder of a full rotary dimension is."""
    assert left(lambda x: x.exp() + padded(x[:, 8:], 8, 8), x) == ["exp"]
    assert left(lambda x: x.exp() + torch.zeros_like(x), x) == ["exp"]
    assert left(lambda x: padded(x.exp(), 0, 8) + padded(x[:, 8:], 8, 8), x) == ["exp"]


def selected(x: Tensor, index: int) -> Tensor:
    return torch.ops.aten.select_backward(x[:, index], [6, 2, 4], 1, index)


def padded_last(p: Tensor) -> Tensor:
    return pad(p, [*p.shape[:2], 4], 2, 0, 3, 1)


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (
            lambda x: padded(x[:, :3], 0, 3) + padded(x[:, 2:], 2, 8),
            "2 of its addends are padded along axis 1, but the ranges [0:3] and [2:8] overlap in part",
        ),
        (lambda x: padded(x[:, :3], 0, 3) + x, "1 of its 2 addends are padded with zeros: it takes two"),
        (
            lambda x: padded(x[:, :3], 0, 3) + pad(x[..., :2], [6, 8, 4], 2, 0, 2, 1),
            "its addends are padded along different axes, [1, 2]",
        ),
        (lambda x: torch.add(padded(x[:, :3], 0, 3), padded(x[:, 3:], 3, 8), alpha=2), None),
        (
            lambda x: F.pad(x, (0, 4), value=1) + F.pad(x, (4, 0)),
            "1 of its 2 addends are padded with zeros: it takes two",
        ),
        (
            lambda x: (padded(x[:, :3], 0, 3) + 1) + padded(x[:, 3:], 3, 8),
            "1 of its 2 addends are padded with zeros: it takes two",
        ),
        (
            lambda x: padded(x[:, :3], 0, 3) * float("inf") + padded(x[:, 3:], 3, 8),  # 0 * inf is nan
            "1 of its 2 addends are padded with zeros: it takes two",
        ),
    ],
)
def test_a_sum_that_stays(fn, reason):
    x = torch.ones(6, 8, 4, dtype=f64)
    captured_ = captured(fn, x)
    result = Cat().run(captured_.trace, (decisions := []).append)
    assert ops(result) == ops(captured_.trace)
    assert reason is None or reason in [d.reason for d in decisions]


def test_an_inner_sum_that_is_returned_stays_as_well():
    def cell(x):
        two = padded(x[:, :2], 0, 2) + padded(x[:, 2:4], 2, 4)
        return two, two + padded(x[:, 4:], 4, 8)

    result = tried(Cat(), captured(cell, x))
    assert [op for op in ops(result.after) if op != "slice"] == ["zeros", "cat", "cat"]


# --- whole programs ----------------------------------------------------------------------------------------------------


def simplified_and_cut(cell) -> tuple[list[str], list[str]]:
    result = tried([Simplify(), Cat(), Simplify()], captured(cell))
    return ops(tried(Simplify(), result.captured).after, "backward"), ops(result.after, "backward")


def test_partial_rope_backward_ends_in_one_cat():
    before, after = simplified_and_cut(programs.rope(f64).fresh().run)
    assert before.count("slice_backward") == 2
    assert after.count("slice_backward") == 0
    assert after[-1] == "cat"
    assert len(after) == len(before) - 2


def test_full_rope_has_no_padding_and_no_empty_operand():
    _, after = simplified_and_cut(programs.rope_full(f64).fresh().run)
    assert "slice_backward" not in after
    assert after.count("cat") == 1  # rotate_half


def test_llama_rotary_backward_adds_no_padded_halves():
    before, after = simplified_and_cut(programs.llama(f64).fresh().run)
    assert before.count("slice_backward") == 8
    assert after.count("slice_backward") == 0
    assert after.count("cat") == 4


def test_three_slices_of_one_projection():
    """qkv[..., :c], [..., c:2c], [..., 2c:]: three padded gradients become one cat."""
    packed = torch.randn(5, 24, dtype=f64, requires_grad=True)

    def cell() -> None:
        q, k, v = packed[:, :8], packed[:, 8:16], packed[:, 16:]
        (q * k.sin() + v).square().sum().backward()

    before, after = simplified_and_cut(cell)
    assert before.count("slice_backward") == 3
    assert (after.count("slice_backward"), after.count("cat")) == (0, 1)


# --- every k-th element ------------------------------------------------------------------------------------------------


def spread(p: Tensor, start: int, step: int, axis: int = 1) -> Tensor:
    """`p` at every `step`-th element of an axis of zeros."""
    return pad(p, [6, 8, 4], axis, start, 2**63 - 1, step)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: spread(x[:, :4], 0, 2) + spread(x[:, 4:], 1, 2), ["unsqueeze", "unsqueeze", "cat", "view"]),
        (lambda x: spread(x[:, 4:], 1, 2) - -spread(x[:, :4], 0, 2), None),
        (
            lambda x: functools.reduce(torch.add, [spread(x[:, 2 * i : 2 * i + 2], i, 4) for i in range(4)]),
            ["unsqueeze"] * 4 + ["cat", "view"],
        ),
        # With a dense addend, and the same places twice.
        (
            lambda x: spread(x[:, :4], 0, 2) + x.exp() + spread(x[:, 4:], 1, 2),
            ["exp", "unsqueeze", "unsqueeze", "cat", "view", "add"],
        ),
        (
            lambda x: spread(x[:, :4], 1, 2) + spread(x[:, 4:], 1, 2),
            ["unsqueeze", "unsqueeze", "add", "slice_backward", "view"],
        ),
    ],
)
def test_a_sum_of_spread_values(fn, expected):
    result = tried([Simplify(), Cat(), Simplify()], captured(fn, x))
    found = [op for op in result.ops if op != "slice"]
    assert expected is None or found == expected


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (
            lambda x: spread(x[:, :4], 0, 2) + spread(x[:, :2], 1, 4),
            "its addends are padded with different steps, [2, 4]",
        ),
        # 8 is no multiple of 3: no axis of length 3 lies in it.
        (lambda x: spread(x[:, :3], 0, 3) + spread(x[:, :3], 1, 3), None),
        (
            lambda x: spread(x[:, :4], 0, 2) + padded(x[:, :4], 0, 4),
            "its addends are padded with different steps, [1, 2]",
        ),
    ],
)
def test_a_sum_of_spread_values_that_stays(fn, reason):
    result = tried(Cat(), captured(fn, x))
    assert result.ops == ops(result.captured.trace)
    assert reason is None or reason in result.reasons("kept")
