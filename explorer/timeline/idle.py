"""Idle time of one GPU as gaps with one cause each. `tracefuse.timeline.gaps` finds the causes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeVar

from tracefuse.timeline.events import Event
from tracefuse.timeline.host_calls import Host
from tracefuse.timeline.spans import NONE

T = TypeVar("T")


def summed(parts: Iterable[tuple[T, int]]) -> Counter[T]:
    """The numbers of all parts by what they are of."""
    found: Counter[T] = Counter()
    for of, number in parts:
        found[of] += number
    return found


class Stretch(NamedTuple):
    """A gap in numbers: `operator`, `call`, `before` and `after` are rows of the run's events, `named` the number of one of
    its host's named stretches, `thread` the thread of the host that held the GPU up; `NONE` is nothing."""

    start_ns: int
    end_ns: int
    cause: str
    operator: int
    call: int
    named: int
    thread: int
    before: int
    after: int

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


class Gap(NamedTuple):
    """Idle time with one cause. `stream` is None where all streams of the GPU were idle.

    `operator` is the host's outermost operator that ran or waited meanwhile, `call` the host's event that held it up (None:
    nothing did), `before` and `after` are what the GPU had done and did next (None at the window's edges). `within` is the
    range or frame whose name is the cause, or the innermost range that somebody named around it, "" in none.
    """

    device: int
    stream: int | None
    start_ns: int
    end_ns: int
    cause: str
    operator: str
    call: Event | None
    before: Event | None
    after: Event | None
    within: str = ""

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class Idle:
    """One GPU, or one stream of it, in a window: `busy_ns` counts every moment once, `work_ns` every record."""

    device: int
    stream: int | None
    start_ns: int
    end_ns: int
    busy_ns: int
    work_ns: int
    stretches: tuple[Stretch, ...]
    host: Host = field(repr=False, compare=False)

    @property
    def window_ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def overlap_ns(self) -> int:
        """What records took while another one was running."""
        return self.work_ns - self.busy_ns

    @cached_property
    def by_cause(self) -> dict[str, int]:
        """Nanoseconds by cause, the longest first; they add up to the window without what was busy."""
        return dict(summed((one.cause, one.duration_ns) for one in self.stretches).most_common())

    @cached_property
    def gaps(self) -> tuple[Gap, ...]:
        """The same stretches with the events that they are about."""
        return tuple(map(self._gap, self.stretches))

    def _gap(self, one: Stretch) -> Gap:
        ends = self._event(one.call), self._event(one.before), self._event(one.after)
        times = one.start_ns, one.end_ns, one.cause
        return Gap(self.device, self.stream, *times, self.operator(one), *ends, self.within(one))

    def _event(self, row: int) -> Event | None:
        return None if row == NONE else self.host.events[row]

    def operator(self, one: Stretch) -> str:
        return "" if one.operator == NONE else self.host.events.name_at(one.operator)

    def called(self, one: Stretch) -> str:
        """What the host's record is called that held the GPU up."""
        return "" if one.call == NONE else self.host.events.name_at(one.call)

    def within(self, one: Stretch) -> str:
        if one.named != NONE:
            return self.host.named[one.named].name
        nested = self.host.ranges.get(one.thread)
        if nested is None:
            return ""
        row = max(nested.shares(one.start_ns, one.end_ns), key=lambda share: share[1])[0]
        return "" if row == NONE else self.host.events.name_at(row)
