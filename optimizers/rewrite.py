"""Replacing one value of a trace by another, without breaking what the rest of the program relies on.

An equal value may still lie elsewhere: in other memory, in another order. What that touches is decided here, once, for all
passes that rewrite:

    outputs     two outputs never come to share memory, no output becomes a view of an input, none changes its strides
    views       every op behind the value is re-typed with the new strides; an op that cannot take them refuses the rewrite
    randomness  a random op fills its result in the order of its strides, so its operands keep theirs
    phases      a forward op never reads a backward value, and the backward reads no forward value that would have to be saved
                only because of the rewrite
    mutation    the backward comes to read no input that the forward overwrites: by then it holds the new value

`replace_value` does it or says why not, in a sentence, and then nothing has changed. What is overwritten it knows of a trace
that `mark_overwritten` has seen.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.facts import devices, storages, stored_bytes
from tracefuse.optimizers.fakes.answers import yields
from tracefuse.optimizers.ops import behind_views, is_getitem, is_named, is_random, is_returned, is_view, reached
from tracefuse.optimizers.trace import (
    Trace,
    begin_edit,
    call,
    fake_mode,
    human_bytes,
    is_read_late,
    phase,
    tensor_type,
    val,
)

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]


def layout(tensor: torch.Tensor) -> Layout:
    """What a consumer can tell apart but the numbers and the address: shape, strides, dtype, device."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def layouts(value: Any) -> Any:
    """The layout of a tensor; a tuple of layouts for a tuple of tensors (None stays None)."""
    if isinstance(value, (tuple, list)):
        return tuple(layouts(v) for v in value)
    return layout(value) if isinstance(value, torch.Tensor) else value


def aliases(node: fx.Node) -> set[fx.Node]:
    """The values that lie in the node's memory, itself among them: what it is a view of, and the views of that."""
    return views_of(behind_views(node))


def views_of(node: fx.Node) -> set[fx.Node]:
    """The node and the views of it, of those, and so on."""
    return set(reached([node], lambda one: [u for u in one.users if u.op == "call_function" and _moves(u)]))


def is_newly_saved(value: fx.Node) -> bool:
    """Whether a backward op that starts to read `value` makes the forward keep memory that it does not keep yet.

    Inputs that the forward does not overwrite are kept anyway, and so are values that share memory with what the backward
    reads already.
    """
    if phase(value) == "backward":
        return False
    if behind_views(value).op == "placeholder" and not is_overwritten(value):
        return False
    return not any(is_read_late(n) for n in aliases(value) if phase(n) == "forward")


def mark_overwritten(trace: Trace) -> None:
    """Note on every input (`meta["overwritten"]`) whether the forward writes a new value to its memory when it ends.

    For passes, before the first rewrite: rewrites see nodes, and only the signature knows. It is no edit, as what is noted
    follows from the trace.
    """
    named = {out.of for out, value in trace.output_pairs if out.kind == "mutation" and phase(value) == "forward"}
    inputs = trace.placeholders
    memory = {m for n in inputs if n.name in named for m in storages(n)}
    for node in inputs:
        node.meta["overwritten"] = not memory.isdisjoint(storages(node))


def is_overwritten(node: fx.Node) -> bool:
    """Whether the value lies in the memory of an input that the forward overwrites, as `mark_overwritten` noted."""
    return bool(behind_views(node).meta.get("overwritten"))


def evaluate(graph: fx.Graph, target: Callable[..., Any], args: Any, kwargs: Any, known: dict[fx.Node, Any]) -> Any:
    """What `target` yields on fake tensors; `known` overrides the values of nodes. Raises what the operator raises."""
    real_args, real_kwargs = fx.node.map_arg((args, kwargs), lambda n: known[n] if n in known else val(n))
    return yields(fake_mode(graph), target, real_args, real_kwargs)


# --- replacing --------------------------------------------------------------------------------------------------------


def replace_value(old: fx.Node, new: fx.Node, may_keep: int = 0) -> str | None:
    """Let everything that reads `old` read `new`. Returns None when done, else the reason, with nothing changed.

    The forward may keep `may_keep` more bytes. `old` stays in the graph, unread: dead code elimination takes it away.
    """
    reason = _type_conflict(old, new) or _phase_conflict(old, new, may_keep)
    if reason := reason or _overwrite_conflict(old, new) or _alias_conflict(old, new):
        return reason
    retyped, reason = _retype(old, new)
    if reason:
        return reason
    begin_edit(old.graph)
    _redirect(old, new)
    for node, value in retyped.items():
        node.meta["val"] = value
    return None


