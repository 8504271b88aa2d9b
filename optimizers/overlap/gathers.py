"""Gathers of parameters: started earlier, in a process group of their own, once a step, or again in the backward."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from tracefuse.optimizers.costs.cost import packet_name
from tracefuse.optimizers.ops import is_getitem, is_view, is_wait
from tracefuse.optimizers.overlap.collectives import COPYING_OUT, gathers_parameters, needed_at
from tracefuse.optimizers.overlap.order import AHEAD, Places, start_at, wait_of
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.trace import call, nbytes, phase

SECOND_GROUP = " for gathers"
"""Behind the name of a group: another one of the same ranks."""


def gathers_in(graph: fx.Graph) -> list[fx.Node]:
    return list(filter(gathers_parameters, graph.nodes))


def prefetch(gathers: Sequence[fx.Node], places: Places, depth: int, decide: Decide) -> None:
    """Each starts where the one `depth` before it is needed; none leaves its phase."""
    needed = {node: needed_at(node, places) for node in gathers}
    in_order = sorted(gathers, key=needed.__getitem__)
    reason = f"{depth} gather{'s' * (depth != 1)} ahead of where it is needed"
    for at, node in enumerate(in_order):
        place = needed[in_order[at - depth]] if at >= depth else 0.0
        start_at(places, node, place - AHEAD)
        decide(Decision(node.name, "start", reason, nbytes(node)))


def second_group(gathers: Sequence[fx.Node], decide: Decide) -> None:
    for node in gathers:
        group = str(node.args[3]).removesuffix(SECOND_GROUP)
        node.args = (*node.args[:3], group + SECOND_GROUP, *node.args[4:])
        decide(Decision(node.name, "regroup", "gathers do not wait in line behind reductions", nbytes(node)))


def keep_gathered(gathers: Sequence[fx.Node], decide: Decide) -> None:
    """The backward reads what the forward gathered."""
    kept = {node.args[6]: node for node in gathers if phase(node) == "forward" and node.args[6]}
    for node in gathers:
        first = kept.get(node.args[6])
        if phase(node) == "forward" or first is None:
            continue
        pairs = [(wait_of(node, at), wait_of(first, at)) for at in range(len(node.args[1]))]  # type: ignore[arg-type]
        if all(old is not None and new is not None for old, new in pairs):
            for old, new in pairs:
                old.replace_all_uses_with(new)  # type: ignore[union-attr]
            decide(Decision(node.name, "leave out", f"the backward reads what {first.name} gathered", nbytes(node)))


def gather_again(graph: fx.Graph, gathers: Sequence[fx.Node], places: Places, decide: Decide) -> None:
    """What the backward reads of these gathers of the forward is gathered there once more."""
    for node in gathers:
        new = _again(graph, node, places)
        if new is not None:
            decide(Decision(new.name, "gather again", f"{node.name} is freed behind the forward", nbytes(new)))


def freed(gathers: Sequence[fx.Node]) -> list[fx.Node]:
    """The gathers of the forward whose parameters no other one gathers for the backward."""
    again = {node.args[6] for node in gathers if phase(node) != "forward"}
    return [node for node in gathers if phase(node) == "forward" and node.args[6] not in again]


def _again(graph: fx.Graph, gather: fx.Node, places: Places) -> fx.Node | None:
    """The new gather; None where the backward reads nothing of `gather`."""
    derived = [gather]
    for node in derived:
        derived += [
            user for user in node.users
            if user not in derived and phase(user) == "forward"
            and (is_wait(user) or is_getitem(user) or is_view(user) or packet_name(user) in COPYING_OUT)
        ]  # fmt: skip
    late = [user for node in derived for user in node.users if user.op == "call_function" and phase(user) == "backward"]
    if not late:
        return None
    first = min(late, key=places.__getitem__)
    new: dict[fx.Node, fx.Node] = {}

    def twin(node: fx.Node) -> fx.Node:
        if node not in new:
            args = fx.node.map_arg(node.args, lambda one: twin(one) if one in derived else one)
            kwargs = fx.node.map_arg(node.kwargs, lambda one: twin(one) if one in derived else one)
            new[node] = call(node, node.target, *args, name=f"{node.name}_again", **kwargs)  # type: ignore[arg-type]
            new[node].meta["phase"] = phase(first)
            places[new[node]] = places[first] - AHEAD
        return new[node]

    with graph.inserting_before(first):
        for user in dict.fromkeys(late):
            user.args = fx.node.map_arg(user.args, lambda one: twin(one) if one in derived else one)
            user.kwargs = fx.node.map_arg(user.kwargs, lambda one: twin(one) if one in derived else one)
    return new[gather]
