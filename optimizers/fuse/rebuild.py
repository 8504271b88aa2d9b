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

The order is one that survives merging its units two at a time (`UnitOrder`). Merging `first` and `second` keeps a graph
acyclic if no path leads from one to the other through a third. With a valid order only the units between the two can lie on
such a path, so that the search is as short as the two are near, and so is the repair of the order afterwards:

    before   first  d  x  d'  second         d, d': what `first` leads to in between
    after    x  merged  d  d'

Source of the idea: Pearce and Kelly, "A dynamic topological sort algorithm for directed acyclic graphs", 2007.
"""

from __future__ import annotations

import heapq
import itertools
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import fx

from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.ops import (
    behind_views,
    draws,
    exchanges,
    frozen,
    is_collective,
    is_getitem,
    is_random,
    is_returned,
    is_view,
    once_per_operator,
    read_by,
)
from tracefuse.optimizers.trace import copy_node, create_op, origin, phase, set_origin, tensors, val

Unit = TypeVar("Unit", bound=Hashable)


@dataclass(frozen=True, eq=False)
class Carved:
    """A kernel, the values it takes, and those of the trace that it yields, in the order of its results.

    It yields those that are `shown` as their views, which are one and the same.
    """

    kernel: Kernel
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    shown: Mapping[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)


_Unit = fx.Node | Carved


def rebuild(graph: fx.Graph, carved: Sequence[Carved]) -> fx.Graph:
    """The graph with kernels in place of the ops that they stand for, without views that the backward takes again; names and
    metadata of all other values are kept."""
    provider: dict[fx.Node, _Unit] = {node: one for one in carved for node in one.outputs}
    provider |= {view: one for one in carved for views in one.shown.values() for view in views}
    new_graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            new[node] = copy_node(new_graph, node, new)
    ordered = _ordered(graph, provider)
    shown = {value for one in carved for value in one.shown}
    assert shown.isdisjoint(a for unit in ordered for a in _operands(unit)), (
        "a result that is read as it is would be yielded as a view"
    )
    for unit in ordered:
        if isinstance(unit, Carved):
            _insert(new_graph, unit, new)
        else:
            new[unit] = copy_node(new_graph, unit, new)
    output = new_graph.output(tuple(new[n] for n in graph.output_node().args[0]))  # type: ignore[union-attr]
    output.meta.update(graph.output_node().meta)
    _share_views(new_graph)
    return new_graph


def _ordered(graph: fx.Graph, provider: dict[fx.Node, _Unit]) -> list[_Unit]:
    """The units that the outputs need, and random ops, each after its operands and otherwise in the order of the trace, which
    random ops and collectives keep among themselves."""
    position = {node: at for at, node in enumerate(graph.nodes)}
    drawn, collectives = keeping_order(graph)
    needs: dict[_Unit, set[_Unit]] = {}
    known = {node for node in position if node.op != "call_function"}
    stack: list[_Unit] = [provider.get(n, n) for n in (*read_by(graph.output_node()), *drawn) if n not in known]
    while stack:
        unit = stack.pop()
        if unit not in needs:
            needs[unit] = {provider.get(n, n) for n in _operands(unit)}.difference(known)
            stack += needs[unit]
    for ordered in (drawn, [n for n in collectives if n in needs]):
        for earlier, later in itertools.pairwise(ordered):
            needs[later].add(earlier)
    places = {unit: last_of(unit.outputs if isinstance(unit, Carved) else (unit,), position) for unit in needs}
    return in_order(needs, places.__getitem__)


def keeping_order(graph: fx.Graph) -> tuple[list[fx.Node], list[fx.Node]]:
    """The random ops of a graph, and its collectives: each of them in the order that they keep."""
    found = [n for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload) and _keeps_order(n.target)]
    return list(filter(is_random, found)), list(filter(is_collective, found))


@once_per_operator
def _keeps_order(target: torch._ops.OpOverload) -> bool:
    return draws(target) or exchanges(target)


def last_of(values: Sequence[fx.Node], position: Mapping[fx.Node, int]) -> int:
    """The place of the last of the values that a unit yields."""
    return max(map(position.__getitem__, values)) if len(values) > 1 else position[values[0]]


def _operands(unit: _Unit) -> Iterable[fx.Node]:
    return unit.inputs if isinstance(unit, Carved) else read_by(unit)


def _insert(graph: fx.Graph, one: Carved, new: dict[fx.Node, fx.Node]) -> None:
    """The call of a kernel, under the name of its result, or with a `getitem` under the name of each."""
    args = tuple(new[n] for n in one.inputs)
    if len(one.outputs) == 1:
        (result,) = one.outputs
        node = _yielded(graph, one, result, one.kernel, args, new)
        set_origin(node, replace(origin(result), rng=None))
        return
    call = create_op(graph, one.kernel, args, {}, "results")
    values = tuple(val(one.shown[result][0] if result in one.shown else result) for result in one.outputs)
    call.meta = {"val": values, "phase": phase(one.outputs[0])}
    set_origin(call, replace(origin(one.outputs[-1]), rng=None))
    for at, result in enumerate(one.outputs):
        _yielded(graph, one, result, operator.getitem, (call, at), new)


def _yielded(
    graph: fx.Graph, one: Carved, result: fx.Node, target: Any, args: tuple[Any, ...], new: dict[fx.Node, fx.Node]
) -> fx.Node:
    """What stands for a result: under its name, or under that of the view of it that the program returns."""
    views = one.shown.get(result, ())
    named = next(filter(is_returned, views), result)
    node = create_op(graph, target, args, {}, named.name)
    node.meta.update(result.meta)
    if views:
        node.meta["val"] = val(views[0])
    new |= dict.fromkeys((result, *views), node)
    return node


# --- order ------------------------------------------------------------------------------------------------------------


def in_order(needs: Mapping[Unit, set[Unit]], place: Callable[[Unit], int]) -> list[Unit]:
    """Units in an order in which each stands after those it `needs`: of those that could come next, the one with the least
    `place` does; each has another one. Raises `ValueError` where `needs` has a cycle.

    They come by their places, but for some that must wait for others behind them.
    """
    order: list[Unit] = []
    done: set[Unit] = set()
    missing: dict[Unit, int] = {}
    waiting: dict[Unit, list[Unit]] = {}  # for a unit those that need it, and whose place has come before
    ready: list[tuple[int, Unit]] = []

    def put(unit: Unit) -> None:
        order.append(unit)
        done.add(unit)
        for reader in waiting.pop(unit, ()):
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, (place(reader), reader))

    for unit in sorted(needs, key=place):
        while ready:
            put(heapq.heappop(ready)[1])
        if done.issuperset(needs[unit]):
            put(unit)
            continue
        lacking = needs[unit] - done
        missing[unit] = len(lacking)
        for operand in lacking:
            waiting.setdefault(operand, []).append(unit)
    while ready:
        put(heapq.heappop(ready)[1])
    if len(order) < len(needs):
        remedy = "group ops so that no path leaves a unit and comes back"
        raise ValueError(f"the units need each other in a cycle: {remedy}")
    return order


class UnitOrder(Generic[Unit]):
    """Units `in_order`; `at` is a unit's place, `readers` what needs it."""

    def __init__(self, needs: dict[Unit, set[Unit]], place: Callable[[Unit], int]) -> None:
        self.needs = needs
        self.readers: dict[Unit, set[Unit]] = {unit: set() for unit in needs}
        for unit, operands in needs.items():
            for operand in operands:
                self.readers[operand].add(unit)
        self._line: list[Unit | None] = [*in_order(needs, place)]
        self.at = {unit: at for at, unit in enumerate(self._line) if unit is not None}

    def near(self, unit: Unit, reach: int) -> Iterator[Unit]:
        """The units at most `reach` places before and behind a unit, and itself."""
        at = self.at[unit]
        return (one for one in self._line[max(0, at - reach) : at + reach + 1] if one is not None)

    def between(self, first: Unit, second: Unit) -> set[Unit] | None:
        """What `first` leads to before `second`; None where a path leads through that to `second`."""
        limit, found = self.at[second], set()
        stack = [unit for unit in self.readers[first] if unit != second]
        while stack:
            unit = stack.pop()
            if unit == second:
                return None
            if unit not in found and self.at[unit] < limit:
                found.add(unit)
                stack += self.readers[unit]
        return found

    def merge(self, first: Unit, second: Unit, merged: Unit, below: set[Unit]) -> None:
        """Put `merged` in place of two units, `below` being what `between` found."""
        start, stop = self.at.pop(first), self.at.pop(second) + 1
        rest = [u for u in self._line[start:stop] if u is not None and u not in (first, second)]
        line = [*(u for u in rest if u not in below), merged, *(u for u in rest if u in below)]
        self._line[start:stop] = [*line, *[None] * (stop - start - len(line))]
        self.at |= {unit: at for at, unit in enumerate(line, start)}
        self._relink(first, second, merged)

    def _relink(self, first: Unit, second: Unit, merged: Unit) -> None:
        old = {first, second}
        self.needs[merged] = (self.needs.pop(first) | self.needs.pop(second)) - old
        self.readers[merged] = (self.readers.pop(first) | self.readers.pop(second)) - old
        for operand in self.needs[merged]:
            self.readers[operand] -= old
            self.readers[operand].add(merged)
        for reader in self.readers[merged]:
            self.needs[reader] -= old
            self.needs[reader].add(merged)


