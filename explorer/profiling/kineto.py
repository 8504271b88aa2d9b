"""A Kineto or Chrome trace as events that know each other, with an account of every record of the file.

    recording = recorded_in("trace.json.gz")

    events      what ran: GPU records, CUDA calls, operators, ranges; as columns by start, `tracefuse.timeline.columns`
    forward_of  the forward operator of a backward one, by flow or by sequence number
    frames      Python frames, if the profiler recorded stacks: they give operators a line and a module
    account     events read = shown + set aside, by category and reason

GPU records find their call by `args.correlation`, or by an `ac2g` flow, and both find their operator by `External id`.
Numbers are those of one process: of several ranks that were merged into one file, load each by itself.
Seen on files of torch 2.1 to 2.13 (Kineto's "schemaVersion": 1); older names of categories are known from its source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tracefuse.optimizers.gc_pause import uncollected
from tracefuse.profiling.account import Account
from tracefuse.profiling.record_columns import Columns
from tracefuse.profiling.trace_file import bytes_of, read
from tracefuse.profiling.typed_records import chunks, elements
from tracefuse.timeline.columns import Events
from tracefuse.timeline.events import Event

_FEWEST, _NEARLY_ALL = 100, 0.9

See = Callable[[Sequence[msgspec.Raw], Sequence[Any]], None]


@dataclass(frozen=True)
class Records:
    """What a file holds. `threads` are the names of the host's threads by their number, `Event.resource`; `forward_of` has the
    row of the forward operator of each backward one, else -1. `numbered` is how many operators the file holds, of how many
    that the profiler numbered one after another."""

    events: Events
    frames: Events
    forward_of: np.ndarray
    threads: tuple[str, ...]
    devices: Mapping[int, str]
    header: Mapping[str, Any]
    account: Account
    numbered: tuple[int, int] = (0, 0)

    @property
    def lacks_records(self) -> bool:
        """Whether the profiler's own numbers have holes, as where somebody took a sample of a file."""
        found, given = self.numbered
        return found >= _FEWEST and found < _NEARLY_ALL * given

    @cached_property
    def backward(self) -> Mapping[Event, Event]:
        """The forward operator of each backward one."""
        rows = np.flatnonzero(self.forward_of >= 0).tolist()
        return {self.events[row]: self.events[int(self.forward_of[row])] for row in rows}


@uncollected()
def recorded_in(path: str | Path, see: See | None = None) -> Records:
    """Read a trace file; `see` is called with the text of its events and what they became, some thousands at a time, where
    they are JSON as it should be. Raises `TraceFileError` for what is none, or is cut off, `OSError` as `open` does."""
    data = bytes_of(Path(path))
    columns = Columns()
    found = elements(data)
    if found is None:
        header, records = read(data, str(path))
        for record in records:
            columns.take(record)
    else:
        header, texts = found
        for some, chunk in chunks(texts):
            columns.take_all(chunk)
            if see is not None:
                see(some, chunk)
        del texts, found
    del data
    events, frames, forward_of, numbered = columns.finished(base_ns_of(header))
    return Records(
        events, frames, forward_of, columns.thread_names(), _devices(header), header, columns.account, numbered
    )


def base_ns_of(header: Mapping[str, Any]) -> int:
    """What Kineto subtracted from all times since 2024, so that they are those of the host's clock again."""
    found = header.get("baseTimeNanoseconds")
    return found if isinstance(found, int) and 0 <= found < 1 << 61 else 0


def _devices(header: Mapping[str, Any]) -> dict[int, str]:
    found = header.get("deviceProperties")
    known = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    return {one["id"]: str(one.get("name")) for one in known if isinstance(one.get("id"), int)}
