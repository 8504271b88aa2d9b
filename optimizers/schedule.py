"""When the backward recomputes: copies of forward ops, made, taken back, and run as late as their first reader allows.

A recomputed copy of `x` is called `x_again`, has phase "backward" and remembers `x` in
`node.meta["custom"]["recomputes"]`. That makes rematerialisation reversible: `forget` gives the trace as it was, so that a
second choice of what to save starts from the same program as the first.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from tracefuse.optimizers.rewrite import refresh_views
from tracefuse.optimizers.trace import Trace, fake_mode, is_getitem, is_view, phase, val


def recomputes(node: fx.Node) -> str | None:
    """The name of the forward value that this op computes a second time; None for every other op."""
    return (node.meta.get("custom") or {}).get("recomputes")


# --- making copies ----------------------------------------------------------------------------------------------------


def recompute(trace: Trace, again: Collection[fx.Node]) -> list[fx.Node]:
    """Edit `trace` so that its backward computes the forward values `again` itself. Returns the copies.

    A copy reads copies where there are any and forward values elsewhere. It runs just before its first reader.
    """
    copies: dict[fx.Node, fx.Node] = {}
    for node in [n for n in trace.ops if n in again]:
        with trace.graph.inserting_after(node):
            copies[node] = _copy(node, copies)
    for node, copy in copies.items():
        _redirect(trace, node, copy)
    just_in_time(trace.graph, set(copies.values()))
    refresh_views(trace.graph)
    return list(copies.values())


def _copy(node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda a: copies.get(a, a))
    copy = node.graph.create_node("call_function", node.target, args, kwargs, f"{node.name}_again")
    copy.meta = {**node.meta, "phase": "backward", "val": _own_value(node, copy)}
    copy.meta["custom"] = {**(node.meta.get("custom") or {}), "recomputes": node.name}
    return copy


def _own_value(node: fx.Node, copy: fx.Node) -> Any:
    """The copy's fake value: memory of its own, or a view of its own argument's, laid out as the original."""
    if is_getitem(copy):
        return operator.getitem(val(copy.args[0]), copy.args[1])  # type: ignore[arg-type]
    with fake_mode(node.graph), torch.no_grad():
        if is_view(copy):
            args, kwargs = fx.node.map_arg((copy.args, copy.kwargs), val)
            return copy.target(*args, **kwargs)  # type: ignore[operator]
        return tree_map_only(torch.Tensor, _empty_like, val(node))


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _redirect(trace: Trace, node: fx.Node, copy: fx.Node) -> None:
    """Let the backward's ops, and the gradients that are returned, read `copy` instead of the forward's `node`."""
    for user in list(node.users):
        if user.op == "call_function" and phase(user) == "backward":
            user.replace_input_with(node, copy)
    returned = zip(trace.outputs, trace.returned, strict=True)
    replaced = tuple(copy if out.kind == "gradient" and r is node else r for out, r in returned)
    trace.graph.output_node().args = (replaced,)


# --- taking them back -------------------------------------------------------------------------------------------------


def forget(trace: Trace) -> Trace:
    """A copy of `trace` that recomputes nothing: every copy gives way to its original.

    An original that nothing else needed is gone by now; there the copy itself returns to the forward, under its old name.
    """
    if not any(recomputes(node) for node in trace.ops):
        return trace.copy()
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    forward: dict[str, fx.Node] = {}
    end_of_forward: fx.Node | None = None
    for node in trace.graph.nodes:
        name = recomputes(node)
        if node.op == "output":
            break
        if name in forward:
            new[node] = forward[name]
        elif name is not None:
            with graph.inserting_before(end_of_forward) if end_of_forward else nullcontext():
                new[node] = forward[name] = _original(graph, node, name, new)
        else:
            new[node] = graph.node_copy(node, new.__getitem__)
            is_backward = node.op == "call_function" and phase(node) == "backward"
            if is_backward:
                end_of_forward = end_of_forward or new[node]
            else:
                forward[node.name] = new[node]
    graph.output(tuple(new[node] for node in trace.returned))
    graph.output_node().meta.update(trace.graph.output_node().meta)
    refresh_views(graph)
    return Trace(graph, trace.inputs, trace.outputs, trace.name)


def _original(graph: fx.Graph, copy: fx.Node, name: str, new: dict[fx.Node, fx.Node]) -> fx.Node:
    args, kwargs = fx.node.map_arg((copy.args, copy.kwargs), new.__getitem__)
    node = graph.create_node("call_function", copy.target, args, kwargs, name)
    custom = {key: value for key, value in copy.meta["custom"].items() if key != "recomputes"}
    node.meta = {**copy.meta, "phase": "forward", "custom": custom}
    return node


# --- order ------------------------------------------------------------------------------------------------------------


def just_in_time(graph: fx.Graph, movable: Collection[fx.Node]) -> None:
    """Move every op of `movable` (backward ops) to right before its first reader; all others keep their order.

    What a moved op reads moves along if it is movable too. So values that are recomputed live as short as they can, and
    random ops and other effects, never movable, keep their order. The result depends on the readers' arguments, not on
    where the movable ops were.
    """
    placed: set[fx.Node] = set()
    for node in [n for n in graph.nodes if n not in movable]:
        for needed in _needed(node, movable, placed):
            node.prepend(needed)


def _needed(node: fx.Node, movable: Collection[fx.Node], placed: set[fx.Node]) -> Iterator[fx.Node]:
    """The movable ops behind `node` that are not yet `placed`, inputs before their readers."""
    stack = [(node, iter(node.all_input_nodes))]
    while stack:
        current, inputs = stack[-1]
        following = next((a for a in inputs if a in movable and a not in placed), None)
        if following is not None:
            placed.add(following)
            stack.append((following, iter(following.all_input_nodes)))
            continue
        stack.pop()
        if current is not node:
            yield current
