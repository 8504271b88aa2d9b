"""Losses and log-softmax as ops that kernels hold: what lies between them is never stored.

ATen's composites store whole matrices for each other. Of R rows of C logits x, with targets t and gradient s per row:

    op                              becomes
    p = _log_softmax(x)             p = x - logsumexp(x)                     computed in f32 for halves
    nll_loss_forward(p, t)          sum(where(valid, -p[r, t[r]], 0)) / count(valid)         valid: t != ignore_index
    g = nll_loss_backward(s, p, t)  where(c == t, -s, 0)                     with s = 0 where a row is ignored
    _log_softmax_backward_data(g, p)  g - exp(p) * rowsum(g)
    sum(p) along rows               sum(x) - C * logsumexp(x)                for label smoothing

Each row of the table holds by itself. Together they leave nothing of R x C elements but x and its gradient:

* p is a pointwise function of x and of one number per row, so the backward computes it again from x, which the matmul before
  it stores anyway, and logsumexp(x): unless p is kept for another reader.
* The picked p[r, t[r]] is computed at one element per row (`gathers`).
* What a row of g holds is known: -s at its target and 0 elsewhere, so that its sum is -s. Multiples and casts of such rows,
  broadcasts, and the sum of the two (label smoothing) are known as well, those of a cast as ATen rounds them, so that
  the backward reads x once and reduces nothing. Autocast to a half on a GPU casts g between the two backwards.

The row's logsumexp is one f32 number (f64 for f64): where logits are large, p has its rounding error, an ulp of logsumexp(x).
Where a row of x holds +inf, it is made NaN, for ATen's log-probabilities of such a row are. Left as they are, each with a
reason: what a kernel could not hold anyway (`fusible.refusal`; another dimension than the last), class weights, losses over
images (`nll_loss2d`) and over a single row. It is for traces that are fused afterwards: without kernels the composites move
fewer bytes.

Sources: the formulas are those of `aten/src/ATen/native/LossNLL.cpp` and `SoftMax.cpp`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.decompose.writing import cast, replace_parts, swap_names, wide
from tracefuse.optimizers.kernels.fusible import refusal
from tracefuse.optimizers.lowering.geometry import reduced_dims
from tracefuse.optimizers.ops import arguments, aten
from tracefuse.optimizers.rewrite import is_overwritten, replace_by, replace_value, views_of
from tracefuse.optimizers.trace import HALVES, call, phase, shape_of, val

NONE, MEAN = 0, 1
"""ATen's numbers for a loss's reduction; 2 is the sum."""


@dataclass(frozen=True)
class Row:
    """What the rows of a gradient `[R, C]` hold, each `[R, 1]` in its type, or in float32 what a loss's own backward rounds to
    a half: `picked` at one column, `rest` (None: 0) at all others; `rest` at every column where nothing is picked."""

    rest: fx.Node | None
    picked: fx.Node | None

    def mapped(self, build: Callable[[fx.Node], fx.Node]) -> Row:
        """The rows after an op on each element that makes 0 of 0."""
        return Row(self.rest and build(self.rest), self.picked and build(self.picked))

    def total(self, node: fx.Node, columns: int) -> fx.Node:
        """The sum of each row, `[R, 1]`, before `node`."""
        if self.rest is None:
            assert self.picked is not None
            return wide(node, self.picked)
        rest = call(node, aten.mul.Scalar, wide(node, self.rest), columns - (self.picked is not None))
        return rest if self.picked is None else call(node, aten.add.Tensor, rest, wide(node, self.picked))


Rows = dict[fx.Node, Row]
"""By the gradients whose rows are known."""


# --- log-softmax ------------------------------------------------------------------------------------------------------


def log_softmax(node: fx.Node) -> fx.Node:
    """`x - logsumexp(x)` before `node`, a `_log_softmax` along the last dimension; rounded once, at the end."""
    args = arguments(node)
    x = wide(node, args["self"])
    lse = call(node, aten.logsumexp.default, x, [args["dim"]], True, name="logsumexp")
    is_infinite = call(node, aten.eq.Scalar, lse, math.inf, name="is_infinite")
    normalizer = call(node, aten.masked_fill.Scalar, lse, is_infinite, math.nan, name="normalizer")
    return cast(node, call(node, aten.sub.Tensor, x, normalizer), val(node).dtype)


def log_softmax_backward(node: fx.Node, row: Row | None) -> fx.Node:
    """`grad - exp(output) * total`; `total`, the sum of each row of the gradient, is added up where no `row` is known."""
    args = arguments(node)
    grad, out = wide(node, args["grad_output"]), wide(node, recomputed(node, args["output"]))
    if row is None:
        total = call(node, aten.sum.dim_IntList, grad, [args["dim"]], True)
    else:
        total = row.total(node, shape_of(node)[-1])
    slope = call(node, aten.mul.Tensor, call(node, aten.exp.default, out), total)
    return cast(node, call(node, aten.sub.Tensor, grad, slope), val(node).dtype)


def sum_of_log_softmax(node: fx.Node) -> fx.Node:
    """`sum(x) - C * logsumexp(x)`, of which neither sum waits for the other: one loop over a long row does both."""
    out, dims, *keepdim = node.args
    x, lse = _log_softmax_operands(out)  # type: ignore[misc]
    total = call(node, aten.sum.dim_IntList, x, dims, True)
    found = call(node, aten.sub.Tensor, total, call(node, aten.mul.Scalar, lse, shape_of(x)[-1]))
    found = found if keepdim == [True] else call(node, aten.squeeze.dims, found, dims)
    return cast(node, found, val(node).dtype)


SUMS_OF_LOGS = {aten.sum.dim_IntList}


def is_sum_of_log_softmax(node: fx.Node) -> bool:
    """Whether the op adds up the log-probabilities of each row, as label smoothing does."""
    if node.target not in SUMS_OF_LOGS or node.kwargs or not node.args[1]:
        return False
    out: fx.Node = node.args[0]  # type: ignore[assignment]
    is_along_rows = reduced_dims(node) == (val(out).dim() - 1,)
    return is_along_rows and phase(node) == phase(out) and _log_softmax_operands(out) is not None


def recomputed(node: fx.Node, out: fx.Node) -> fx.Node:
    """`out` computed again for the backward op `node` where it is a log-softmax that would be kept for nobody else."""
    operands = _log_softmax_operands(out)
    if operands is None or phase(node) == phase(out) or _is_kept_anyway(out, node):
        return out
    x, lse = operands
    if is_overwritten(x):
        return out
    return cast(node, call(node, aten.sub.Tensor, x, lse), val(out).dtype)


def _log_softmax_operands(out: Any) -> tuple[fx.Node, fx.Node] | None:
    """x and its normalizer where `out` is what `log_softmax` wrote: their difference, or that rounded to a half."""
    is_rounded = out.target is aten._to_copy.default and val(out).dtype in HALVES
    difference = out.args[0] if is_rounded else out
    operands = difference.all_input_nodes if difference.target is aten.sub.Tensor and not difference.kwargs else []
    if len(operands) != 2 or operands[1].target is not aten.masked_fill.Scalar:
        return None
    (x, normalizer), lse = operands, operands[1].args[0]
    is_of_x = lse.target is aten.logsumexp.default and lse.args[0] is x
    return (x, normalizer) if is_of_x and shape_of(lse) == (*shape_of(x)[:-1], 1) else None


def _is_kept_anyway(out: fx.Node, node: fx.Node) -> bool:
    """Whether the caller, or an op of the backward but `node`, needs the log-probabilities. What nothing reads is dead."""
    readers = {user for one in views_of(out) for user in one.users} - {node}
    return any(user.op == "output" or (phase(user) == "backward" and user.users) for user in readers)


def known_row(grad: fx.Node, rows: Rows) -> Row | None:
    """What the rows of `grad` hold, where it is known. What is inserted for it comes right behind `grad`."""
    if grad in rows or grad.op != "call_function":
        return rows.get(grad)
    with grad.graph.inserting_before(grad.next):
        found = _row_by_rule(grad, rows)
    if found is not None:
        rows[grad] = found
    return found


def _row_by_rule(grad: fx.Node, rows: Rows) -> Row | None:
    operands = grad.all_input_nodes
    if grad.target is aten.expand.default and shape_of(operands[0]) == (*shape_of(grad)[:-1], 1):
        return Row(operands[0], None)
    if grad.target is aten.mul.Scalar and math.isfinite(grad.args[1]):  # type: ignore[arg-type]
        inner = known_row(operands[0], rows)
        return inner and inner.mapped(lambda one: call(grad, aten.mul.Scalar, one, grad.args[1]))
    if grad.target is aten._to_copy.default and val(operands[0]).is_floating_point():
        inner = known_row(operands[0], rows)
        return inner and inner.mapped(lambda one: cast(grad, one, val(grad).dtype))
    is_plain_add = grad.target is aten.add.Tensor and not grad.kwargs
    if not is_plain_add or len(operands) != 2 or any(shape_of(a) != shape_of(grad) for a in operands):
        return None
    one, other = (known_row(a, rows) for a in operands)
    return None if one is None or other is None else _added(grad, one, other)


def _added(grad: fx.Node, one: Row, other: Row) -> Row | None:
    """The sum of two rows, unless each has a picked column, which may be two."""
    if one.picked is not None and other.picked is not None:
        return None

    def add(a: fx.Node | None, b: fx.Node | None) -> fx.Node | None:
        return call(grad, aten.add.Tensor, a, b) if a is not None and b is not None else a or b

    rest, picked = add(one.rest, other.rest), one.picked or other.picked
    return Row(rest, None if picked is None else add(picked, other.rest if one.picked is not None else one.rest))


# --- negative log-likelihood ------------------------------------------------------------------------------------------


def nll_loss(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The loss and the total weight, which without class weights is the number of rows that count."""
    args, dtype = arguments(node), val(node)[0].dtype
    valid = call(node, aten.ne.Scalar, args["target"], args["ignore_index"], name="valid")
    # An ignored target may lie outside of the classes, where nothing can be gathered.
    target = call(node, aten.where.ScalarOther, valid, args["target"], 0)
    column = call(node, aten.unsqueeze.default, target, 1)
    picked = call(node, aten.gather.default, args["self"], 1, column, name="picked")
    negated = call(node, aten.neg.default, call(node, aten.squeeze.dim, picked, 1))
    losses = call(node, aten.where.ScalarOther, valid, negated, 0.0, name="losses")
    if args["reduction"] == NONE:
        return losses, call(node, aten.full.default, [], 0.0, dtype=dtype, device=val(losses).device)
    wide = torch.float32 if dtype in HALVES else dtype
    loss = call(node, aten.sum.default, losses, dtype=wide)
    count = call(node, aten.sum.default, valid, dtype=wide, name="count")
    if args["reduction"] == MEAN:
        loss = call(node, aten.div.Tensor, loss, count)
    return cast(node, loss, dtype), cast(node, count, dtype)


