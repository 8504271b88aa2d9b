"""Label smoothing as `F.cross_entropy` does it, which is several ops: where a trace has them around an `nll_loss_forward`.

    p      = _log_softmax(x)
    spread = masked_fill(-sum(p, 1), target == ignore_index, 0)
    mean   = sum(spread) / sum(~(target == ignore_index))         or the sum alone
    loss   = nll_loss(p, target) * (1 - e)  +  mean * (e / classes)

The gradient of p is the sum of two as well, `nll_loss_backward(c * (1 - e))` and a row's `-c * e / classes / count`, c being
the cotangent of the loss.

Source: `cross_entropy_loss_label_smoothing` in `aten/src/ATen/native/LossNLL.cpp`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import fx

from tracefuse.optimizers.linear_cross_entropy.rows import NoHeadLoss, behind_reshapes, live_readers
from tracefuse.optimizers.ops import arguments, aten, readers
from tracefuse.optimizers.trace import shape_of, val

MEAN = 1
REMEDY = "let F.cross_entropy(..., label_smoothing=e) smooth the labels"

_NOTS = {aten.bitwise_not.default, aten.logical_not.default}


@dataclass(frozen=True)
class Smoothing:
    """`amount` is e, `loss` the sum of both terms, `spread` the first op of the second one, `share` its factor e / classes."""

    amount: float
    loss: fx.Node
    spread: fx.Node
    share: float


def smoothing_of(loss: fx.Node, softmax: fx.Node) -> Smoothing | None:
    """The smoothing of the labels of an `nll_loss_forward`; None where no op sums up its log-probabilities. Raises
    `NoHeadLoss` where one does that is no smoothing."""
    sums = [one for one in readers(softmax) if one.target is aten.sum.dim_IntList and one.users]
    if not sums:
        return None
    try:
        return _smoothing(loss, sums)
    except _Other as other:
        raise NoHeadLoss(f"the log-probabilities are read by {sums[0].name} too, {other}: {REMEDY}") from None


class _Other(Exception):
    """What an op is where label smoothing has another."""


def _smoothing(loss: fx.Node, sums: list[fx.Node]) -> Smoothing:
    (spread, *others), args = sums, arguments(loss)
    rows = arguments(spread)
    if others or [d % 2 for d in rows["dim"] or []] != [1] or rows["keepdim"]:
        raise _Other("which does not sum up each row once")
    node = _next(_next(spread, aten.neg.default), aten.masked_fill.Scalar)
    if not _is_ignored(node.args[1], args) or node.args[2] != 0:
        raise _Other("whose rows to ignore are others than the loss's")
    node = _next(node, aten.sum.default)
    if args["reduction"] == MEAN:
        node = _next(node, aten.div.Tensor)
        if not _is_count(node.args[1], args):
            raise _Other("which is divided by another number than that of the rows that count")
    share = _next(node, aten.mul.Scalar, aten.mul.Tensor)
    result = _next(share, aten.add.Tensor)
    plain = [one for one in result.all_input_nodes if one is not share]
    if len(plain) != 1 or result.kwargs or not _is_number(share.args[1]):
        raise _Other("whose sum is not added to the loss")
    by = plain[0].args[1] if plain[0].target in (aten.mul.Scalar, aten.mul.Tensor) else None
    is_of_loss = by is not None and isinstance(plain[0].args[0], fx.Node) and plain[0].args[0].args == (loss, 0)
    amount = share.args[1] * shape_of(spread.args[0])[1]  # type: ignore[arg-type,operator]
    if not is_of_loss or not _is_number(by) or not math.isclose(by, 1 - amount, abs_tol=1e-9):  # type: ignore[arg-type]
        raise _Other("whose weight and the loss's do not add up to 1")
    if [one for item in loss.users if item.args[1] == 0 for one in live_readers(item)] != plain:
        raise _Other("and the loss without it by others")
    return Smoothing(amount, result, spread, share.args[1])  # type: ignore[arg-type]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _next(node: fx.Node, *targets: Any) -> fx.Node:
    """The only reader of a value, which is one of these ops."""
    ends = live_readers(node)
    if len(ends) != 1 or ends[0].target not in targets:
        raise _Other(f"of which {' and '.join(end.name for end in ends)} makes something else")
    return ends[0]


def _is_ignored(node: object, args: dict[str, Any]) -> bool:
    """Whether the value says which rows the loss ignores."""
    if not isinstance(node, fx.Node) or node.target is not aten.eq.Scalar or node.args[1] != args["ignore_index"]:
        return False
    return behind_reshapes(node.args[0]) is behind_reshapes(args["target"])  # type: ignore[arg-type]


def _is_count(node: object, args: dict[str, Any]) -> bool:
    """Whether the value is the number of rows that count."""
    if not isinstance(node, fx.Node) or node.target is not aten.sum.default:
        return False
    mask: Any = node.args[0]
    if mask.target is aten.ne.Scalar:
        return mask.args[1] == args["ignore_index"] and behind_reshapes(mask.args[0]) is behind_reshapes(args["target"])
    return mask.target in _NOTS and _is_ignored(mask.args[0], args)


# --- backward ---------------------------------------------------------------------------------------------------------


def cotangent_of(found: Smoothing, loss: fx.Node, back: fx.Node, grad: fx.Node) -> fx.Node | None:
    """The cotangent of the smoothed loss, where `grad`, the gradient of the log-probabilities, is the sum of `back`, an
    `nll_loss_backward`, and of what the smoothing adds; None where it is another."""
    if grad.target is not aten.add.Tensor or grad.kwargs or len(grad.all_input_nodes) != 2:
        return None
    others = [one for one in grad.all_input_nodes if behind_reshapes(one) is not back]
    plain = arguments(back)["grad_output"]
    if len(others) != 1 or live_readers(back) != [grad]:
        return None
    share = _behind_rows(others[0], arguments(loss))
    if share is None or plain.target not in (aten.mul.Scalar, aten.mul.Tensor) or share.target is not plain.target:
        return None
    is_same = plain.args[0] is share.args[0] and isinstance(plain.args[0], fx.Node)
    is_weighed = is_same and share.args[1] == found.share and _is_number(plain.args[1])
    return plain.args[0] if is_weighed and math.isclose(plain.args[1], 1 - found.amount, abs_tol=1e-9) else None  # type: ignore[arg-type,return-value]


def _behind_rows(node: fx.Node, args: dict[str, Any]) -> fx.Node | None:
    """The one number that is spread, negated, over the rows that count; None where the value is another."""
    node = _behind_shown(node)
    if node.target is not aten.neg.default:
        return None
    node = _behind_shown(node.args[0])  # type: ignore[arg-type]
    if node.target is not aten.masked_fill.Scalar or node.args[2] != 0 or not _is_ignored(node.args[1], args):
        return None
    node = _behind_shown(node.args[0])  # type: ignore[arg-type]
    if args["reduction"] != MEAN:
        return node
    is_mean = node.target is aten.div.Tensor and _is_count(node.args[1], args) and val(node).dim() == 0
    return node.args[0] if is_mean else None  # type: ignore[return-value]


def _behind_shown(node: fx.Node) -> fx.Node:
    while node.target is aten.expand.default or (node.target is aten.unsqueeze.default and node.args[1] in (1, -1)):
        node = node.args[0]  # type: ignore[assignment]
    return node