# --- views ------------------------------------------------------------------------------------------------------------


def _share_views(graph: fx.Graph) -> None:
    """Let the backward read the forward's views of values that the program makes, instead of taking the same ones again."""
    taken: dict[fx.Node, dict[Hashable, fx.Node]] = {}
    spared: list[fx.Node] = []
    for node in [one for one in graph.nodes if is_view(one) and phase(one) == "backward"]:
        if not _is_handed_over(node):
            continue
        shown = _shown(node)
        if shown not in taken:
            taken[shown] = _taken_forward(shown)
        same = taken[shown].get(_call(node)) if taken[shown] else None
        if same is not None and not is_returned(node):
            node.replace_all_uses_with(same)
            spared.append(node)
    for node in reversed(spared):
        while not node.users and is_view(node):
            unread, node = node, node.args[0]  # type: ignore[assignment]
            graph.erase_node(unread)


def _shown(node: fx.Node) -> fx.Node:
    """What a view is taken of, by one op or as a part of what one yields."""
    operand: fx.Node = node.args[0]  # type: ignore[assignment]
    return operand.args[0] if is_getitem(node) else operand  # type: ignore[return-value]


def _taken_forward(value: fx.Node) -> dict[Hashable, fx.Node]:
    """The views that the forward takes of a value, the first of equal ones."""
    direct = [one for one in value.users if phase(one) == "forward" and is_view(one)]
    views = [*direct, *(part for one in direct for part in one.users if is_getitem(part) and phase(part) == "forward")]
    found: dict[Hashable, fx.Node] = {}
    for view in sorted(filter(_is_handed_over, views)):
        found.setdefault(_call(view), view)
    return found


def _is_handed_over(view: fx.Node) -> bool:
    """Whether it is a view that the forward may keep: one tensor, which a list of them is not."""
    base, shown = behind_views(view), val(view)
    if base.op == "placeholder" or not isinstance(shown, torch.Tensor):
        return False
    return shown.numel() <= sum([one.numel() for one in tensors(base)])


def _call(node: fx.Node) -> Hashable:
    """What a view is of what: a key that is the same for the same view. A part is one of a call, of which there may be two."""
    operand, *others = node.args
    shown = _call(operand) if is_getitem(node) and is_view(operand) else operand  # type: ignore[arg-type]
    return id(node.target), shown, frozen(others), frozen(node.kwargs) if node.kwargs else ()
