"""Facts about a value or an op that are worked out once, and are known in every copy of it.

    @once_per_value                          @once_per_op
    def devices(value): ...                  def refusal(node): ...

    follows from the fake value alone        from target, arguments and value of an op, and the targets and values of its
                                             operands: from nothing else, such as their names, readers or own operands

Passes copy traces and then ask about each op what was asked of the one that it is a copy of. So the answers lie in the
node's metadata, beside the objects that they follow from: where one of those is another object, they are worked out anew.
Those objects are never edited in place: an FX node's arguments are immutable, and nobody edits fake tensors. An answer
holds no nodes, since those of a copy are others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import fx

T = TypeVar("T")

_VALUE, _OP = "value_facts", "op_facts"


def once_per_value(compute: Callable[[Any], T]) -> Callable[[fx.Node], T]:
    """`compute`, a function of a fake value (None where a node has none), as a function of the node that yields it."""

    @functools.wraps(compute)
    def of_node(node: fx.Node) -> T:
        meta = node.meta
        value, known = meta.get("val"), meta.get(_VALUE)
        if known is None or known[0] is not value:
            known = meta[_VALUE] = (value, {})
        facts = known[1]
        if of_node not in facts:
            facts[of_node] = compute(value)
        return facts[of_node]

    return of_node


def once_per_op(compute: Callable[[fx.Node], T]) -> Callable[[fx.Node], T]:
    """`compute`, a function of an op, its value and its operands' targets and values, with its results kept."""

    @functools.wraps(compute)
    def of_node(node: fx.Node) -> T:
        facts = _facts_of(node)
        if of_node not in facts:
            facts[of_node] = compute(node)
        return facts[of_node]

    return of_node


def _facts_of(node: fx.Node) -> dict[Any, Any]:
    meta = node.meta
    known = meta.get(_OP)
    if known is not None and _holds(known, node):
        return known[-1]
    operands = [(a.target, a.meta.get("val")) for a in node.all_input_nodes]
    facts: dict[Any, Any] = {}
    meta[_OP] = (node.args, node.kwargs, node.target, meta.get("val"), operands, facts)
    return facts


def _holds(known: tuple[Any, ...], node: fx.Node) -> bool:
    args, kwargs, target, value, operands, _ = known
    if args is not node.args or kwargs is not node.kwargs or target is not node.target:
        return False
    if value is not node.meta.get("val"):
        return False
    for operand, (its_target, its_value) in zip(node.all_input_nodes, operands, strict=True):
        if operand.target is not its_target or operand.meta.get("val") is not its_value:
            return False
    return True


def share_facts(node: fx.Node, copy: fx.Node) -> None:
    """Let two nodes have one memory: what is worked out for one is known of the other.

    `copy` has the metadata of `node`, and its arguments with operands of its own.
    """
    value, known = node.meta.get("val"), node.meta.get(_VALUE)
    if known is None or known[0] is not value:
        known = node.meta[_VALUE] = (value, {})
    copy.meta[_VALUE] = known
    if node.op != "call_function":
        return
    known = node.meta.get(_OP)
    if known is None or known[0] is not node.args or known[1] is not node.kwargs:
        _facts_of(node)
        known = node.meta[_OP]
    copy.meta[_OP] = (copy.args, copy.kwargs, *known[2:])


def tensors_in(value: Any) -> tuple[torch.Tensor, ...]:
    """Every tensor of a value: one, or several for a multi-output op."""
    if isinstance(value, torch.Tensor):
        return (value,)
    return tuple(v for v in value if isinstance(v, torch.Tensor)) if isinstance(value, (tuple, list)) else ()


@once_per_value
def devices(value: Any) -> tuple[torch.device, ...]:
    """The device of each tensor of the value."""
    return tuple(t.device for t in tensors_in(value))


@once_per_value
def is_empty(value: Any) -> bool:
    """Whether a tensor of the value has no elements."""
    return any(t.numel() == 0 for t in tensors_in(value))
