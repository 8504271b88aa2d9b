"""Where a trace has a linear layer whose logits only a cross-entropy reads, and what its backward makes of their gradient.

    logits = mm(input, weight.t())                     or addmm(bias, input, weight.t())
    x      = logits behind ops on each row             `rows`
    p      = _log_softmax(x)
    loss   = nll_loss_forward(p, target)               of rows of classes, a mean or a sum; its labels smoothed: `smoothing`
    g      = nll_loss_backward(cotangent, p, target)
    g      = _log_softmax_backward_data(g, p)
    G      = g behind the slopes of those ops
             mm(G, weight), mm(G.t(), input) or mm(input.t(), G), sum(G, 0)

A forward without a backward ends at the loss. `head_loss` gives a `HeadLoss`, or raises `NoHeadLoss` with the sentence that
says why a loss is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.linear_cross_entropy.rows import (
    NoHeadLoss,
    RowMap,
    behind_reshapes,
    between,
    check_logits,
    check_readers,
    gradient_of_product,
    live_readers,
    row_map,
)  # fmt: skip
from tracefuse.optimizers.linear_cross_entropy.smoothing import Smoothing, cotangent_of, smoothing_of
from tracefuse.optimizers.ops import arguments, aten, is_getitem, op_name, readers
from tracefuse.optimizers.trace import shape_of, val

NONE, MEAN = 0, 1
"""ATen's numbers for a loss's reduction; 2 is the sum."""
FLAT = "give F.cross_entropy rows of classes, as `logits.reshape(-1, classes)`, and `targets.reshape(-1)`"
LOG_P = "the log-probabilities"
OF_LOSS_ALONE = "train by F.cross_entropy's loss alone"

_TRANSPOSES = {aten.t.default, aten.transpose.int, aten.permute.default}
_BACKWARDS = {aten.nll_loss_backward.default, aten._log_softmax_backward_data.default}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Gradient:
    """A value of the backward that the operator makes: the gradient of `of`, "input", "weight" or "bias". It is turned where
    it is the transposed of what the operator yields, and has one more dimension of 1 where it `keeps` the summed one."""

    node: fx.Node
    of: str
    is_turned: bool = False
    keeps: bool = False


@dataclass(frozen=True)
class HeadLoss:
    """A loss of a linear layer: the matmul, the factors, the ops `between` it and the log-softmax, the loss and what its
    backward makes.

    `weight` is [classes, width] after a transpose if it `is_turned` in the trace. `values` are the nodes that are the loss.
    `cotangent` is what the loss's gradient is multiplied by, None where there is no backward.
    """

    product: fx.Node
    input: fx.Node
    weight: fx.Node
    is_turned: bool
    bias: fx.Node | None
    target: fx.Node
    loss: fx.Node
    ignore_index: int
    is_mean: bool
    values: tuple[fx.Node, ...]
    between: tuple[fx.Node, ...]
    map: RowMap
    smoothing: float
    cotangent: fx.Node | None = None
    gradients: tuple[Gradient, ...] = field(default=())

    @property
    def count(self) -> int:
        return shape_of(self.product)[0]

    @property
    def classes(self) -> int:
        return shape_of(self.product)[1]

    @property
    def width(self) -> int:
        return shape_of(self.input)[1]

    @property
    def dtype(self) -> torch.dtype:
        return val(self.product).dtype

    @property
    def wanted(self) -> list[bool]:
        made = {gradient.of for gradient in self.gradients}
        return [of in made for of in ("input", "weight", "bias")]


def is_loss(node: fx.Node) -> bool:
    return node.target in (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)


def head_loss(loss: fx.Node) -> HeadLoss:
    """What the loss, an `nll_loss_forward`, belongs to. Raises `NoHeadLoss`."""
    args = arguments(loss)
    _check_loss(loss)
    softmax = behind_reshapes(args["self"])
    if softmax.target is not aten._log_softmax.default:
        raise NoHeadLoss("it is not a cross-entropy of logits: give F.cross_entropy the logits themselves")
    product, ops = between(softmax)
    _check_product(product)
    smoothing = smoothing_of(loss, softmax)
    sums = [smoothing.spread] if smoothing else []
    check_readers(softmax, [loss, *sums, *(one for one in readers(softmax) if one.target in _BACKWARDS)], LOG_P)
    cotangent, slope = _backward_of(loss, softmax, smoothing)
    values = [smoothing.loss] if smoothing else [item for item in loss.users if item.args[1] == 0]
    args_of_product: list[Any] = list(product.args)
    bias = args_of_product.pop(0) if product.target is aten.addmm.default else None
    source, right = args_of_product
    weight, is_turned = _untransposed(right)
    found = HeadLoss(
        product, source, weight, is_turned, bias, args["target"], loss, args["ignore_index"], args["reduction"] == MEAN,
        tuple(values), tuple(ops), row_map(ops), smoothing.amount if smoothing else 0.0,
    )  # fmt: skip
    check_logits(product, ops, softmax)
    if slope is None:
        return found
    grad, slopes = gradient_of_product(slope, ops)
    check_logits(product, ops, softmax, slopes)
    return replace(found, cotangent=cotangent, gradients=tuple(_gradients(grad, found)))


# --- forward ----------------------------------------------------------------------------------------------------------


def _check_loss(loss: fx.Node) -> None:
    args = arguments(loss)
    if loss.target is aten.nll_loss2d_forward.default:
        raise NoHeadLoss(f"it is a loss over images: {FLAT}")
    if args["weight"] is not None:
        raise NoHeadLoss("it weighs the classes, which chunks do not: leave weight= out, or switch this pass off")
    if args["reduction"] == NONE:
        raise NoHeadLoss(
            "it is a loss for each row, whose gradients are scaled by what comes later: ignore rows by ignore_index, and use "
            "reduction='sum' divided by a number"
        )
    if len(shape_of(args["self"])) != 2 or not shape_of(args["self"])[0]:
        raise NoHeadLoss(f"it is no loss of rows of classes: {FLAT}")
    if val(args["target"]).dtype is not torch.int64:
        raise NoHeadLoss("its targets are no 64-bit integers: give it targets.long()")


def _check_product(node: fx.Node) -> None:
    classes = shape_of(node)[1]
    if node.kwargs:
        raise NoHeadLoss("its linear layer scales the product or the bias: use torch.nn.Linear")
    if node.target is aten.addmm.default and shape_of(node.args[0]) != (classes,):  # type: ignore[arg-type]
        raise NoHeadLoss("what its linear layer adds is no bias of the classes: use torch.nn.Linear")
    if val(node).dtype not in _FLOATS:
        raise NoHeadLoss(f"its logits are {val(node).dtype}: compute them in a floating-point type")


def _untransposed(right: fx.Node) -> tuple[fx.Node, bool]:
    """The weight, and whether the matrix [width, classes] that the layer multiplies by is its transposed."""
    is_turned = False
    while right.op == "call_function":
        if right.target in (aten.detach.default, aten.alias.default):
            pass
        elif right.target in _TRANSPOSES and _swaps(right):
            is_turned = not is_turned
        else:
            break
        right = right.args[0]  # type: ignore[assignment]
    return right, is_turned


def _swaps(view: fx.Node) -> bool:
    shape = shape_of(view.args[0])  # type: ignore[arg-type]
    if len(shape) != 2:
        return False
    if view.target is aten.t.default:
        return True
    dims = view.args[1] if view.target is aten.permute.default else view.args[1:3]
    return [d % 2 for d in dims] != [0, 1] and len({d % 2 for d in dims}) == 2  # type: ignore[operator,union-attr]


# --- backward ---------------------------------------------------------------------------------------------------------


def _backward_of(loss: fx.Node, softmax: fx.Node, smoothing: Smoothing | None) -> tuple[fx.Node | None, fx.Node | None]:
    """The cotangent of the loss and the backward of the log-softmax; None, None where there is none."""
    backs = [n for n in readers(softmax) if n.target is aten.nll_loss_backward.default and n.users]
    slopes = [n for n in readers(softmax) if n.target is aten._log_softmax_backward_data.default and n.users]
    _check_total_weight(loss, backs)
    if not backs and not slopes:
        return None, None
    if len(backs) != 1 or len(slopes) != 1:
        raise NoHeadLoss(
            f"it has {len(backs)} backwards and its log-softmax {len(slopes)}, not one each: run its backward once"
        )
    (back,), (slope,) = backs, slopes
    here, there = arguments(loss), arguments(back)
    for name in ("target", "weight", "reduction", "ignore_index"):
        if _plain(here[name]) != _plain(there[name]):
            raise NoHeadLoss(f"its backward has another {name}: leave it to autograd")
    grad = behind_reshapes(arguments(slope)["grad_output"])
    cotangent = arguments(back)["grad_output"] if grad is back else None
    if smoothing is not None:
        cotangent = cotangent_of(smoothing, loss, back, grad)
    if cotangent is None:
        raise NoHeadLoss(
            f"its log-probabilities have a gradient of {op_name(grad)} besides the loss's: {OF_LOSS_ALONE}"
        )
    check_readers(back, [slope if grad is back else grad], "the gradients of the log-probabilities")
    return cotangent, slope


def _plain(value: object) -> object:
    return behind_reshapes(value) if isinstance(value, fx.Node) else value


def _check_total_weight(loss: fx.Node, backs: list[fx.Node]) -> None:
    for item in loss.users:
        if not is_getitem(item):
            raise NoHeadLoss(f"its results are read together: {OF_LOSS_ALONE}")
        others = [one for one in readers(item) if one.op == "output" or (one not in backs and one.users)]
        if item.args[1] == 1 and others:
            raise NoHeadLoss("the number of its rows is read by others: count them by (target != ignore_index).sum()")


def _gradients(node: fx.Node, found: HeadLoss) -> Iterator[Gradient]:
    """What the backward makes of the gradient of the logits, each value once. Raises `NoHeadLoss` for anything else."""
    if val(node).dtype != found.dtype:
        raise NoHeadLoss(
            f"the gradient of its logits is {val(node).dtype}, and they are {found.dtype}: leave it to autograd"
        )
    for end in live_readers(node):
        if end.op == "output":
            raise NoHeadLoss("the gradient of the logits is returned: no chunk can keep it, return those of the layer")
        yield _gradient(end, node, found)


def _gradient(end: fx.Node, logits: fx.Node, found: HeadLoss) -> Gradient:
    if end.target is aten.mm.default and not end.kwargs:
        left, right = (_matrix(one, (found.count, found.classes), logits) for one in end.args)
        if left == "itself" and _is_weight(end.args[1], found):
            return Gradient(end, "input")
        shape, base = shape_of(found.input), behind_reshapes(found.input)
        if left == "turned" and _matrix(end.args[1], shape, base) == "itself":
            return Gradient(end, "weight")
        if right == "itself" and _matrix(end.args[0], shape, base) == "turned":
            return Gradient(end, "weight", is_turned=True)
    if end.target is aten.sum.dim_IntList and _matrix(end.args[0], (found.count, found.classes), logits) == "itself":
        args = arguments(end)
        if [d % 2 for d in args["dim"] or []] == [0] and val(end).dtype == found.dtype:
            return Gradient(end, "bias", keeps=bool(args["keepdim"]))
    raise NoHeadLoss(
        f"the gradient of the logits is read by {end.name}, which is no gradient of the layer: leave it to autograd"
    )


def _matrix(node: object, shape: tuple[int, ...], base: fx.Node) -> str:
    """ "itself" if `node` shows `base` as a matrix of `shape`, "turned" if it is transposed, else ""."""
    if not isinstance(node, fx.Node):
        return ""
    node, is_turned = _untransposed(node)
    if shape_of(node) != shape or behind_reshapes(node) is not base:
        return ""
    return "turned" if is_turned else "itself"


def _is_weight(node: object, found: HeadLoss) -> bool:
    """Whether `node` is [classes, width], the weight."""
    return isinstance(node, fx.Node) and _untransposed(node) == (found.weight, not found.is_turned)
