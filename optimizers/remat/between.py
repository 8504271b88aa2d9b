"""Recomputing between regions: what a region would write only for others is computed where it is read, if that weighs less.

    add_1 = aten.add.Tensor(mm_1, x)        region 1        add_1 = aten.add.Tensor(mm_1, x)            region 1
    tanh_1 = aten.tanh.default(add_1)                       tanh_1 = aten.tanh.default(add_1)
    mm_2 = aten.mm.default(w, tanh_1)                       mm_2 = aten.mm.default(w, tanh_1)
    add_2 = aten.add.Tensor(mm_2, add_1)    region 2        add_1_again = aten.add.Tensor(mm_1, x)      region 2
                                                            add_2 = aten.add.Tensor(mm_2, add_1_again)

The regions are those that the pass fuse would form (`regions.form_regions`). For each region a minimum cut over the ops
behind what it reads of other regions of its phase decides where it starts from:

    weight of reading a value = bytes
           x 0                        if the region reads it from memory for another reason
             producer_input_weight    if it is in memory anyway when the region runs: another op reads it that late, or it
                                      is an input, or is returned
             1                        if it would have to stay in memory for this region; or crosses to it as it is, and
                                      would be written only for such regions
             2                        else: it would have to be written for this region, or is all that its own is there for

What is in memory at all is never recomputed here. So at weight 1 a region changes only if it then reads fewer bytes. At 1/2
a sum of two values of its own size is a tie, and a tie keeps the value: a residual stream stays as it is. At 0 what is in
memory anyway costs nothing. A residual chain whose forward keeps the results of all matmuls for the backward then sums the
stream anew in each region, from all the matmuls before it, and never writes the sums in between. That takes a number of
reads that is quadratic in the depth, so a chain of `longest_chain` ops ends it: the next value that crosses a border is
written, and is in memory for the rest. A backward that accumulates what it could free stays as it is, at any weight: to sum
it up later would hold all terms at once.

One cut for each reading region, over all that it reads, takes the place of one for each pair of regions as in Thunder's
`find_cut`: a value that two of its operands are computed from counts once, and a chain over many regions is weighed as one.

Only pointwise ops, casts, copies, gathers and views are copied: a reduction computed again has loops of its own, and what is
drawn or heavy is never computed twice. The table of a gather weighs all its bytes: it is read in pieces. A copy is marked
(`remaking.is_for_reader`), so that the pass fuse puts it into the kernel that reads it and not into that of its operands; it
remembers its original, as all copies do (`schedule.forget`).

Sources: the weight of a producer's input is that of Thunder's `find_cut` (lightning-thunder,
thunder/core/rematerialization.py), what it does at 0 is NVIDIA/Fuser issue 2916.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

from torch import fx

from tracefuse.optimizers.fuse.remaking import nbytes_read
from tracefuse.optimizers.kernels.fusible import is_constant, is_free
from tracefuse.optimizers.ops import behind_views, reached, read_by
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.remat.borders import Borders
from tracefuse.optimizers.remat.mincut import Edge, min_cut
from tracefuse.optimizers.remat.read_anyway import compute_from_what_is_read
from tracefuse.optimizers.remat.schedule import copy_again, just_in_time, views
from tracefuse.optimizers.rewrite import refresh_views
from tracefuse.optimizers.trace import Trace, eliminate_dead_code, nbytes, recomputes

_LEAST = "it weighs no more than what it could be computed from"


def recompute_between(trace: Trace, weight: float, longest_chain: int | None, decide: Decide) -> Trace:
    """`trace`, edited in place so that regions compute what they read of others where that weighs less than to read it, as
    another object; or itself where that is nowhere.

    `weight` is the factor for what is in memory anyway; at most `longest_chain` ops are computed again one after another
    (None: any number). Each value that crosses a border between two regions of one phase is told to `decide`.
    """
    borders = Borders(trace)
    longest = math.inf if longest_chain is None else longest_chain
    again = {region: choose(borders, region, weight, longest) for region in borders.reading}
    for decision in _explain(borders, again):
        decide(decision)
    region_of = _copy(borders, again)
    copies = [*region_of, *compute_from_what_is_read(trace, {**borders.region_of, **region_of}, decide)]
    if not copies:
        return trace
    refresh_views(trace.graph, reached(copies, views))
    eliminate_dead_code(trace.graph)
    just_in_time({n for n in trace.ops if recomputes(n)})
    return replace(trace, _cache={})


# --- the choice -------------------------------------------------------------------------------------------------------


def choose(borders: Borders, region: int, weight: float, longest: float) -> list[fx.Node]:
    """What `region` computes again, in the order of the trace; what it then reads of other regions becomes stored."""
    wanted = [value for value in borders.reading[region] if not borders.is_stored(value)]
    needs = needs_of(borders, wanted)
    if ends := _chain_ends(wanted, needs, longest):
        for value in ends:
            borders.store(value, f"it ends a chain of {longest:g} ops that are computed again")
            borders.keep(value, math.inf)
        return choose(borders, region, weight, longest)
    weights = {node: weigh(borders, node, region, weight) for node in needs}
    again, read = (_cut_of_tree if _is_tree(wanted, needs) else _cut)(wanted, needs, weights)
    for root in map(behind_views, read):
        borders.store(root, _LEAST)
        borders.keep(root, borders.runs_at[region])
    return _working(again, borders.position)


Needs = dict[fx.Node, list[fx.Node] | None]
"""Of what a region wants and what that is computed from, operands before their readers: what it takes to compute each; None
where the region may not."""


def needs_of(borders: Borders, wanted: Iterable[fx.Node]) -> Needs:
    """What a region may compute, and of what, that wants these values."""
    found: Needs = {}
    stack = list(wanted)
    while stack:
        node = stack.pop()
        if node in found:
            continue
        may_compute = borders.is_copyable(node) and not borders.is_stored(node)
        found[node] = [a for a in read_by(node) if not is_constant(a)] if may_compute else None
        stack += found[node] or ()
    return {node: found[node] for node in sorted(found, key=borders.position.__getitem__)}


Weights = dict[fx.Node, float]
"""Of the same values."""


def _cut(wanted: list[fx.Node], needs: Needs, weights: Weights) -> tuple[set[fx.Node], set[fx.Node]]:
    """(what is computed again, what is read) at the least weight: of several such cuts the one nearest to the region."""
    index = {node: i for i, node in enumerate(needs)}
    number = index.__getitem__
    operands = tuple([None if of is None else tuple(map(number, of)) for of in needs.values()])
    again, read = _cut_of_numbers(tuple(map(number, wanted)), operands, tuple(map(weights.__getitem__, needs)))
    nodes = list(needs)
    return {nodes[i] for i in again}, {nodes[i] for i in read}


@lru_cache(maxsize=256)
def _cut_of_numbers(
    wanted: tuple[int, ...], needs: tuple[tuple[int, ...] | None, ...], weights: tuple[float, ...]
) -> tuple[list[int], list[int]]:
    """`_cut` of values by number: regions that are alike, as those of the steps of a loop, have one answer."""
    count = len(needs)
    source, sink = 2 * count, 2 * count + 1
    edges: list[Edge] = [(source, 2 * value, math.inf) for value in wanted]
    for i, operands in enumerate(needs):
        edges.append((2 * i, 2 * i + 1, weights[i]))
        behind = [sink] if operands is None else [2 * a for a in operands]
        edges += [(2 * i + 1, end, math.inf) for end in behind]
    side = min_cut(edges, 2 * count + 2, source, sink)
    if side is None:
        raise AssertionError("a value that a region reads can be neither read nor computed again; this is a defect")
    again = [i for i in range(count) if 2 * i + 1 in side]
    return again, [i for i in range(count) if 2 * i in side and 2 * i + 1 not in side]


def _is_tree(wanted: list[fx.Node], needs: Needs) -> bool:
    read = [*wanted, *(a for operands in needs.values() for a in operands or ())]
    return len(read) == len(set(read))


def _cut_of_tree(wanted: list[fx.Node], needs: Needs, weights: Weights) -> tuple[set[fx.Node], set[fx.Node]]:
    """What `_cut` gives where no value is read twice, as in most regions, without setting up the solver."""
    least: Weights = {}
    deeper: Needs = {}
    for node, operands in needs.items():
        own, behind = weights[node], math.inf if operands is None else math.fsum(map(least.__getitem__, operands))
        least[node] = min(own, behind)
        if behind < own:
            deeper[node] = operands
    again: set[fx.Node] = set()
    stack, read = list(wanted), set()
    while stack:
        node = stack.pop()
        (again if node in deeper else read).add(node)
        stack += deeper.get(node) or ()
    return again, read


def _chain_ends(wanted: list[fx.Node], needs: Needs, longest: float) -> list[fx.Node]:
    """The values of `wanted` that would take more than `longest` ops, one after another."""
    depth: dict[fx.Node, int] = {}
    for node, operands in needs.items():
        above = max([depth[a] for a in operands or ()], default=0)
        depth[node] = 0 if operands is None else above + (not is_free(node))
    return [behind_views(value) for value in wanted if depth[value] > longest]


def weigh(borders: Borders, node: fx.Node, region: int, weight: float) -> float:
    """Bytes times factor of reading `node` from memory; infinite for a view of what is not there."""
    root = behind_views(node)
    if is_constant(root):
        return 0.0
    if borders.why_stored(root) is None:
        if node is not root:
            return math.inf
        is_there = root in borders.crossing and not borders.is_idle(borders.region_of[root])
        return nbytes_read(node) * (1.0 if is_there else 2.0)
    if root in borders.outside[region]:
        return 0.0
    return nbytes_read(node) * (weight if borders.lives_to(root) >= borders.runs_at[region] else 1.0)


def _working(again: set[fx.Node], position: dict[fx.Node, int]) -> list[fx.Node]:
    """`again` in order, without views of what is not computed again: those are free where they are."""
    kept: dict[fx.Node, None] = {}
    for node in sorted(again, key=position.__getitem__):
        if not is_free(node) or any(a in kept for a in node.all_input_nodes):
            kept[node] = None
    return list(kept)


# --- the copies -------------------------------------------------------------------------------------------------------


def _copy(borders: Borders, again: dict[int, list[fx.Node]]) -> dict[fx.Node, int]:
    """Let each region read copies of its own; the regions by copy. All are made before a reader changes: what is copied may be
    a reader."""
    copies: dict[int, dict[fx.Node, fx.Node]] = {region: {} for region in again}
    for region, nodes in again.items():
        for node in nodes:
            with node.graph.inserting_after(node):
                copies[region][node] = copy_again(node, copies[region], for_reader=True)
    for region, mine in copies.items():
        for node, copy in mine.items():
            for user in [u for u in node.users if borders.region_of.get(u) == region]:
                user.replace_input_with(node, copy)
    return {copy: region for region, mine in copies.items() for copy in mine.values()}


# --- telling ----------------------------------------------------------------------------------------------------------


def _explain(borders: Borders, again: dict[int, list[fx.Node]]) -> Iterator[Decision]:
    """One decision for each value that would be written only for other regions, in the order of the trace."""
    inside = {region: set(nodes) for region, nodes in again.items()}
    for value in sorted(filter(borders.only_crosses, borders.crossing), key=borders.position.__getitem__):
        regions = borders.crossing[value]
        copying = [region for region in regions if value in inside[region]]
        if not copying:
            yield Decision(value.name, "write", _why_written(borders, value), nbytes(value))
            continue
        saved = 0 if borders.is_stored(value) else nbytes(value)
        yield Decision(value.name, "duplicate", _why_copied(borders, value, again, copying), saved)


def _why_copied(borders: Borders, value: fx.Node, again: dict[int, list[fx.Node]], copying: list[int]) -> str:
    """Of the first region that computes `value` again: the others start from no more than the same values."""
    sources = [a.name for a in _sources(value, set(again[copying[0]]))]
    more = f" and {len(sources) - 3} more" if len(sources) > 3 else ""
    where = f"computed again in {len(copying)} of {len(borders.crossing[value])} other regions that read it"
    written = "it is written all the same" if borders.is_stored(value) else "it is not written any more"
    return f"{where}, from {', '.join(sources[:3]) or 'constants'}{more}: {written}"


def _sources(value: fx.Node, mine: set[fx.Node]) -> list[fx.Node]:
    found = reached([value], lambda n: [a for a in n.all_input_nodes if not is_constant(a)] if n in mine else ())
    return [node for node in found if node not in mine]


def _why_written(borders: Borders, value: fx.Node) -> str:
    count = len(borders.crossing[value])
    read = f"read from memory by {count} other region{'s' * (count > 1)}"
    return f"{read}: {borders.why_stored(value)}"
