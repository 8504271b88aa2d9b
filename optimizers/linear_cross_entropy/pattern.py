"""Where a trace has a linear layer whose logits only a cross-entropy reads, and what its backward makes of their gradient.

    logits = mm(input, weight.t())                     or addmm(bias, input, weight.t())
    x      = logits, cast, viewed or copied            the rows stay rows
    p      = _log_softmax(x)
    loss   = nll_loss_forward(p, target)               of rows of classes, a mean or a sum
    g      = nll_loss_backward(cotangent, p, target)
    g      = _log_softmax_backward_data(g, p)
    G      = g, viewed, cast or copied back
             mm(G, weight), mm(G.t(), input) or mm(input.t(), G), sum(G, 0)

A forward without a backward ends at the loss. `head_loss` gives a `HeadLoss`, or raises `NoHeadLoss` with the sentence that
says why a loss is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from tracefuse.optimizers.ops import arguments, aten, is_getitem, op_name, readers
from tracefuse.optimizers.trace import shape_of, val

NONE, MEAN = 0, 1
"""ATen's numbers for a loss's reduction; 2 is the sum."""

_RESHAPES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.detach.default,
    aten.alias.default,
}
_TRANSPOSES = {aten.t.default, aten.transpose.int, aten.permute.default}
_BACKWARDS = {aten.nll_loss_backward.default, aten._log_softmax_backward_data.default}
_COPIES = {aten._to_copy.default, aten.clone.default}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class NoHeadLoss(Exception):
    """Why a loss is none of a linear layer's alone; its message is the reason that a decision gives."""


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
    """A loss of a linear layer: the matmul, the factors, the loss and what its backward makes.

    `weight` is [classes, width] after a transpose if it `is_turned` in the trace. `cotangent` is what the loss's gradient is
    multiplied by, None where there is no backward.
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
    softmax = _behind_reshapes(args["self"])
    if softmax.target is not aten._log_softmax.default:
        raise NoHeadLoss("it is not a cross-entropy of logits")
    product = _product_behind(softmax)
    known = [one for one in readers(softmax) if one.target in _BACKWARDS]
    _check_readers(softmax, [loss, *known], "the log-probabilities")
    back, slope = _backward_of(loss, softmax)
    args_of_product = list(product.args)
    bias = args_of_product.pop(0) if product.target is aten.addmm.default else None
    source, right = args_of_product
    weight, is_turned = _untransposed(right)
    found = HeadLoss(
        product, source, weight, is_turned, bias, args["target"], loss, args["ignore_index"], args["reduction"] == MEAN
    )  # fmt: skip
    if back is None or slope is None:
        return found
    gradients = tuple(_gradients(slope, found))
    return HeadLoss(**{**vars(found), "cotangent": arguments(back)["grad_output"], "gradients": gradients})


# --- forward ----------------------------------------------------------------------------------------------------------


def _check_loss(loss: fx.Node) -> None:
    args = arguments(loss)
    if loss.target is aten.nll_loss2d_forward.default:
        raise NoHeadLoss("it is a loss over images")
    if args["weight"] is not None:
        raise NoHeadLoss("it weighs the classes")
    if args["reduction"] == NONE:
        raise NoHeadLoss("it is a loss for each row, whose gradients are scaled by what comes later")
    if len(shape_of(args["self"])) != 2 or not shape_of(args["self"])[0]:
        raise NoHeadLoss("it is no loss of rows of classes")
    if val(args["target"]).dtype is not torch.int64:
        raise NoHeadLoss("its targets are no 64-bit integers")


def _product_behind(softmax: fx.Node) -> fx.Node:
    """The matmul that makes the logits. Raises `NoHeadLoss` where others read them."""
    reader, node = softmax, arguments(softmax)["self"]
    classes = shape_of(softmax)[-1]
    if arguments(softmax)["dim"] not in (-1, len(shape_of(softmax)) - 1):
        raise NoHeadLoss("its classes are no columns")
    while True:
        node = _behind_reshapes(node)
        if shape_of(node)[-1:] != (classes,):
            raise NoHeadLoss(f"{node.name} is no matrix of logits")
        if node.target not in _COPIES:
            break
        _check_readers(node, [reader], "the logits")
        reader, node = node, node.args[0]  # type: ignore[assignment]
    if node.target not in (aten.mm.default, aten.addmm.default):
        raise NoHeadLoss(f"its logits come from {op_name(node)}, and no linear layer")
    _check_readers(node, [reader], "the logits")
    if node.kwargs:
        raise NoHeadLoss("its linear layer scales the product or the bias")
    if node.target is aten.addmm.default and shape_of(node.args[0]) != (classes,):  # type: ignore[arg-type]
        raise NoHeadLoss("what its linear layer adds is no bias of the classes")
    if val(node).dtype not in _FLOATS:
        raise NoHeadLoss(f"its logits are {val(node).dtype}")
    return node


def _check_readers(node: fx.Node, known: list[fx.Node], what: str) -> None:
    for one in readers(node):
        if one.op == "output":
            raise NoHeadLoss(f"{what} are returned")
        if one not in known and one.users:
            raise NoHeadLoss(f"{what} are read by {one.name} too")


def _behind_reshapes(node: fx.Node) -> fx.Node:
    """What a value shows the elements of in the same order, its rows in one piece: not behind a transpose or a slice."""
    while node.target in _RESHAPES and _keeps_columns(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _keeps_columns(node: fx.Node) -> bool:
    return shape_of(node)[-1:] == shape_of(node.args[0])[-1:]  # type: ignore[arg-type]


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


def _backward_of(loss: fx.Node, softmax: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """The backward of the loss and that of the log-softmax; None, None where there is none."""
    backs = [n for n in readers(softmax) if n.target is aten.nll_loss_backward.default and n.users]
    slopes = [n for n in readers(softmax) if n.target is aten._log_softmax_backward_data.default and n.users]
    _check_total_weight(loss, backs)
    if not backs and not slopes:
        return None, None
    if len(backs) != 1 or len(slopes) != 1:
        raise NoHeadLoss(f"it has {len(backs)} backwards and its log-softmax {len(slopes)}, not one each")
    (back,), (slope,) = backs, slopes
    here, there = arguments(loss), arguments(back)
    for name in ("target", "weight", "reduction", "ignore_index"):
        if _plain(here[name]) != _plain(there[name]):
            raise NoHeadLoss(f"its backward has another {name}")
    grad = _behind_reshapes(arguments(slope)["grad_output"])
    if grad is not back:
        raise NoHeadLoss(f"its log-probabilities have a gradient of {op_name(grad)} besides the loss's")
    _check_readers(back, [slope], "the gradients of the log-probabilities")
    return back, slope


def _plain(value: object) -> object:
    return _behind_reshapes(value) if isinstance(value, fx.Node) else value


def _check_total_weight(loss: fx.Node, backs: list[fx.Node]) -> None:
    for item in loss.users:
        if not is_getitem(item):
            raise NoHeadLoss("its results are read together")
        others = [one for one in readers(item) if one.op == "output" or (one not in backs and one.users)]
        if item.args[1] == 1 and others:
            raise NoHeadLoss("the number of its rows is read by others")


def _gradients(slope: fx.Node, found: HeadLoss) -> Iterator[Gradient]:
    """What the backward makes of the gradient of the logits, each value once. Raises `NoHeadLoss` for anything else."""
    node = slope
    while True:
        ends = list(dict.fromkeys(one for one in readers(node) if one.op == "output" or one.users))
        if len(ends) != 1 or ends[0].target not in _COPIES:
            break
        node = ends[0]
    if val(node).dtype != found.dtype:
        raise NoHeadLoss(f"the gradient of its logits is {val(node).dtype}, and they are {found.dtype}")
    for end in ends:
        if end.op == "output":
            raise NoHeadLoss("the gradient of the logits is returned")
        yield _gradient(end, node, found)


def _gradient(end: fx.Node, logits: fx.Node, found: HeadLoss) -> Gradient:
    if end.target is aten.mm.default and not end.kwargs:
        left, right = (_matrix(one, (found.count, found.classes), logits) for one in end.args)
        if left == "itself" and _is_weight(end.args[1], found):
            return Gradient(end, "input")
        if left == "turned" and _is_input(end.args[1], found):
            return Gradient(end, "weight")
        if right == "itself" and _is_turned_input(end.args[0], found):
            return Gradient(end, "weight", is_turned=True)
    if end.target is aten.sum.dim_IntList and _matrix(end.args[0], (found.count, found.classes), logits) == "itself":
        args = arguments(end)
        if [d % 2 for d in args["dim"] or []] == [0] and val(end).dtype == found.dtype:
            return Gradient(end, "bias", keeps=bool(args["keepdim"]))
    raise NoHeadLoss(f"the gradient of the logits is read by {end.name}, which is no gradient of the layer")


def _matrix(node: object, shape: tuple[int, int], base: fx.Node) -> str:
    """ "itself" if `node` shows `base` as a matrix of `shape`, "turned" if it is transposed, else ""."""
    if not isinstance(node, fx.Node):
        return ""
    node, is_turned = _untransposed(node)
    if shape_of(node) != shape or _behind_reshapes(node) is not base:
        return ""
    return "turned" if is_turned else "itself"


def _is_weight(node: object, found: HeadLoss) -> bool:
    """Whether `node` is [classes, width], the weight."""
    return isinstance(node, fx.Node) and _untransposed(node) == (found.weight, not found.is_turned)


def _is_input(node: object, found: HeadLoss) -> bool:
    return isinstance(node, fx.Node) and _matrix(node, shape_of(found.input), _base(found)) == "itself"  # type: ignore[arg-type]


def _is_turned_input(node: object, found: HeadLoss) -> bool:
    return isinstance(node, fx.Node) and _matrix(node, shape_of(found.input), _base(found)) == "turned"  # type: ignore[arg-type]


def _base(found: HeadLoss) -> fx.Node:
    return _behind_reshapes(found.input)
