"""Static memory of a trace: which storages are alive when, and what the forward keeps for the backward.

    storage     the memory that a value and all its views share; memory is counted per storage, never per value
    lifetime    from the op that allocates a storage to the last op that reads any of its aliases
    pinned      inputs live throughout (the caller holds them), returned values from their op to the end

    kind        what a storage is there for, one of `KINDS`: the first that fits

A kernel that writes its result over an operand that dies there (`reused`) needs no memory for it: the result's storage
begins where the operand's has ended. In a backward half the `saved` inputs are the exception: they are handed over, and die
after their last reader. What was received of other processes when a step was recorded is no memory of the program, which
receives it into what the collective returns: it is not counted.
All numbers are bytes that the program needs, not what an allocator takes: no rounding, no workspace, no fragmentation.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import fx

from tracefuse.optimizers.facts import once_per_trace, once_per_value, storage_id, storages, tensors_in
from tracefuse.optimizers.ops import is_of_ranks, once_per_operator, producer, read_by
from tracefuse.optimizers.trace import OutputKind, Trace, nbytes, phase, tensors

Kind = Literal["input", "state", "saved", "gradient", "result", "temporary"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Inputs, parameters and buffers; what an optimizer keeps; what the forward made and the backward reads; gradients and
results that are returned; everything else."""


_Returned = dict[fx.Node, OutputKind]


class Lifetime(NamedTuple):
    """A storage of `nbytes`, called like its first value that is one tensor; alive from op `start` to op `end`, both included,
    counted in `trace.ops`. `aliases` are the names of all its values."""

    name: str
    nbytes: int
    start: int
    end: int
    aliases: tuple[str, ...]
    kind: Kind

    @property
    def is_input(self) -> bool:
        return self.kind in ("input", "state")


class Saved(NamedTuple):
    """A storage that the forward keeps for the backward.

    `name` is the first of its values that is read there, `readers` the backward ops that read any of its values (empty
    if it is only returned as a gradient).
    """

    name: str
    nbytes: int
    readers: tuple[str, ...]


def lifetimes(trace: Trace) -> list[Lifetime]:
    """One per storage, in the order of allocation."""
    ops = trace.ops
    pairs = trace.output_pairs
    returned = {node: out.kind for out, node in pairs if out.kind == "mutation"}  # which a clipped gradient is, too
    returned |= {node: out.kind for out, node in pairs if out.kind != "mutation"}
    handed_over = {entry.name for entry in trace.inputs if entry.kind == "saved"}
    kept = {entry.name for entry in trace.inputs if entry.kind == "state"}
    answers = {entry.name for entry in trace.inputs if entry.kind == "received"}
    groups, last = _extents(trace)
    over = set(map(_memory_of_result, _reused(trace, groups, last)))
    late = {operand for node in ops if phase(node) == "backward" for operand in read_by(node)}
    found = []
    for memory, (start, nodes) in groups.items():
        first = nodes[0]
        if first.name in answers:
            continue
        is_input = first.op == "placeholder"
        is_held = not returned.keys().isdisjoint(nodes) or (is_input and first.name not in handed_over)
        end = len(ops) - 1 if is_held else last.get(memory, start)
        name = next(filter(_yields_one, nodes), first).name
        kind = "state" if is_input and first.name in kept else _kind(nodes, returned, handed_over, late)
        nbytes = storages(first)[memory]
        start += memory in over
        found.append(Lifetime(name, nbytes, start, end, tuple([n.name for n in nodes]), kind))
    return found


_Groups = dict[int, tuple[int, list[fx.Node]]]


@once_per_value
def _yields_one(value: Any) -> bool:
    return len(tensors_in(value)) == 1


def _extents(trace: Trace) -> tuple[_Groups, dict[int, int]]:
    """By each storage the op that allocates it, 0 for those of inputs, with its values; and the last op that makes or reads
    one of them, where there is one."""
    groups: _Groups = {}
    last: dict[int, int] = {}
    place = {node: at for at, node in enumerate(trace.ops)}
    ends = dict(place)  # Of each value the op that reads it last, or makes it.
    for node, at in place.items():
        ends.update(dict.fromkeys(read_by(node), at))
    for node in (*trace.placeholders, *place):
        start, end = place.get(node, 0), ends.get(node)
        for memory in storages(node):
            groups.setdefault(memory, (start, []))[1].append(node)
            if end is not None:
                last[memory] = max(end, last.get(memory, end))
    return groups, last


def reused(trace: Trace) -> dict[fx.Node, fx.Node]:
    """By kernel, the operand that its result is written over: memory that the program itself allocated, that the kernel is the
    last to read, and that nothing reads again, such as another process that it is being sent to."""
    return _reused(trace, *_extents(trace))


