"""The ops that are more than one expression: constants, reductions, softmax, scans, norms; `placements` has the others.

Each row of `COMPOSITES` is a function `(lowering, node, at, guards) -> Value`. A row reduction reads its operand along the
whole row that the program holds, then continues at the index asked for. A column reduction adds up its operand over the
rows that the program goes through, and is known after the last of them.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from tracefuse.optimizers.lowering.gathers import GATHERS
from tracefuse.optimizers.lowering.geometry import along_row_dims, columns_of, operand_of, reduced_dims
from tracefuse.optimizers.lowering.indexing import constant, reshape, unravel, variable
from tracefuse.optimizers.lowering.layouts import FIRST
from tracefuse.optimizers.lowering.literals import COMPUTE_TYPE, literal
from tracefuse.optimizers.lowering.lowering import Composite, Guards, Lowering, NotFusible, Value, index_block
from tracefuse.optimizers.lowering.masks import MASKS
from tracefuse.optimizers.lowering.norms import norm, norm_backward
from tracefuse.optimizers.lowering.placements import PLACEMENTS
from tracefuse.optimizers.lowering.reductions import (  # fmt: skip
    centred_row,
    column_moments,
    column_total,
    exponentials,
    extremum,
    logsumexp,
    place_of,
    product,
    reduce,
    row_moments,
    scan,
    summed_rows,
)
from tracefuse.optimizers.lowering.views import Indices
from tracefuse.optimizers.ops import arguments, aten, is_getitem
from tracefuse.optimizers.trace import shape_of, val

# --- constants --------------------------------------------------------------------------------------------------------


def _full(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
    dtype = COMPUTE_TYPE[val(node).dtype]
    return self.emit(node, f"tl.full((), {literal(fill_value(node), dtype)}, tl.{dtype})", dtype, frozenset())


def fill_value(node: fx.Node) -> float:
    """The number that a constant op fills its result with."""
    name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
    if "zeros" in name or "ones" in name:
        return float("ones" in name)
    args = arguments(node)
    return args["fill_value"] if "fill_value" in args else args["s"]


def _arange(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
    args, dtype = arguments(node), COMPUTE_TYPE[val(node).dtype]
    start, step = args.get("start", 0), args.get("step", 1)
    text = f"{index_block(at[0])}.to(tl.{dtype})"
    text += "" if step == 1 else f" * {literal(step, dtype)}"
    text += "" if start == 0 else f" + {literal(start, dtype)}"
    return self.emit(node, text, dtype, at[0].lanes)


# --- row reductions ---------------------------------------------------------------------------------------------------


def _row_index(self: Lowering, node: fx.Node, operand: fx.Node, at: Indices) -> Indices:
    """Indices along the row of `operand` that the reduction's element `at` comes from; `at` is of the reduced shape."""
    dims, shape = along_row_dims(node), shape_of(operand)
    kept = [d for d in range(len(shape)) if d not in dims]
    outer = [at[d] for d in kept] if len(at) == len(shape) else list(at)
    whole = dict(zip(kept, outer, strict=True))
    return self.along_row(node, shape, dims, tuple(whole.get(d, constant(0)) for d in range(len(shape))))


