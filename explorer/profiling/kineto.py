"""A Kineto or Chrome trace as events that know each other, with an account of every record of the file.

    recording = recorded_in("trace.json.gz")

    events      what ran: GPU records, CUDA calls, operators, ranges; as `tracefuse.timeline.events.Event`, sorted by start
    backward    the forward operator of a backward one, by flow or by sequence number
    frames      Python frames, if the profiler recorded stacks: they give operators a line and a module
    account     events read = shown + set aside, by category and reason

GPU records find their call by `args.correlation`, or by an `ac2g` flow, and both find their operator by `External id`.
Numbers are those of one process: of several ranks that were merged into one file, load each by itself.
Seen on files of torch 2.11 and 2.13 (Kineto's "schemaVersion": 1); older names of categories are known from its source.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tracefuse.optimizers.gc_pause import uncollected
from tracefuse.profiling.trace_file import nanoseconds, read
from tracefuse.text import aligned
from tracefuse.timeline.events import Event

# As Kineto writes them now, and as it did before 2022.
GPU_WORK = {"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"}
CALLS = {"cuda_runtime", "cuda_driver", "runtime", "driver"}
FRAME = "python_function"

_ASIDE = {
    "gpu_user_annotation": "a range as it appears on the GPU: it is shown on the host",
    "cuda_sync": "a wait as the GPU saw it: its call is shown",
    FRAME: "a Python frame: gives operators their line and module",
    "trace": "the profiler's own mark",
}
_PHASES = {
    "M": "names of processes and threads",
    "C": "a counter: has no duration",
    **dict.fromkeys("iIR", "an instant: has no duration"),
    **dict.fromkeys("bneSTFp", "asynchronous: belongs to no thread"),
    **dict.fromkeys("NOD", "an object: has no duration"),
    **dict.fromkeys("vV", "a memory dump"),
}
_NO_TIME = "has no time that can be read"


@dataclass
class Account:
    """How many records of a file are shown, and why the others are not, by category."""

    read: int = 0
    shown: Counter[str] = field(default_factory=Counter)
    aside: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def is_balanced(self) -> bool:
        return self.read == self.shown.total() + self.aside.total()

    def __str__(self) -> str:
        rows = [(category, f"{count:,}", "shown") for category, count in sorted(self.shown.items())]
        rows += [(category, f"{count:,}", reason) for (category, reason), count in sorted(self.aside.items())]
        sums = f"{self.read:,} records read = {self.shown.total():,} shown + {self.aside.total():,} set aside"
        return "\n".join([sums, aligned([("category", "records", ""), *rows])])


@dataclass(frozen=True)
class Records:
    """What a file holds. `threads` are the names of the host's threads by their number, `Event.resource`."""

    events: tuple[Event, ...]
    frames: tuple[Event, ...]
    backward: Mapping[Event, Event]
    threads: tuple[str, ...]
    devices: Mapping[int, str]
    header: Mapping[str, Any]
    account: Account


@uncollected()
def recorded_in(path: str | Path) -> Records:
    """Read a trace file. Raises `TraceFileError` for what is none, or is cut off, `OSError` as `open` does."""
    header, records = read(path)
    reader = _Reader()
    for record in records:
        reader.take(record)
    return reader.recording(header)


