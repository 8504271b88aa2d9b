"""What the host did while a GPU was idle: which calls block it, what its ranges are named, which operators ran. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tracefuse.timeline.columns import Events
from tracefuse.timeline.events import is_cuda_call_name
from tracefuse.timeline.named import cause_of_frame, cause_of_range
from tracefuse.timeline.spans import NONE, Nested, Spans

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
_BLOCKS = ("", SYNCHRONIZATION, ALLOCATION, LOADING, PAGEABLE, SLOW_LAUNCH)
_OVERHEAD = "overhead"


def blocks(call: str) -> str:
    """The cause of idle time that a call of the host is by its name; "" for a launch or an operator."""
    if not is_cuda_call_name(call):
        return ""
    return next((cause for cause, names in _BLOCKING if names.match(call)), "")


def pageable(events: Events) -> np.ndarray:
    """Which records are copies of a GPU to or from pageable memory, large enough to be staged."""
    is_large = np.where(events.nbytes != 0, events.nbytes > STAGED_NBYTES, events.duration_ns > STAGED_NS)
    return events.on_gpu & events.named(lambda name: "Pageable" in name) & is_large


class Named(NamedTuple):
    """A stretch of a thread whose name says why nothing is launched: from a range, or from a frame of Python."""

    cause: str
    name: str
    start_ns: int
    end_ns: int
    thread: int
    is_range: bool


class Thread:
    """One thread of the host: `named` are stretches whose name is a cause, `blocking` the calls that hold it up, `running` its
    outermost operators and calls, `operators` without the calls."""

    def __init__(self, events: Events, rows: np.ndarray, is_blocking: np.ndarray, named: Spans) -> None:
        self.named = named
        self.blocking = Spans.of(events, rows[is_blocking[rows]])
        self.running = Spans.of(events, rows)
        self.operators = Spans.of(events, rows[~events.is_cuda_call[rows]])


class Host:
    """The host's side of a run. `call_of` has the row of the call that asked for what a GPU did, else `NONE`, `named` the
    stretches that the rows of `Thread.named` are numbers of. `frames` are those of Python, on the same threads; where the
    recording is known to lack records, `lacks_records` says so."""

    def __init__(self, events: Events, frames: Events | None = None, lacks_records: bool = False) -> None:
        self.events, self.lacks_records = events, lacks_records
        is_host = ~events.on_gpu & ~events.is_range
        is_overhead = is_host & events.in_category(lambda one: one == _OVERHEAD)
        self.overhead = Spans.of(events, np.flatnonzero(is_overhead))
        self.call_of = _calls(events, is_host)
        self.blocks = _blocking(events, is_host, self.call_of)
        self.named: list[Named] = sorted(_named(events, frames), key=lambda one: (one.start_ns, -one.end_ns))
        self.named_on = {thread: self._named_on(thread) for thread in {one.thread for one in self.named}}
        nothing = Spans(*np.zeros((3, 0), np.int64))
        self.threads = {
            thread: Thread(events, rows, self.blocks > 0, self.named_on.get(thread, nothing))
            for thread, rows in by_thread(events, is_host & ~is_overhead).items()
        }
        launching = self.call_of[events.on_gpu & (self.call_of != NONE)]
        self.launching = np.unique(events.resource[launching]).tolist()

    def _named_on(self, thread: int) -> Spans:
        own = [(one.start_ns, one.end_ns, at) for at, one in enumerate(self.named) if one.thread == thread]
        starts, ends, rows = np.array(own, np.int64).reshape(-1, 3).T
        nested = Nested(starts, ends, rows)
        bounds, inner = (
            np.array(nested.bounds, np.int64),
            np.array([self._outer(nested, at) for at in nested.inner], np.int64),
        )
        kept = np.flatnonzero(inner[:-1] != NONE) if len(inner) else np.zeros(0, np.int64)
        return Spans(bounds[kept], bounds[kept + 1], inner[kept])

    def _outer(self, nested: Nested, at: int) -> int:
        """Of named stretches inside one another that have one cause, the outermost, called as the range among them."""
        while (
            at != NONE and (around := nested.parents[at]) != NONE and self.named[around].cause == self.named[at].cause
        ):
            if self.named[at].is_range and not self.named[around].is_range:
                self.named[around] = self.named[around]._replace(name=self.named[at].name, is_range=True)
            at = around
        return at

    @cached_property
    def launch_of(self) -> np.ndarray:
        """`call_of`, and where no call was recorded, the operator that the work says it is of."""
        events, found = self.events, self.call_of.copy()
        works = np.flatnonzero((found == NONE) & events.on_gpu & (events.operator != 0))
        is_operator = ~events.on_gpu & ~events.is_range & ~events.is_cuda_call & (events.correlation != 0)
        found[works] = _with_number(events, np.flatnonzero(is_operator), events.operator[works])
        return found

    @cached_property
    def first_call(self) -> int:
        """The lowest number of a call: what the GPU did under a lower one was launched before the recording."""
        events = self.events
        return int(events.correlation[events.is_cuda_call & (events.correlation != 0)].min(initial=1 << 62))

    @cached_property
    def ranges(self) -> dict[int, Nested]:
        """The ranges of each thread, ours left out."""
        shown = self.events.is_range & ~self.events.on_gpu & ~self.events.is_marked
        return {
            thread: Nested(self.events.start_ns[rows], self.events.end_ns[rows], rows)
            for thread, rows in by_thread(self.events, shown).items()
        }

    def cause(self, row: int) -> str:
        """Why a call blocks; "" of one that does not."""
        return _BLOCKS[self.blocks[row]]

    def operator_row(self, row: int) -> int:
        """The outermost operator that a record of the host runs in, `NONE` outside of any."""
        thread = self.threads.get(int(self.events.resource[row]))
        return thread.operators.at(int(self.events.start_ns[row])) if thread else NONE

    def operator(self, row: int) -> str:
        """What that operator is called, "" outside of any."""
        found = self.operator_row(row)
        return "" if found == NONE else self.events.name_at(found)

    def operators_of(self, rows: np.ndarray) -> np.ndarray:
        """`operator_row` of many records."""
        found = np.full(len(rows), NONE, np.int64)
        for number, thread in self.threads.items():
            here = np.flatnonzero(self.events.resource[rows] == number)
            found[here] = thread.operators.all_at(self.events.start_ns[rows[here]])
        return found


def by_thread(events: Events, chosen: np.ndarray) -> dict[int, np.ndarray]:
    """The rows of `chosen` by thread, in order."""
    rows = np.flatnonzero(chosen)
    threads = events.resource[rows]
    return {int(thread): rows[threads == thread] for thread in np.unique(threads)}


def _calls(events: Events, is_host: np.ndarray) -> np.ndarray:
    """The row of the call with the number of each record of a GPU: of several, the last one."""
    found = np.full(len(events), NONE, np.int64)
    calls = np.flatnonzero(is_host & events.is_cuda_call & (events.correlation != 0))
    works = np.flatnonzero(events.on_gpu)
    found[works] = _with_number(events, calls, events.correlation[works])
    return found


def _with_number(events: Events, rows: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """For each number the last of `rows` whose `correlation` it is, else `NONE`."""
    if not len(rows):
        return np.full(len(asked), NONE, np.int64)
    rows = rows[np.argsort(events.correlation[rows], kind="stable")]
    numbers = events.correlation[rows]
    at = np.searchsorted(numbers, asked, side="right") - 1
    return np.where((at >= 0) & (numbers[at] == asked), rows[at], NONE)


def _blocking(events: Events, is_host: np.ndarray, call_of: np.ndarray) -> np.ndarray:
    """Why each record of the host blocks it, as an index into `_BLOCKS`."""
    by_name = np.array([_BLOCKS.index(blocks(name)) for name in events.names], np.int8)
    found = np.where(is_host, by_name[events.name] if len(by_name) else 0, 0).astype(np.int8)
    works = np.flatnonzero(call_of != NONE)
    calls = call_of[works]
    slow = calls[(events.duration_ns[calls] >= SLOW_LAUNCH_NS) & (found[calls] == 0)]
    found[slow] = _BLOCKS.index(SLOW_LAUNCH)
    is_staged = pageable(events)[works]
    # The call returns once the value is there, after all that was queued.
    is_read = events.named(lambda name: "DtoH" in name and "Pageable" in name)[works]
    found[calls[is_read]] = _BLOCKS.index(SYNCHRONIZATION)
    found[calls[is_staged]] = _BLOCKS.index(PAGEABLE)
    return found


def _named(events: Events, frames: Events | None) -> Iterator[Named]:
    for table, cause_of, chosen in (
        (events, cause_of_range, events.is_range & ~events.on_gpu),
        *([(frames, cause_of_frame, np.ones(len(frames), bool))] if frames else []),
    ):
        for row in np.flatnonzero(chosen & table.named(cause_of)).tolist():
            name = table.name_at(row)
            start_ns, end_ns = int(table.start_ns[row]), int(table.end_ns[row])
            yield Named(cause_of(name), name, start_ns, end_ns, int(table.resource[row]), table is events)
