"""Why a GPU did nothing: the idle time of a window, cut into gaps that have exactly one cause each. Pure.

An idle stretch ends where the GPU starts something; whoever launched that decides. Where the call came in time (it had
returned when the GPU ran dry), the GPU itself took so long. Where it came late, what the host did until then is the cause,
cut where that changes: it loaded data, it was blocked in a call, it ran operators, it did nothing.

A host that is held up loses its lead: what it does next, and the launch after that, would have been hidden behind earlier
work. So this time, up to the time for which it was held up, has the cause of that, until a launch comes in time again.

Times are integers of nanoseconds, so that for each GPU, exactly: busy (a union) + gaps = window, and
sum of the records' times - overlap + gaps = window.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from tracefuse.timeline.causes import (
    COMPUTING_NS,
    DEPENDENCY,
    END,
    GRAPH,
    HOST,
    IDLE,
    IDLING,
    LATENCY,
    LATENCY_NS,
    LEFT_OUT,
    LONG_NS,
    OVERHEAD,
    START,
    UNKNOWN,
)
from tracefuse.timeline.columns import Events
from tracefuse.timeline.events import Event
from tracefuse.timeline.host_calls import SLOW_LAUNCH, Host, Thread
from tracefuse.timeline.idle import Idle, Stretch
from tracefuse.timeline.spans import NONE, Interval, Spans


def idle_of_devices(events: Iterable[Event], window: Interval, host: Host | None = None) -> tuple[Idle, ...]:
    """The idle time of each GPU that did anything in `window` (ns), all of its streams together. `host` is that of `events`,
    where it is known already."""
    host = host or Host(Events.of(events))
    events, works = host.events, _works(host.events, window)
    found = []
    for device in np.unique(events.device[works]).tolist():
        is_own = events.device[works] == device
        others = None if is_own.all() else Spans.of(events, works[~is_own])
        found.append(_idle(device, None, works[is_own], window, host, others))
    return tuple(found)


def idle_of_streams(events: Iterable[Event], window: Interval, host: Host | None = None) -> tuple[Idle, ...]:
    """The idle time of each stream between its first record in `window` (ns) and its last; `host` as above."""
    host = host or Host(Events.of(events))
    events, works = host.events, _works(host.events, window)
    places = np.stack([events.device[works], events.resource[works]])
    found = []
    for device, stream in np.unique(places, axis=1).T.tolist():
        is_own = (places[0] == device) & (places[1] == stream)
        own = works[is_own]
        others = Spans.of(events, works[(places[0] == device) & ~is_own])
        span = max(int(events.start_ns[own[0]]), window[0]), min(int(events.end_ns[own].max()), window[1])
        found.append(_idle(device, stream, own, span, host, others))
    return tuple(found)


def _works(events: Events, window: Interval) -> np.ndarray:
    return np.flatnonzero(events.is_work & (events.end_ns > window[0]) & (events.start_ns < window[1]))


def _idle(
    device: int, stream: int | None, works: np.ndarray, window: Interval, host: Host, others: Spans | None
) -> Idle:
    events = host.events
    busy = Spans.of(events, works)
    pieces, idle = busy.cut([window])
    starting = {start: at for at, start in enumerate(busy.starts)}
    ending = dict(zip(busy.ends, busy.rows, strict=True))
    cause = _Causes(host, others)
    found: list[Stretch] = []
    for start, end in idle:
        at = starting.get(end)
        after = NONE if at is None else busy.rows[at]
        before = ending.get(start, NONE)
        found += [Stretch(*piece, before, after) for piece in cause.of(start, end, before, after)]
    starts, ends = np.maximum(events.start_ns[works], window[0]), np.minimum(events.end_ns[works], window[1])
    busy_ns = sum(end - start for start, end, _ in pieces)
    return Idle(device, stream, *window, busy_ns, int((ends - starts).sum()), tuple(found), host)


# --- one stretch ------------------------------------------------------------------------------------------------------


class _Piece(NamedTuple):
    """Of an idle stretch. `operator` and `call` are rows of the host, `named` a number of one of its named stretches, `thread`
    the one that held it up."""

    start_ns: int
    end_ns: int
    cause: str
    operator: int = NONE
    call: int = NONE
    named: int = NONE
    thread: int = NONE

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


class _Lead:
    """By how much the host would have been ahead, had it not been held up, and by what it was."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.calls: list[tuple[int, int, int, bool]] = []
        for number in host.launching:
            thread = host.threads[number]
            spans = thread.blocking
            calls = zip(spans.starts, spans.rows, strict=True)
            self.calls += [(start, number, row, False) for start, row in calls if thread.named.at(start) == NONE]
        named = [one for one in enumerate(host.named) if one[1].thread in host.launching]
        self.calls += [(one.start_ns, one.thread, at, True) for at, one in named]
        self.calls.sort()
        self.taken = 0
        self.lost_ns = 0
        self.why = _Piece(0, 0, UNKNOWN)

    def see(self, launch_ns: int, was_late: bool) -> None:
        """What held the host up before the launch at `launch_ns`; a launch in time has lost nothing."""
        while self.taken < len(self.calls) and self.calls[self.taken][0] < launch_ns:
            self._lose_by(*self.calls[self.taken])
            self.taken += 1
        if not was_late:
            self.lost_ns = 0

    def _lose_by(self, start_ns: int, thread: int, at: int, is_named: bool) -> None:
        host = self.host
        if is_named:
            one = host.named[at]
            self.lose(one.end_ns - one.start_ns, _Piece(0, 0, one.cause, named=at, thread=thread))
        else:
            duration_ns = int(host.events.duration_ns[at])
            self.lose(duration_ns, _Piece(0, 0, host.cause(at), host.operator_row(at), at, NONE, thread))

    def lose(self, duration_ns: int, why: _Piece) -> None:
        self.why = why if duration_ns >= self.lost_ns else self.why
        self.lost_ns += duration_ns

    def split(self, piece: _Piece) -> list[_Piece]:
        """`piece` as what would have been hidden, which has the cause of the loss, and what is left."""
        if piece.cause == IDLE and self.why.cause in IDLING:  # what was lost by idling hides no idling
            self.lost_ns = 0
        hidden = min(self.lost_ns, piece.duration_ns)
        middle = piece.start_ns + hidden
        self.lost_ns -= hidden
        parts = self.why._replace(start_ns=piece.start_ns, end_ns=middle), piece._replace(start_ns=middle)
        return [part for part in parts if part.duration_ns > 0]