def nll_loss_backward(node: fx.Node) -> tuple[fx.Node, Row]:
    """The gradient of the log-probabilities, `[R, C]`, and what its rows hold."""
    args = arguments(node)
    grad = wide(node, args["grad_output"])
    if args["reduction"] == MEAN:
        grad = call(node, aten.div.Tensor, grad, wide(node, args["total_weight"]))
    valid = call(node, aten.ne.Scalar, args["target"], args["ignore_index"], name="valid")
    # Without a single valid row the quotient is infinite, and every row 0 all the same.
    per_row = call(node, aten.where.ScalarOther, valid, call(node, aten.neg.default, grad), 0.0)
    column = call(node, aten.unsqueeze.default, per_row, 1)
    classes = shape_of(node)[1]
    arange = call(node, aten.arange.default, classes, dtype=torch.int64, device=val(node).device)
    target = call(node, aten.unsqueeze.default, args["target"], 1)
    is_target = call(node, aten.eq.Tensor, arange, target, name="is_target")
    found = call(node, aten.where.ScalarOther, is_target, column, 0.0)
    return cast(node, found, val(node).dtype), Row(None, column)


def loss_refusal(node: fx.Node) -> str | None:
    """Why a loss stays as it is."""
    args = arguments(node)
    logp, target = args["self"], args["target"]
    if val(logp).dim() != 2:
        return f"its input has {val(logp).dim()} dimensions, not rows of classes"
    if args["weight"] is not None:
        return "it weighs the classes"
    if val(logp).numel() == 0:
        return "it has no elements"
    return None if val(target).dtype is torch.int64 else f"its targets are {val(target).dtype}, not 64-bit integers"


