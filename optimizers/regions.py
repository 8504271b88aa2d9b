"""Regions: sets of ops that may become one Triton kernel each.

A region is grown in one walk over the trace, in linear time. Every op has a depth, the number of region borders above it:

    depth(op) = max over operands a of  depth(a) + (0 if op may join a's region else 1)

and a region is a set of joined ops of one depth. Since a border always adds to the depth, no path can leave a region and
come back: regions are convex and the trace stays acyclic, whatever decides "may join". Random ops run in their order, so
that one is no less deep than those before it.

An op may join where phase and device agree and where the rows that are reduced agree. Afterwards an op that is cheaper to
compute where it is read sinks into the region of its readers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from tracefuse.optimizers.fusible import is_remade, row_of
from tracefuse.optimizers.random_ops import is_draw, is_mask
from tracefuse.optimizers.trace import is_getitem, is_random, nbytes, phase, producer, tensors
from tracefuse.optimizers.views import SPLITS

Row = tuple[int, int]


@dataclass(eq=False)
class Region:
    """Ops being joined. `row` is (elements, elements per row) once one of them reduces; `below` are those after that."""

    nodes: dict[fx.Node, None]
    phase: str
    device: torch.device | None
    row: Row | None = None
    below: set[fx.Node] = field(default_factory=set)


# --- growing ----------------------------------------------------------------------------------------------------------


def form_regions(graph: fx.Graph, fusible: set[fx.Node]) -> list[set[fx.Node]]:
    """The regions of a trace's graph over its `fusible` ops, in no particular order, views at their borders included."""
    depth: dict[fx.Node, int] = {}
    region_of: dict[fx.Node, Region] = {}
    drawn = 0
    for node in graph.nodes:
        inputs, is_fusible = node.all_input_nodes, node in fusible
        links = [a for a in inputs if is_fusible and a in region_of and _may_join(node, region_of[a])]
        depth[node] = max((depth[a] + (a not in links and _is_border(a)) for a in inputs), default=0)
        if is_random(node):
            drawn = depth[node] = max(depth[node], drawn)
        if is_fusible:
            near = {region_of[a]: None for a in links if depth[a] == depth[node]}
            depth[node] += not _join(node, list(near), region_of)
    _sink(graph, region_of)
    return [set(r.nodes) for r in dict.fromkeys(region_of.values())]


def _is_border(node: fx.Node) -> bool:
    """Whether a reader of the value, which no region holds, lies below a border. What reads nothing lies below none."""
    return node.op == "call_function" and not is_mask(node) and not is_draw(producer(node))


def _may_join(node: fx.Node, region: Region) -> bool:
    return region.phase == phase(node) and (region.device is None or region.device == _device(node))


def _join(node: fx.Node, near: list[Region], region_of: dict[fx.Node, Region]) -> bool:
    """Put `node` and the regions `near` together; where their rows disagree, begin a region and return False."""
    row = row_of(node)
    own = Region({node: None}, phase(node), _device(node), row, {node} if row else set())
    if not _agree(node, own, near):
        region_of[node] = own
        return False
    largest = max([own, *near], key=lambda r: len(r.nodes))
    for other in [own, *near]:
        if other is not largest:
            largest.nodes |= other.nodes
            largest.below |= other.below
            largest.row = largest.row or other.row
            region_of.update(dict.fromkeys(other.nodes, largest))
    region_of.setdefault(node, largest)
    if any(a in largest.below for a in node.all_input_nodes):
        largest.below.add(node)
    return True


def _agree(node: fx.Node, own: Region, near: list[Region]) -> bool:
    rows = {r.row for r in [own, *near] if r.row}
    if len(rows) > 1:
        return False
    follows = any(a in r.below for r in near for a in node.all_input_nodes)
    if not rows or not (follows or own.row) or not isinstance(node.meta["val"], torch.Tensor):
        return True
    ((numel, columns),) = rows
    return node.meta["val"].numel() in (numel, numel // columns)


def _device(node: fx.Node) -> torch.device | None:
    return next((t.device for t in tensors(node)), None)


def _sink(graph: fx.Graph, region_of: dict[fx.Node, Region]) -> None:
    """Move an op whose readers are all in one other region there, if that region then reads no more bytes than before."""
    for node in reversed(graph.nodes):
        if node not in region_of or _is_anchored(node, region_of[node]):
            continue
        homes = {region_of.get(user) for user in node.users}
        target = homes.pop() if len(homes) == 1 else None
        if target is None or target is region_of[node] or not _may_join(node, target):
            continue
        if sum(nbytes(a) for a in node.all_input_nodes if not is_remade(a)) <= nbytes(node):
            del region_of[node].nodes[node]
            target.nodes[node] = None
            region_of[node] = target


def _is_anchored(node: fx.Node, region: Region) -> bool:
    """Whether an op must stay with what it reads: row results, and the parts of a multi-output op."""
    return bool(row_of(node)) or node in region.below or is_getitem(node) or node.target in SPLITS
