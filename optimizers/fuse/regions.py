"""Regions: sets of ops that may become one Triton kernel each.

A region is grown in one walk over the trace, in linear time. Every op has a depth, the number of region borders above it:

    depth(op) = max over operands a of  depth(a) + (0 if op may join a's region else 1)

and a region is a set of joined ops of one depth. Since a border always adds to the depth, no path can leave a region and
come back: regions are convex and the trace stays acyclic, whatever decides "may join". Random ops run in their order, so
that one is no less deep than those before it.

An op may join where phase and device agree, and where its loops do: all reductions of a kernel are of the same elements.
Afterwards an op that is cheaper to compute where it is read sinks into the region of its readers, and so does a copy that was
made for them (`between`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import fx

from tracefuse.optimizers.facts import devices, once_per_trace
from tracefuse.optimizers.formulas.windows import WINDOW_OPS
from tracefuse.optimizers.fuse.remaking import is_for_reader, reads_of, sources
from tracefuse.optimizers.kernels.fusible import fusible_ops, is_remade, is_split
from tracefuse.optimizers.lowering.composites import REDUCTIONS
from tracefuse.optimizers.lowering.geometry import MAX_SUMMED_ROW, SUMMED, columns_of, rows_of
from tracefuse.optimizers.lowering.random_ops import DRAW, MASK, is_draw, is_mask
from tracefuse.optimizers.ops import (
    draws,
    exchanges,
    is_collective,
    is_getitem,
    is_random,
    is_view,
    once_per_operator,
    producer,
    read_by,
)
from tracefuse.optimizers.trace import Trace, nbytes, phase, tensors

Sizes = tuple[int, int, int]
Loops = tuple[Sizes | None, Sizes | None]
Place = tuple[str, torch.device | None]
NO_LOOPS: Loops = (None, None)

TABLE_SHARE = 16
"""What an op reads beside its large operand, such as a number for each channel, weighs nothing up to 1 / TABLE_SHARE of it."""
TABLE_NBYTES = 1 << 20
"""A table for results that large is made where it is read: what it is made of is read sooner than a kernel is launched."""
SINKING_TOGETHER = 16
"""At most so many ops are looked at as one when they might be cheaper where their result is read."""


@dataclass(eq=False)
class Region:
    """Ops being joined. `rows` and `columns` are the sizes (outer, rows, columns) of what its reductions read, where it has
    any; `below` are the ops after a reduction of rows, `after` those after a sum down columns."""

    nodes: dict[fx.Node, None]
    phase: str
    device: torch.device | None
    rows: Sizes | None = None
    columns: Sizes | None = None
    below: set[fx.Node] = field(default_factory=set)
    after: set[fx.Node] = field(default_factory=set)


def form_regions(graph: fx.Graph, fusible: Set[fx.Node]) -> list[set[fx.Node]]:
    """The regions of a trace's graph over its `fusible` ops, in no particular order, views at their borders included."""
    depth: dict[fx.Node, int] = {}
    below: dict[fx.Node, int] = {}  # The depth of what reads a value in another region.
    region_of: dict[fx.Node, Region] = {}
    drawn = started = 0
    for node in graph.nodes:
        operands, is_fusible, deepest = read_by(node), node in fusible, 0
        links: Sequence[fx.Node] = ()
        if is_fusible:
            place = phase(node), _device(node)
            links = _links(node, place, operands, region_of)
        for operand in operands:
            above = depth[operand] if operand in links else below[operand]
            if above > deepest:
                deepest = above
        is_plain = _is_plain(node)
        if not is_plain and is_random(node):
            drawn = deepest = max(deepest, drawn)
        if not is_plain and is_collective(node):
            started = deepest = max(deepest, started)
        if is_fusible:
            near = [region_of[a] for a in links if depth[a] == deepest]
            near = list(dict.fromkeys(near)) if len(near) > 1 else near
            deepest += not _join(node, place, operands, near, region_of)
        depth[node] = deepest
        below[node] = deepest + (is_plain or _is_border(node))
    _sink(graph, region_of)
    return [set(r.nodes) for r in dict.fromkeys(region_of.values())]


