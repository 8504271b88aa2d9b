"""Intervals of time with the row of what fills them: disjoint ones, which can be cut out of others, and nested ones. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np

Interval = tuple[int, int]
Piece = tuple[int, int, int]
"""From, to, and the row of what fills it."""

NONE = -1
"""In place of a row: nothing."""


class Spans:
    """Disjoint intervals, sorted; of two that overlap, what begins later has only what is left of it.

    `start_ns` and `end_ns` are columns by start, and of those that start together the longest first; `rows` says whose.
    """

    def __init__(self, start_ns: np.ndarray, end_ns: np.ndarray, rows: np.ndarray) -> None:
        reached = np.maximum.accumulate(end_ns) if len(end_ns) else end_ns
        begin = start_ns.copy()
        begin[1:] = np.maximum(begin[1:], reached[:-1])
        kept = end_ns > begin
        # Lists, since single elements of an array are slow to read.
        self.starts: list[int] = begin[kept].tolist()
        self.ends: list[int] = end_ns[kept].tolist()
        self.rows: list[int] = rows[kept].tolist()

    @classmethod
    def of(cls, events: Any, rows: np.ndarray) -> Spans:
        """Those of some rows, in order, of `tracefuse.timeline.columns.Events`."""
        return cls(events.start_ns[rows], events.end_ns[rows], rows)

    def at(self, time_ns: int) -> int:
        """The row whose interval holds `time_ns`."""
        index = bisect.bisect_right(self.starts, time_ns) - 1
        return self.rows[index] if index >= 0 and time_ns < self.ends[index] else NONE

    def all_at(self, times_ns: np.ndarray) -> np.ndarray:
        """The same of many times."""
        if not self.rows:
            return np.full(len(times_ns), NONE, np.int64)
        index = np.searchsorted(np.array(self.starts), times_ns, side="right") - 1
        found = np.array(self.rows)[index]
        return np.where((index >= 0) & (times_ns < np.array(self.ends)[index]), found, NONE)

    def cut(self, rest: Sequence[Interval]) -> tuple[list[Piece], list[Interval]]:
        """What of the intervals `rest` these cover, with the row that does, and what is left."""
        if not self.starts:
            return [], [(start, end) for start, end in rest if start < end]
        starts, ends = self.starts, self.ends
        pieces: list[Piece] = []
        left: list[Interval] = []
        for start, end in rest:
            index = bisect.bisect_right(ends, start)
            while start < end and index < len(starts) and starts[index] < end:
                begin, stop = max(starts[index], start), min(ends[index], end)
                if begin > start:
                    left.append((start, begin))
                pieces.append((begin, stop, self.rows[index]))
                start = stop
                index += 1
            if start < end:
                left.append((start, end))
        return pieces, left

    def total_ns(self, start_ns: int, end_ns: int) -> int:
        """How much of an interval these cover."""
        return sum(end - start for start, end, _ in self.cut([(start_ns, end_ns)])[0])


class Nested:
    """Intervals inside one another, as frames and ranges of a thread are: at each time, the innermost one.

    Where one outlasts what it began in, it is the innermost until it ends. The columns are sorted as those of `Spans`.
    """

    def __init__(self, start_ns: np.ndarray, end_ns: np.ndarray, rows: np.ndarray) -> None:
        self.bounds: list[int] = []
        self.inner: list[int] = []
        self.parents: dict[int, int] = {}
        open_: list[tuple[int, int]] = []
        for start, end, row in zip(start_ns.tolist(), end_ns.tolist(), rows.tolist(), strict=True):
            self._close(open_, start)
            self.parents[row] = open_[-1][1] if open_ else NONE
            self._note(start, row)
            open_.append((end, row))
        self._close(open_, None)

    def _close(self, open_: list[tuple[int, int]], until: int | None) -> None:
        """End what ends by `until`; None: all."""
        while open_ and (until is None or open_[-1][0] <= until):
            end, _ = open_.pop()
            while open_ and open_[-1][0] <= end:
                open_.pop()
            self._note(end, open_[-1][1] if open_ else NONE)

    def _note(self, at: int, row: int) -> None:
        self.bounds.append(at)
        self.inner.append(row)

    def at(self, times_ns: np.ndarray) -> np.ndarray:
        """The row of the innermost one at each time, `NONE` outside of all."""
        if not self.bounds:
            return np.full(len(times_ns), NONE, np.int64)
        index = np.searchsorted(np.array(self.bounds), times_ns, side="right") - 1
        return np.where(index >= 0, np.array(self.inner)[index], NONE)

    def shares(self, start_ns: int, end_ns: int) -> list[tuple[int, int]]:
        """For how long of an interval each was the innermost: (row, ns) pieces in order, `NONE` where none was."""
        index = max(bisect.bisect_right(self.bounds, start_ns) - 1, 0)
        found, at = [], start_ns
        while at < end_ns:
            stop = min(end_ns, self.bounds[index + 1]) if index + 1 < len(self.bounds) else end_ns
            row = self.inner[index] if self.bounds and self.bounds[index] <= at else NONE
            if self.bounds and self.bounds[index] > at:
                stop = min(end_ns, self.bounds[index])
                index -= 1
            if stop > at:
                found.append((row, stop - at))
            at, index = max(stop, at), index + 1
        return found
