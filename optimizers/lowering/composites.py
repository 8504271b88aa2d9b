"""The ops that are more than one expression: constants, reductions, softmax, norms; `placements` has the others.

Each row of `COMPOSITES` is a function `(lowering, node, at, guards) -> Value`. A row reduction reads its operand along the
whole row that the program holds, then continues at the index asked for. A column reduction adds up its operand over the
rows that the program goes through, and is known after the last of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.lowering.gathers import GATHERS
from tracefuse.optimizers.lowering.geometry import along_row_dims, columns_of, operand_of
from tracefuse.optimizers.lowering.indexing import broadcast, constant, reshape
from tracefuse.optimizers.lowering.literals import COMPUTE_TYPE, literal
from tracefuse.optimizers.lowering.lowering import Composite, Guards, Lowering, NotFusible, Value, index_block
from tracefuse.optimizers.lowering.masks import MASKS
from tracefuse.optimizers.lowering.placements import PLACEMENTS
from tracefuse.optimizers.lowering.reductions import column_moments, column_total, exponentials, logsumexp, reduce
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
        return _extremum(self, node, block, how)

    return lower


def _column_reduction(self: Lowering, node: fx.Node, at: Indices, how: str) -> Value:
    rows = _summed_rows(self, node)
    operand, dtype = operand_of(node), COMPUTE_TYPE[val(node).dtype]
    where = reshape(rows.layout.indices, rows.layout.shape, shape_of(operand))
    total = column_total(self, node, rows.cast(rows.value(operand, where), dtype), at)
    if how == "sum":
        return total
    return self.emit(node, f"{total.text} / {rows.layout.columns.sizes[1]}", dtype, total.lanes)  # type: ignore[union-attr]


def _summed_rows(self: Lowering, node: fx.Node) -> Lowering:
    """The lowering of the elements that `node` sums down the columns. Raises `NotFusible` where there is none."""
    if self.rows is None:
        raise NotFusible(node, "it is known only after the last row, and read among the rows")
    geometry, columns = columns_of(node), self.rows.layout.columns
    if columns is None or geometry is None or not geometry.adds_up_like(columns):
        raise NotFusible(node, "it sums other columns than those that the kernel's programs share out")
    return self.rows


def _extremum(self: Lowering, node: fx.Node, block: Value, how: str) -> Value:
    # `tl.max` skips NaN; ATen's amax yields it.
    nan = self.emit(node, f"({block.text} != {block.text}).to(tl.int32)", "int32", block.lanes, "is_nan")
    nans = reduce(self, node, nan, "sum", "nans")
    best = reduce(self, node, block, how, "best")
    return self.emit(node, f"tl.where({nans.text} > 0, float('nan'), {best.text})", block.dtype, best.lanes)


def _moments(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
    """`var`, or a part of `var_mean`: the variance, or the mean."""
    op: fx.Node = node.args[0] if is_getitem(node) else node  # type: ignore[assignment]
    args, operand, dtype = arguments(op), operand_of(op), COMPUTE_TYPE[val(node).dtype]
    if columns_of(op) is not None:
        rows = _summed_rows(self, op)
        mean, squares = column_moments(self, node, operand, dtype, at)
        count = rows.layout.columns.sizes[1]  # type: ignore[union-attr]
    else:
        block = self.value(operand, _row_index(self, op, operand, at), self.row_guards(op, guards))
        mean, centred = _centred(self, op, self.cast(block, dtype))
        squares = reduce(self, op, _product(self, op, centred, centred, "squares"), "sum", "squares")
        count = self.layout.row_length
    if op is not node and node.args[1] == 1:
        return mean
    divisor = max(count - (1 if args["correction"] is None else args["correction"]), 0)
    text = f"{squares.text} / {divisor}" if divisor else f"{squares.text} * float('nan')"
    return self.emit(node, text, dtype, squares.lanes)


def _logsumexp(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
    return logsumexp(self, node, _row(self, node, at, guards))


def _product(self: Lowering, node: fx.Node, a: Value, b: Value, name: str = "product") -> Value:
    return self.emit(node, f"{a.text} * {b.text}", a.dtype, a.lanes | b.lanes, name)


def _centred(self: Lowering, node: fx.Node, block: Value) -> tuple[Value, Value]:
    total = reduce(self, node, block, "sum", "total")
    mean = self.emit(node, f"{total.text} / {self.layout.row_length}", block.dtype, total.lanes, "mean")
    return mean, self.emit(node, f"{block.text} - {mean.text}", block.dtype, block.lanes, "centred")


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
        grad_row = _product(self, node, grad_row, self.value(output, row, rows))
    total = reduce(self, node, grad_row, "sum", "total")
    g, y = self.value(grad, at, guards), self.value(output, at, guards)
    text = f"{g.text} - tl.exp({y.text}) * {total.text}" if is_log else f"{y.text} * ({g.text} - {total.text})"
    return self.emit(node, text, dtype, g.lanes | y.lanes)


def _softmax_row(self: Lowering, node: fx.Node, at: Indices) -> Indices:
    return self.along_row(node, shape_of(node), along_row_dims(node), at)


# --- norms ------------------------------------------------------------------------------------------------------------


def _norm(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
    """An output of `native_layer_norm` (result, mean, rstd) or `_fused_rms_norm` (result, rstd)."""
    norm, which = node.args
    args, shape = arguments(norm), shape_of(node.args[0].args[0])  # type: ignore[union-attr, arg-type]
    operand, dims, rows = args["input"], along_row_dims(norm), self.row_guards(node, guards)  # type: ignore[arg-type]
    row = self.value(operand, self.along_row(norm, shape, dims, at), rows)  # type: ignore[arg-type]
    is_rms = norm.target is aten._fused_rms_norm.default  # type: ignore[union-attr]
    mean, centred = (None, row) if is_rms else _centred(self, norm, row)  # type: ignore[arg-type]
    rstd = _rstd(self, norm, centred, args["eps"])  # type: ignore[arg-type]
    if which == (1 if is_rms else 2):
        return rstd
    if which == 1:
        return mean  # type: ignore[return-value]
    here = self.value(operand, at, guards)
    text = f"{here.text} * {rstd.text}" if is_rms else f"({here.text} - {mean.text}) * {rstd.text}"  # type: ignore[union-attr]
    lanes = here.lanes | rstd.lanes
    for name, sign in (("weight", "*"), ("bias", "+")):
        if args.get(name) is not None:
            factor = _per_row(self, args[name], at, guards)
            text, lanes = f"{text} {sign} {factor.text}", lanes | factor.lanes
    return self.emit(norm, text, row.dtype, lanes, "normed")  # type: ignore[arg-type]


def _rstd(self: Lowering, node: fx.Node, centred: Value, eps: float | None) -> Value:
    eps = torch.finfo(val(node.args[0]).dtype).eps if eps is None else eps  # type: ignore[arg-type]
    total = reduce(self, node, _product(self, node, centred, centred, "squares"), "sum", "total")
    text = f"1.0 / tl.sqrt({total.text} / {self.layout.row_length} + {eps!r})"
    return self.emit(node, text, centred.dtype, total.lanes, "rstd")


def _norm_backward(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
    """`native_layer_norm_backward` (gradients of input, weight, bias) or `_fused_rms_norm_backward` (input, weight)."""
    norm, which = node.args
    if which != 0:
        return _norm_weight_gradient(self, node, at)
    args, shape = arguments(norm), shape_of(node)  # type: ignore[arg-type]
    row = self.along_row(norm, shape, along_row_dims(norm), at)  # type: ignore[arg-type]
    rows = self.row_guards(node, guards)
    grad, normed = _scaled_gradient(self, norm, args, row, rows), _normed(self, norm, args, row, rows)  # type: ignore[arg-type]
    slope = reduce(self, norm, _product(self, norm, grad, normed), "sum", "slope")  # type: ignore[arg-type]
    columns = self.layout.row_length
    g, x = _scaled_gradient(self, norm, args, at, guards), _normed(self, norm, args, at, guards)  # type: ignore[arg-type]
    inner = f"{g.text} - {x.text} * ({slope.text} / {columns})"
    if "mean" in args:
        shift = reduce(self, norm, grad, "sum", "shift")  # type: ignore[arg-type]
        inner = f"{inner} - {shift.text} / {columns}"
    rstd = _per_row(self, args["rstd"], at, guards)
    return self.emit(norm, f"{rstd.text} * ({inner})", g.dtype, g.lanes | x.lanes, "grad_input")  # type: ignore[arg-type]


def _norm_weight_gradient(self: Lowering, node: fx.Node, at: Indices) -> Value:
    """The gradient of a norm's weight, the sum of `grad * normed` down the columns, or of its bias, that of `grad`."""
    (norm, which), rows = node.args, _summed_rows(self, node)
    args = arguments(norm)  # type: ignore[arg-type]
    where = reshape(rows.layout.indices, rows.layout.shape, shape_of(args["grad_out"]))
    block = rows.value(args["grad_out"], where)
    if which == 1:
        block = _product(rows, norm, block, _normed(rows, norm, args, where, ()))  # type: ignore[arg-type]
    return column_total(self, node, block, at)


