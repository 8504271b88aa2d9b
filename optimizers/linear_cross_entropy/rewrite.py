"""Replacing a linear layer with its cross-entropy by the operator, and its gradients by multiples of those it yields."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.linear_cross_entropy.operator import LINEAR_CROSS_ENTROPY
from tracefuse.optimizers.linear_cross_entropy.pattern import Gradient, HeadLoss
from tracefuse.optimizers.linear_cross_entropy.rows import RowMap, targets_of_all_rows
from tracefuse.optimizers.ops import aten, reached
from tracefuse.optimizers.rewrite import replace_under_name, replace_value
from tracefuse.optimizers.trace import Trace, call, origin, phase, set_origin, shape_of, val

LOSS = 0
RESULT_OF = {"input": 1, "weight": 2, "bias": 3}
"""The operator's results by their number."""
NAMES = ("loss", "kept_grad_input", "kept_grad_weight", "kept_grad_bias")

_FACTORS = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}
_PASSED_ON = {aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default}

NO_SCALE = (
    "its gradients are float16, and the scale that keeps them from vanishing is not known in the forward: scale the loss in "
    "the captured program, as `scaler.scale(loss)` does"
)


def factors_of(head: HeadLoss) -> tuple[fx.Node | None, list[fx.Node]]:
    """The cotangent of the step behind the loss's gradient, and the ops that multiply it by what the forward knows, in order;
    None, [] where the gradient comes from anything else."""
    found: list[fx.Node] = []
    node = head.cotangent
    while node is not None and node.op == "call_function":
        source = _factor(node)
        if source is None:
            return None, []
        found.insert(0, node)
        node = source
    return (node, found) if node is not None else (None, [])


def _factor(node: fx.Node) -> fx.Node | None:
    """What the op multiplies by a number or by a scalar of the forward; None for any other op."""
    if node.target in _PASSED_ON:
        return node.args[0]  # type: ignore[return-value]
    if node.target not in _FACTORS or node.kwargs or shape_of(node) != ():
        return None
    late = [one for one in node.all_input_nodes if _is_of_the_backward(one)]
    is_first = bool(late) and node.args[0] is late[0]
    is_once = len(late) == 1 and sum(one is late[0] for one in node.args) == 1
    return late[0] if is_once and (is_first or node.target is aten.mul.Tensor) else None


def _is_of_the_backward(node: fx.Node) -> bool:
    return phase(node) == "backward" or node.meta.get("is_cotangent", False)


def mark_cotangents(trace: Trace) -> None:
    """Note on the inputs of a copy which are cotangents: rewrites see nodes, and only the signature knows."""
    for entry, node in trace.input_pairs:
        node.meta["is_cotangent"] = entry.kind == "cotangent"


def rewrite(head: HeadLoss, rows: int) -> str | None:
    """Put the operator in the place of the loss. Returns None when done, else why not; the graph is of no use then."""
    cotangent, factors = factors_of(head)
    at = _place(head, factors)
    if at is None:  # what scales the loss is made only after the loss is read
        cotangent, factors, at = None, [], head.loss
    has_scale = any(one.target in _FACTORS for one in factors)
    if head.dtype is torch.float16 and head.gradients and not has_scale:
        return NO_SCALE
    with head.loss.graph.inserting_before(at):
        made = _operator(head, factors if has_scale else [], rows)
        yielded = [LOSS, *(index for index, wants in enumerate(head.wanted, start=1) if wants)]
        items = {index: call(head.loss, operator.getitem, made, index, name=NAMES[index]) for index in yielded}
    for loss in head.values:
        if reason := replace_value(loss, items[LOSS]):
            return reason
        items[LOSS].name, loss.name = loss.name, items[LOSS].name
    for gradient in head.gradients:
        by = cotangent if cotangent is not None and has_scale else head.cotangent
        if reason := replace_under_name(gradient.node, _scaled(gradient, items[RESULT_OF[gradient.of]], by)):
            return f"{gradient.node.name} cannot be replaced: {reason}"
    return None


def _place(head: HeadLoss, factors: Sequence[fx.Node]) -> fx.Node | None:
    """The op that the operator can stand before: the loss, or the first behind all factors; None where the loss is read by
    then, as it is by a factor that is made of the loss."""
    position = {node: at for at, node in enumerate(head.loss.graph.nodes)}
    known = [n for one in factors for n in one.all_input_nodes if not _is_of_the_backward(n)]
    if head.loss in reached(known, lambda node: node.all_input_nodes):
        return None
    last = max(known, key=position.__getitem__, default=head.loss)
    if position[last] <= position[head.loss]:
        return head.loss
    users = [user for value in head.values for user in value.users]
    return last.next if all(position[last] < position[user] for user in users) else None


def _operator(head: HeadLoss, factors: Sequence[fx.Node], rows: int) -> fx.Node:
    like = head.loss
    weight = head.weight if head.is_turned else call(like, aten.t.default, head.weight)
    scale = _scale(head, factors) if factors else None
    target = targets_of_all_rows(head.target, like, head.product, list(head.between), head.ignore_index)
    source = (head.input, weight, head.bias, target, scale)
    made = call(
        like, LINEAR_CROSS_ENTROPY, *source, name="loss_and_gradients", ignore_index=head.ignore_index,
        mean=head.is_mean, dtype=val(like)[0].dtype, rows=rows, **_row_options(head),
        **{f"{of}_wanted": wants for of, wants in zip(RESULT_OF, head.wanted, strict=True)},
    )  # fmt: skip
    set_origin(made, replace(origin(head.product), rng=None))  # it does the matmuls of the layer, forward and backward
    return made


def _row_options(head: HeadLoss) -> dict[str, Any]:
    """What the operator does to each row, but for its defaults."""
    options, plain = {"smoothing": head.smoothing, **vars(head.map)}, {"smoothing": 0.0, **vars(RowMap())}
    return {name: value for name, value in options.items() if value != plain[name]}


def _scale(head: HeadLoss, factors: Sequence[fx.Node]) -> fx.Node:
    """What the factors make of 1, computed in the forward."""
    like, first = head.loss, val(_factor(factors[0]))  # type: ignore[arg-type]
    value = call(like, aten.full.default, [], 1.0, dtype=first.dtype, device=first.device, name="scale")
    known: dict[fx.Node, fx.Node] = {}
    for node in factors:
        known[_factor(node)] = value  # type: ignore[index]
        args = fx.node.map_arg(node.args, lambda one: known.get(one, one))
        value = call(like, node.target, *args, name="scale", **node.kwargs)  # type: ignore[arg-type]
        known[node] = value
    return value


def _scaled(gradient: Gradient, kept: fx.Node, cotangent: fx.Node | None) -> Callable[[], fx.Node]:
    def build() -> fx.Node:
        like, found = gradient.node, kept
        if gradient.is_turned:
            found = call(like, aten.t.default, found)
        if gradient.keeps:
            found = call(like, aten.unsqueeze.default, found, 0)
        return call(like, aten.mul.Tensor, found, cotangent)

    return build
