"""Gathers inside a kernel: the value of an operand at an index that is itself loaded data.

    embedding(weight, ids)[..., d]        = weight[ids[...], d]
    gather(x, dim, index)[i, j, k]        = x[i, index[i, j, k], k]           for dim = 1
    index_select(x, dim, index)[i, j, k]  = x[i, index[j], k]                 for dim = 1
    x[:, index][i, *j, k]                 = x[i, index[*j], k]                `index.Tensor` with one index tensor

A loaded index is one more variable of the index algebra (`indexing`), so an operand that the same kernel computes is computed
at the gathered elements only: the log-probability of each row's target is one exponential sum and one element.

Indices are 64-bit whatever they were loaded as, since a table may have more than 2**31 elements. A masked lane loads index 0.

Out of range: eager's kernels assert on the GPU, which a fused kernel would pay for in every program, and clamping would
answer with a wrong row. Here nothing outside of the operand is read (element 0 is) and the result is NaN, which reaches the
loss. Integers have no NaN: gathers from them stay with ATen. Only `index.Tensor` counts negative indices from the end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.formulas.windows import places_indexed
from tracefuse.optimizers.lowering.indexing import variable
from tracefuse.optimizers.lowering.lowering import Composite, Guards, Lowering, Value
from tracefuse.optimizers.lowering.placements import places_written
from tracefuse.optimizers.lowering.views import Indices
from tracefuse.optimizers.ops import arguments, aten
from tracefuse.optimizers.trace import Trace, shape_of, val

INDEX_TYPES = (torch.int64, torch.int32)


def _embedding(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
    args = arguments(node)
    ids = self.value(args["indices"], at[:-1], guards)
    return _at_loaded(self, node, (), ids, at[-1:], guards)


def _gather(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
    args = arguments(node)
    dim = args["dim"] % len(at)
    chosen = self.value(args["index"], at, guards)
    return _at_loaded(self, node, at[:dim], chosen, at[dim + 1 :], guards)


def _index_select(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
    args = arguments(node)
    dim = args["dim"] % len(at)
    chosen = self.value(args["index"], at[dim : dim + 1] if shape_of(args["index"]) else (), guards)
    return _at_loaded(self, node, at[:dim], chosen, at[dim + 1 :], guards)


def _index(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
    ((dim, index),) = _given_indices(node)
    end = dim + len(shape_of(index))
    chosen = self.value(index, at[dim:end], guards)
    size = shape_of(node.args[0])[dim]  # type: ignore[arg-type]
    text = f"tl.where({chosen.text} < 0, {chosen.text} + {size}, {chosen.text})"
    wrapped = self.emit(node, text, chosen.dtype, chosen.lanes, "wrapped")
    return _at_loaded(self, node, at[:dim], wrapped, at[end:], guards)


def _at_loaded(self: Lowering, node: fx.Node, before: Indices, chosen: Value, after: Indices, guards: Guards) -> Value:
    """The first operand at the index `chosen` of the dimension between `before` and `after`; NaN where that is outside."""
    operand: fx.Node = node.args[0]  # type: ignore[assignment]
    size = shape_of(operand)[len(before)]
    text = f"({chosen.text} >= 0) & ({chosen.text} < {size})"
    is_inside = self.emit(node, text, "int1", chosen.lanes, "is_inside")
    text = f"tl.where({is_inside.text}, {chosen.text}, 0).to(tl.int64)"
    index = variable(self.emit(node, text, "int64", chosen.lanes, "chosen").text, size, chosen.lanes)
    block = self.value(operand, (*before, index, *after), guards)
    text = f"tl.where({is_inside.text}, {block.text}, float('nan'))"
    return self.emit(node, text, block.dtype, is_inside.lanes | block.lanes)


def _given_indices(node: fx.Node) -> list[tuple[int, fx.Node]]:
    """The dimensions that `index.Tensor` indexes, each with its index tensor."""
    return [(dim, index) for dim, index in enumerate(arguments(node)["indices"]) if index is not None]


GATHERS: dict[Any, Composite] = {
    aten.embedding.default: _embedding,
    aten.gather.default: _gather,
    aten.index_select.default: _index_select,
    aten.index.Tensor: _index,
}


def gather_refusal(node: fx.Node) -> str | None:
    """Why a gather stays with ATen; None for other ops, and where a kernel can hold it."""
    if node.target not in GATHERS:
        return None
    if node.target is aten.index.Tensor and len(_given_indices(node)) != 1:
        return f"it has {len(_given_indices(node))} index tensors: a kernel gathers along one dimension"
    operand = node.args[0]
    if not val(operand).dim() or not val(operand).numel():  # type: ignore[arg-type]
        return "it gathers from a scalar, or from no elements"
    if not val(operand).dtype.is_floating_point:  # type: ignore[arg-type]
        return "it gathers integers, for which a kernel has no way to tell an index out of range"
    indices = [a for a in node.all_input_nodes if a is not operand]
    wrong = [a for a in indices if val(a).dtype not in INDEX_TYPES]
    return f"its indices are {val(wrong[0]).dtype}, not integers of 32 or 64 bits" if wrong else None


def index_bound(body: Trace) -> int | None:
    """The number below which every index of a kernel's body is valid, in whatever it chooses; None where it has none."""
    return min((size for node in body.ops for _, _, size in indices_of(node)), default=None)


def indices_of(node: fx.Node) -> list[tuple[fx.Node, int, int]]:
    """The tensors of indices that an op of a kernel chooses by, each with the least valid one and the first behind all."""
    if node.target in GATHERS:
        return [(index, -size if node.target is aten.index.Tensor else 0, size) for index, size in _gathered(node)]
    size = places_indexed(node) or places_written(node)
    return [] if size is None else [(arguments(node).get("indices", arguments(node).get("index")), 0, size)]


def _gathered(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """The tensors of indices of a gather, each with the size of the dimension that it chooses in."""
    args, shape = arguments(node), shape_of(node.args[0])  # type: ignore[arg-type]
    if node.target is aten.index.Tensor:
        return [(index, shape[dim]) for dim, index in _given_indices(node)]
    if node.target is aten.embedding.default:
        return [(args["indices"], shape[0])]
    return [(args["index"], shape[args["dim"] % len(shape)])]


def is_table_of(node: fx.Node, user: fx.Node) -> bool:
    """Whether `user` gathers from `node`: of that it reads only as many elements as it yields."""
    return user.target in GATHERS and user.args[0] is node
