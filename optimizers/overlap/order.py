"""The order of a trace's ops around its collectives: what starts them goes up, what waits for them goes down.

    place = where an op stands; collectives that start early stand half a place behind what they need, waits and views of what
            was received a quarter of a place before their first reader

Ops are taken in the order of their places, as soon as all that they read is there; so every order that results is one of the
same program. Nothing leaves its phase.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Collection, Mapping

import torch
from torch import fx

from tracefuse.optimizers.ops import RECORDED, is_getitem, is_wait
from tracefuse.optimizers.overlap.collectives import sent_by
from tracefuse.optimizers.trace import call, phase

Places = dict[fx.Node, float]

_PHASES = {"forward": 0, "backward": 1, "update": 2}
AFTER, BEFORE, AHEAD = 0.5, 0.25, 0.4


def places_of(graph: fx.Graph) -> Places:
    return {node: float(at) for at, node in enumerate(graph.nodes)}


def start_early(places: Places, node: fx.Node) -> None:
    """A collective starts as soon as all that it sends is there."""
    sent = sent_by(node)
    place = places[node] = max((places[one] for one in sent), default=0.0) + AFTER
    for one in node.all_input_nodes:
        if one not in sent and one.op == "call_function":  # a part of what was received
            places[one] = place


def start_at(places: Places, node: fx.Node, place: float) -> None:
    """A collective starts at a place, and what makes its operands of inputs runs there too."""
    places[node] = place
    above = [one for one in node.all_input_nodes if one.op == "call_function"]
    while above:
        one = above.pop()
        if places[one] > place:
            places[one] = place
        above += [source for source in one.all_input_nodes if source.op == "call_function"]


def wait_late(graph: fx.Graph, places: Places, passing: Collection[fx.Node]) -> None:
    """The ops of `passing`, waits and views of what these give, stand right before their first reader, or at the end of their
    phase where it has none."""
    last: dict[str, float] = {}
    for node in graph.nodes:
        last[phase(node)] = max(places[node], last.get(phase(node), 0.0))
    for node in reversed(graph.nodes):
        if node in passing:
            readers = [one for one in node.users if one.op == "call_function" and phase(one) == phase(node)]
            firsts = (places[one] - (0.0 if one in passing else BEFORE) for one in readers)
            places[node] = min(firsts, default=last[phase(node)] + 1)


def reordered(graph: fx.Graph, places: Mapping[fx.Node, float]) -> None:
    """Put the ops of `graph` into the order of their places, as far as each is behind all that it reads."""
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    ops = [node for node in graph.nodes if node.op == "call_function"]
    left = {node: sum(one.op == "call_function" for one in node.all_input_nodes) for node in ops}

    def entry(node: fx.Node) -> tuple[int, float, int, fx.Node]:
        return _PHASES[phase(node)], places[node], numbers[node], node

    ready = [entry(node) for node in ops if not left[node]]
    heapq.heapify(ready)
    output = graph.output_node()
    while ready:
        *_, node = heapq.heappop(ready)
        output.prepend(node)
        for user in node.users:
            if user.op == "call_function":
                left[user] -= 1
                if not left[user]:
                    heapq.heappush(ready, entry(user))


def wait_apart(graph: fx.Graph, places: Places, node: fx.Node) -> None:
    """Let a collective that the program waits for at once only start, and a wait of its own follow."""
    if not node.args[5]:
        return
    node.args = (*node.args[:5], False, node.args[6])
    items = [one for one in node.users if is_getitem(one)]
    with graph.inserting_before(graph.output_node()):
        wait = call(node, getattr(torch.ops, RECORDED).wait.default, items)
        places[wait] = max(places[one] for one in items)
        for at, item in enumerate(items):
            result = call(node, operator.getitem, wait, at)
            places[result] = places[wait]
            item.replace_all_uses_with(result, delete_user_cb=lambda user: user is not wait)


def wait_of(node: fx.Node, index: int) -> fx.Node | None:
    """What a collective gave as its result `index` once it was waited for; itself where the program waited at once."""
    item = next((one for one in node.users if is_getitem(one) and one.args[1] == index), None)
    if item is None:
        return None
    for user in item.users:
        if is_wait(user):
            at = user.args[0].index(item)  # type: ignore[union-attr, arg-type]
            return next((one for one in user.users if is_getitem(one) and one.args[1] == at), None)
    return item
