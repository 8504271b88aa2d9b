"""Collectives that a compiled graph issues itself: each operator starts one, and `wait_tensor` waits for it.

before   whole = all_gather_into_tensor(shard, 8, group); whole = wait_tensor(whole); y = mm(x, whole)
after    whole = all_gather_into_tensor(shard, 8, group); ...; whole = wait_tensor(whole); y = mm(x, whole)

Such are the graphs that `torch.compile` makes of models with functional collectives. What starts goes up, what waits goes down
to its first reader, and neither leaves its phase. With `bucket_mb` reductions are joined as what they send gets there, and
gathers of parameters as they are needed, to coalesced calls.

Ranks whose batches have other sizes make other kernels, and must start the same collectives in the same order. So the pass
runs before `remat` and `fuse`, and follows what an op reads, sends and is a gather of, which sizes do not change; those two
keep the order that they find.

On CPUs, whose collectives are gloo's, each gather of a group is waited for before the next one of it starts. Gloo sends both
under one tag (`allgather_coalesced`, which `all_gather_into_tensor` calls too; torch 2.13 and 2.14), so that two at once write
into each other's memory.

Sources: the operators of `torch.distributed._functional_collectives`, whose results are waited for before they are read.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import fx

from tracefuse.optimizers.costs.cost import packet_name
from tracefuse.optimizers.ops import ISSUED, is_collective, is_getitem, is_recorded, is_wait, reached
from tracefuse.optimizers.overlap.collectives import gathers_parameters, needed_at, passing_on, sent_by
from tracefuse.optimizers.overlap.gathers import gather_again, gathers_in, prefetch
from tracefuse.optimizers.overlap.options import Options
from tracefuse.optimizers.overlap.order import AFTER, Places, places_of, reordered, start_at, start_early, wait_late
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.rewrite import refresh_views
from tracefuse.optimizers.trace import Trace, call, eliminate_dead_code, human_bytes, nbytes, phase, val

BEHIND = 1e-9
"""How far a collective's place is behind that of the one before it, at least."""
_REDUCTIONS = {"reduce_scatter_tensor", "all_reduce"}
_STARTS = {"all_gather_into_tensor", *_REDUCTIONS, "all_to_all_single", "broadcast"}
_JOINED = "_coalesced"


def issues_collectives(trace: Trace) -> bool:
    """Whether running the trace exchanges tensors with other processes."""
    return any(is_collective(node) and not is_recorded(node) for node in trace.ops)


def order_of_collectives(trace: Trace) -> list[tuple[str, str, str]]:
    """The collectives of a trace in the order in which they start: the name of each, by which two of one kind are told apart,
    what it is, and which group it is of."""
    return [(node.name, str(node.target), str(node.args[-1])) for node in trace.ops if is_collective(node)]


def is_start(node: fx.Node) -> bool:
    """Whether an op starts a collective whose only readers wait for it."""
    is_one = is_collective(node) and packet_name(node) in _STARTS
    return is_one and bool(node.users) and all(map(is_wait, node.users))


def is_joined(node: fx.Node) -> bool:
    """Whether it starts several collectives at once."""
    return is_collective(node) and packet_name(node).endswith(_JOINED)


def issued_early(trace: Trace, options: Options, decide: Decide) -> Trace:
    """The trace with its collectives started early and waited for late. But for gathers of inputs, which go ahead, they start
    in the program's order."""
    new = trace.copy()
    graph = new.graph
    places = places_of(graph)
    if options.reshard:
        gather_again(graph, _freed(graph, _kept(new)), places, decide)
    if options.bucket_mb is not None:
        _join(graph, places, options.bucket_mb * 2**20, decide)
    eliminate_dead_code(graph)
    found = sorted(filter(is_collective, graph.nodes), key=places.__getitem__)
    movable = [node for node in found if is_start(node) or is_joined(node)]
    gathers = list(filter(gathers_parameters, movable))
    last = 0.0
    for node in (one for one in found if one not in gathers):
        if node in movable:
            start_early(places, node)
            decide(Decision(node.name, "start", "as soon as all that it sends is there", nbytes(node)))
        last = places[node] = max(places[node], last + BEHIND)
    wait_late(graph, places, passing_on(graph))
    if options.prefetch is not None:
        prefetch(gathers, places, options.prefetch, decide)
    reordered(graph, places)
    _wait_for_gathers_of_cpus(graph, decide)
    refresh_views(graph)
    if options.second_group:
        decide(Decision(found[0].name, "leave", "second_group changes nothing: the groups are the program's own"))
    if options.reshard is False:
        decide(Decision(found[0].name, "leave", "reshard=False changes nothing: what was gathered is kept as it is"))
    return new


