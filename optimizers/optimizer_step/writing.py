"""The graph with calls of kernels over lists in place of the pieces that they do, level by level.

At each level come the other ops, then the kernels. A kernel's result is written over the input that it is the new value of
where nothing reads the old one afterwards: no other piece of the level, no later op, no view, no output.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch
from torch import fx

from tracefuse.optimizers.costs.cost import bytes_moved
from tracefuse.optimizers.facts import storages
from tracefuse.optimizers.kernels.lists import ListKernel, Piece, list_kernel
from tracefuse.optimizers.ops import is_view, op_name
from tracefuse.optimizers.optimizer_step.calls import SHARED
from tracefuse.optimizers.optimizer_step.elements import refusal
from tracefuse.optimizers.optimizer_step.merging import Group, alike, arranged, call_arguments
from tracefuse.optimizers.optimizer_step.pieces import Plan, held_by_kernels, pieces, plan
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.trace import Input, Trace, copy_node, human_bytes, origin, phase, set_origin, val

Unit = fx.Node | Group


def write(trace: Trace, roles: Mapping[fx.Node, str], left: Mapping[str, str], decide: Decide) -> fx.Graph:
    """A new graph for `trace`, whose kernels name their inputs by `roles`; `left` says why ops on lists stay."""
    returned = set(trace.returned)
    made, groups = _planned(trace.graph, returned)
    units = list(_units(made, groups))
    targets = _Targets(trace, units)
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {n: copy_node(graph, n, {}) for n in trace.placeholders}
    for at, unit in enumerate(units):
        if isinstance(unit, fx.Node):
            new[unit] = copy_node(graph, unit, new)
            continue
        for group in targets.split(unit, at):
            decide(_insert(graph, group, new, roles))
    _tell_left(made, left, decide)
    output = graph.output(tuple(new[n] for n in trace.returned))
    output.meta.update(trace.graph.output_node().meta)
    graph._graph_namespace._used_names |= trace.graph._graph_namespace._used_names
    return graph


def roles_of(trace: Trace) -> dict[fx.Node, str]:
    """What a kernel calls each input: a parameter, a gradient, the optimizer's name for its state."""
    kinds = {i.name: i for i in trace.inputs}
    return {node: _role(kinds[node.name]) for node in trace.placeholders}


def _role(entry: Input) -> str:
    if entry.kind == "state":
        name = entry.source.partition(" of ")[0]
        return name if name.isidentifier() else "state"
    return {"parameter": "param", "gradient": "grad", "hyperparameter": "rate"}.get(entry.kind, "x")


# --- order ------------------------------------------------------------------------------------------------------------


def _planned(graph: fx.Graph, returned: set[fx.Node]) -> tuple[Plan, dict[int, list[Group]]]:
    """The plan, and the groups of its pieces by their level; ops whose group saves no launch are planned as others."""
    held = held_by_kernels(graph)
    while True:
        made = plan(graph, returned, held)
        groups = {level: [Group(one) for one in alike(found)] for level, found in pieces(made, returned).items()}
        left = {n for found in groups.values() for one in found if not _is_worth(one.pieces) for n in one.ops}
        if not left:
            return made, groups
        held = [node for node in held if node not in left]


def _units(made: Plan, groups: Mapping[int, Sequence[Group]]) -> Iterator[Unit]:
    """Other ops and groups of pieces, each after what it reads."""
    others: dict[int, list[fx.Node]] = {}
    for node in made.graph.nodes:
        if node.op == "call_function" and made.is_other(node):
            others.setdefault(made.level[node], []).append(node)
    for level in range(max([0, *others, *groups]) + 1):
        yield from others.get(level, ())
        yield from groups.get(level, ())


def _is_worth(alike_pieces: Sequence[Piece]) -> bool:
    """Whether a kernel saves a launch."""
    ops = len(alike_pieces[0].ops)
    return len(alike_pieces) > 1 if alike_pieces[0].is_scalar else len(alike_pieces) * ops > 1


# --- in place ---------------------------------------------------------------------------------------------------------


