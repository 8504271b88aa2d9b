"""Why a GPU did nothing: the idle time of a window, cut into gaps that have exactly one cause each. Pure.

An idle stretch ends where the GPU starts something; whoever launched that decides. Where the call came in time (it had
returned when the GPU ran dry), the GPU itself took so long. Where it came late, what the host did until then is the cause,
cut where that changes: it was blocked in a call, it ran operators, it did nothing.

A host that is held up loses its lead: what it does next, and the launch after that, would have been hidden behind earlier
work. So this time, up to the time for which it was held up, has the cause of that, until a launch comes in time again.

Times are integers of nanoseconds, so that for each GPU, exactly: busy (a union) + gaps = window, and
sum of the records' times - overlap + gaps = window.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tracefuse.timeline.events import Event
from tracefuse.timeline.host_calls import (
    ALLOCATION,
    LOADING,
    PAGEABLE,
    SLOW_LAUNCH,
    SYNCHRONIZATION,
    Host,
    Interval,
    Spans,
)

HOST, IDLE, DEPENDENCY = "host-bound launch", "host idle", "stream dependency"
LATENCY, OVERHEAD = "launch latency", "profiler overhead"
START, END, UNKNOWN = "start of the window", "end of the window", "unknown"

CAUSES = {
    SYNCHRONIZATION: "the host waited for the GPU, so that nothing was queued when the GPU was done",
    PAGEABLE: "a copy to or from pageable memory held the host until it was done",
    ALLOCATION: "the host allocated or freed memory through the driver",
    LOADING: "the host loaded a kernel's code: its first use",
    HOST: "the host was still running operators: the launch came after the GPU had run dry",
    IDLE: "no operator ran on the host: Python, input data, or something outside of torch",
    SLOW_LAUNCH: "the launch call itself took long, as the first launch of a kernel does",
    DEPENDENCY: "launched in time, while another stream was at work: it waited for that, or for room",
    LATENCY: "launched in time: what the GPU needs between two kernels",
    OVERHEAD: "the profiler itself, as it says",
    START: "nothing had been launched yet",
    END: "nothing was launched any more",
    UNKNOWN: "launched in time, or by a call that was not recorded: the recording does not say",
}
"""Every cause that a gap can have, in a sentence."""

# Between two operators eager Python needs some 10 µs (tests/bench/launch.py): ten times that is no operator's doing.
LONG_NS = 100_000
# An operator launches in tens of µs, in some hundred where it does so first after a wait (tests/timelines). One that takes a
# millisecond computes on the host, or sets something up: it is a cause of its own, whatever was before it.
COMPUTING_NS = 1_000_000
# On an H200 a kernel starts at most 10 µs after its launch has returned, if the GPU is idle (tests/timelines).
LATENCY_NS = 20_000


class Gap(NamedTuple):
    """Idle time with one cause. `stream` is None where all streams of the GPU were idle.

    `operator` is the host's outermost operator that ran or waited meanwhile, `call` the host's event that held it up (None:
    nothing did), `before` and `after` are what the GPU had done and did next (None at the window's edges).
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
    gaps: tuple[Gap, ...]

    @property
    def window_ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def overlap_ns(self) -> int:
        """What records took while another one was running."""
        return self.work_ns - self.busy_ns

    @property
    def by_cause(self) -> dict[str, int]:
        """Nanoseconds by cause, the longest first; they add up to the window without what was busy."""
        found: dict[str, int] = defaultdict(int)
        for gap in self.gaps:
            found[gap.cause] += gap.duration_ns
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def idle_of_devices(events: Sequence[Event], window: Interval, host: Host | None = None) -> tuple[Idle, ...]:
    """The idle time of each GPU that did anything in `window` (ns), all of its streams together. `host` is that of `events`,
    where it is known already."""
    host, works = host or Host(events), _works(events, window)
    devices = sorted({work.device for work in works})
    return tuple(
        _idle(device, None, [w for w in works if w.device == device], window, host, None) for device in devices
    )


def idle_of_streams(events: Sequence[Event], window: Interval, host: Host | None = None) -> tuple[Idle, ...]:
    """The idle time of each stream between its first record in `window` (ns) and its last; `host` as above."""
    host, works, found = host or Host(events), _works(events, window), []
    for device, stream in sorted({(work.device, work.resource) for work in works}):
        own = [w for w in works if (w.device, w.resource) == (device, stream)]
        others = Spans(w for w in works if w.device == device and w.resource != stream)
        span = max(own[0].start_ns, window[0]), min(max(w.end_ns for w in own), window[1])
        found.append(_idle(device, stream, own, span, host, others))
    return tuple(found)


def _works(events: Iterable[Event], window: Interval) -> list[Event]:
    found = [e for e in events if e.on_gpu and not e.is_range and e.end_ns > window[0] and e.start_ns < window[1]]
    return sorted(found, key=lambda one: one.start_ns)


def _idle(
    device: int, stream: int | None, works: list[Event], window: Interval, host: Host, others: Spans | None
) -> Idle:
    busy = Spans(works)
    pieces, idle = busy.cut([window])
    starting = {start: at for at, start in enumerate(busy.starts)}
    gaps: list[Gap] = []
    lead = _Lead(host)
    for start, end in idle:
        at = starting.get(end)
        after = None if at is None else busy.events[at]
        before = busy.at(start - 1)
        for piece in _causes(start, end, before, after, host, others, lead):
            gaps.append(Gap(device, stream, piece.start_ns, piece.end_ns, *piece.why, before, after))
    work_ns = sum(min(w.end_ns, window[1]) - max(w.start_ns, window[0]) for w in works)
    return Idle(device, stream, *window, sum(end - start for start, end, _ in pieces), work_ns, tuple(gaps))


# --- one stretch ------------------------------------------------------------------------------------------------------


class _Piece(NamedTuple):
    start_ns: int
    end_ns: int
    cause: str
    operator: str
    call: Event | None

    @property
    def why(self) -> tuple[str, str, Event | None]:
        return self.cause, self.operator, self.call

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


class _Lead:
    """By how much the host would have been ahead, had it not been held up, and by what it was."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.calls = [call for one in host.launching for call in host.threads[one].blocking.events]
        self.calls.sort(key=lambda call: call.start_ns)
        self.taken = 0
        self.lost_ns = 0
        self.why: tuple[str, str, Event | None] = (UNKNOWN, "", None)

    def see(self, launch: Event, was_late: bool) -> None:
        """The calls that blocked before `launch`; a launch in time has lost nothing."""
        while self.taken < len(self.calls) and self.calls[self.taken].start_ns < launch.start_ns:
            call = self.calls[self.taken]
            self.lose(call.duration_ns, (self.host.causes[call], self.host.operator(call), call))
            self.taken += 1
        if not was_late:
            self.lost_ns = 0

    def lose(self, duration_ns: int, why: tuple[str, str, Event | None]) -> None:
        self.why = why if duration_ns >= self.lost_ns else self.why
        self.lost_ns += duration_ns

    def split(self, piece: _Piece) -> list[_Piece]:
        """`piece` as what would have been hidden, which has the cause of the loss, and what is left."""
        if piece.cause == self.why[0] == IDLE:  # what was lost by idling hides no idling
            self.lost_ns = 0
        hidden = min(self.lost_ns, piece.duration_ns)
        middle = piece.start_ns + hidden
        self.lost_ns -= hidden
        parts = _Piece(piece.start_ns, middle, *self.why), piece._replace(start_ns=middle)
        return [part for part in parts if part.duration_ns > 0]


def _causes(
    start: int, end: int, before: Event | None, after: Event | None, host: Host, others: Spans | None, lead: _Lead
) -> list[_Piece]:
    """An idle stretch as pieces, one after another, neighbours of different causes."""
    if after is None:
        return [_Piece(start, end, END, "", None)]
    launch = host.calls.get(after.correlation)
    if launch is None:
        return [_Piece(start, end, UNKNOWN, "", None)]
    was_late = launch.end_ns > start
    lead.see(launch, was_late)
    middle = min(max(launch.end_ns, start), end)
    launched = _once_launched(middle, end, launch, host, others)
    if not was_late:
        return _merged(launched)
    found: list[_Piece] = []
    for piece in sorted(_until_launched(start, middle, launch, host) + launched):
        found += _late(piece, before is None, lead)
    return _merged(found)


def _until_launched(start: int, end: int, launch: Event, host: Host) -> list[_Piece]:
    """What the host did until it had launched: first the thread that did, then any other that launches, else nothing."""
    overhead, rest = host.overhead.cut([(start, end)])
    found = [_Piece(a, b, OVERHEAD, "", event) for a, b, event in overhead]
    for number in (launch.resource, *(one for one in host.launching if one != launch.resource)):
        thread = host.threads[number]
        blocked, rest = thread.blocking.cut(rest)
        running, rest = thread.running.cut(rest)
        found += [_Piece(a, b, host.causes[event], host.operator(event), event) for a, b, event in blocked]
        # Of an operator that is a cause of its own, the event says so.
        found += [_Piece(a, b, HOST, host.operator(e), e if b - a >= COMPUTING_NS else None) for a, b, e in running]
    operator = host.operator(launch)
    return found + [_Piece(a, b, *((IDLE, "") if b - a >= LONG_NS else (HOST, operator)), None) for a, b in rest]


def _once_launched(start: int, end: int, launch: Event, host: Host, others: Spans | None) -> list[_Piece]:
    """From the launch to the start on the GPU."""
    operator = host.operator(launch)
    overhead, rest = host.overhead.cut([(start, end)])
    found = [_Piece(a, b, OVERHEAD, "", event) for a, b, event in overhead]
    if others is not None and end - start > LATENCY_NS:
        waited, rest = others.cut(rest)
        found += [_Piece(a, b, DEPENDENCY, operator, None) for a, b, _ in waited]
    return sorted(found + [_Piece(a, b, LATENCY if b - a <= LATENCY_NS else UNKNOWN, operator, None) for a, b in rest])


def _late(piece: _Piece, is_first: bool, lead: _Lead) -> list[_Piece]:
    """What a piece of a stretch is that a late launch ended."""
    if is_first and piece.cause in (HOST, IDLE, LATENCY, SLOW_LAUNCH):
        return [piece._replace(cause=START, operator="", call=None)]
    if piece.cause not in (HOST, IDLE, LATENCY) or piece.call is not None:
        return [piece]
    *hidden, rest = lead.split(piece)
    if rest.cause == IDLE:
        lead.lose(rest.duration_ns, rest.why)
    return [*hidden, rest._replace(cause=HOST) if rest.cause == LATENCY else rest]


def _merged(pieces: list[_Piece]) -> list[_Piece]:
    """Neighbours of one cause as one piece, with what is said of the longest of them."""
    found: list[_Piece] = []
    longest = 0
    for piece in pieces:
        if not found or found[-1].cause != piece.cause:
            found.append(piece)
            longest = piece.duration_ns
            continue
        why = piece.why if piece.duration_ns > longest else found[-1].why
        longest = max(longest, piece.duration_ns)
        found[-1] = _Piece(found[-1].start_ns, piece.end_ns, *why)
    return found