class _Reader:
    def __init__(self) -> None:
        self.account = Account()
        self.events: list[Event] = []
        self.frames: list[Event] = []
        self.names: dict[tuple[Any, Any], str] = {}
        self.threads: dict[tuple[Any, Any], int] = {}
        self.begun: dict[tuple[Any, Any], list[dict[str, Any]]] = defaultdict(list)
        self.flows: dict[tuple[str, Any], list[tuple[str, tuple[Any, Any], int]]] = defaultdict(list)
        self.places: dict[int, tuple[Any, Any]] = {}

    def take(self, record: Any) -> None:
        self.account.read += 1
        if not isinstance(record, dict) or not isinstance(record.get("ph"), str):
            self._aside("none", "is no event")
            return
        phase, category = record["ph"], str(record.get("cat", "none"))
        if phase in "stf" and phase:
            self._flow(record, phase, category)
        elif phase == "M":
            self._name(record)
        elif phase == "X":
            self._complete(record, category, 1)
        elif phase == "B":
            self.begun[_place(record)].append(record)
        elif phase == "E":
            self._end(record, category)
        else:
            self._aside(category, _PHASES.get(phase, f"phase {phase!r} is not known"))

    def _aside(self, category: str, reason: str, records: int = 1) -> None:
        self.account.aside[category, reason] += records

    def _name(self, record: dict[str, Any]) -> None:
        if record.get("name") == "thread_name":
            self.names[_place(record)] = str(_arguments(record).get("name", "")).strip()
        self._aside("metadata", _PHASES["M"])

    def _flow(self, record: dict[str, Any], phase: str, category: str) -> None:
        start_ns = nanoseconds(record.get("ts"))
        if start_ns is None:
            self._aside(category, _NO_TIME)
            return
        self.flows[category, record.get("id")].append((phase, _place(record), start_ns))

    def _end(self, record: dict[str, Any], category: str) -> None:
        begun = self.begun[_place(record)]
        if not begun:
            self._aside(category, "an end without its begin")
            return
        first = begun.pop()
        start_ns, end_ns = nanoseconds(first.get("ts")), nanoseconds(record.get("ts"))
        arguments = {**_arguments(first), **_arguments(record)}
        self._event(first, str(first.get("cat", category)), start_ns, (end_ns or 0) - (start_ns or 0), arguments, 2)

    def _complete(self, record: dict[str, Any], category: str, records: int) -> None:
        duration_ns = nanoseconds(record.get("dur", 0))
        start_ns = nanoseconds(record.get("ts"))
        self._event(record, category, start_ns, -1 if duration_ns is None else duration_ns, _arguments(record), records)

    def _event(
        self, record: dict[str, Any], category: str, start_ns: int | None, duration_ns: int, args: Any, records: int
    ) -> None:
        kind = category.casefold()
        reason = _NO_TIME if start_ns is None or duration_ns < 0 else _ASIDE.get(kind)
        if reason:
            self._aside(category, reason, records)
        if start_ns is None or duration_ns < 0 or (reason and kind != FRAME):
            return
        on_gpu, place = kind in GPU_WORK, _place(record)
        event = Event(
            name=str(record.get("name", "")),
            on_gpu=on_gpu,
            device=_number(args.get("device"), place[0]) if on_gpu else 0,
            resource=_number(args.get("stream"), place[1])
            if on_gpu
            else self.threads.setdefault(place, len(self.threads)),
            start_ns=start_ns,
            duration_ns=duration_ns,
            correlation=_number(args.get("correlation" if on_gpu or kind in CALLS else "External id"), 0),
            operator=_number(args.get("External id"), 0) if on_gpu or kind in CALLS else 0,
            category=kind,
            sequence=_number(args.get("Sequence number"), -1),
            forward_thread=_number(args.get("Fwd thread id"), 0),
            nbytes=_number(args.get("bytes"), 0),
        )
        if kind == FRAME:
            self.frames.append(event)
            return
        self.places[len(self.events)] = place
        self.events.append(event)
        self.account.shown[category] += records

    # --- when all is read ---------------------------------------------------------------------------------------------

    def recording(self, header: Mapping[str, Any]) -> Records:
        for place, begun in self.begun.items():
            for record in begun:
                self._aside(str(record.get("cat", "none")), f"a begin without its end, on {place}")
        found = {(place, self.events[i].start_ns): i for i, place in self.places.items()}
        links = list(self._links(found))
        for category, start, end in links:
            if category == "ac2g" and not self.events[end].correlation:
                self.events[end] = self.events[end]._replace(correlation=self.events[start].correlation)
        by_flow = {self.events[end]: self.events[start] for category, start, end in links if category == "fwdbwd"}
        events = tuple(sorted(self.events, key=lambda one: (one.start_ns, -one.duration_ns)))
        names = tuple(self.names.get(place, f"thread {place[1]}") for place in self.threads)
        frames = tuple(sorted(self.frames, key=lambda one: (one.start_ns, -one.duration_ns)))
        devices = {
            d["id"]: str(d.get("name"))
            for d in header.get("deviceProperties") or ()
            if isinstance(d, dict) and "id" in d
        }
        return Records(events, frames, by_flow or _by_sequence(events), names, devices, header, self.account)

    def _links(self, found: Mapping[tuple[Any, int], int]) -> Iterator[tuple[str, int, int]]:
        """(category, index of the event that it starts at, of the one that it ends at) of each flow with both."""
        for (category, _), ends in self.flows.items():
            starts = [found.get((place, at)) for phase, place, at in ends if phase == "s"]
            stops = [found.get((place, at)) for phase, place, at in ends if phase != "s"]
            pairs = [(a, b) for a in starts for b in stops if a is not None and b is not None]
            self._aside(
                category, "a link: joins two events" if pairs else "a link of which one end is not recorded", len(ends)
            )
            yield from ((category, a, b) for a, b in pairs)


def _by_sequence(events: tuple[Event, ...]) -> dict[Event, Event]:
    """A backward operator has the sequence number of the last forward operator that was given it, and names its thread."""
    forward: dict[int, Event] = {}
    for event in events:
        if event.sequence >= 0 and not event.forward_thread:
            forward[event.sequence] = event
    backward = (event for event in events if event.sequence >= 0 and event.forward_thread)
    return {event: forward[event.sequence] for event in backward if event.sequence in forward}


def _place(record: Mapping[str, Any]) -> tuple[Any, Any]:
    """Process and thread."""
    return str(record.get("pid", "")), str(record.get("tid", ""))


def _arguments(record: Mapping[str, Any]) -> dict[str, Any]:
    found = record.get("args")
    return found if isinstance(found, dict) else {}


def _number(value: Any, otherwise: Any) -> int:
    """An integer of a file, which may be written as text; `otherwise`, or 0 where that is none either."""
    for one in (value, otherwise):
        try:
            return int(one)
        except (TypeError, ValueError, OverflowError):
            continue
    return 0