def _wait_for_gathers_of_cpus(graph: fx.Graph, decide: Decide) -> None:
    """Before a gather of a group of CPUs starts, wait for the one of this group that is in flight."""
    in_flight: dict[object, fx.Node] = {}
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        seen.add(node)
        if not (is_collective(node) and packet_name(node).startswith("all_gather")):
            continue
        if val(sent_by(node)[0]).device.type != "cpu":
            continue
        before = in_flight.get(node.args[-1])
        late = [] if before is None else [one for one in _taken(before) if one not in seen]
        for one in late:
            node.prepend(one)
            seen.add(one)
        if late:
            decide(Decision(before.name, "wait", f"gloo cannot gather for {node.name} meanwhile", nbytes(before)))  # type: ignore[union-attr]
        in_flight[node.args[-1]] = node


def _taken(gather: fx.Node) -> list[fx.Node]:
    """The waits for what a gather gives, each behind the item that it waits for."""
    items = [one for one in gather.users if is_getitem(one)]
    return [*items, *(one for given in (gather, *items) for one in given.users if is_wait(one))]


def _kept(trace: Trace) -> set[fx.Node]:
    """The parameters that the program does not write to: they are the same in the backward."""
    written = {out.of for out in trace.outputs if out.kind == "mutation"}
    return {node for entry, node in trace.input_pairs if entry.kind == "parameter" and entry.name not in written}


def _freed(graph: fx.Graph, kept: set[fx.Node]) -> list[fx.Node]:
    """The gathers of the forward, of nothing but parameters that are `kept`."""
    gathers = [node for node in gathers_in(graph) if is_start(node) and phase(node) == "forward"]
    above = {node: reached([node], lambda one: one.all_input_nodes) for node in gathers}
    return [node for node in gathers if {one for one in above[node] if one.op == "placeholder"} <= kept]


# --- buckets ----------------------------------------------------------------------------------------------------------


def _size(node: fx.Node) -> int:
    """The bytes of the whole tensor: what is gathered, or what is reduced before it is scattered."""
    return max(nbytes(node), sum(map(nbytes, sent_by(node))))


def _join(graph: fx.Graph, places: Places, most_nbytes: float, decide: Decide) -> None:
    """Join collectives of one kind, group and dtype until a call has so many bytes: gathers of inputs in the order in which
    they are needed, and reductions of the backward, but those that another collective needs, as what they send gets there."""
    wait_late(graph, places, passing_on(graph))
    every = list(filter(is_collective, graph.nodes))
    needed = reached([one for node in every for one in node.all_input_nodes], lambda one: one.all_input_nodes)
    pools: dict[str, list[fx.Node]] = defaultdict(list)
    for node in filter(is_start, every):
        is_last = packet_name(node) in _REDUCTIONS and phase(node) == "backward" and node not in needed
        if gathers_parameters(node) or is_last:
            pools[str((node.target, node.args[1:], phase(node), val(node).dtype, val(node).device))].append(node)
    for pool in pools.values():
        is_gather = gathers_parameters(pool[0])
        bucket: list[fx.Node] = []
        for node in sorted(pool, key=lambda one: needed_at(one, places) if is_gather else places[sent_by(one)[0]]):
            if bucket and sum(map(_size, bucket)) >= most_nbytes:
                _joined(graph, places, bucket, decide)
                bucket = []
            bucket.append(node)
        _joined(graph, places, bucket, decide)


def _joined(graph: fx.Graph, places: Places, bucket: Sequence[fx.Node], decide: Decide) -> None:
    if len(bucket) < 2:
        return
    first, sent = bucket[0], [one for node in bucket for one in sent_by(node)]
    target = getattr(getattr(torch.ops, ISSUED), f"{packet_name(first)}{_JOINED}").default
    is_gather = gathers_parameters(first)
    place = places[first] if is_gather else max(places[one] for one in sent) + AFTER
    with graph.inserting_before(graph.output_node()):
        new = call(first, target, sent, *first.args[1:])
        items = [call(one, operator.getitem, new, at) for at, one in enumerate(bucket)]
    places |= dict.fromkeys((new, *items), place)
    if is_gather:
        start_at(places, new, place)  # what casts or joins the shards comes before it
    for one, item in zip(bucket, items, strict=True):
        one.replace_all_uses_with(item)
    size = human_bytes(sum(map(_size, bucket)))
    decide(Decision(new.name, "bucket", f"{len(bucket)} {'gathers' if is_gather else 'reductions'}, {size}"))
