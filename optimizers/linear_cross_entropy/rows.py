"""What lies between a linear layer and the log-softmax of its logits: ops that act on each row alone.

    op                                       what the operator does instead
    view, clone, cast                        nothing: its kernel reads a row in the type that the matmul wrote
    slice or select of rows                  nothing: `targets_of_all_rows` ignores the rows that were left out
    mul, div, add, sub of a number           is part of the `RowMap` that it applies to each logit
    tanh, sigmoid                            likewise, one of them: `tanh(x / 30) * 30` is Gemma's soft cap

The slope of each op stands in the backward, in the opposite order: `gradient_of_product` follows it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.ops import arguments, aten, is_view, op_name, readers
from tracefuse.optimizers.trace import call, phase, shape_of, val


class NoHeadLoss(Exception):
    """Why a loss is none of a linear layer's alone; its message is the reason that a decision gives, and the remedy."""


RESHAPES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.detach.default,
    aten.alias.default,
}
_COPIES = {aten._to_copy.default, aten.clone.default}
_SELECTIONS: dict[Any, tuple[Any, Any]] = {
    aten.slice.Tensor: (aten.slice_backward.default, aten.slice_scatter.default),
    aten.select.int: (aten.select_backward.default, aten.select_scatter.default),
}
"""The ops that leave out rows, by what is their slope, and what undoes them."""
_SCALINGS: dict[Any, set[Any]] = {
    aten.mul.Tensor: {aten.mul.Tensor, aten.mul.Scalar},
    aten.mul.Scalar: {aten.mul.Tensor, aten.mul.Scalar},
    aten.div.Tensor: {aten.div.Tensor, aten.div.Scalar},
    aten.div.Scalar: {aten.div.Tensor, aten.div.Scalar},
}
_SHIFTS: dict[Any, int] = {aten.add.Tensor: 1, aten.add.Scalar: 1, aten.sub.Tensor: -1, aten.sub.Scalar: -1}
_ACTIVATIONS: dict[Any, tuple[str, Any]] = {
    aten.tanh.default: ("tanh", aten.tanh_backward.default),
    aten.sigmoid.default: ("sigmoid", aten.sigmoid_backward.default),
}
_MATMULS = {aten.mm.default, aten.addmm.default}
_POINTWISE = _SCALINGS.keys() | _SHIFTS.keys() | _ACTIVATIONS.keys()


@dataclass(frozen=True)
class RowMap:
    """What is applied to each logit: `outer * activation(inner * logit + shift)`, where "" is no activation."""

    activation: str = ""
    inner: float = 1.0
    shift: float = 0.0
    outer: float = 1.0

    def scaled(self, by: float) -> RowMap:
        if self.activation:
            return replace(self, outer=self.outer * by)
        return replace(self, inner=self.inner * by, shift=self.shift * by)

    def shifted(self, by: float) -> RowMap:
        """No loss changes when all logits of a row are shifted alike: it counts in front of an activation only."""
        return self if self.activation else replace(self, shift=self.shift + by)

    def activated(self, activation: str) -> RowMap | None:
        return None if self.activation else replace(self, activation=activation)


# --- forward ----------------------------------------------------------------------------------------------------------


