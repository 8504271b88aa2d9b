"""Calls that the pass writes: many of them are alike, so that each kind of result is worked out once.

While the pass works, values of one type share one fake tensor. `settle` gives those that stay a fake tensor of their own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.ops import frozen
from tracefuse.optimizers.optimizer_step.elements import refusal
from tracefuse.optimizers.rewrite import evaluate
from tracefuse.optimizers.trace import origin, phase, set_origin, val

SHARED = "shares_its_type"
"""Marks values that share their fake tensor, in `node.meta`."""


@dataclass
class Calls:
    """Writes calls into `graph`, where its insertion point is."""

    graph: fx.Graph
    known: dict[Any, Any] = field(default_factory=dict)
    refusals: dict[int, str | None] = field(default_factory=dict)

    def call(self, like: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """`target(*args, **kwargs)` with the phase and the origin of `like`; raises what the operator raises."""
        key = target, frozen(args, _type), frozen(kwargs, _type)
        if key not in self.known:
            self.known[key] = evaluate(self.graph, target, args, kwargs, {})
        name = target.overloadpacket.__name__.strip("_") if isinstance(target, torch._ops.OpOverload) else None
        node = self.graph.create_node("call_function", target, args, kwargs, name)
        node.meta = {"val": self.known[key], "phase": phase(like), SHARED: True}
        set_origin(node, origin(like))
        return node

    def item(self, of: fx.Node, at: int) -> fx.Node:
        """One of several results."""
        node = self.graph.create_node("call_function", operator.getitem, (of, at))
        node.meta = of.meta | {"val": val(of)[at]}
        return node

    def refusal(self, node: fx.Node) -> str | None:
        """Why a kernel over lists cannot hold a call that was written here; calls of one kind share the answer."""
        kind = id(val(node))
        if kind not in self.refusals:
            self.refusals[kind] = refusal(node)
        return self.refusals[kind]

    def like(self, node: fx.Node) -> Call:
        return Call(self, node)


@dataclass(frozen=True)
class Call:
    """`call(target, *args)`, for the op that `node` is."""

    calls: Calls
    node: fx.Node

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.calls.call(self.node, target, *args, **kwargs)

    def cast(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        """`value` as `dtype`; itself where it is that."""
        return value if val(value).dtype is dtype else self(torch.ops.aten._to_copy.default, value, dtype=dtype)


def settle(graph: fx.Graph) -> None:
    """Give each value that shares its fake tensor with others one of its own."""
    for node in graph.nodes:
        if node.meta.pop(SHARED, False):
            node.meta["val"] = evaluate(graph, node.target, node.args, node.kwargs, {})  # type: ignore[arg-type]


def take_name(new: fx.Node, old: fx.Node) -> None:
    """Let `new` be what `old` was, by name and fake tensor too; `old` leaves the graph."""
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)
    new.name = old.name
    new.meta["val"] = val(old)
    new.meta.pop(SHARED, None)


def _type(node: fx.Node) -> Hashable:
    """What of an operand decides the type of a result."""
    tensor = val(node)
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