@once_per_trace
def regions_of(trace: Trace) -> list[set[fx.Node]]:
    """The regions over all ops that kernels can hold, of a trace that nobody edits any more."""
    return form_regions(trace.graph, fusible_ops(trace))


def _is_plain(node: fx.Node) -> bool:
    """Whether the node is an op that depends on no others but its operands, as nearly all do: this is asked of each."""
    return isinstance(node.target, torch._ops.OpOverload) and _runs_anywhere(node.target)


@once_per_operator
def _runs_anywhere(target: torch._ops.OpOverload) -> bool:
    return not (draws(target) or exchanges(target) or target in (MASK, DRAW))


def _is_border(node: fx.Node) -> bool:
    """Whether a reader of the value, which no region holds, lies below a border. What reads nothing lies below none."""
    return node.op == "call_function" and not is_mask(node) and not is_draw(producer(node))


def _links(node: fx.Node, place: Place, operands: Iterable[fx.Node], region_of: dict[fx.Node, Region]) -> list[fx.Node]:
    """The operands whose region `node` may join: a copy for a reader only that of another such copy."""
    found = [a for a in operands if a in region_of and _may_join(place, region_of[a])]
    return [a for a in found if is_for_reader(a)] if found and is_for_reader(node) else found


def _may_join(place: Place, region: Region) -> bool:
    """Whether an op of this phase and device may be in a region."""
    return region.phase == place[0] and (region.device is None or region.device == place[1])


def _join(
    node: fx.Node, place: Place, operands: Iterable[fx.Node], near: list[Region], region_of: dict[fx.Node, Region]
) -> bool:
    """Put `node` and the regions `near` together; where their loops disagree, begin a region and return False."""
    loops, reducing = loops_of(node), [r for r in near if r.rows or r.columns]
    has_loops = bool(reducing) or loops != NO_LOOPS
    is_joined = not has_loops or _agree(node, operands, loops, near, reducing)
    home = _united(near, region_of) if is_joined and near else Region({}, *place)
    if has_loops:
        _put(node, operands, loops, home)
    else:
        home.nodes[node] = None
    region_of[node] = home
    return is_joined


def _united(near: list[Region], region_of: dict[fx.Node, Region]) -> Region:
    """The largest of the regions, with all that the others hold."""
    if len(near) == 1:
        return near[0]
    largest = max(near, key=lambda r: len(r.nodes))
    for other in near:
        if other is not largest:
            largest.nodes |= other.nodes
            largest.below |= other.below
            largest.after |= other.after
            largest.rows = largest.rows or other.rows
            largest.columns = largest.columns or other.columns
            region_of.update(dict.fromkeys(other.nodes, largest))
    return largest


def _put(node: fx.Node, operands: Iterable[fx.Node], loops: Loops, home: Region) -> None:
    rows, columns = loops
    home.nodes[node] = None
    if rows or columns:
        home.rows, home.columns = home.rows or rows, home.columns or columns
        (home.below if rows else home.after).add(node)
    for follows in (home.below, home.after):
        if follows and node not in home.after and not follows.isdisjoint(operands):
            follows.add(node)


def loops_of(node: fx.Node) -> Loops:
    """The sizes of what an op reduces by rows, and of what it sums down columns."""
    target = node.target
    if node.op != "call_function" or (isinstance(target, torch._ops.OpOverload) and not _reduces(target)):
        return NO_LOOPS
    columns = columns_of(node)
    if columns is not None or node.target not in REDUCTIONS:
        return None, columns.sizes if columns else None
    rows = rows_of(node)
    return rows.sizes if rows else None, None


@once_per_operator
def _reduces(target: torch._ops.OpOverload) -> bool:
    return target in SUMMED or target in REDUCTIONS


def agree(rows: set[Sizes], columns: set[Sizes]) -> bool:
    """Whether one kernel can have these reductions: of the same elements, in rows that a program holds if it needs both."""
    if not (rows and columns):
        return len(rows) <= 1 and len(columns) <= 1
    return len(rows | columns) == 1 and next(iter(rows))[2] <= MAX_SUMMED_ROW