def _row(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
    """The row that the reduction's element `at` comes from, in the type of the result."""
    operand = operand_of(node)
    block = self.value(operand, _row_index(self, node, operand, at), self.row_guards(node, guards))
    return self.cast(block, COMPUTE_TYPE[val(node).dtype])


def _reduction(how: str) -> Composite:
    def lower(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
        if columns_of(node) is not None:
            return _column_reduction(self, node, at, how)
        block = _row(self, node, at, guards)
        if how == "mean":
            total = reduce(self, node, block, "sum", "total")
            return self.emit(node, f"{total.text} / {self.layout.row_length}", block.dtype, total.lanes)
        if how == "sum":
            return reduce(self, node, block, "sum", node.name)
        return extremum(self, node, block, how)

    return lower


def _column_reduction(self: Lowering, node: fx.Node, at: Indices, how: str) -> Value:
    rows = summed_rows(self, node)
    operand, dtype = operand_of(node), COMPUTE_TYPE[val(node).dtype]
    where = reshape(rows.layout.indices, rows.layout.shape, shape_of(operand))
    total = column_total(self, node, rows.cast(rows.value(operand, where), dtype), at)
    if how == "sum":
        return total
    return self.emit(node, f"{total.text} / {rows.layout.columns.sizes[1]}", dtype, total.lanes)  # type: ignore[union-attr]


def _extremum(how: str) -> Composite:
    """`max` or `min` along one dimension, its value or place, or `argmax` or `argmin`."""

    def lower(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
        op: fx.Node = node.args[0] if is_getitem(node) else node  # type: ignore[assignment]
        operand, args = operand_of(op), arguments(op)
        if args["dim"] is None and val(operand).dim() > 1:
            raise NotFusible(op, "it counts the places of several dimensions")
        block = self.value(operand, _row_index(self, op, operand, at), self.row_guards(op, guards))
        best = extremum(self, op, block, how)
        is_value = op is not node and node.args[1] == 0
        return best if is_value else place_of(self, node, block, best)

    return lower


def _moments(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
    """`var`, or a part of `var_mean`: the variance, or the mean."""
    op: fx.Node = node.args[0] if is_getitem(node) else node  # type: ignore[assignment]
    args, operand, dtype = arguments(op), operand_of(op), COMPUTE_TYPE[val(node).dtype]
    if columns_of(op) is not None:
        rows = summed_rows(self, op)
        mean, squares = column_moments(self, node, operand, dtype, at)
        count = rows.layout.columns.sizes[1]  # type: ignore[union-attr]
    else:
        mean, squares = _moments_of_row(self, op, at, guards, dtype)
        count = self.layout.row_length
    if op is not node and node.args[1] == 1:
        return mean
    divisor = max(count - (1 if args["correction"] is None else args["correction"]), 0)
    # ATen divides by zero where the correction leaves no degree of freedom: equal elements yield NaN, others infinity.
    text = f"{squares.text} / {divisor}" if divisor else f"{squares.text} * float('inf')"
    return self.emit(node, text, dtype, squares.lanes)


def _moments_of_row(self: Lowering, node: fx.Node, at: Indices, guards: Guards, dtype: str) -> tuple[Value, Value]:
    """The mean of a row, and the sum of the squared differences from it."""
    operand, dims, own = operand_of(node), along_row_dims(node), self.row_guards(node, guards)
    where = _row_index(self, node, operand, at)
    block = self.cast(self.value(operand, where, own), dtype)
    if self.layout.loop is not None and self.layout.loop.lane == "col":
        begin = variable("tl.arange(0, COLS)", self.layout.blocks["col"], FIRST)
        inner = dict(zip(dims, unravel(begin, [shape_of(operand)[d] for d in dims]), strict=True))
        first = self.value(operand, tuple(inner.get(d, index) for d, index in enumerate(where)), own)
        return row_moments(self, node, block, self.cast(first, dtype))
    mean, centred = centred_row(self, node, block)
    return mean, reduce(self, node, product(self, node, centred, centred, "squares"), "sum", "squares")


def _logsumexp(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
    return logsumexp(self, node, _row(self, node, at, guards))


# --- softmax ----------------------------------------------------------------------------------------------------------


def _softmax(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
    args, dtype = arguments(node), COMPUTE_TYPE[val(node).dtype]
    operand, rows = args["self"], self.row_guards(node, guards)
    row = self.cast(self.value(operand, _softmax_row(self, node, at), rows), dtype)
    maximum, total = exponentials(self, node, row)
    here = self.cast(self.value(operand, at, guards), dtype)
    if node.target is aten._log_softmax.default:
        return self.emit(node, f"{here.text} - {maximum.text} - tl.log({total.text})", dtype, here.lanes | total.lanes)
    power = self.emit(node, f"tl.exp({here.text} - {maximum.text})", dtype, here.lanes | maximum.lanes, "power")
    return self.emit(node, f"{power.text} / {total.text}", dtype, power.lanes)


def _softmax_backward(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
    args, dtype = arguments(node), COMPUTE_TYPE[val(node).dtype]
    grad, output = args["grad_output"], args["output"]
    row, rows = _softmax_row(self, node, at), self.row_guards(node, guards)
    grad_row = self.value(grad, row, rows)
    is_log = node.target is aten._log_softmax_backward_data.default
    if not is_log:
        grad_row = product(self, node, grad_row, self.value(output, row, rows))
    total = reduce(self, node, grad_row, "sum", "total")
    g, y = self.value(grad, at, guards), self.value(output, at, guards)
    text = f"{g.text} - tl.exp({y.text}) * {total.text}" if is_log else f"{y.text} * ({g.text} - {total.text})"
    return self.emit(node, text, dtype, g.lanes | y.lanes)


def _softmax_row(self: Lowering, node: fx.Node, at: Indices) -> Indices:
    return self.along_row(node, shape_of(node), along_row_dims(node), at)


# --- scans ------------------------------------------------------------------------------------------------------------


def _cumsum(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
    """A cumulative sum along the row that the program holds: from its end where the row is read so, as a flipped one is."""
    operand, (dim,), shape = operand_of(node), reduced_dims(node), shape_of(node)
    along = self.along_row(node, shape, (dim,), at)[dim]
    if at[dim] not in (along, along.flipped(shape[dim])):
        raise NotFusible(node, "its result is read in another order than the one along its rows")
    block = self.value(operand, at, self.row_guards(node, guards))
    return scan(self, node, self.rounded(block, val(operand).dtype, val(node).dtype), is_reversed=at[dim] != along)


CONSTANTS = {
    aten.full.default: _full, aten.full_like.default: _full, aten.zeros.default: _full, aten.ones.default: _full,
    aten.zeros_like.default: _full, aten.ones_like.default: _full, aten.new_zeros.default: _full,
    aten.new_ones.default: _full, aten.new_full.default: _full, aten.scalar_tensor.default: _full,
    aten.arange.default: _arange, aten.arange.start: _arange, aten.arange.start_step: _arange,
}  # fmt: skip

REDUCTIONS = {
    aten.sum.dim_IntList: _reduction("sum"), aten.sum.default: _reduction("sum"), aten.mean.dim: _reduction("mean"),
    aten.mean.default: _reduction("mean"), aten.amax.default: _reduction("max"), aten.amin.default: _reduction("min"),
    aten.max.default: _reduction("max"), aten.min.default: _reduction("min"), aten.var.correction: _moments,
    aten.var_mean.correction: _moments,
    aten.max.dim: _extremum("max"), aten.min.dim: _extremum("min"),
    aten.argmax.default: _extremum("max"), aten.argmin.default: _extremum("min"),
    aten.logsumexp.default: _logsumexp,
    aten._softmax.default: _softmax, aten._log_softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax_backward, aten._log_softmax_backward_data.default: _softmax_backward,
    aten.cumsum.default: _cumsum,
    aten.native_layer_norm.default: norm, aten.native_layer_norm_backward.default: norm_backward,
    aten._fused_rms_norm.default: norm, aten._fused_rms_norm_backward.default: norm_backward,
}  # fmt: skip

COMPOSITES: dict[Any, Composite] = CONSTANTS | REDUCTIONS | PLACEMENTS | GATHERS | MASKS