# --- replacing ---------------------------------------------------------------------------------------------------------

BECOMES: dict[Any, str] = {
    aten._log_softmax.default: "x - logsumexp(x)",
    aten._log_softmax_backward_data.default: "grad - exp(output) * (row sum of grad)",
    aten.nll_loss_forward.default: "a gather, a masked sum and a count",
    aten.nll_loss2d_forward.default: "a gather, a masked sum and a count",
    aten.nll_loss_backward.default: "a comparison of classes with targets",
    aten.nll_loss2d_backward.default: "a comparison of classes with targets",
}


def rewrite_loss(node: fx.Node, rows: Rows) -> str | None:
    """Replace an op that `becomes` something. Returns None when done, else the reason why it stays."""
    if node.target is aten.sum.dim_IntList:
        return _replace_by(node, lambda: sum_of_log_softmax(node))
    is_softmax = node.target in (aten._log_softmax.default, aten._log_softmax_backward_data.default)
    if is_softmax and reduced_dims(node) != (val(node).dim() - 1,):
        return "it runs along another dimension than the last: one kernel holds it as it is"
    if node.target is aten._log_softmax.default:
        return refusal(node) or _replace_by(node, lambda: log_softmax(node))
    if node.target is aten._log_softmax_backward_data.default:
        row = known_row(node.args[0], rows)  # type: ignore[arg-type]
        # Without a sum it is pointwise, and a row of any length fits.
        reason = refusal(node) if row is None else None
        return reason or _replace_by(node, lambda: log_softmax_backward(node, row))
    if reason := loss_refusal(node):
        return reason
    if node.target is aten.nll_loss_forward.default:
        return replace_parts(node, nll_loss)
    return _replace_loss_backward(node, rows)


def _replace_by(node: fx.Node, build: Callable[[], fx.Node]) -> str | None:
    reason = replace_by(node, build)
    if reason is None:
        # What was built last, the value itself, stands right before the op.
        swap_names(node.prev, node)
    return reason


def _replace_loss_backward(node: fx.Node, rows: Rows) -> str | None:
    with node.graph.inserting_before(node):
        grad, row = nll_loss_backward(node)
    if reason := replace_value(node, grad):
        return reason
    rows[grad] = row
    swap_names(grad, node)
    return None
