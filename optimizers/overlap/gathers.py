"""Gathers of parameters: started earlier, in a process group of their own, once a step, or again in the backward."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from tracefuse.optimizers.ops import is_getitem, is_view
from tracefuse.optimizers.overlap.order import AHEAD, Places, is_passing_on, start_at, wait_of
from tracefuse.optimizers.overlap.schedule import gathers_parameters, is_collective, op_name_of, readers_of
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.trace import call, nbytes, phase

SECOND_GROUP = " for gathers"
"""Behind the name of a group: another one of the same ranks."""

_LASTING = {"split_with_sizes_copy", "_to_copy"}
"""What copies parameters out of what a gather gave."""


def gathers_in(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "call_function" and is_collective(n) and gathers_parameters(n)]


def prefetch(gathers: Sequence[fx.Node], places: Places, depth: int, decide: Decide) -> None:
    """Each starts where the one `depth` before it is waited for; none leaves its phase."""
    needed = {node: min((places[one] for one in readers_of(node)), default=places[node]) for node in gathers}
    for at, node in enumerate(gathers):
        place = needed[node] if depth == 0 else needed[gathers[at - depth]] if at >= depth else 0.0
        place = min(place, needed[node])
        start_at(places, node, place - AHEAD)
        decide(Decision(node.name, "start", f"{depth} gathers ahead of where it is needed", nbytes(node)))


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


def gather_again(graph: fx.Graph, gathers: Sequence[fx.Node], places: Places, decide: Decide) -> list[fx.Node]:
    """What the backward reads of a gather of the forward is gathered there once more. The new gathers."""
    again = {node.args[6] for node in gathers if phase(node) != "forward"}
    found = []
    for node in gathers:
        if phase(node) == "forward" and node.args[6] not in again:
            new = _again(graph, node, places)
            found += new
            for one in new:
                decide(Decision(one.name, "gather again", f"{node.name} is freed behind the forward", nbytes(one)))
    return found


def _again(graph: fx.Graph, gather: fx.Node, places: Places) -> list[fx.Node]:
    derived = [gather]
    for node in derived:
        derived += [
            user for user in node.users
            if user not in derived and phase(user) == "forward"
            and (is_passing_on(user) or is_getitem(user) or is_view(user) or op_name_of(user) in _LASTING)
        ]  # fmt: skip
    late = [user for node in derived for user in node.users if user.op == "call_function" and phase(user) == "backward"]
    if not late:
        return []
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
    return [new[gather]]
