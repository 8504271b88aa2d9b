"""What collectives exchange and serve: what they send, whether they gather parameters or reduce gradients, and who reads them.

    recorded   (whole,) = all_gather([shard], [received], "", group, ranks, waits, "0.weight"); (whole,) = wait([whole])
    issued     whole = all_gather_into_tensor(shard, 8, group); whole = wait_tensor(whole)

Those of a recording say which parameters they serve; those that a graph of `torch.compile` issues itself do not.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from tracefuse.optimizers.costs.cost import packet_name
from tracefuse.optimizers.ops import is_collective, is_getitem, is_recorded, is_view, is_wait

COPYING_OUT = {"split_with_sizes_copy", "_to_copy"}
"""What copies parameters out of what a gather gave."""

_GATHERS = {"all_gather", "gather", "all_gather_into_tensor", "all_gather_into_tensor_coalesced"}
_LAYING_OUT = {"cat", "_to_copy", "constant_pad_nd", "clone", "copy", "_foreach_copy", "empty", "empty_strided"}
"""What puts the shards of parameters into one tensor, in the dtype that is gathered."""


def sent_by(node: fx.Node) -> list[fx.Node]:
    """The tensors that a collective sends."""
    sent = node.args[0]
    return [sent] if isinstance(sent, fx.Node) else list(sent)  # type: ignore[arg-type]


def gathers_parameters(node: fx.Node) -> bool:
    """Whether an op gathers inputs of the step, as parameters of which each rank holds a part."""
    is_gather = is_collective(node) and packet_name(node) in _GATHERS
    return is_gather and bool(sent_by(node)) and all(map(_is_of_inputs, sent_by(node)))


def reduces_gradients(node: fx.Node) -> bool:
    """Whether an op is a recorded reduction that serves parameters."""
    is_reduction = is_recorded(node) and packet_name(node) in ("all_reduce", "reduce_scatter")
    return is_reduction and bool(node.args[-1]) and not gathers_parameters(node)


def _is_of_inputs(node: fx.Node) -> bool:
    """Whether a value is inputs of the step, joined, cast or seen otherwise, as the shards that a gather sends are."""
    above = [node]
    while above:
        one = above.pop()
        if one.op == "call_function":
            if not _lays_out(one):
                return False
            above += one.all_input_nodes
    return True


def _lays_out(node: fx.Node) -> bool:
    """Whether an op, or all of a kernel that stands for several, computes no other numbers than it reads."""
    body = getattr(node.target, "body", None)
    if body is not None:
        return all(map(_lays_out, body.ops))
    return is_view(node) or is_getitem(node) or packet_name(node) in _LAYING_OUT


# --- what they give ---------------------------------------------------------------------------------------------------


def workers(node: fx.Node, through_wait: bool) -> Iterator[fx.Node]:
    """The ops that read what a collective gave, behind views, and behind the wait for it where that is asked for."""
    for user in node.users:
        if is_getitem(user) or is_view(user) or (through_wait and is_wait(user)):
            yield from workers(user, through_wait)
        else:
            yield user


def needed_at(node: fx.Node, places: dict[fx.Node, float]) -> float:
    """The place of the first op that works on what a collective gave, behind views and the wait for it; its own where none
    does."""
    readers = (places[one] for one in workers(node, through_wait=True) if one.op == "call_function")
    return min(readers, default=places[node])


def passing_on(graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
    """The ops that do nothing but wait for collectives or show what they gave, each with these collectives."""
    found: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        known = [{one} if is_collective(one) else found.get(one) for one in node.all_input_nodes]
        if is_wait(node) or ((is_getitem(node) or is_view(node)) and None not in known):
            found[node] = set().union(*(one for one in known if one))
    return found
