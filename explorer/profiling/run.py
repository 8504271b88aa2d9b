"""A run of the user's own as a profiler recorded it: its events, its idle time, and the lines of Python that waited. Pure.

Kineto writes a frame of Python as "folder/file.py(12): function"; the line is where the function begins, not the one that ran.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tracefuse.profiling.kineto import Records
from tracefuse.tables.folding import grouped
from tracefuse.timeline.events import Event
from tracefuse.timeline.gaps import Idle, idle_of_devices, idle_of_streams
from tracefuse.timeline.host_calls import SYNCHRONIZATION, Host, Interval

_FRAME = re.compile(r"(?P<file>[^<].*)\((?P<line>\d+)\): (?P<function>.+)")
# Frames of torch and of Python itself, wherever they are installed.
_NOT_THE_USERS = re.compile(r"(^|/)(torch|contextlib\.py|threading\.py|runpy\.py|importlib|multiprocessing)(/|\(|$)")


class Wait(NamedTuple):
    """A call in which the host waited for the GPU: in which operator, in which function of yours (with stacks recorded), and
    for how long the GPU was idle because of it."""

    call: Event
    operator: str
    line: str
    idle_ns: int


@dataclass(frozen=True, eq=False)
class Run:
    """One run. `window` is the part of it that is looked at (ns, as the events have it), `provenance` begins with "measured".

    `clocks` are the same run by other clocks than the profiler's: what was measured, its µs, and what the timeline says of
    the same stretch.
    """

    recording: Records
    window: Interval
    provenance: str
    clocks: tuple[tuple[str, float, float], ...] = ()

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """The events in the window, by start."""
        return tuple(inside(self.recording.events, self.window))

    @property
    def window_us(self) -> float:
        return (self.window[1] - self.window[0]) / 1e3

    @cached_property
    def host(self) -> Host:
        return Host(self.recording.events)

    @cached_property
    def idle(self) -> tuple[Idle, ...]:
        """The idle time of each GPU, all its streams together."""
        return idle_of_devices(self.recording.events, self.window, self.host)

    @cached_property
    def idle_streams(self) -> tuple[Idle, ...]:
        """The idle time of each stream, between its first record and its last."""
        return idle_of_streams(self.recording.events, self.window, self.host)

    @cached_property
    def without_operator(self) -> tuple[Interval, ...]:
        """The stretches of the window (ns) in which no thread of the host ran an operator or a CUDA call."""
        rest: Sequence[Interval] = [self.window]
        for thread in self.host.threads.values():
            rest = thread.running.cut(rest)[1]
        return tuple(rest)

    @cached_property
    def waits(self) -> tuple[Wait, ...]:
        """Every synchronization of the window, by start."""
        calls = [e for e in self.events if self.host.causes.get(e) == SYNCHRONIZATION]
        lines = lines_of(self.recording.frames, calls)
        gaps = [gap for one in self.idle for gap in one.gaps if gap.cause == SYNCHRONIZATION]
        idle_ns = {call: sum(g.duration_ns for g in gaps if g.call == call) for call in {g.call for g in gaps}}
        return tuple(Wait(call, self.host.operator(call), lines[call], idle_ns.get(call, 0)) for call in calls)


def inside(events: Iterable[Event], window: Interval) -> Iterable[Event]:
    return (e for e in events if e.end_ns >= window[0] and e.start_ns <= window[1])


# --- lines of Python --------------------------------------------------------------------------------------------------


def lines_of(frames: Sequence[Event], events: Iterable[Event]) -> dict[Event, str]:
    """The innermost function of the user's around each event, "run, at train.py:12"; "" where no frame of one is known."""
    found: dict[Event, str] = {}
    own = grouped((frame for frame in frames if _is_the_users(frame.name)), lambda frame: frame.resource)
    for thread, asked in grouped(events, lambda event: event.resource).items():
        found |= _innermost(own[thread], sorted(asked, key=lambda one: one.start_ns))
    return found


def _innermost(frames: Sequence[Event], events: Sequence[Event]) -> dict[Event, str]:
    """Both by start: frames nest, so that those around a time are a stack."""
    found, stack, at = {}, [], 0
    for event in events:
        while at < len(frames) and frames[at].start_ns <= event.start_ns:
            stack.append(frames[at])
            at += 1
        stack = [frame for frame in stack if frame.end_ns > event.start_ns]
        found[event] = _written(stack[-1].name) if stack else ""
    return found


def _is_the_users(name: str) -> bool:
    match = _FRAME.fullmatch(name)
    return match is not None and _NOT_THE_USERS.search(match["file"]) is None


def _written(name: str) -> str:
    match = _FRAME.fullmatch(name)
    assert match is not None
    return f"{match['function']}, at {match['file']}:{match['line']}"
