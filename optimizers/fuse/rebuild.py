"""The graph with kernels in place of the ops that they stand for, everything defined before its use.

Then the backward reads the forward's own view of a value where it takes the same one again:

    forward                                   forward
    h2 = aten.view.default(h, [8, 64])        h2 = aten.view.default(h, [8, 64])        saved
    backward                                  backward
    again = aten.view.default(h, [8, 64])
    dw = aten.mm.default(dy, again)           dw = aten.mm.default(dy, h2)

A view moves no bytes and holds the memory that its base holds, but the host takes a microsecond and more for each, which a
step of small kernels waits for. `remat` takes views again, since a kernel that reads one reads its base in place. Which views
no kernel holds is known here. Views of inputs stay: autograd keeps the input, and an update may write to it. So do views of
more elements than their base has, as which hooks on saved tensors would store them.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from tracefuse.optimizers.fuse.order import UnitOrder
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.ops import (
    behind_views,
    frozen,
    is_collective,
    is_getitem,
    is_random,
    is_returned,
    is_view,
    read_by,
)
from tracefuse.optimizers.trace import copy_node, create_op, origin, phase, set_origin, tensors, val


@dataclass(frozen=True, eq=False)
class Carved:
    """A kernel, the values it takes, and those of the trace that it yields, in the order of its results."""

    kernel: Kernel
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


_Unit = fx.Node | Carved


def rebuild(graph: fx.Graph, carved: Sequence[Carved]) -> fx.Graph:
    """The graph with kernels in place of the ops that they stand for, without views that the backward takes again; names and
    metadata of all other values are kept."""
    provider: dict[fx.Node, _Unit] = {node: one for one in carved for node in one.outputs}
    new_graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            new[node] = copy_node(new_graph, node, new)
    for unit in _ordered(graph, provider).at:
        if isinstance(unit, Carved):
            _insert(new_graph, unit, new)
        else:
            new[unit] = copy_node(new_graph, unit, new)
    output = new_graph.output(tuple(new[n] for n in graph.output_node().args[0]))  # type: ignore[union-attr]
    output.meta.update(graph.output_node().meta)
    _share_views(new_graph)
    return new_graph


def _ordered(graph: fx.Graph, provider: dict[fx.Node, _Unit]) -> UnitOrder[_Unit]:
    """The units that the outputs need, and random ops, each after its operands and otherwise in the order of the trace, which
    random ops and collectives keep among themselves."""
    position = {node: at for at, node in enumerate(graph.nodes)}
    draws = [n for n in graph.nodes if is_random(n) and not is_getitem(n)]
    roots = [*graph.output_node().all_input_nodes, *draws]
    needs: dict[_Unit, set[_Unit]] = {}
    stack = [provider.get(n, n) for n in roots]
    while stack:
        unit = stack.pop()
        if unit not in needs and _is_op(unit):
            operands = unit.inputs if isinstance(unit, Carved) else read_by(unit)
            needs[unit] = {u for n in operands if _is_op(u := provider.get(n, n))}
            stack += needs[unit]
    for ordered in (draws, [n for n in graph.nodes if is_collective(n) and n in needs]):
        for earlier, later in itertools.pairwise(ordered):
            needs[later].add(earlier)
    places = {unit: last_of(unit.outputs if isinstance(unit, Carved) else (unit,), position) for unit in needs}
    return UnitOrder(needs, places.__getitem__)


def last_of(values: Sequence[fx.Node], position: Mapping[fx.Node, int]) -> int:
    """The place of the last of the values that a unit yields."""
    return max(map(position.__getitem__, values)) if len(values) > 1 else position[values[0]]


def _is_op(unit: _Unit) -> bool:
    return isinstance(unit, Carved) or unit.op == "call_function"


def _insert(graph: fx.Graph, one: Carved, new: dict[fx.Node, fx.Node]) -> None:
    """The call of a kernel, under the name of its result, or with a `getitem` under the name of each."""
    args = tuple(new[n] for n in one.inputs)
    if len(one.outputs) == 1:
        (result,) = one.outputs
        node = new[result] = create_op(graph, one.kernel, args, {}, result.name)
        node.meta.update(result.meta)
        set_origin(node, replace(origin(result), rng=None))
        return
    call = create_op(graph, one.kernel, args, {}, "results")
    call.meta = {"val": tuple(map(val, one.outputs)), "phase": phase(one.outputs[0])}
    set_origin(call, replace(origin(one.outputs[-1]), rng=None))
    for at, result in enumerate(one.outputs):
        new[result] = create_op(graph, operator.getitem, (call, at), {}, result.name)
        new[result].meta.update(result.meta)


# --- views ------------------------------------------------------------------------------------------------------------


def _share_views(graph: fx.Graph) -> None:
    """Let the backward read the forward's views of values that the program makes, instead of taking the same ones again."""
    taken: dict[fx.Node, dict[Hashable, fx.Node]] = {}
    for node in [one for one in graph.nodes if phase(one) == "backward" and _is_handed_over(one)]:
        shown = _shown(node)
        if shown not in taken:
            taken[shown] = _taken_forward(shown)
        if not is_returned(node) and (same := taken[shown].get(_call(node))):
            node.replace_all_uses_with(same)
    for node in reversed(graph.nodes):
        if not node.users and is_view(node):
            graph.erase_node(node)


def _shown(node: fx.Node) -> fx.Node:
    """What a view is taken of, by one op or as a part of what one yields."""
    operand: fx.Node = node.args[0]  # type: ignore[assignment]
    return operand.args[0] if is_getitem(node) else operand  # type: ignore[return-value]


def _taken_forward(value: fx.Node) -> dict[Hashable, fx.Node]:
    """The views that the forward takes of a value, the first of equal ones."""
    direct = [one for one in value.users if phase(one) == "forward"]
    views = [*direct, *(part for one in direct for part in one.users if is_getitem(part) and phase(part) == "forward")]
    found: dict[Hashable, fx.Node] = {}
    for view in sorted(filter(_is_handed_over, views)):
        found.setdefault(_call(view), view)
    return found


def _is_handed_over(node: fx.Node) -> bool:
    """Whether the node is a view that the forward may keep: one tensor, which a list of them is not."""
    if (
        not is_view(node)
        or (base := behind_views(node)).op == "placeholder"
        or phase(node) not in ("forward", "backward")
    ):
        return False
    shown, whole = val(node), tensors(base)
    return isinstance(shown, torch.Tensor) and shown.numel() <= sum(one.numel() for one in whole)


def _call(node: fx.Node) -> Hashable:
    """What a view is of what: a key that is the same for the same view. A part is one of a call, of which there may be two."""
    operand, *others = node.args
    shown = _call(operand) if is_getitem(node) and is_view(operand) else operand  # type: ignore[arg-type]
    return id(node.target), shown, frozen(others), frozen(node.kwargs) if node.kwargs else ()