def behind_reshapes(node: fx.Node) -> fx.Node:
    """What a value shows the elements of in the same order, its rows in one piece: not behind a transpose or a slice."""
    while node.target in RESHAPES and _keeps_columns(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _keeps_columns(node: fx.Node) -> bool:
    return shape_of(node)[-1:] == shape_of(node.args[0])[-1:]  # type: ignore[arg-type]


def between(softmax: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The matmul that makes the logits of a log-softmax, and the ops between them in the forward's order, reshapes left out.
    Raises `NoHeadLoss`."""
    dim, classes = arguments(softmax)["dim"], shape_of(softmax)[-1]
    if dim not in (-1, len(shape_of(softmax)) - 1):
        raise NoHeadLoss("its classes are no columns: give it rows of classes, as `logits.reshape(-1, classes)`")
    node, found = behind_reshapes(arguments(softmax)["self"]), []
    while node.target in _COPIES or node.target in _SELECTIONS or node.target in _POINTWISE:
        _check_op(node)
        found.insert(0, node)
        node = behind_reshapes(node.args[0])  # type: ignore[arg-type]
    if node.target not in _MATMULS:
        raise NoHeadLoss(
            f"its logits come from {op_name(node)}; computed in chunks are a linear layer and, behind it, casts, slices of "
            "rows, numbers that scale or shift, and one tanh or sigmoid: keep to these between the layer and the loss"
        )
    if shape_of(node)[-1] != classes:
        raise NoHeadLoss(f"{node.name} is no matrix of logits: give the loss the linear layer's logits, row by row")
    return node, found


def _check_op(node: fx.Node) -> None:
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    if node.target in _SELECTIONS and _dim(node) == len(shape_of(source)) - 1 and not _is_whole(node):
        raise NoHeadLoss(f"{node.name} takes a part of the classes: give the head a weight of that many rows instead")
    if node.target in _SCALINGS.keys() | _SHIFTS.keys() and _number(node) is None:
        raise NoHeadLoss(
            f"{node.name} changes the logits by what is no finite number: pass it as a Python number, or put it into the "
            "layer's input, weight or bias"
        )
    if val(node).device != val(source).device:
        raise NoHeadLoss(f"{node.name} moves the logits to another device: compute the loss where the head is")


def row_map(ops: list[fx.Node]) -> RowMap:
    """What the ops between make of each logit. Raises `NoHeadLoss` where there are two activations."""
    found: RowMap | None = RowMap()
    for node in ops:
        assert found is not None
        if node.target in _ACTIVATIONS:
            found = found.activated(_ACTIVATIONS[node.target][0])
        elif node.target in _SCALINGS.keys() | _SHIFTS.keys():
            number = _number(node)
            assert number is not None
            found = found.scaled(number) if node.target in _SCALINGS else found.shifted(number)
        if found is None:
            raise NoHeadLoss(f"{node.name} is the second activation behind its linear layer: keep one")
    assert found is not None
    return found


def _number(node: fx.Node) -> float | None:
    """What the op multiplies by or adds; None where it is no finite number."""
    other = node.args[1]
    if isinstance(other, bool) or not isinstance(other, (int, float)):
        return None
    if node.target in _SHIFTS:
        found = _SHIFTS[node.target] * other * arguments(node)["alpha"]
    elif node.target in (aten.div.Tensor, aten.div.Scalar):
        found = 1 / other if other else math.inf
    else:
        found = other
    return float(found) if math.isfinite(found) else None


def _dim(node: fx.Node) -> int:
    return arguments(node)["dim"] % len(shape_of(node.args[0]))  # type: ignore[arg-type]


def _is_whole(node: fx.Node) -> bool:
    return node.target is aten.slice.Tensor and shape_of(node) == shape_of(node.args[0])  # type: ignore[arg-type]


def targets_of_all_rows(target: fx.Node, like: fx.Node, product: fx.Node, ops: list[fx.Node], ignored: int) -> fx.Node:
    """The targets of all rows of the `product`, inserted with the origin of `like`: a row that the ops left out is to be
    `ignored`. It is `target` itself where none was."""
    for node in reversed(ops):
        if node.target not in _SELECTIONS or _is_whole(node):
            continue
        here, before = shape_of(node)[:-1], shape_of(node.args[0])[:-1]  # type: ignore[arg-type]
        target = _shaped(target, here) or call(like, aten.view.default, target, list(here))
        none = call(like, aten.full.default, list(before), ignored, dtype=torch.int64, device=val(target).device)
        where = list(arguments(node).values())[1:]
        target = call(like, _SELECTIONS[node.target][1], none, target, *where, name="targets")
    rows = shape_of(product)[:1]
    return target if shape_of(target) == rows else call(like, aten.view.default, target, list(rows))


def _shaped(node: fx.Node, shape: tuple[int, ...]) -> fx.Node | None:
    """The first value with the elements of `node` in the same order that has the `shape`; None where there is none."""
    found = node if shape_of(node) == shape else None
    while node.target in RESHAPES or node.target is aten.clone.default:
        node = node.args[0]  # type: ignore[assignment]
        found = node if shape_of(node) == shape else found
    return found


# --- backward ---------------------------------------------------------------------------------------------------------


def live_readers(node: fx.Node) -> list[fx.Node]:
    return list(dict.fromkeys(one for one in readers(node) if one.op == "output" or one.users))


def gradient_of_product(slope: fx.Node, ops: list[fx.Node]) -> tuple[fx.Node, dict[fx.Node, fx.Node]]:
    """The gradient of the matmul's result, behind the `slope` of the log-softmax, and by each op between what is its slope.
    Raises `NoHeadLoss` where the backward is another than the ops'."""
    node, slopes = _past_copies(slope), {}
    for op in reversed(ops):
        if op.target in _COPIES or op.target in _SHIFTS:
            continue
        ends = live_readers(node)
        if len(ends) != 1 or not _is_slope(ends[0], op, node):
            raise NoHeadLoss(
                f"the gradient behind {op.name} is read by {', '.join(end.name for end in ends) or 'nothing'}, which is not "
                f"the slope of {op_name(op)} alone: leave the gradient of the logits to autograd"
            )
        slopes[op] = ends[0]
        node = _past_copies(ends[0])
    return node, slopes


def _past_copies(node: fx.Node) -> fx.Node:
    while True:
        ends = live_readers(node)
        if len(ends) != 1 or ends[0].target not in _COPIES:
            return node
        node = ends[0]


def _is_slope(node: fx.Node, op: fx.Node, grad: fx.Node) -> bool:
    """Whether `node` is the gradient of the op's operand, `grad` being that of its result."""
    if not node.args or not isinstance(node.args[0], fx.Node) or behind_reshapes(node.args[0]) is not grad:
        return False
    if op.target in _SELECTIONS:
        args = list(arguments(op).values())
        sizes = shape_of(op.args[0])  # type: ignore[arg-type]
        if node.target is not _SELECTIONS[op.target][0] or shape_of(node.args[0]) != shape_of(op):
            return False
        given = list(arguments(node).values())
        return tuple(given[1]) == sizes and _bounds(op, args[1:]) == _bounds(op, given[2:])
    if op.target in _ACTIVATIONS:
        return node.target is _ACTIVATIONS[op.target][1] and behind_reshapes(node.args[1]) is behind_reshapes(op)  # type: ignore[arg-type]
    return node.target in _SCALINGS[op.target] and node.args[1:] == op.args[1:] and not node.kwargs


def _bounds(op: fx.Node, where: list[Any]) -> tuple[Any, ...]:
    """The dimension, and which of it a selection takes, as ranges and indices that compare."""
    size = shape_of(op.args[0])[_dim(op)]  # type: ignore[arg-type]
    dim = where[0] % len(shape_of(op.args[0]))  # type: ignore[arg-type]
    if op.target is aten.select.int:
        return dim, where[1] % size
    return dim, range(size)[slice(*where[1:])]


# --- who reads --------------------------------------------------------------------------------------------------------


def check_readers(node: fx.Node, known: list[fx.Node], what: str) -> None:
    """Raises `NoHeadLoss` where others than the `known` read `what` the node is."""
    for one in readers(node):
        if one.op == "output":
            raise NoHeadLoss(
                f"{what} are returned: return the loss alone, as `torch.compile(lambda **batch: model(**batch).loss)` does"
            )
        if one not in known and one.users:
            raise NoHeadLoss(f"{what} are read by {one.name} too: leave that out of the steps that train")


def check_logits(
    product: fx.Node, ops: list[fx.Node], softmax: fx.Node, slopes: dict[fx.Node, fx.Node] | None = None
) -> None:
    """Raises `NoHeadLoss` where others than the ops between, and their slopes, read a value between; without `slopes` any op
    of the backward may."""
    made = [product, *(op for op in ops if not is_view(op))]
    for node, reader in zip(made, [*made[1:], softmax], strict=True):
        if slopes is None:
            late = [one for one in readers(node) if one.op != "output" and phase(one) == "backward"]
        else:
            late = [slopes[node]] if node in slopes else []
        check_readers(node, [reader, *late], "the logits")
