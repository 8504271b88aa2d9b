"""A run of the user's own as a profiler recorded it: its events, its idle time, and the lines of Python that waited. Pure.

Kineto writes a frame of Python as "folder/file.py(12): function"; the line is where the function begins, not the one that ran.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from tracefuse.optimizers.ops import grouped
from tracefuse.profiling.kineto import Records
from tracefuse.timeline.columns import Events
from tracefuse.timeline.events import Event
from tracefuse.timeline.gaps import idle_of_devices, idle_of_streams
from tracefuse.timeline.host_calls import SYNCHRONIZATION, Host, by_thread
from tracefuse.timeline.idle import Idle, summed
from tracefuse.timeline.spans import NONE, Interval, Nested, Piece

_FRAME = re.compile(r"(?P<file>[^<].*)\((?P<line>\d+)\): (?P<function>.+)")
# Frames of torch, of frameworks around it, and of Python itself, wherever they are installed.
_NOT_THE_USERS = re.compile(
    r"(^|/)(torch|torchvision|lightning|pytorch_lightning|transformers|accelerate|deepspeed|tensorboardX?|wandb|mlflow|tqdm"
    r"|safetensors|numpy|PIL|importlib|multiprocessing|logging|json|concurrent|asyncio|encodings"
    r"|(contextlib|threading|runpy|queue|selectors|functools|copy|pickle|zipfile|gzip|tempfile|subprocess|random|socket"
    r"|ssl|abc|typing)\.py)(/|\(|$)"
)


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
    def rows(self) -> np.ndarray:
        """The rows of `recording.events` that are in the window."""
        return self.recording.events.within(self.window)

    @cached_property
    def events(self) -> Events:
        """The events in the window, by start."""
        return self.recording.events[self.rows]

    @property
    def window_us(self) -> float:
        return (self.window[1] - self.window[0]) / 1e3

    @cached_property
    def has_gpu(self) -> bool:
        """Whether a GPU did anything in the window."""
        events, (start_ns, end_ns) = self.recording.events, self.window
        return bool((events.is_work & (events.end_ns > start_ns) & (events.start_ns < end_ns)).any())

    @cached_property
    def host(self) -> Host:
        return Host(self.recording.events, self.recording.frames, self.recording.lacks_records)

    @cached_property
    def lines(self) -> Lines:
        """The functions of the user's, where Python's frames were recorded."""
        return Lines(self.recording.frames)

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
    def named_pieces(self) -> dict[str, list[Piece]]:
        """Of the window, what the host's ranges and frames name as loading, saving or logging, by cause; the third of each
        is its number in `host.named`."""
        pieces = (piece for thread in self.host.named_on.values() for piece in thread.cut([self.window])[0])
        return grouped(pieces, lambda piece: self.host.named[piece[2]].cause)

    def line_of(self, start_ns: int, end_ns: int) -> str:
        """The function in which a stretch was spent for longest, on whichever thread; "" where none is known."""
        shares = [one for thread in self.lines.threads for one in self.lines.shares(thread, start_ns, end_ns)]
        return max(shares, key=lambda one: one[1])[0] if shares else ""

    @cached_property
    def waits(self) -> tuple[Wait, ...]:
        """Every synchronization of the window, by start."""
        events, host = self.recording.events, self.host
        rows = [row for row in self.rows[host.blocks[self.rows] > 0].tolist() if host.cause(row) == SYNCHRONIZATION]
        gaps = (gap for one in self.idle for gap in one.stretches if gap.cause == SYNCHRONIZATION)
        idle_ns = summed((gap.call, gap.duration_ns) for gap in gaps)
        lines = self.lines.of_rows(events, np.array(rows, np.int64))
        waited = zip(rows, lines, strict=True)
        return tuple(Wait(events[row], host.operator(row), line, idle_ns[row]) for row, line in waited)


# --- lines of Python --------------------------------------------------------------------------------------------------


class Lines:
    """The innermost function of the user's at each time of each thread, "run, at train.py:12"; "" outside of all."""

    def __init__(self, frames: Events) -> None:
        self.frames = frames
        is_own = frames.named(_is_the_users)
        self.threads = {
            thread: Nested(frames.start_ns[rows], frames.end_ns[rows], rows)
            for thread, rows in by_thread(frames, is_own).items()
        }

    def of_rows(self, events: Events, rows: np.ndarray) -> list[str]:
        """The function that each record of the host began in."""
        return self.at(events.resource[rows], events.start_ns[rows])

    def at(self, threads: np.ndarray, times_ns: np.ndarray) -> list[str]:
        found = [""] * len(threads)
        for number, nested in self.threads.items():
            here = np.flatnonzero(threads == number)
            for at, row in zip(here.tolist(), nested.at(times_ns[here]).tolist(), strict=True):
                found[at] = self.text(row)
        return found

    def shares(self, thread: int, start_ns: int, end_ns: int) -> list[tuple[str, int]]:
        """For how many ns of a stretch the thread was in each function."""
        nested = self.threads.get(thread)
        pieces = nested.shares(start_ns, end_ns) if nested else []
        return [(self.text(row), ns) for row, ns in pieces if row != NONE]

    def text(self, row: int) -> str:
        return "" if row == NONE else _written(self.frames.name_at(row))


def _is_the_users(name: str) -> bool:
    match = _FRAME.fullmatch(name)
    return match is not None and _NOT_THE_USERS.search(match["file"]) is None


@cache
def _written(name: str) -> str:
    match = _FRAME.fullmatch(name)
    assert match is not None
    return f"{match['function']}, at {match['file']}:{match['line']}"
