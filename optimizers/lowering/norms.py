"""Norms inside a kernel: the parts of each, which arguments those are computed from, and how.

ATen's norms yield several values, of which a kernel computes only those that somebody reads. Then it does not read all of
their arguments either: `native_layer_norm_backward` takes a bias only to know whether a gradient of it is wanted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.lowering.geometry import along_row_dims
from tracefuse.optimizers.lowering.indexing import broadcast, reshape
from tracefuse.optimizers.lowering.lowering import Guards, Lowering, Value
from tracefuse.optimizers.lowering.reductions import centred_row, column_total, product, reduce, summed_rows
from tracefuse.optimizers.lowering.views import Indices
from tracefuse.optimizers.ops import arguments, aten, is_getitem
from tracefuse.optimizers.trace import shape_of, val

PARTS: dict[torch._ops.OpOverload, dict[str, set[str]]] = {
    aten.native_layer_norm.default: {"normed": {"input", "weight", "bias"}, "mean": {"input"}, "rstd": {"input"}},
    aten._fused_rms_norm.default: {"normed": {"input", "weight"}, "rstd": {"input"}},
    aten.native_layer_norm_backward.default: {
        "grad_input": {"grad_out", "input", "mean", "rstd", "weight"},
        "grad_weight": {"grad_out", "input", "mean", "rstd"},
        "grad_bias": {"grad_out"},
    },
    aten._fused_rms_norm_backward.default: {
        "grad_input": {"grad_out", "input", "rstd", "weight"},
        "grad_weight": {"grad_out", "input", "rstd"},
    },
}
"""For each norm, its results in their order, and the arguments that each needs."""


def part_of_norm(node: fx.Node) -> str | None:
    """What a result of a norm is called; None for any other value."""
    parts = PARTS.get(node.args[0].target) if is_getitem(node) else None  # type: ignore[union-attr]
    return list(parts)[node.args[1]] if parts else None  # type: ignore[index]


def is_needed_by(node: fx.Node, user: fx.Node) -> bool:
    """Whether `user`, which takes `node`, reads it: a norm does for those of its results only that the graph holds."""
    if user.target not in PARTS:
        return True
    needed = set().union(*(PARTS[user.target][part_of_norm(part)] for part in user.users))  # type: ignore[index]
    return any(arg is node and name in needed for name, arg in arguments(user).items())


def norm(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
    """An output of `native_layer_norm` (result, mean, rstd) or `_fused_rms_norm` (result, rstd)."""
    norm, which = node.args
    args, shape = arguments(norm), shape_of(node.args[0].args[0])  # type: ignore[union-attr, arg-type]
    operand, dims, rows = args["input"], along_row_dims(norm), self.row_guards(node, guards)  # type: ignore[arg-type]
    row = self.value(operand, self.along_row(norm, shape, dims, at), rows)  # type: ignore[arg-type]
    is_rms = norm.target is aten._fused_rms_norm.default  # type: ignore[union-attr]
    mean, centred = (None, row) if is_rms else centred_row(self, norm, row)  # type: ignore[arg-type]
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
    total = reduce(self, node, product(self, node, centred, centred, "squares"), "sum", "total")
    text = f"1.0 / tl.sqrt({total.text} / {self.layout.row_length} + {eps!r})"
    return self.emit(node, text, centred.dtype, total.lanes, "rstd")


def norm_backward(self: Lowering, node: fx.Node, at: Indices, guards: Guards) -> Value:
    """`native_layer_norm_backward` (gradients of input, weight, bias) or `_fused_rms_norm_backward` (input, weight)."""
    norm, which = node.args
    if which != 0:
        return _norm_weight_gradient(self, node, at)
    args, shape = arguments(norm), shape_of(node)  # type: ignore[arg-type]
    row = self.along_row(norm, shape, along_row_dims(norm), at)  # type: ignore[arg-type]
    rows = self.row_guards(node, guards)
    grad, normed = _scaled_gradient(self, norm, args, row, rows), _normed(self, norm, args, row, rows)  # type: ignore[arg-type]
    slope = reduce(self, norm, product(self, norm, grad, normed), "sum", "slope")  # type: ignore[arg-type]
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
    (norm, which), rows = node.args, summed_rows(self, node)
    args = arguments(norm)  # type: ignore[arg-type]
    where = reshape(rows.layout.indices, rows.layout.shape, shape_of(args["grad_out"]))
    block = rows.value(args["grad_out"], where)
    if which == 1:
        block = product(rows, norm, block, _normed(rows, norm, args, where, ()))  # type: ignore[arg-type]
    return column_total(self, node, block, at)


def _scaled_gradient(self: Lowering, node: fx.Node, args: dict[str, Any], at: Indices, guards: Guards) -> Value:
    grad = self.value(args["grad_out"], at, guards)
    if args["weight"] is None:
        return grad
    return product(self, node, grad, _per_row(self, args["weight"], at, guards), "scaled")


def _per_row(self: Lowering, operand: fx.Node, at: Indices, guards: Guards) -> Value:
    """`operand`, a weight or a statistic, broadcast to the elements `at` of the norm's operand."""
    return self.value(operand, broadcast(at, shape_of(operand)), guards)


def _normed(self: Lowering, node: fx.Node, args: dict[str, Any], at: Indices, guards: Guards) -> Value:
    x, rstd = self.value(args["input"], at, guards), _per_row(self, args["rstd"], at, guards)
    if "mean" not in args:
        return product(self, node, x, rstd, "normed")
    mean = _per_row(self, args["mean"], at, guards)
    return self.emit(node, f"({x.text} - {mean.text}) * {rstd.text}", x.dtype, x.lanes | rstd.lanes, "normed")