_RETURNED = "returned"


@contextmanager
def returned_later(graph: fx.Graph) -> Iterator[None]:
    """Inside, a value that is returned is replaced in the output's users only, and in its arguments when all is done: torch
    goes through all of them each time, which are as many as the program has parameters.

    Private: `Node._input_nodes`, seen on torch 2.11, 2.13 and 2.15.
    """
    output = graph.output_node()
    originals = output.meta[_RETURNED] = {node: [node] for node in output.all_input_nodes}
    try:
        yield
    finally:
        del output.meta[_RETURNED]
        now = {original: node for node, found in originals.items() for original in found if original is not node}
        if now:
            output.args = fx.node.map_arg(output.args, lambda node: now.get(node, node))


def _redirect(old: fx.Node, new: fx.Node) -> None:
    """Let everything that reads `old`, but `new`, read `new`."""
    output = old.graph.output_node()
    originals = output.meta.get(_RETURNED)
    if originals is None or output not in old.users:
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        return
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new and user is not output)
    del old.users[output], output._input_nodes[old]
    new.users[output] = output._input_nodes[new] = None
    originals.setdefault(new, []).extend(originals.pop(old))


def replace_by(old: fx.Node, build: Callable[[], fx.Node], may_keep: int = 0) -> str | None:
    """Replace `old` by what `build` inserts before it. Returns None when done, else the reason, with nothing inserted.

    An operator that cannot take its operands, such as a view of strides that have no such view, is a reason too.
    """
    before, graph = old.prev, old.graph
    begin_edit(graph)
    try:
        with graph.inserting_before(old):
            new = build()
        reason = _late_reader(old, before) or replace_value(old, new, may_keep)
    except (RuntimeError, ValueError) as error:  # a view that strides do not allow is the second on fake tensors (2.13)
        reason = str(error).splitlines()[0]
    while reason is not None and old.prev is not before:
        graph.erase_node(old.prev)
    return reason


def replace_under_name(old: fx.Node, build: Callable[[], fx.Node], may_keep: int = 0) -> str | None:
    """`replace_by`; what is built takes the name of a value that is returned or has one of its own: it is the user's.

    Until dead code elimination takes `old` away, both have it.
    """
    is_the_users, before = is_named(old) or any(user.op == "output" for user in old.users), old.prev
    new: list[fx.Node] = []

    def remembered() -> fx.Node:
        new.append(build())
        return new[0]

    reason = replace_by(old, remembered, may_keep)
    if reason is None and is_the_users and before < new[0]:  # `build` may find a value that has a name already
        new[0].name = old.name
    return reason