class _Causes:
    """The causes of a GPU's or a stream's idle stretches, which are asked for in order. `others` are what else was at work."""

    def __init__(self, host: Host, others: Spans | None) -> None:
        self.host, self.events, self.others = host, host.events, others
        self.lead = _Lead(host)

    def of(self, start: int, end: int, before: int, after: int) -> list[_Piece]:
        """An idle stretch as pieces, one after another, neighbours of different causes."""
        if after == NONE:
            return self._nothing_more(start, end)
        launch = int(self.host.launch_of[after])
        if launch == NONE:
            return [_Piece(start, end, self._without_launch(after))]
        if before != NONE and self.events.correlation[before] == self.events.correlation[after]:
            return [_Piece(start, end, LATENCY if end - start <= LATENCY_NS else GRAPH)]
        launched_ns = int(self.events.end_ns[launch])
        was_late = launched_ns > start
        self.lead.see(int(self.events.start_ns[launch]), was_late)
        middle = min(max(launched_ns, start), end)
        launched = self._once_launched(middle, end, launch)
        if not was_late:
            return _merged(launched)
        found: list[_Piece] = []
        for piece in sorted(self._until_launched(start, middle, launch) + launched):
            found += self._late(piece, before == NONE)
        return _merged(found)

    def _nothing_more(self, start: int, end: int) -> list[_Piece]:
        """From the last work to the end of the window: what is named there, as a checkpoint behind the last step is."""
        rest: list[Interval] = [(start, end)]
        found: list[_Piece] = []
        for number, spans in self.host.named_on.items():
            named, rest = spans.cut(rest)
            found += [_Piece(a, b, self.host.named[at].cause, named=at, thread=number) for a, b, at in named]
        return _merged(sorted(found + [_Piece(a, b, END) for a, b in rest]))

    def _without_launch(self, after: int) -> str:
        """Of work whose launch nobody recorded: it came before the recording, or the file lacks records."""
        number = int(self.events.correlation[after])
        if number and number < self.host.first_call:
            return START
        return LEFT_OUT if self.host.lacks_records else UNKNOWN

    def _until_launched(self, start: int, end: int, launch: int) -> list[_Piece]:
        """What the host did until it had launched: first the thread that did, then any other that launches, else nothing."""
        host, (found, rest) = self.host, self._overhead(start, end)
        launching = int(self.events.resource[launch])
        for number in (launching, *(one for one in host.launching if one != launching)):
            if rest:
                rest = self._on(host.threads[number], number, rest, found)
        operator = host.operator_row(launch)
        for a, b in rest:
            is_long = b - a >= LONG_NS
            found.append(_Piece(a, b, IDLE if is_long else HOST, NONE if is_long else operator, thread=launching))
        return found

    def _overhead(self, start: int, end: int) -> tuple[list[_Piece], list[Interval]]:
        """What the profiler itself did in a stretch, and what is left of it."""
        overhead, rest = self.host.overhead.cut([(start, end)])
        return [_Piece(a, b, OVERHEAD, call=row) for a, b, row in overhead], rest

    def _on(self, thread: Thread, number: int, rest: list[Interval], found: list[_Piece]) -> list[Interval]:
        """What one thread did in `rest`, put into `found`; what is left of it."""
        host = self.host
        named, rest = thread.named.cut(rest)
        blocked, rest = thread.blocking.cut(rest)
        running, rest = thread.running.cut(rest)
        found += [_Piece(a, b, host.named[at].cause, named=at, thread=number) for a, b, at in named]
        found += [_Piece(a, b, host.cause(row), host.operator_row(row), row, NONE, number) for a, b, row in blocked]
        # Of an operator that is a cause of its own, the event says so.
        found += [
            _Piece(a, b, HOST, host.operator_row(row), row if b - a >= COMPUTING_NS else NONE, NONE, number)
            for a, b, row in running
        ]
        return rest

    def _once_launched(self, start: int, end: int, launch: int) -> list[_Piece]:
        """From the launch to the start on the GPU."""
        if start >= end:
            return []
        host, (found, rest) = self.host, self._overhead(start, end)
        operator = host.operator_row(launch)
        if self.others is not None and end - start > LATENCY_NS:
            waited, rest = self.others.cut(rest)
            found += [_Piece(a, b, DEPENDENCY, operator) for a, b, _ in waited]
        otherwise = LEFT_OUT if host.lacks_records else UNKNOWN
        found += [_Piece(a, b, LATENCY if b - a <= LATENCY_NS else otherwise, operator) for a, b in rest]
        return sorted(found)

    def _late(self, piece: _Piece, is_first: bool) -> list[_Piece]:
        """What a piece of a stretch is that a late launch ended."""
        if is_first and piece.cause in (HOST, IDLE, LATENCY, SLOW_LAUNCH):
            return [_Piece(piece.start_ns, piece.end_ns, START)]
        if piece.cause not in (HOST, IDLE, LATENCY) or piece.call != NONE:
            return [piece]
        *hidden, rest = self.lead.split(piece)
        if rest.cause == IDLE:
            self.lead.lose(rest.duration_ns, rest)
        return [*hidden, rest._replace(cause=HOST) if rest.cause == LATENCY else rest]


def _merged(pieces: list[_Piece]) -> list[_Piece]:
    """Neighbours of one cause as one piece, with what is said of the longest of them."""
    if len(pieces) < 2:
        return pieces
    found: list[_Piece] = []
    longest = 0
    for piece in pieces:
        if not found or found[-1].cause != piece.cause:
            found.append(piece)
            longest = piece.duration_ns
            continue
        said = piece if piece.duration_ns > longest else found[-1]
        longest = max(longest, piece.duration_ns)
        found[-1] = said._replace(start_ns=found[-1].start_ns, end_ns=piece.end_ns)
    return found
