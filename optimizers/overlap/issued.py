"""Collectives that a compiled graph issues itself: each operator starts one, and `wait_tensor` waits for it.

before   whole = all_gather_into_tensor(shard, 8, group); whole = wait_tensor(whole); y = mm(x, whole)
after    whole = all_gather_into_tensor(shard, 8, group); ...; whole = wait_tensor(whole); y = mm(x, whole)

Such are the graphs that `torch.compile` makes of models with functional collectives. What starts goes up, what waits goes down
to its first reader, and neither leaves its phase. With `bucket_mb` reductions are joined as what they send gets there, and
gathers of parameters as they are needed, to coalesced calls.

Ranks whose batches have other sizes make other kernels, and must start the same collectives in the same order. So the pass
runs before `remat` and `fuse`, and follows what an op reads, sends and is a gather of, which sizes do not change; those two
keep the order that they find.

Sources: the operators of `torch.distributed._functional_collectives`, whose results are waited for before they are read.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import fx

from tracefuse.optimizers.ops import exchanges, is_getitem, is_view, reached
from tracefuse.optimizers.overlap.options import Options
from tracefuse.optimizers.overlap.order import AFTER, AHEAD, Places, places_of, reordered, start_at, wait_late
from tracefuse.optimizers.overlap.schedule import is_of_inputs, op_name_of
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.rewrite import refresh_views
from tracefuse.optimizers.trace import Trace, call, eliminate_dead_code, human_bytes, nbytes, phase, val

NAMESPACE = "_c10d_functional"
BEHIND = 1e-9
"""How far a collective's place is behind that of the one before it, at least."""
GATHER, REDUCTIONS = "all_gather_into_tensor", ("reduce_scatter_tensor", "all_reduce")
_STARTS = {GATHER, *REDUCTIONS, "all_to_all_single", "broadcast"}
WAIT, _JOINED = "wait_tensor", "_coalesced"


def issues_collectives(trace: Trace) -> bool:
    """Whether running the trace exchanges tensors with other processes."""
    return any(getattr(node.target, "namespace", "") == NAMESPACE and not is_wait(node) for node in trace.ops)


def order_of_collectives(trace: Trace) -> list[tuple[str, str]]:
    """What each collective of a trace is and which group it is of, in the order in which they start."""
    return [(str(node.target), str(node.args[-1])) for node in trace.ops if exchanges(node)]


def is_start(node: fx.Node) -> bool:
    """Whether an op starts a collective whose only readers wait for it."""
    starts = getattr(node.target, "namespace", "") == NAMESPACE and op_name_of(node) in _STARTS
    return starts and bool(node.users) and all(map(is_wait, node.users))


