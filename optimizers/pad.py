"""Matmuls over rows that are not aligned, over rows that are: columns of zeros on the operands, and the result without them.

    y = mm(x, w)  # bf16[8, 1001]                       cuBLAS takes slow kernels where rows are no multiple of 16 bytes

    padded_w = constant_pad_nd(w, [0, 23])  # bf16[64, 1024]
    y = slice(mm(x, padded_w), 1, 0, 1001)

Exact: what is multiplied by zero adds nothing, and what is computed of zeros is cut off. The padding is part of the program,
so that a replay pays for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.errors import NotSupported
from tracefuse.optimizers.rewrite import mark_overwritten, replace_by
from tracefuse.optimizers.trace import Trace, call, eliminate_dead_code, val
from tracefuse.optimizers.verify import verify

aten = torch.ops.aten

ALIGNED_BYTES = 16
# Rows of eight times as many bytes: whole sectors, and tiles of tensor cores.
ROUNDED_BYTES = 8 * ALIGNED_BYTES

_TRANSPOSES = {aten.t.default, aten.transpose.int, aten.permute.default}


def padded(trace: Trace, names: Sequence[str]) -> Trace:
    """`trace` with the matmuls `names` padded. Raises `NotSupported` for one that is neither `mm` nor `addmm`."""
    new = trace.copy()
    mark_overwritten(new)
    for node in map(new.node, names):
        if not can_pad(node):
            raise NotSupported(f"{node.name} is neither mm nor addmm: pad its operands yourself")
        reason = replace_by(node, lambda: _multiplied(node))  # noqa: B023
        # Where the result's strides matter, a copy restores them.
        if reason is not None:
            reason = replace_by(node, lambda: _contiguous(_multiplied(node)))  # noqa: B023
        if reason is not None:
            raise NotSupported(f"{node.name} cannot be padded: {reason}; pad its operands yourself")
    eliminate_dead_code(new.graph)
    verify(new)
    return new


def can_pad(node: fx.Node) -> bool:
    """Whether the op is a matmul of two matrices."""
    return node.target in (aten.mm.default, aten.addmm.default)


def rounded(count: int, element_size: int) -> int:
    """The width that rows of `count` elements are padded to."""
    multiple = ROUNDED_BYTES // element_size
    return -(-count // multiple) * multiple


def _contiguous(node: fx.Node) -> fx.Node:
    return call(node, aten.clone.default, node, memory_format=torch.contiguous_format)


def _multiplied(node: fx.Node) -> fx.Node:
    """The matmul over aligned rows, and what of its result was asked for."""
    *added, left, right = node.args
    rows, inner, columns = val(left).shape[0], val(left).shape[1], val(right).shape[1]  # type: ignore[arg-type]
    widths = [_row_width(val(one)) for one in (left, right, node)]  # type: ignore[arg-type]
    size = val(node).element_size()
    wide = [rounded(n, size) if n in widths and n * size % ALIGNED_BYTES else n for n in (rows, inner, columns)]
    operands = [_pad(node, left, wide[:2]), _pad(node, right, wide[1:])]
    biases = [_pad(node, one, _unless_broadcast(one, (wide[0], wide[2]))) for one in added]
    product = call(node, node.target, *biases, *operands, **node.kwargs)  # type: ignore[arg-type]
    for dim, count in ((0, rows), (1, columns)):
        if val(product).shape[dim] != count:
            product = call(node, aten.slice.Tensor, product, dim, 0, count)
    return product


def _unless_broadcast(bias: Any, wide: Sequence[int]) -> list[int]:
    """The shape that a bias is padded to: a dimension of 1 is added to every row or column, the padded ones too."""
    shape = val(bias).shape
    return [1 if count == 1 else width for count, width in zip(shape, wide[len(wide) - len(shape) :], strict=True)]


def _row_width(tensor: torch.Tensor) -> int:
    """How many elements lie one after another: along the dimension of stride 1."""
    return tensor.shape[1 if tensor.stride(1) == 1 else 0]


def _pad(like: fx.Node, operand: Any, shape: Sequence[int]) -> fx.Node:
    """The operand with zeros up to `shape`; a transposed one is padded as it lies."""
    missing = [wanted - count for wanted, count in zip(shape, val(operand).shape, strict=True)]
    if not any(missing):
        return operand
    if operand.target in _TRANSPOSES and len(missing) == 2:
        return call(like, aten.t.default, _pad(like, operand.args[0], list(reversed(shape))))
    zeros = [n for count in reversed(missing) for n in (0, count)]
    return call(like, aten.constant_pad_nd.default, operand, zeros, 0.0)
