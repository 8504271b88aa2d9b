"""The order in which a step takes its data: as the program binds it, of several micro-batches one after the other.

for y, x in loader:                y, x, y_1, x_1: as the loop binds them, whichever is read first
    F.mse_loss(model(x), y)…

What no variable holds stands where it is read: what a module is given where the module is called, in the order of its
arguments, whatever its forward reads first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx

from tracefuse.assembly.parts import GIVEN
from tracefuse.optimizers.trace import Trace, origin, phase, val


def prepared(trace: Trace) -> dict[fx.Node, set[fx.Node]]:
    """The ops that prepare data, in order, and the inputs that each starts from: they run outside all modules on nothing but
    data."""
    written = {out.of for out in trace.outputs if out.kind != "result"}
    found: dict[fx.Node, set[fx.Node]] = {}
    for entry, placeholder in trace.input_pairs:
        if entry.kind == "input" and not entry.trainable and entry.name not in written:
            found[placeholder] = {placeholder}
    ops = {}
    for node in trace.ops:
        where = origin(node)
        is_outside = not where.module_type and (phase(node) == "forward" or not where.autograd)  # or of a later round
        if is_outside and all(one in found for one in node.all_input_nodes):
            found[node] = ops[node] = set().union(*(found[one] for one in node.all_input_nodes))
    return ops


def as_read(trace: Trace, data: Collection[fx.Node]) -> list[fx.Node]:
    """`data`, which are inputs of `trace`, by where the program binds it; else by where it is first read, itself or as what is
    prepared of it. What modules are given is in the order of their calls and arguments, and numbers come last, but for those
    that a module is given."""
    ops, passing = trace.ops, prepared(trace)
    when: dict[fx.Node, tuple[int, int]] = dict.fromkeys((*trace.placeholders, *ops), (len(ops), 0))
    given = {node: place for node in when if (place := node.meta.get("custom", {}).get(GIVEN))}
    for at, node in reversed(list(enumerate(ops))):
        for place, read in enumerate(node.all_input_nodes):
            when[read] = min(when[read], when[node] if node in passing else (at, place))
    _stand_where_prepared(given, passing)
    found = sorted(data, key=when.__getitem__)
    in_turn = iter(sorted((node for node in found if node in given), key=given.__getitem__))
    found = [next(in_turn) if node in given else node for node in found]
    found = sorted(found, key=lambda node: _is_number(node) and node not in given)
    return _as_bound(found, {p: entry.bound for entry, p in trace.input_pairs if entry.bound})


def _as_bound(data: Sequence[fx.Node], bound: Mapping[fx.Node, tuple[int, ...]]) -> list[fx.Node]:
    """`data` by where it is `bound`: what a loop binds, and what is bound outside of it, each among themselves; the rest stays
    where it is. A variable that holds data once more has the next micro-batch: these stay in turn."""
    groups: dict[tuple[int, int], list[fx.Node]] = {}
    group_of: dict[fx.Node, tuple[int, int]] = {}
    seen: set[tuple[int, ...]] = set()
    at = 0
    for node in (one for one in data if one in bound):
        if bound[node] in seen:
            at, seen = at + 1, set()
        seen.add(bound[node])
        group_of[node] = at, bound[node][0]
        groups.setdefault(group_of[node], []).append(node)
    in_turn = {group: iter(sorted(nodes, key=bound.__getitem__)) for group, nodes in groups.items()}
    return [next(in_turn[group_of[node]]) if node in group_of else node for node in data]


def _stand_where_prepared(given: dict[fx.Node, tuple[int, int]], passing: dict[fx.Node, set[fx.Node]]) -> None:
    """Add to what modules are given that of which it was prepared. What is given itself and is counted for a number besides,
    as the labels of all micro-batches are before the first one, stands where it is given."""
    own, counted = set(given), set[fx.Node]()
    for node in reversed(passing):
        for read in node.all_input_nodes if node in given else ():
            is_counted = node in counted or (_is_number(node) and not _is_number(read))
            if _is_number(read) > _is_number(node) or (is_counted and read in own):
                continue
            (counted.add if is_counted else counted.discard)(read)
            given[read] = min(given.get(read, given[node]), given[node])


def _is_number(node: fx.Node) -> bool:
    value = val(node)  # a list where an op takes a batch apart
    return isinstance(value, torch.Tensor) and value.dim() == 0