def is_wait(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") == NAMESPACE and op_name_of(node) == WAIT


def gathers_inputs(node: fx.Node) -> bool:
    """Whether it gathers what is there from the beginning, as parameters of which each rank holds a part."""
    return op_name_of(node).removesuffix(_JOINED) == GATHER and all(map(is_of_inputs, _sent(node)))


def issued_early(trace: Trace, options: Options, decide: Decide) -> Trace:
    """The trace with its collectives started early and waited for late. But for gathers of inputs, which go ahead, they start
    in the program's order."""
    new = trace.copy()
    graph = new.graph
    places = places_of(graph)
    if options.reshard:
        _gather_again(graph, places, _kept(new), decide)
    if options.bucket_mb is not None:
        _join(graph, places, options.bucket_mb * 2**20, decide)
    eliminate_dead_code(graph)
    found = sorted((node for node in graph.nodes if exchanges(node)), key=places.__getitem__)
    gathers = [node for node in found if _is_movable(node) and gathers_inputs(node)]
    last = 0.0
    for node in (one for one in found if one not in gathers):
        if _is_movable(node):
            places[node] = max((places[one] for one in node.all_input_nodes), default=0.0) + AFTER
            decide(Decision(node.name, "start", "as soon as all that it sends is there", nbytes(node)))
        last = places[node] = max(places[node], last + BEHIND)
    wait_late(graph, places, _passing(graph))
    if options.prefetch is not None:
        _prefetch(gathers, places, options.prefetch, decide)
    reordered(graph, places)
    refresh_views(graph)
    if options.second_group:
        decide(Decision(found[0].name, "leave", "second_group changes nothing: the groups are the program's own"))
    if options.reshard is False:
        decide(Decision(found[0].name, "leave", "reshard=False changes nothing: what was gathered is kept as it is"))
    return new


def _is_movable(node: fx.Node) -> bool:
    return is_start(node) or is_joined(node)


# --- gathers ----------------------------------------------------------------------------------------------------------


def _prefetch(gathers: Sequence[fx.Node], places: Places, depth: int, decide: Decide) -> None:
    """Each starts where the one `depth` before it is waited for; none leaves its phase."""
    needed = {node: _needed(node, places) for node in gathers}
    for half in ("forward", "backward"):
        mine = [node for node in sorted(gathers, key=needed.__getitem__) if phase(node) == half]
        for at, node in enumerate(mine):
            before = needed[node] if depth == 0 else needed[mine[at - depth]] if at >= depth else -1.0
            start_at(places, node, min(before, needed[node]) - AHEAD)
            decide(
                Decision(
                    node.name, "start", f"{depth} gather{'s' * (depth != 1)} ahead of where it is needed", nbytes(node)
                )
            )


def _kept(trace: Trace) -> set[fx.Node]:
    """The parameters that the program does not write to: they are the same in the backward."""
    written = {out.of for out in trace.outputs if out.kind == "mutation"}
    return {node for entry, node in trace.input_pairs if entry.kind == "parameter" and entry.name not in written}


def _gather_again(graph: fx.Graph, places: Places, kept: set[fx.Node], decide: Decide) -> None:
    """What the backward reads of a gather of the forward is gathered there once more, of parameters, which are `kept`."""
    for node in [one for one in graph.nodes if one.op == "call_function" and is_start(one) and gathers_inputs(one)]:
        above = reached([node], lambda one: one.all_input_nodes)
        if phase(node) != "forward" or not {one for one in above if one.op == "placeholder"} <= kept:
            continue
        derived = [*node.users]
        for one in derived:
            derived += [
                user for user in one.users if is_view(user) and phase(user) == "forward" and user not in derived
            ]
        late = [
            user for one in derived for user in one.users if phase(user) == "backward" and user.op == "call_function"
        ]
        if not late:
            continue
        first = min(late, key=places.__getitem__)
        new: dict[fx.Node, fx.Node] = {}
        with graph.inserting_before(first):
            for one in (node, *derived):
                args = fx.node.map_arg(one.args, lambda given, new=new: new.get(given, given))
                new[one] = call(one, one.target, *args, name=f"{one.name}_again", **one.kwargs)  # type: ignore[arg-type]
                new[one].meta["phase"] = phase(first)
                places[new[one]] = places[first] - AHEAD
        for user in dict.fromkeys(late):
            user.args = fx.node.map_arg(user.args, lambda given, new=new: new.get(given, given))
            user.kwargs = fx.node.map_arg(user.kwargs, lambda given, new=new: new.get(given, given))
        decide(Decision(new[node].name, "gather again", f"{node.name} is freed behind the forward", nbytes(node)))


# --- buckets ----------------------------------------------------------------------------------------------------------


def is_joined(node: fx.Node) -> bool:
    """Whether it starts several collectives at once."""
    return getattr(node.target, "namespace", "") == NAMESPACE and op_name_of(node).endswith(_JOINED)


def _sent(node: fx.Node) -> list[fx.Node]:
    sent = node.args[0]
    return [sent] if isinstance(sent, fx.Node) else list(sent)  # type: ignore[arg-type]


def _size(node: fx.Node) -> int:
    """The bytes of the whole tensor: what is gathered, or what is reduced before it is scattered."""
    return max(nbytes(node), sum(map(nbytes, _sent(node))))


def _needed(node: fx.Node, places: Places) -> float:
    """Where the first wait for a collective stands."""
    waits = (one for user in node.users for one in ([user] if is_wait(user) else user.users))
    return min((places[one] for one in waits), default=places[node])


def _join(graph: fx.Graph, places: Places, most_nbytes: float, decide: Decide) -> None:
    """Join collectives of one kind, group and dtype until a call has so many bytes: gathers of inputs in the order in which
    they are needed, and reductions of the backward, but those that another collective needs, as what they send gets there."""
    wait_late(graph, places, _passing(graph))
    every = [node for node in graph.nodes if exchanges(node)]
    needed = reached([one for node in every for one in node.all_input_nodes], lambda one: one.all_input_nodes)
    pools: dict[str, list[fx.Node]] = defaultdict(list)
    for node in filter(is_start, every):
        is_last = op_name_of(node) in REDUCTIONS and phase(node) == "backward" and node not in needed
        if gathers_inputs(node) or is_last:
            pools[str((node.target, node.args[1:], phase(node), val(node).dtype, val(node).device))].append(node)
    for pool in pools.values():
        is_gather = gathers_inputs(pool[0])
        bucket: list[fx.Node] = []
        for node in sorted(pool, key=lambda one: _needed(one, places) if is_gather else places[_sent(one)[0]]):
            if bucket and sum(map(_size, bucket)) >= most_nbytes:
                _joined(graph, places, bucket, decide)
                bucket = []
            bucket.append(node)
        _joined(graph, places, bucket, decide)


def _joined(graph: fx.Graph, places: Places, bucket: Sequence[fx.Node], decide: Decide) -> None:
    if len(bucket) < 2:
        return
    first, sent = bucket[0], [one for node in bucket for one in _sent(node)]
    target = getattr(getattr(torch.ops, NAMESPACE), f"{op_name_of(first)}{_JOINED}").default
    is_gather = gathers_inputs(first)
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


# --- waits ------------------------------------------------------------------------------------------------------------


def _passing(graph: fx.Graph) -> set[fx.Node]:
    """Waits, and views of what they give."""
    passing: set[fx.Node] = set()
    for node in graph.nodes:
        shows = is_view(node) or is_getitem(node)
        if node.op == "call_function" and (is_wait(node) or (shows and set(node.all_input_nodes) <= passing)):
            passing.add(node)
    return passing
