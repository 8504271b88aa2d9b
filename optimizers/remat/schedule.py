"""The schedule of recomputing: copies of forward ops, made, taken back, and run as late as their first reader allows.

A recomputed copy of `x` is called `x_again`, has phase "backward" and remembers `x` in
`node.meta["custom"]["recomputes"]`. That makes rematerialisation reversible: `forget` gives the trace as it was, so that a
second choice of what to save starts from the same program as the first. Copies that another region of the same phase reads
(`between`) are made, marked and taken back alike.

`native_dropout` yields a result and a mask, and may never be run again. But the result is its operand times the saved mask,
of one byte per element, times a constant: what `native_dropout_backward` computes. So while a cut is chosen the result is
that op in the graph, and can be recomputed without a draw; afterwards it is the dropout's own result again, and only the
backward's copies are products.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from contextlib import nullcontext
from typing import Any, TypeVar

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from tracefuse.optimizers.fakes.made import fake_view, like
from tracefuse.optimizers.ops import arguments, aten, does_work, is_getitem, reached, read_by
from tracefuse.optimizers.rewrite import refresh_views
from tracefuse.optimizers.trace import (
    Trace,
    copy_node,
    create_op,
    eliminate_dead_code,
    phase,
    recomputes,
    recomputes_in,
    val,
)

_MARKS = ("recomputes", "recomputes_in", "for_reader")

Op = TypeVar("Op")


# --- making copies ----------------------------------------------------------------------------------------------------


def recompute(trace: Trace, again: Collection[fx.Node]) -> list[fx.Node]:
    """Edit `trace` so that its backward computes the forward values `again` itself. Returns the copies.

    A copy reads copies where there are any and forward values elsewhere. It runs just before its first reader.
    """
    copies: dict[fx.Node, fx.Node] = {}
    for node in [n for n in trace.ops if n in again]:
        with trace.graph.inserting_after(node):
            copies[node] = copy_again(node, copies, phase="backward")
    _redirect(trace, copies)
    just_in_time(set(copies.values()))
    _move_views(copies)
    return list(copies.values())


def copy_again(node: fx.Node, copies: dict[fx.Node, fx.Node], **changes: Any) -> fx.Node:
    """Insert a copy of `node` that reads `copies` where there are any: in its phase, or in the `phase` given.

    Other `changes` go into the copy's own fields. A copy of a copy is one of the original.
    """
    known = recomputes(node)
    original = known or node.name
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda a: copies.get(a, a))
    copy = create_op(node.graph, node.target, args, kwargs, f"{original}_again")
    marks = {"recomputes": original, "recomputes_in": recomputes_in(node) if known else phase(node)}
    own = {"phase": changes.pop("phase", phase(node)), "val": _own_value(node, copy)}
    own["custom"] = {**(node.meta.get("custom") or {}), **marks, **changes}
    copy.meta.update(node.meta, **own)  # set, it is looked up by its operator, which torch hashes in Python
    return copy


def _own_value(node: fx.Node, copy: fx.Node) -> Any:
    """The copy's fake value: memory of its own, or its place in its own argument's, laid out as the original."""
    if not does_work(copy):
        return _moved(copy, val(node), val(node.all_input_nodes[0]))
    value = val(node)
    if isinstance(value, FakeTensor):
        return like(value)
    return fx.node.map_aggregate(value, lambda t: like(t) if isinstance(t, FakeTensor) else t)


def _moved(node: fx.Node, value: Any, was_of: Any) -> Any:
    """`value`, a view or an item of `was_of`, at the same place in what the argument of `node` is now."""
    now = val(node.all_input_nodes[0])
    if now is was_of:
        return value
    if is_getitem(node):
        return now[node.args[1]]
    shift, memory = now.storage_offset() - was_of.storage_offset(), now.untyped_storage()

    def moved(t: FakeTensor) -> FakeTensor:
        offset = t.storage_offset() + shift
        return fake_view(t.fake_mode, memory, offset, t.shape, t.stride(), t.dtype, t.device)

    return fx.node.map_aggregate(value, moved)


def _move_views(copies: dict[fx.Node, fx.Node]) -> None:
    """Type anew, in place, the backward's views of copies, so that `storage` tells aliases again."""
    was = {copy: val(node) for node, copy in copies.items()}
    for node in reached(list(was), views):  # operands before their readers
        if node not in was and (source := node.all_input_nodes[0]) in was:
            was[node] = val(node)
            node.meta["val"] = _moved(node, was[node], was[source])


def views(node: fx.Node) -> list[fx.Node]:
    """The readers of a value that only show its memory, or a part of what an op yields."""
    return [user for user in node.users if user.op == "call_function" and not does_work(user)]