def replace_by_call(old: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> str | None:
    """`replace_by` with one new op."""
    return replace_by(old, lambda: call(old, target, *args, **kwargs))


def _type_conflict(old: fx.Node, new: fx.Node) -> str | None:
    if not _are_typed_alike(val(old), val(new)):
        return f"its type would change from {tensor_type(val(old))} to {tensor_type(val(new))}"
    return f"{new.name} lies on another device" if devices(old) != devices(new) else None


def _are_typed_alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape
    return tensor_type(one) == tensor_type(other)


def _phase_conflict(old: fx.Node, new: fx.Node, may_keep: int) -> str | None:
    if phase(new) == "backward":
        is_early = any(phase(user) == "forward" for user in old.users if user.op == "call_function")
        return f"the forward would read the backward value {new.name}" if is_early else None
    if not any(map(is_read_late, views_of(old))) or not is_newly_saved(new):
        return None
    freed, kept = stored_bytes(old) if phase(old) == "forward" else 0, stored_bytes(new)
    if kept <= freed + may_keep:
        return None
    return f"{new.name} would have to be saved for the backward, {human_bytes(kept)}"


def _overwrite_conflict(old: fx.Node, new: fx.Node) -> str | None:
    if not is_overwritten(new) or behind_views(new) is behind_views(old) or not any(map(is_read_late, views_of(old))):
        return None
    return _overwritten(new)


def _late_reader(old: fx.Node, before: fx.Node) -> str | None:
    """Why the ops between `before` and `old`, inserted to replace it, may not read what they read; None if they may."""
    node = before.next
    while node is not old:
        for operand in node.all_input_nodes if phase(node) == "backward" else ():
            if is_overwritten(operand) and behind_views(operand) is not behind_views(old):
                return _overwritten(operand)
        node = node.next
    return None


def _overwritten(value: fx.Node) -> str:
    return f"the forward overwrites {behind_views(value).name} before the backward would read it"


def _alias_conflict(old: fx.Node, new: fx.Node) -> str | None:
    before, after = storages(old).keys(), storages(new).keys()
    if before == after:
        return None
    if not any(map(is_returned, _sharing(old, before))):
        return None
    returned = old.graph.output_node().all_input_nodes
    moved = [n for n in returned if storages(n).keys() & before]
    for node in [n for n in old.graph.nodes if n.op == "placeholder"]:
        if storages(node).keys() & after:
            return f"output {moved[0].name} would share memory with input {node.name}"
    for node in returned:
        if node not in moved and storages(node).keys() & after:
            return f"outputs {moved[0].name} and {node.name} would share memory"
    return None


def _sharing(node: fx.Node, memory: Set[int]) -> Iterable[fx.Node]:
    """The values that lie in the `memory` of `node`: what lies there was made of what lies there, but for inputs."""

    def near(one: fx.Node) -> Iterator[fx.Node]:
        return (n for n in (*one.all_input_nodes, *one.users) if n.op != "output" and storages(n).keys() & memory)

    found = reached([node], near)
    if not any(one.op == "placeholder" for one in found):
        return found
    inputs = (n for n in node.graph.nodes if n.op == "placeholder" and storages(n).keys() & memory)
    return reached([node, *inputs], near)


def _retype(old: fx.Node, new: fx.Node) -> tuple[dict[fx.Node, Any], str | None]:
    """The values behind `old` whose strides or memory change when it becomes `new`, or the reason why that cannot be."""
    if layouts(val(old)) == layouts(val(new)) and storages(old) == storages(new):
        return {}, None
    known: dict[fx.Node, Any] = {old: val(new)}
    if reason := _restride_conflict(old, known):
        return {}, reason
    waiting = _Waiting(old, new)
    while (node := waiting.first()) is not None:
        restrided = [one for one in node.all_input_nodes if one in known and layouts(known[one]) != layouts(val(one))]
        if not (_moves(node) or restrided):
            continue  # it yields what it yielded, from other memory
        try:
            value = evaluate(old.graph, node.target, node.args, node.kwargs, known)  # type: ignore[arg-type]
            before = evaluate(old.graph, node.target, node.args, node.kwargs, {}) if restrided else None
        except (RuntimeError, ValueError) as error:
            return {}, f"{node.name} cannot take other strides: {str(error).splitlines()[0]}"
        if restrided and layouts(before) != layouts(val(node)):
            return {}, f"the strides of {node.name} are not those that torch's fake tensors foretell"
        if _moves(node) or layouts(value) != layouts(val(node)):
            known[node] = value
            waiting.add(node.users)
        if reason := _restride_conflict(node, known):
            return {}, reason
    del known[old]
    return known, None


class _Waiting:
    """The ops that read a value whose type changes, in the order of the graph: the first of them next."""

    def __init__(self, old: fx.Node, new: fx.Node) -> None:
        self._seen, self._heap = {new}, list[fx.Node]()
        self.add(old.users)

    def add(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            if node.op == "call_function" and node not in self._seen:
                self._seen.add(node)
                heapq.heappush(self._heap, node)

    def first(self) -> fx.Node | None:
        return heapq.heappop(self._heap) if self._heap else None


def _moves(node: fx.Node) -> bool:
    """Whether the node's memory is its operand's, so that it moves with it."""
    return is_getitem(node) or is_view(node)


def refresh_views(graph: fx.Graph, nodes: Iterable[fx.Node] | None = None) -> None:
    """Type anew, in place, the views, and the items of several results, whose operand came to lie in other memory, so that
    `storages` tells aliases again: all of the graph, or of `nodes`, which are operands before their readers."""
    for node in graph.nodes if nodes is None else nodes:
        if node.op == "call_function" and _moves(node) and not storages(node).keys() <= storages(node.args[0]).keys():
            node.meta["val"] = evaluate(graph, node.target, node.args, node.kwargs, {})


def _restride_conflict(node: fx.Node, known: dict[fx.Node, Any]) -> str | None:
    if node not in known or layouts(known[node]) == layouts(val(node)):
        return None
    if is_returned(node):
        return f"output {node.name} would change its strides"
    for user in node.users:
        if is_random(user):
            return f"the random op {user.name} would fill other strides and so draw other numbers"
    return None
