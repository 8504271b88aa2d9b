"""What the host did while a GPU was idle: which calls block it, and which operators ran on each thread, as spans. Pure."""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from tracefuse.timeline.events import Event

Interval = tuple[int, int]
Piece = tuple[int, int, Event]

SYNCHRONIZATION, ALLOCATION, LOADING = "synchronization", "memory allocation", "kernel loading"
PAGEABLE, SLOW_LAUNCH = "pageable copy", "slow launch call"

# A copy of more than this from pageable memory is staged, and its call returns when that is done: "API synchronization
# behavior", CUDA Runtime API. What is smaller is a value that was read back.
STAGED_NBYTES = 64 << 10
# As long as so many bytes take at the 1.3 GB/s that were measured from a GPU to pageable memory, where no bytes are recorded.
STAGED_NS = 50_000
# A launch takes 5 to 10 µs, some 40 at first (tests/timelines): ten times the most is a launch that loads or waits.
SLOW_LAUNCH_NS = 400_000

_BLOCKING = (
    (SYNCHRONIZATION, re.compile(r"(cu|cuda|hip)(Stream|Device|Event|Ctx)Synchronize|(cuda|hip)Memcpy(2D|3D|WithStream)?$")),
    (ALLOCATION, re.compile(r"(cuda|hip)(Malloc|Free)(Host|Pitch|Array|Managed)?$|(cuda|hip)Host(Alloc|Register|Unregister)$"
                            r"|cuMem(Alloc|Free|Create|Map|Unmap|Release|SetAccess|AddressReserve|AddressFree)(_v2)?$")),
    (LOADING, re.compile(r"cu(Module|Library)(Load|Unload)|cu(ModuleGet|LibraryGet|KernelGet)Function")),
)  # fmt: skip
_OVERHEAD = "overhead"


def blocks(event: Event) -> str:
    """The cause of idle time that a call of the host is by itself; "" for a launch or an operator."""
    if not event.is_cuda_call:
        return ""
    return next((cause for cause, names in _BLOCKING if names.match(event.name)), "")


def is_pageable(work: Event) -> bool:
    """Whether a copy of the GPU goes to or from pageable memory, and is large enough to be staged."""
    if not work.on_gpu or "Pageable" not in work.name:
        return False
    return work.nbytes > STAGED_NBYTES if work.nbytes else work.duration_ns > STAGED_NS


class Spans:
    """Disjoint intervals, sorted; of events that overlap, what begins later has only what is left of it."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.events: list[Event] = []
        for event in sorted(events, key=lambda one: (one.start_ns, -one.duration_ns)):
            start = max(event.start_ns, self.ends[-1]) if self.ends else event.start_ns
            if event.end_ns > start:
                self.starts.append(start)
                self.ends.append(event.end_ns)
                self.events.append(event)

    def at(self, time_ns: int) -> Event | None:
        """The event whose interval holds `time_ns`."""
        index = bisect.bisect_right(self.starts, time_ns) - 1
        return self.events[index] if index >= 0 and time_ns < self.ends[index] else None

    def cut(self, rest: Sequence[Interval]) -> tuple[list[Piece], list[Interval]]:
        """What of the intervals `rest` these cover, with the event that does, and what is left."""
        pieces, left = [], []
        for start, end in rest:
            for index in range(bisect.bisect_right(self.ends, start), len(self.starts)):
                if self.starts[index] >= end:
                    break
                begin, stop = max(self.starts[index], start), min(self.ends[index], end)
                if begin > start:
                    left.append((start, begin))
                pieces.append((begin, stop, self.events[index]))
                start = stop
            if start < end:
                left.append((start, end))
        return pieces, left

    def total_ns(self, start_ns: int, end_ns: int) -> int:
        """How much of an interval these cover."""
        return sum(end - start for start, end, _ in self.cut([(start_ns, end_ns)])[0])


class Thread:
    """One thread of the host: `blocking` are the calls that hold it up, `running` its outermost operators and calls."""

    def __init__(self, events: Sequence[Event], causes: dict[Event, str]) -> None:
        self.blocking = Spans(event for event in events if event in causes)
        self.running = Spans(events)
        self.operators = Spans(event for event in events if not event.is_cuda_call)


class Host:
    """The host's side of a run. `causes` has why each blocking call blocks, `calls` the CUDA call of each correlation."""

    def __init__(self, events: Sequence[Event]) -> None:
        host = [event for event in events if not event.on_gpu and not event.is_range]
        self.overhead = Spans(event for event in host if event.category == _OVERHEAD)
        self.calls = {event.correlation: event for event in host if event.is_cuda_call and event.correlation}
        self.causes = {event: cause for event in host if (cause := blocks(event))}
        for work in events:
            call = self.calls.get(work.correlation) if work.on_gpu else None
            if call is not None and is_pageable(work):
                self.causes[call] = PAGEABLE
            elif call is not None and "DtoH" in work.name and "Pageable" in work.name:
                self.causes[call] = (
                    SYNCHRONIZATION  # The call returns once the value is there, after all that was queued.
                )
            elif call is not None and call.duration_ns >= SLOW_LAUNCH_NS:
                self.causes.setdefault(call, SLOW_LAUNCH)
        by_thread: dict[int, list[Event]] = defaultdict(list)
        for event in host:
            if event.category != _OVERHEAD:
                by_thread[event.resource].append(event)
        self.threads = {thread: Thread(found, self.causes) for thread, found in by_thread.items()}
        launching = {call.resource for work in events if work.on_gpu and (call := self.calls.get(work.correlation))}
        self.launching = sorted(launching)

    def operator(self, event: Event) -> str:
        """The outermost operator that `event` of the host runs in, "" outside of any."""
        thread = self.threads.get(event.resource)
        found = thread.operators.at(event.start_ns) if thread else None
        return found.name if found else ""
