"""The time of a schedule on a described machine: one stream that computes, and one that talks for each process group.

A collective begins when the program starts it and what its group has to do before is over. Where several groups talk at once
they share the link, each at an equal part of its bandwidth; a call's latency is its own. Computing goes on until it waits, and
beside a collective at the share of its speed that the machine says: at all of it where nothing is known. The host is taken to
be ahead, and no rank to be late.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from tracefuse.optimizers.overlap.links import Mesh
from tracefuse.optimizers.overlap.options import Options, chosen
from tracefuse.optimizers.overlap.schedule import Collective, Schedule


@dataclass(frozen=True)
class Timed:
    """A collective as modelled: when it began and ended, in µs from the step's begin, and for how long computing waited."""

    collective: Collective
    ranks: int
    began_us: float
    ended_us: float
    exposed_us: float


@dataclass(frozen=True)
class Modelled:
    """A step on a described machine, in µs. `latency_only_us` is the step with infinite bandwidth, `computing_us` what no
    machine with this GPU can go below. `held_nbytes` are the most bytes that gathered parameters and buckets take at once."""

    options: Options
    machine: str
    how: str
    step_us: float
    computing_us: float
    latency_only_us: float
    held_nbytes: int
    collectives: tuple[Timed, ...]

    @property
    def exposed_us(self) -> float:
        """For how long computing waits for collectives."""
        return sum(one.exposed_us for one in self.collectives)

    @property
    def transfer_us(self) -> float:
        """What the collectives take together."""
        return sum(one.ended_us - one.began_us for one in self.collectives)

    def by_module(self) -> dict[tuple[str, str, str], float]:
        """The exposed µs by kind of collective, module and phase, the most first."""
        found: dict[tuple[str, str, str], float] = defaultdict(float)
        for one in self.collectives:
            found[one.collective.kind, one.collective.module, one.collective.phase] += one.exposed_us
        return dict(sorted(found.items(), key=lambda row: -row[1]))


def modelled(schedule: Schedule, machine: Mesh, options: Options | None = None) -> Modelled:
    """The step of `schedule` with `options` on `machine`.

    Parameters and gradients are exchanged by all of its ranks, or of ranks that share the work on a batch, as tensor parallel
    ones, by one of each such group. Those groups stay as large as they were recorded, and so do all tensors.
    """
    options = options or Options()
    made = chosen(schedule, options)
    step_us, timed = _run(made, machine, options, 1.0)
    return Modelled(
        options, machine.text, schedule.how, step_us, schedule.computing_us, _run(made, machine, options, 0.0)[0],
        _held(made), timed,
    )  # fmt: skip


def _run(schedule: Schedule, machine: Mesh, options: Options, share: float) -> tuple[float, tuple[Timed, ...]]:
    """The step, with transfers of so much of their time."""
    starts, waits = defaultdict(list), defaultdict(list)
    for at, one in enumerate(schedule.collectives):
        starts[one.starts].append(at)
        waits[max(one.waits, one.starts)].append(at)
    wire, now_us = _Wire(), 0.0
    exposed: dict[int, float] = {}
    ranks = [_ranks(one, schedule, machine) for one in schedule.collectives]
    for place in range(len(schedule.us) + 1):
        for at in starts[place]:
            one = schedule.collectives[at]
            link = machine.link(ranks[at] if one.role == "other" else machine.ranks)
            latency_us, transfer_us = link.parts_us(one.kind, one.nbytes, ranks[at])
            group = f"{one.group} for gathers" if options.second_group and one.role == "gather" else one.group
            wire.run(now_us)
            wire.add(at, group, latency_us, share * transfer_us)
        for at in waits[place]:
            ended_us = wire.end_of(at)
            exposed[at] = max(0.0, ended_us - now_us)
            now_us = max(now_us, ended_us)
        if place < len(schedule.us):
            now_us = wire.computed(now_us, schedule.us[place], machine.beside)
    timed = (
        Timed(one, ranks[at], wire.began[at], wire.ended[at], exposed[at])
        for at, one in enumerate(schedule.collectives)
    )
    return now_us, tuple(timed)


def _ranks(one: Collective, schedule: Schedule, machine: Mesh) -> int:
    """How many ranks exchange it on the machine."""
    return min(one.ranks, machine.ranks) if one.role == "other" else max(1, machine.ranks // schedule.inner)


def _held(schedule: Schedule) -> int:
    """The most bytes at once of what gathers gave, until its last reader, and of what reductions send, from its first part."""
    changes = [0] * (len(schedule.us) + 2)
    for one in schedule.collectives:
        if one.role != "other":
            first = one.starts if one.role == "gather" else min((part.ready for part in one.parts), default=one.starts)
            last = max(one.waits, one.held_until if one.role == "gather" else one.waits)
            changes[min(first, one.starts)] += one.nbytes
            changes[min(last, len(schedule.us)) + 1] -= one.nbytes
    return max(accumulate(changes))


class _Wire:
    """What the process groups have to do, one after another in each, and what of that is done when."""

    def __init__(self) -> None:
        self.now_us = 0.0
        self.queues: Mapping[str, deque[list[float]]] = defaultdict(deque)
        self.began: dict[int, float] = {}
        self.ended: dict[int, float] = {}

    def add(self, number: int, group: str, latency_us: float, transfer_us: float) -> None:
        self.queues[group].append([number, latency_us, transfer_us])
        if len(self.queues[group]) == 1:
            self.began[number] = self.now_us

    def end_of(self, number: int) -> float:
        """When a call is over, for which the others go on as far."""
        while number not in self.ended:
            self._until_next(float("inf"))
        return self.ended[number]

    def computed(self, now_us: float, us: float, beside: float) -> float:
        """When computing that takes `us` alone is over if it begins now; `beside` is the share of its speed that it keeps
        while any group has something to do."""
        if beside == 1.0:
            return now_us + us
        self.run(now_us)
        while us > 1e-9 * max(1.0, self.now_us) and any(self.queues.values()):
            began_us = self.now_us
            self._until_next(began_us + us / beside if beside else float("inf"))
            us -= beside * (self.now_us - began_us)
        return self.now_us + max(us, 0.0)

    def run(self, until_us: float) -> None:
        """Let all groups go on until then."""
        while self.now_us < until_us and any(self.queues.values()):
            self._until_next(until_us)
        self.now_us = max(self.now_us, until_us)

    def _until_next(self, until_us: float) -> None:
        """Go on until something ends, a latency or a call."""
        heads = [queue[0] for queue in self.queues.values() if queue]
        talking = [head for head in heads if head[1] <= 0]
        left = [head[1] if head[1] > 0 else head[2] * len(talking) for head in heads]
        step_us = min(*left, until_us - self.now_us)
        ending = [head for head, us in zip(heads, left, strict=True) if us <= step_us]
        self.now_us += step_us
        for head in heads:
            at, by = (1, step_us) if head[1] > 0 else (2, step_us / len(talking))
            head[at] = 0.0 if head in ending else head[at] - by
        for queue in self.queues.values():
            if queue and queue[0][1] <= 0 and queue[0][2] <= 0:
                self.ended[int(queue.popleft()[0])] = self.now_us
                if queue:
                    self.began[int(queue[0][0])] = self.now_us