def _redirect(trace: Trace, copies: dict[fx.Node, fx.Node]) -> None:
    """Let the backward's ops, and the gradients that are returned, read the copies instead of the forward's values."""
    for node, copy in copies.items():
        for user in list(node.users):
            if user.op == "call_function" and phase(user) == "backward":
                user.replace_input_with(node, copy)
    replaced = tuple(copies.get(node, node) if out.kind == "gradient" else node for out, node in trace.output_pairs)
    trace.graph.output_node().args = (replaced,)


# --- taking them back -------------------------------------------------------------------------------------------------


def forget(trace: Trace) -> Trace:
    """A copy of `trace` that recomputes nothing, as it was before: every copy gives way to its original.

    An original that nothing else needed is gone by now; there the copy itself returns to the forward, under its old name.
    """
    new = _forget(trace) if any(recomputes(node) for node in trace.ops) else trace.copy()
    eliminate_dead_code(new.graph)
    return new


def _forget(trace: Trace) -> Trace:
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    originals: dict[str, fx.Node] = {}
    end_of_forward: fx.Node | None = None
    for node in trace.graph.nodes:
        name = recomputes(node)
        if node.op == "output":
            break
        if name in originals:
            new[node] = originals[name]
        elif name is not None:
            place = end_of_forward if recomputes_in(node) == "forward" else None
            with graph.inserting_before(place) if place else nullcontext():
                new[node] = originals[name] = _original(graph, node, name, new)
        else:
            new[node] = originals[node.name] = copy_node(graph, node, new)
        if new[node].op == "call_function" and phase(new[node]) == "backward":
            end_of_forward = end_of_forward or new[node]
    graph.output(tuple(new[node] for node in trace.returned))
    graph.output_node().meta.update(trace.graph.output_node().meta)
    refresh_views(graph)
    return Trace(graph, trace.inputs, trace.outputs, trace.name)


def _original(graph: fx.Graph, copy: fx.Node, name: str, new: dict[fx.Node, fx.Node]) -> fx.Node:
    args, kwargs = fx.node.map_arg((copy.args, copy.kwargs), new.__getitem__)
    node = create_op(graph, copy.target, args, kwargs, name)
    custom = {key: value for key, value in copy.meta["custom"].items() if key not in _MARKS}
    node.meta = {**copy.meta, "phase": recomputes_in(copy), "custom": custom}
    return node


# --- order ------------------------------------------------------------------------------------------------------------


def just_in_time(movable: Set[fx.Node]) -> None:
    """Move every op of `movable` (backward ops) to right before its first reader; all others keep their order.

    What a moved op reads moves along if it is movable too. So values that are recomputed live as short as they can, and
    random ops and other effects, never movable, keep their order. The result depends on the readers' arguments, not on
    where the movable ops were.
    """
    placed: set[fx.Node] = set()
    readers = {user for node in movable for user in node.users if user not in movable}
    for node in sorted(readers):
        for needed in needed_by(node, read_by, movable, placed):
            node.prepend(needed)


def needed_by(node: Op, inputs: Callable[[Op], Iterable[Op]], movable: Collection[Op], placed: set[Op]) -> Iterator[Op]:
    """The movable ops behind `node` that are not yet `placed`, inputs before their readers."""
    stack = [(node, iter(inputs(node)))]
    while stack:
        current, left = stack[-1]
        following = next((a for a in left if a in movable and a not in placed), None)
        if following is not None:
            placed.add(following)
            stack.append((following, iter(inputs(following))))
            continue
        stack.pop()
        if current is not node:
            yield current


# --- dropouts as products ----------------------------------------------------------------------------------------------


Product = tuple[fx.Node, fx.Node, fx.Node]
"""A dropout, its result, and the node after which that stood."""


def expose_products(graph: fx.Graph) -> list[Product]:
    """Edit `graph` in place: the results of the forward's dropouts become products. Undone by `restore_products`."""
    dropouts = [n for n in graph.nodes if is_dropout(n)]
    return [product for node in dropouts if (product := _expose(node)) is not None]


def is_dropout(node: fx.Node) -> bool:
    """Whether the op is a dropout of the forward."""
    return node.target is aten.native_dropout.default and phase(node) == "forward"


def restore_products(products: list[Product]) -> None:
    """Edit the graph in place: the products are results of their dropouts again."""
    for dropout, result, before in products:
        result.target, result.args = operator.getitem, (dropout, 0)
        before.append(result)


def _expose(dropout: fx.Node) -> Product | None:
    parts = {user.args[1]: user for user in dropout.users if phase(user) == "forward"}
    x, p, train = (arguments(dropout)[name] for name in ("input", "p", "train"))
    if train is False or not 0 < p < 1 or parts.keys() != {0, 1}:
        return None
    result, mask = parts[0], parts[1]
    if len({val(n).stride() for n in (x, result, mask)}) > 1:
        return None  # the product would lie in memory in another order
    before = result.prev
    dropout.append(mask)
    result.target, result.args = aten.native_dropout_backward.default, (x, mask, 1 / (1 - p))
    return dropout, result, before