def _scaled_gradient(self: Lowering, node: fx.Node, args: dict[str, Any], at: Indices, guards: Guards) -> Value:
    grad = self.value(args["grad_out"], at, guards)
    if args["weight"] is None:
        return grad
    return _product(self, node, grad, _per_row(self, args["weight"], at, guards), "scaled")


def _per_row(self: Lowering, operand: fx.Node, at: Indices, guards: Guards) -> Value:
    """`operand`, a weight or a statistic, broadcast to the elements `at` of the norm's operand."""
    return self.value(operand, broadcast(at, shape_of(operand)), guards)


def _normed(self: Lowering, node: fx.Node, args: dict[str, Any], at: Indices, guards: Guards) -> Value:
    x, rstd = self.value(args["input"], at, guards), _per_row(self, args["rstd"], at, guards)
    if "mean" not in args:
        return _product(self, node, x, rstd, "normed")
    mean = _per_row(self, args["mean"], at, guards)
    return self.emit(node, f"({x.text} - {mean.text}) * {rstd.text}", x.dtype, x.lanes | rstd.lanes, "normed")


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
    aten.logsumexp.default: _logsumexp,
    aten._softmax.default: _softmax, aten._log_softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax_backward, aten._log_softmax_backward_data.default: _softmax_backward,
    aten.native_layer_norm.default: _norm, aten.native_layer_norm_backward.default: _norm_backward,
    aten._fused_rms_norm.default: _norm, aten._fused_rms_norm_backward.default: _norm_backward,
}  # fmt: skip

COMPOSITES: dict[Any, Composite] = CONSTANTS | REDUCTIONS | PLACEMENTS | GATHERS | MASKS