def _agree(
    node: fx.Node, operands: Iterable[fx.Node], loops: Loops, near: list[Region], reducing: list[Region]
) -> bool:
    """Whether the loops of an op and of those regions `near` that are `reducing` can be one kernel's; some have any."""
    every = loops, *[(r.rows, r.columns) for r in reducing]
    rows, columns = {rows for rows, _ in every if rows}, {columns for _, columns in every if columns}
    if not agree(rows, columns):
        return False
    value = node.meta["val"]
    is_after = any(not r.after.isdisjoint(operands) for r in near)
    if not isinstance(value, torch.Tensor) and node.target in WINDOW_OPS:
        value = value[0]  # A pool and its parts are in one region: it joins where they can.
    if not isinstance(value, torch.Tensor):
        return not is_after
    if is_after and not is_getitem(node):
        ((outer, _, n_cols),) = columns
        return loops == NO_LOOPS and value.numel() == outer * n_cols
    own_rows, own_columns = loops
    follows = any(not r.below.isdisjoint(operands) for r in near)
    if not rows or not (follows or own_rows):
        return True
    ((_, n_rows, n_cols),) = rows
    return own_columns is not None or value.numel() in (n_rows * n_cols, n_rows)


def _device(node: fx.Node) -> torch.device | None:
    found = devices(node)
    return found[0] if found else None


def _sink(graph: fx.Graph, region_of: dict[fx.Node, Region]) -> None:
    """Move an op whose readers are all in one other region there, with what only it needs, if that reads no more bytes."""
    for node in reversed(graph.nodes):
        region = region_of.get(node)
        if region is None or (target := _region_of_readers(node, region, region_of)) is None:
            continue
        if _is_anchored(node, region):
            continue
        if not _may_join((phase(node), _device(node)), target):
            continue
        if is_for_reader(node):
            _move({node}, target, region_of)
            continue
        moved = next((m for m in ({node}, _own_operands(node, region_of)) if _is_no_dearer(m, node, target)), ())
        _move(moved, target, region_of)


def _region_of_readers(node: fx.Node, own: Region, region_of: dict[fx.Node, Region]) -> Region | None:
    """The one region, not its `own`, that all readers of a value are in."""
    found = None
    for user in node.users:
        home = region_of.get(user)
        if home is None or home is own or (found is not None and home is not found):
            return None
        found = home
    return found


def _move(nodes: Iterable[fx.Node], target: Region, region_of: dict[fx.Node, Region]) -> None:
    for node in nodes:
        del region_of[node].nodes[node]
        target.nodes[node] = None
        region_of[node] = target


def _own_operands(node: fx.Node, region_of: dict[fx.Node, Region]) -> set[fx.Node]:
    """`node` with the ops of its region, not many, that nothing else needs."""
    found, home = {node}, region_of[node]
    waiting = list(node.all_input_nodes)
    while waiting and len(found) < SINKING_TOGETHER:
        one = waiting.pop()
        is_at_home = region_of.get(one) is home and one not in found
        if is_at_home and not _is_anchored(one, home) and found.issuperset(one.users):
            found.add(one)
            waiting += one.all_input_nodes
    return found


def _is_no_dearer(moved: set[fx.Node], node: fx.Node, target: Region) -> bool:
    """Whether a region that computes `node` by the ops `moved` reads no more bytes for that than `node` has."""
    if all(map(is_view, moved)):
        return True
    read = reads_of(a for a in sources(moved) if not _is_at_hand(a, target))
    more, least = sum(read.values()) - nbytes(node), min(TABLE_NBYTES, max(map(nbytes, node.users)))
    return more * TABLE_SHARE <= max(nbytes(node), least)


def _is_at_hand(value: fx.Node, region: Region) -> bool:
    """Whether a region reads `value` at no cost: it does already, or the value is made again anyway, or one element."""
    is_read = any(user in region.nodes for user in value.users)
    return is_read or is_remade(value) or sum(t.numel() for t in tensors(value)) == 1


def _is_anchored(node: fx.Node, region: Region) -> bool:
    """Whether an op must stay with what it reads: row results, and the parts of a multi-output op."""
    return node in region.below or node in region.after or is_getitem(node) or is_split(node)