def _reused(trace: Trace, groups: _Groups, last: dict[int, int]) -> dict[fx.Node, fx.Node]:
    held = {memory for node in trace.returned for memory in storages(node)}
    ops = trace.ops
    held |= {memory for node in ops if is_of_ranks(node) for one in node.all_input_nodes for memory in storages(one)}

    def is_free(memory: int, kernel: fx.Node, at: int) -> bool:
        is_read_once = sum(memory in storages(one) for one in kernel.all_input_nodes) == 1
        return is_read_once and last[memory] == at and memory not in held and _is_allocated(groups[memory][1][0])

    found = {}
    for at, node in enumerate(ops):
        known = _overwriting(node)
        if known is None:
            continue
        result = _memory_of_result(node)
        for operand in (node.args[position] for position in known.inputs):
            whole = storages(operand) == {(memory := next(iter(storages(operand)))): storages(node)[result]}
            is_wanted = result in held or last[result] > at
            if whole and is_wanted and nbytes(operand) == storages(node)[result] and is_free(memory, node, at):
                found[node] = operand
                break
    return found


def _overwriting(node: fx.Node) -> Any:
    """What a kernel, or an operator of ours, can write its result over; None for any other op."""
    target = node.target
    return _of_operator(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "overwriting", None)


@once_per_operator
def _of_operator(target: torch._ops.OpOverload) -> Any:
    return getattr(target, "overwriting", None)  # which torch looks for in Python, where there is none


def _memory_of_result(node: fx.Node) -> int:
    """The memory of the result that a kernel can write over an operand."""
    return storage_id(tensors(node)[node.target.overwriting.result])


def _is_allocated(node: fx.Node) -> bool:
    """Whether the op that made the first value in some memory allocates it: operators of others may say so and not do it."""
    target = producer(node).target if node.op == "call_function" else None
    if hasattr(target, "overwriting"):  # a kernel, or an operator of ours
        return True
    is_atens = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
    return is_atens and not any(one.alias_info for one in target._schema.returns)


def live_bytes(trace: Trace, known: Iterable[Lifetime] | None = None) -> list[int]:
    """Bytes alive while each op of `trace.ops` runs: its operands and its result included, in that order.

    `known` are the trace's lifetimes, for who has them.
    """
    change = [0] * (len(trace.ops) + 1)
    for life in lifetimes(trace) if known is None else known:
        change[life.start] += life.nbytes
        change[life.end + 1] -= life.nbytes
    return list(accumulate(change))[:-1]


def live_by_kind(trace: Trace, known: Iterable[Lifetime] | None = None) -> dict[Kind, list[int]]:
    """`live_bytes`, parted by what the storages are there for; the kinds that the trace has, in the order of `KINDS`."""
    found = list(lifetimes(trace) if known is None else known)
    parts = {kind: [life for life in found if life.kind == kind] for kind in KINDS}
    return {kind: live_bytes(trace, part) for kind, part in parts.items() if part}


def peak_bytes(trace: Trace) -> int:
    """The most bytes alive at any op; 0 for a trace without ops."""
    return max(live_bytes(trace), default=0)


def saved_values(trace: Trace) -> list[Saved]:
    """What the forward of a joint trace keeps for its backward, one entry per storage, in the forward's order.

    Inputs, parameters and their views are not among them: the caller holds those anyway.
    """
    found = saved_storages(trace).values()
    return [Saved(name, count, tuple(reader.name for reader in readers)) for name, count, readers in found]


known_saved_values = once_per_trace(saved_values)
"""Those of a trace that nobody edits any more."""


def saved_storages(trace: Trace) -> dict[int, tuple[str, int, dict[fx.Node, None]]]:
    """Storage -> (first value in it that the backward reads or returns, bytes, the backward's ops that read it)."""
    theirs = {memory for node in trace.placeholders for memory in storages(node)}
    gradients = {node for out, node in trace.output_pairs if out.kind == "gradient"}
    found: dict[int, tuple[str, int, dict[fx.Node, None]]] = {}
    for node in trace.ops:
        if phase(node) == "backward":
            continue
        # Asked of each reader of a trace: no call in Python.
        readers = [u for u in node.users if u.meta.get("phase") == "backward" and u.op == "call_function"]
        if not (readers or node in gradients):
            continue
        for memory, count in storages(node).items():
            if memory not in theirs:
                found.setdefault(memory, (node.name, count, {}))[2].update(dict.fromkeys(readers))
    return found


def saved_bytes(trace: Trace) -> int:
    """Bytes that the forward of a joint trace keeps for its backward: each storage once, inputs not counted."""
    late = [node for node in trace.ops if phase(node) == "backward"]
    read = {operand for node in late for operand in read_by(node)}
    read.update(node for out, node in trace.output_pairs if out.kind == "gradient")
    kept: dict[int, int] = {}
    for node in read:
        if node.op == "call_function" and phase(node) != "backward":
            kept.update(storages(node))
    theirs = {memory for node in trace.placeholders for memory in storages(node)}
    return sum(count for memory, count in kept.items() if memory not in theirs)


def _kind(nodes: list[fx.Node], returned: _Returned, handed_over: set[str], late: set[fx.Node]) -> Kind:
    """What a storage is there for; `late` are the values that the backward reads."""
    if nodes[0].op == "placeholder":
        return "saved" if nodes[0].name in handed_over else "input"
    returned_as = {returned[node] for node in nodes if node in returned}
    if "saved" in returned_as:
        return "saved"
    if phase(nodes[0]) == "forward" and ("gradient" in returned_as or not late.isdisjoint(nodes)):
        return "saved"
    if "gradient" in returned_as:
        return "gradient"
    return "result" if returned_as else "temporary"
