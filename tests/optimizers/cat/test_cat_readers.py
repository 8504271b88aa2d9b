"""What reads a concatenation takes its parts: R4 (pointwise ops, views) and R5 (reductions) of cat, stacks and nested ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cat_cells import x, y
from torch import Tensor
from traces import Tried, captured, ops, tried

import tracefuse
from tracefuse.optimizers.cat import Cat
from tracefuse.optimizers.simplify import Simplify

f64, bf16 = torch.float64, torch.bfloat16
long = torch.randn(64, 8, 4, dtype=f64)


def after(fn, *inputs: Tensor) -> Tried:
    return tried([Simplify(), Cat(), Simplify()], captured(fn, *inputs))


def halves(value: Tensor, axis: int = 1) -> Tensor:
    p, q = value.chunk(2, axis)
    return p.sin() * q


# --- R4 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "left"),
    [
        (lambda x, y: halves(torch.cat([x, y], 1).exp()), ["exp", "exp", "sin", "mul"]),
        (lambda x, y: halves(torch.cat([x, y], 1) * x[:, :1]), ["slice", "mul", "mul", "sin", "mul"]),  # broadcast
        (lambda x, y: halves(torch.cat([x, y], 1) * x[0, 0]), ["select", "select", "mul", "mul", "sin", "mul"]),
        (lambda x, y: halves(torch.cat([x, y], 1) + torch.cat([y, x], 1)), ["add", "add", "sin", "mul"]),
        (lambda x, y: halves(torch.cat([x, y], 1).transpose(0, 1), 0).sum(), ["transpose", "sin", "transpose", "mul", "sum"]),
        (lambda x, y: halves(torch.cat([x, y]).view(3, 4, 8, 4).view(12, 32), 0), ["view", "view", "sin", "mul"]),
        (lambda x, y: halves(F.gelu(torch.cat([x, y], 1)).float()), ["gelu", "gelu", "_to_copy", "_to_copy", "sin", "mul"]),
    ],
)  # fmt: skip
def test_an_op_before_the_parts_is_computed_on_each(fn, left):
    assert sorted(after(fn, x, y).ops) == sorted(left)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: torch.cat([x, y], 1).exp(),  # fuse stores the parts into their slices
        lambda x, y: halves(torch.cat([x, y], 1).exp(), 2),  # parts along another axis
        lambda x, y: torch.cat([x, y], 1).exp()[:, 2:12].sin(),  # a part that spans two operands
        lambda x, y: halves(torch.cat([x, y], 1).softmax(1)),  # no pointwise op
        lambda x, y: halves(torch.cat([x, y.float()], 1).exp()),  # y alone would be rounded
        lambda x, y: (c := torch.cat([x, y], 1).exp(), halves(c)),  # the whole is returned too
    ],
)
def test_an_op_that_is_not_computed_on_parts(fn):
    result = tried(Cat(), captured(fn, x, y))
    assert not result.reasons("cat of parts")
    assert result.ops.count("cat") == ops(result.captured.trace).count("cat") == 1


def test_dropout_is_drawn_for_the_whole():
    result = tried(Cat(), captured(lambda x, y: halves(F.dropout(torch.cat([x, y], 1))), x, y))
    assert result.ops == ops(result.captured.trace)


def test_a_rearranged_copy_is_one_concatenation():
    result = after(lambda x, y: torch.stack([x.sin(), y.cos()]).permute(1, 2, 0, 3).reshape(6, -1).exp(), x, y)
    assert [op for op in result.ops if op not in ("unsqueeze", "permute")] == [
        "sin",
        "cos",
        "cat",
        "_unsafe_view",
        "exp",
    ]
    apart = after(lambda x, y: torch.cat([x, y, x], 1).view(6, 2, 12, 4).transpose(1, 2).contiguous().exp(), x, y)
    assert "a copy of the cat cat, but axis 1 of cat does not pass through view" in apart.reasons("kept")


def test_a_copy_that_is_not_the_only_reader_stays():
    result = after(
        lambda x, y: ((c := torch.stack([x.sin(), y.cos()])).exp(), c.transpose(0, 1).contiguous().sin()), x, y
    )
    assert "clone" in result.ops


# --- R5 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reduce", "left"),
    [
        (lambda c: c.sum(0), ["sum", "sum", "cat"]),
        (lambda c: c.sum((0, 2), keepdim=True), ["sum", "sum", "cat"]),
        (lambda c: c.mean((0, 2)), ["mean", "mean", "cat"]),
        (lambda c: c.var((0, 2), correction=0), ["var", "var", "cat"]),
        (lambda c: c.sum((0, 1)), ["sum", "sum", "add"]),
        (lambda c: c.sum((-1, 0, 1), keepdim=True), ["sum", "sum", "add"]),
        (lambda c: c.sum(), ["sum", "sum", "add"]),
        (lambda c: (c.sum(0), c.amax(0)), ["sum", "sum", "cat", "amax", "amax", "cat"]),
    ],
)
def test_a_reduction_of_parts(reduce, left):
    def cell(z: Tensor) -> Tensor:
        return reduce(torch.cat([z.sin(), z.exp()], 1))

    assert after(cell, long).ops == ["sin", "exp", *left]


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda z: (c := torch.cat([z.sin(), z], 1)).sum(0) + c[0], "reads it whole"),
        (lambda z: torch.cat([z.sin(), z], 1).amax((0, 1)), "is not put together from its parts"),
        (lambda z: torch.cat([z.sin(), z], 1).sum(2), "by parts it would write 16 KiB"),
    ],
)
def test_a_reduction_of_the_whole(fn, reason):
    result = tried(Cat(), captured(fn, long))
    assert result.ops == ops(result.captured.trace)
    assert any(reason in found for found in result.reasons("kept"))


def test_sums_in_half_precision_are_added_in_float32():
    """Rounding the sum of each part as well would lose half of the digits that are left."""
    z = torch.full((4096, 4), 0.01, dtype=bf16)
    capture = captured(lambda z: torch.cat([z, -z, z]).sum(0), z)
    (result,) = tracefuse.replay(tried(Cat(), capture).after, capture.example_inputs)
    exact = z.double().sum(0)
    assert result.dtype is bf16
    torch.testing.assert_close(result.double(), exact, rtol=2**-8, atol=0)


# --- forms -------------------------------------------------------------------------------------------------------------


def test_nested_concatenations_are_one():
    result = after(lambda x, y: torch.cat([x.sin(), torch.cat([y, torch.cat([x, y.exp()])]), y]), x, y)
    assert result.ops == ["sin", "exp", "cat"]
    assert len(result.after.ops[-1].args[0]) == 5


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x, y: torch.cat([torch.cat([x, y], 1), torch.cat([y, x], 1)]), None),
        (
            lambda x, y: ((c := torch.cat([x, y])), torch.cat([c, x])),
            "concatenates the same axis, but output reads it too",
        ),
        (
            lambda x, y: torch.cat([torch.cat([x.float(), y]), x]),
            "concatenates the same axis, but dtypes are promoted on the way",
        ),
    ],
)
def test_nested_concatenations_that_stay(fn, reason):
    result = tried(Cat(), captured(fn, x, y))
    assert result.ops.count("cat") == ops(result.captured.trace).count("cat")
    assert reason is None or any(reason in found for found in result.reasons("kept"))


@pytest.mark.parametrize(
    ("fn", "left"),
    [
        (lambda x: torch.stack(x.unbind(0), 2).sum(), ["permute", "sum"]),
        (lambda x: torch.stack([p.reshape(2, 4, 4)[:, None] for p in x.unbind(0)], 1).flatten(2, 3).sum(), None),
        (lambda x: torch.stack(x.unbind(1)[2:5], 1).exp(), ["slice", "exp"]),
        (lambda x: torch.stack([p.sin().t() for p in x.unbind(1)], 0).sum(), ["permute", "sin", "permute", "sum"]),
        (lambda x: torch.cat([p.unsqueeze(1) * 2 for p in x.unbind(1)], 1), ["mul"]),
        (lambda x: torch.cat(x.unbind(1), 1).exp(), ["view", "exp"]),
        (lambda x: torch.cat([p.unflatten(0, (2, 3)).unsqueeze(1).squeeze(1) for p in x.unbind(1)], 2).sum(), None),
        (lambda x: torch.stack([x[:, ::2], x[:, 1::2]], 2).view(6, 8, 4).exp(), ["exp"]),
        (lambda x: torch.stack([x[:, i::4].sin() for i in range(4)], 2).flatten(1, 2), None),
        (lambda x: torch.stack([x[:, i::4] for i in (1, 2)], 2).exp(), ["view", "slice", "exp"]),
    ],
)
def test_places_of_an_axis_put_together_again(fn, left):
    result = after(fn, x)
    assert left is None or [op for op in result.ops if op not in ("getitem", "unbind")] == left
    assert "cat" not in result.ops
    assert "stack" not in result.ops
