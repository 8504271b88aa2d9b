"""Alignment of matmuls: tensor cores are fed whole vectors where the bytes from row to row are a multiple of 16.

    x, w      bf16[8192, 768], bf16[50257, 768]
    mm(x, w.t())    rows of the result lie 100,514 bytes apart: a dimension of 50,257 lies along them, 50,304 would be aligned

It is the distance between rows that counts: the first 50,257 columns of a matrix of 50,304 are aligned.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from tracefuse.optimizers.facts import once_per_kind
from tracefuse.optimizers.ops import aten, once_per_operator
from tracefuse.optimizers.trace import val

MATMULS = {aten.mm.default: 0, aten.addmm.default: 1, aten.bmm.default: 0, aten.baddbmm.default: 1}
"""How many operands stand before the factors: what is added."""

ALIGNED_BYTES = 16
# Rows of eight times as many bytes: whole sectors, and tiles of tensor cores.
ROUNDED_BYTES = 8 * ALIGNED_BYTES
MOST_ADDED = 1 / 16
"""Of a row: where rounding to whole tiles adds more than that, it is rounded to what is just aligned."""

UNALIGNED_SHARE = 0.25
"""Of the arithmetic that tensor cores can do: `tests/bench/gpt_step.py --breakdown --no-pass pad` has times of both."""

Dims = tuple[int, int, int]
"""Rows of the left factor, what is summed over, columns of the right one."""


def dims_of(node: fx.Node) -> Dims:
    """The sizes of a matmul, without those of its batch."""
    left, right = (val(factor).shape for factor in factors(node))
    return left[-2], left[-1], right[-1]


def factors(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    at = MATMULS[node.target]  # type: ignore[index]
    return node.args[at], node.args[at + 1]  # type: ignore[return-value]


def unaligned(node: fx.Node) -> Dims | None:
    """What a matmul over unaligned rows would be padded to; None for any other op, and where nothing is computed."""
    return _padded(node) if isinstance(node.target, torch._ops.OpOverload) and _is_matmul(node.target) else None


@once_per_operator
def _is_matmul(target: torch._ops.OpOverload) -> bool:
    return target in MATMULS


@once_per_kind
def _padded(node: fx.Node) -> Dims | None:
    dims, (left, right) = dims_of(node), factors(node)
    if not all(isinstance(n, int) for n in dims) or val(node).numel() * dims[1] == 0:
        return None
    size, of = val(node).element_size(), ((val(left), (0, 1)), (val(right), (1, 2)))
    along = {*_along(val(node), (0, 2)), *(dim for tensor, both in of for dim in _along(tensor, both))}
    while True:
        wide = tuple(rounded(n, size) if dim in along else n for dim, n in enumerate(dims))
        # A copy that is padded along its other dimension lies in rows of its own, whatever it was a part of.
        copied = [(t, both) for t, both in of if _has_rows(t) and any(wide[d] != dims[d] for d in both)]
        lines = {both[0 if is_turned(tensor) else 1] for tensor, both in copied}
        more = {dim for dim in lines if wide[dim] * size % ALIGNED_BYTES}
        if not more:
            return None if wide == dims else wide  # type: ignore[return-value]
        along |= more


def is_turned(matrix: torch.Tensor) -> bool:
    """Whether the matrix, or each of a batch, lies column by column in memory."""
    return matrix.dim() > 1 and matrix.stride(-2) == 1 and matrix.stride(-1) != 1


def _has_rows(matrix: torch.Tensor) -> bool:
    return min(matrix.shape[-2:]) > 1


def _along(tensor: torch.Tensor, dims: tuple[int, int]) -> Iterator[int]:
    """Which of the matrix's two `dims` lies along its rows in memory, if those are not aligned."""
    if not _has_rows(tensor):
        return
    is_copied = 1 not in tensor.stride()[-2:]  # by the operator itself
    pitch = tensor.shape[-1] if is_copied else tensor.stride(-1 if is_turned(tensor) else -2)
    if pitch * tensor.element_size() % ALIGNED_BYTES:
        yield dims[0 if is_turned(tensor) else 1]


def rounded(count: int, element_size: int) -> int:
    """The width that rows of `count` elements are padded to."""
    units = (ROUNDED_BYTES // element_size, ALIGNED_BYTES // element_size)
    tiles, aligned = (-(-count // unit) * unit for unit in units)
    return tiles if tiles - count <= MOST_ADDED * count else aligned
