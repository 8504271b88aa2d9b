"""A step of one rank as its collectives and what is computed between them, in the order in which the program asked for both.

    schedule   = the µs of each op of a trace, in order, and its collectives
    collective = what it exchanges, and places: from where it could start (its operands are there), where it starts, where
                 computing waits for it, and the ops that read what it gave

A place is a number of ops that are done. Places come from the trace: operands are there after the ops that make them, and
computing must wait no earlier than before the first op that works on what was received.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import fx

from tracefuse.optimizers.ops import is_getitem, is_view
from tracefuse.optimizers.trace import Phase, Trace, nbytes, origin, phase

NAMESPACE = "tracefuse_ranks"
"""Of the operators that stand for collectives, `kind(sent, received, op, group, ranks, waits, serves)`, and of `wait`."""

Role = Literal["gather", "reduction", "other"]
"""Gathers parameters that each rank holds a part of; reduces gradients; anything else, as tensor parallel layers exchange."""


_LAYING_OUT = {"cat", "_to_copy", "constant_pad_nd", "clone", "copy", "_foreach_copy", "empty", "empty_strided"}
"""What puts the shards of parameters into one tensor, in the dtype that is gathered."""


@dataclass(frozen=True)
class Part:
    """A tensor that a collective sends: its bytes, and from which place on it is there."""

    nbytes: int
    ready: int


@dataclass(frozen=True)
class Collective:
    """One collective. `nbytes` are those of the whole tensor, `ranks` how many exchange it.

    `waits` is where computing waits as the program was recorded, and `needed` where it has to at the latest: before the first
    op that works on what was received. `read_at` are the places of all that read it, or a part that was copied out of it.
    """

    name: str
    kind: str
    role: Role
    group: str
    ranks: int
    nbytes: int
    module: str
    serves: str
    phase: Phase
    parts: tuple[Part, ...]
    starts: int
    waits: int
    needed: int
    read_at: tuple[int, ...]

    @property
    def ready(self) -> int:
        """The place from which all that it sends is there."""
        return max((part.ready for part in self.parts), default=0)

    @property
    def held_until(self) -> int:
        return max(self.read_at, default=self.needed)


@dataclass(frozen=True)
class Schedule:
    """`us` are the times of a step's ops in order, 0 for what does not work; `how` says where they come from, and
    `backward_from` is the place where the forward ends."""

    us: tuple[float, ...]
    collectives: tuple[Collective, ...]
    how: str
    backward_from: int

    @property
    def inner(self) -> int:
        """How many ranks share the work on one batch, as tensor parallel ones do: the largest group that exchanges anything
        but parameters and gradients; 1 where those are the same ranks."""
        data = {one.group for one in self.collectives if one.role != "other"}
        return max((one.ranks for one in self.collectives if one.group not in data), default=1)

    @property
    def computing_us(self) -> float:
        return sum(self.us)


def schedule_of(trace: Trace, us: Mapping[str, float], how: str) -> Schedule:
    """The schedule of a whole step's trace; `us` are the times of its ops by name, in which collectives take none."""
    ops = trace.ops
    place = {node: at for at, node in enumerate(ops)}
    found = [_collective(node, place) for node in ops if is_collective(node)]
    times = tuple(0.0 if is_of_ranks(node) else us.get(node.name, 0.0) for node in ops)
    backward = (at for at, node in enumerate(ops) if phase(node) != "forward")
    return Schedule(times, tuple(found), how, next(backward, len(ops)))


def is_of_ranks(node: fx.Node) -> bool:
    """Whether an op is a collective, or the wait for one."""
    return getattr(node.target, "namespace", "") == NAMESPACE


def is_collective(node: fx.Node) -> bool:
    """Whether an op is a collective, and not the wait for one."""
    return is_of_ranks(node) and len(node.args) > 1


def gathers_parameters(node: fx.Node) -> bool:
    """Whether a collective gathers inputs of the step, as parameters of which each rank holds a part."""
    sent = node.args[0]
    return kind_of(node) in ("all_gather", "gather") and bool(sent) and all(is_of_inputs(one) for one in sent)  # type: ignore[union-attr, arg-type]


def reduces_gradients(node: fx.Node) -> bool:
    """Whether a collective is a reduction that serves parameters."""
    return bool(node.args[-1]) and kind_of(node) in ("all_reduce", "reduce_scatter") and not gathers_parameters(node)


def kind_of(node: fx.Node) -> str:
    """ "all_reduce", "wait"."""
    return node.target.__name__.partition(".")[0]  # type: ignore[union-attr]


def _collective(node: fx.Node, place: Mapping[fx.Node, int]) -> Collective:
    sent, received, _, group, ranks, waits_at_once, serves = node.args
    end = len(place)
    gathers = gathers_parameters(node)
    role: Role = "gather" if gathers else "reduction" if reduces_gradients(node) else "other"
    readers = [place[one] for one in _workers(node, through_wait=True) if one in place]
    waits = [place[one] for one in _workers(node, through_wait=False) if is_of_ranks(one) and one in place]
    needed = min(readers, default=end)
    return Collective(
        name=node.name,
        kind=kind_of(node),
        role=role,
        group=group,
        ranks=len(ranks),
        nbytes=max(sum(nbytes(one) for one in sent), sum(nbytes(one) for one in received)),
        module=origin(node).module,
        serves=serves,
        phase=phase(node),
        parts=tuple(Part(nbytes(one), 0 if gathers else _ready(one, place)) for one in sent),
        starts=place[node],
        waits=place[node] if waits_at_once else min(waits, default=needed),
        needed=needed,
        read_at=tuple(sorted({place[one] for one in _lasting(node) if one in place})),
    )


def _ready(node: fx.Node, place: Mapping[fx.Node, int]) -> int:
    """After how many ops a value is there; an input is from the beginning."""
    return place[node] + 1 if node in place else 0


def is_of_inputs(node: fx.Node) -> bool:
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
    return is_view(node) or is_getitem(node) or op_name_of(node) in _LAYING_OUT


def op_name_of(node: fx.Node) -> str:
    """ "cat" of `aten.cat.default`."""
    packet = getattr(node.target, "overloadpacket", None)
    return "" if packet is None else packet.__name__


def readers_of(node: fx.Node) -> list[fx.Node]:
    """The ops that work on what a collective gave, behind views and the wait for it."""
    return [one for one in _workers(node, through_wait=True) if one.op == "call_function"]


def _workers(node: fx.Node, through_wait: bool) -> Iterator[fx.Node]:
    """The ops that read what a collective gave, behind views, and behind the wait for it where that is asked for."""
    for user in node.users:
        if is_getitem(user) or is_view(user) or (through_wait and is_of_ranks(user) and not is_collective(user)):
            yield from _workers(user, through_wait)
        else:
            yield user


def _lasting(node: fx.Node) -> Iterator[fx.Node]:
    for one in _workers(node, through_wait=True):
        yield one
        if op_name_of(one) in ("split_with_sizes_copy", "_to_copy"):
            yield from _workers(one, through_wait=True)