class _Targets:
    """Which result of a piece may be written over which input."""

    def __init__(self, trace: Trace, units: Sequence[Unit]) -> None:
        self.runs: dict[fx.Node, list[tuple[int, Piece | None]]] = {}
        for at, unit in enumerate(units):
            for piece in unit.pieces if isinstance(unit, Group) else (None,):
                for node in (unit,) if piece is None else piece.ops:
                    self.runs.setdefault(node, []).append((at, piece))
        inputs = {n.name: n for n in trace.placeholders}
        uses: dict[fx.Node, list[fx.Node | None]] = {}
        for out, node in trace.output_pairs:
            uses.setdefault(node, []).append(inputs.get(out.of) if out.kind == "mutation" else None)
        self.returned = set(uses)
        self.over = {node: found[0] for node, found in uses.items() if len(found) == 1 and found[0] is not None}
        self.lying = Counter(memory for node in trace.placeholders for memory in storages(node))

    def split(self, group: Group, at: int) -> list[Group]:
        """The group in parts whose results are written over the same inputs."""
        parts: dict[Hashable, Group] = {}
        for piece in group.pieces:
            whole, targets = self._of_piece(piece, at)
            key = len(whole.inputs), targets
            known = parts[key].pieces if key in parts else ()
            parts[key] = Group((*known, whole), targets)
        return list(parts.values())

    def _of_piece(self, piece: Piece, at: int) -> tuple[Piece, tuple[int | None, ...]]:
        """The piece, which takes what it overwrites too, and the position of that for each result."""
        over = [self.over.get(result) for result in piece.outputs]
        over = [
            x if x is not None and self._may(piece, r, x, at) else None
            for r, x in zip(piece.outputs, over, strict=True)
        ]
        new = [x for x in over if x is not None and x not in piece.inputs]
        inputs = (*new, *piece.inputs)
        return Piece(piece.ops, inputs, piece.outputs), tuple(None if x is None else inputs.index(x) for x in over)

    def _may(self, piece: Piece, result: fx.Node, over: fx.Node, at: int) -> bool:
        one, other = val(result), val(over)
        is_alike = (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        is_alone = over not in self.returned and all(self.lying[memory] == 1 for memory in storages(over))
        return is_alike and is_alone and all(self._has_read(user, piece, at) for user in over.users)

    def _has_read(self, reader: fx.Node, piece: Piece, at: int) -> bool:
        """Whether a reader of the old value reads it before, or in the very program that then writes the new one there."""
        return not is_view(reader) and all(place < at or own is piece for place, own in self.runs.get(reader, ()))


# --- calls ------------------------------------------------------------------------------------------------------------


def _insert(graph: fx.Graph, group: Group, new: dict[fx.Node, fx.Node], roles: Mapping[fx.Node, str]) -> Decision:
    """The call of the group's kernel, with a `getitem` under the name of each result."""
    over = [None if at is None else [piece.inputs[at] for piece in group.pieces] for at in group.targets]
    moved, shared = arranged(group.pieces)
    in_place = [None if x is None else moved[0].inputs.index(x[0]) for x in over]
    kernel = list_kernel(moved[0], shared, in_place, roles)
    args = fx.node.map_arg(call_arguments(moved, shared), new.__getitem__)
    last = moved[0].ops[-1]
    call = graph.create_node("call_function", kernel, args, {}, "updated")
    columns = list(zip(*(piece.outputs for piece in moved), strict=True))
    call.meta = {"val": tuple([_own_type(n) for n in column] for column in columns), "phase": phase(last)}
    set_origin(call, origin(last))
    for at, column in enumerate(columns):
        one = graph.create_node("call_function", operator.getitem, (call, at))
        one.meta = {"val": val(call)[at], "phase": phase(last)}
        for place, result in enumerate(column):
            part = graph.create_node("call_function", operator.getitem, (one, place), {}, result.name)
            part.meta = {k: v for k, v in result.meta.items() if k != SHARED} | {"val": val(one)[place]}
            part.name = result.name
            new[result] = part
    return _decision(kernel, moved, call)


def _own_type(node: fx.Node) -> torch.Tensor:
    """The fake tensor of a value; one of its own where it shares that with others."""
    tensor = val(node)
    if SHARED not in node.meta:
        return tensor
    with tensor.fake_mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _decision(kernel: ListKernel, pieces: Sequence[Piece], call: fx.Node) -> Decision:
    ops, count = len(kernel.body.ops), len(pieces)
    moved = bytes_moved(call)
    written = sum(at is not None for at in kernel.in_place)
    where = f", {written} of {len(kernel.in_place)} results over what they are the new values of"
    does = f"{ops} op{'s' * (ops != 1)} on each of {count} tensor{'s' * (count != 1)} in one launch"
    return Decision(call.name, "merge", f"{does} of {kernel.name}; it moves {human_bytes(moved)}{where}", moved)


def _tell_left(made: Plan, left: Mapping[str, str], decide: Decide) -> None:
    """Why ops on tensors of the update stay with ATen, once for each reason and operator."""
    told: dict[tuple[str, str], list[str]] = {}
    for node in made.graph.nodes:
        if node.op == "call_function" and made.is_other(node) and isinstance(node.target, torch._ops.OpOverload):
            reason = left.get(node.name) or refusal(node)
            if reason is not None and not is_view(node):
                told.setdefault((op_name(node), reason), []).append(node.name)
    for (op, reason), names in told.items():
        count = f" ({len(names)} of {op})" if len(names) > 1 else ""
        decide(Decision(names[0], "leave", f"{reason}{count}"))
