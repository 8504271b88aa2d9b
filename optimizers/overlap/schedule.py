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

from tracefuse.optimizers.costs.cost import packet_name
from tracefuse.optimizers.ops import is_of_ranks, is_recorded, is_wait
from tracefuse.optimizers.overlap.collectives import COPYING_OUT, gathers_parameters, reduces_gradients, workers
from tracefuse.optimizers.trace import Phase, Trace, nbytes, origin, phase

Role = Literal["gather", "reduction", "other"]
"""Gathers parameters that each rank holds a part of; reduces gradients; anything else, as tensor parallel layers exchange."""


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
    found = [_collective(node, place) for node in ops if is_recorded(node)]
    times = tuple(0.0 if is_of_ranks(node) else us.get(node.name, 0.0) for node in ops)
    backward = (at for at, node in enumerate(ops) if phase(node) != "forward")
    return Schedule(times, tuple(found), how, next(backward, len(ops)))


def _collective(node: fx.Node, place: Mapping[fx.Node, int]) -> Collective:
    sent, received, _, group, ranks, waits_at_once, serves = node.args
    end = len(place)
    gathers = gathers_parameters(node)
    role: Role = "gather" if gathers else "reduction" if reduces_gradients(node) else "other"
    readers = [place[one] for one in workers(node, through_wait=True) if one in place]
    waits = [place[one] for one in workers(node, through_wait=False) if is_wait(one) and one in place]
    needed = min(readers, default=end)
    return Collective(
        name=node.name,
        kind=packet_name(node),
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


def _lasting(node: fx.Node) -> Iterator[fx.Node]:
    for one in workers(node, through_wait=True):
        yield one
        if packet_name(one) in COPYING_OUT:
            yield from workers(one, through_wait=True)
