"""The columns of a trace file, filled some thousand records at a time."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from decimal import Decimal
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from tracefuse.profiling.account import ASIDE, CALLS, FRAME, GPU_WORK, NO_TIME_SAID, PHASES, Account
from tracefuse.profiling.links import Flows, by_sequence, numbered, of_pairs
from tracefuse.profiling.typed_records import ABSENT, CHUNK, NO_TIME, Arguments, Record, ns_or_none, times_ns
from tracefuse.timeline.columns import Events

_NONE = Arguments()
_RAW = ("name", "category", "place", "start_ns", "duration_ns")
_ARGUMENTS = ("correlation", "external", "device", "stream", "nbytes", "sequence", "forward_thread", "index")
_ALL_ARGUMENTS = attrgetter(*_ARGUMENTS)
_FLOWS = frozenset("stf")


class _Names(dict[Any, int]):
    """A number for each thing, in the order of their first use."""

    def __missing__(self, key: Any) -> int:
        found = self[key] = len(self)
        return found


class _Places(dict[Any, int]):
    """The place of each process and thread as a file writes them, in numbers or as text."""

    def __init__(self, places: _Names) -> None:
        self.places = places

    def __missing__(self, key: tuple[Any, Any]) -> int:
        found = self[key] = self.places[str(key[0]), str(key[1])]
        return found


class Columns:
    """Takes the records of a file, and gives them as events; the `account` is complete when they are `finished`."""

    def __init__(self) -> None:
        self.account = Account()
        self.names, self.categories, self.places = _Names(), _Names(), _Names()
        self.place_of = _Places(self.places)
        self.flows = Flows()
        self.parts: dict[str, list[np.ndarray]] = defaultdict(list)
        self.begun: dict[int, list[dict[str, Any]]] = defaultdict(list)
        self.thread_name: dict[int, str] = {}
        self.threads: list[int] = []
        self.pending: list[tuple[Any, ...]] = []

    def take_all(self, records: Sequence[Any]) -> None:
        """Typed records, or one that is none."""
        if not isinstance(records[0], Record):
            for record in records:
                self.take(record)
            return
        self._flush()  # what came before them in the file
        self._complete([one for one in records if one.ph == "X"])
        self._typed_flows([one for one in records if one.ph in _FLOWS])
        rest = [one for one in records if one.ph != "X" and one.ph not in _FLOWS]
        known = Counter((one.ph, one.cat) for one in rest if one.ph in PHASES and one.ph != "M")
        for (phase, category), count in known.items():
            self.account.read += count
            self._aside(category, PHASES[phase], count)
        for one in rest:
            if (one.ph, one.cat) not in known:
                self.take(_plain(one))

    def take(self, record: Any) -> None:
        """One record as Python reads JSON."""
        self.account.read += 1
        if not isinstance(record, dict) or not isinstance(record.get("ph"), str):
            self._aside("none", "is no event")
            return
        phase, category = record["ph"], str(record.get("cat", "none"))
        place = self.places[str(record.get("pid", "")), str(record.get("tid", ""))]
        if phase in _FLOWS:
            number = record.get("id")
            number = number if isinstance(number, int | str | None) else str(number)
            self._flow(category, number, phase, place, ns_or_none(record.get("ts")))
        elif phase == "M":
            if record.get("name") == "thread_name":
                self.thread_name[place] = str(_arguments(record).get("name", "")).strip()
            self._aside("metadata", PHASES["M"])
        elif phase == "X":
            self._plain(record, category, place, ns_or_none(record.get("ts")), ns_or_none(record.get("dur", 0)), 1)
        elif phase == "B":
            self.begun[place].append(record)
        elif phase == "E":
            self._end(record, category, place)
        else:
            self._aside(category, PHASES.get(phase, f"phase {phase!r} is not known"))

    def _aside(self, category: str, reason: str, records: int = 1) -> None:
        self.account.aside[category, reason] += records

    def _flow(self, category: str, number: Any, phase: str, place: int, time_ns: int) -> None:
        if time_ns == NO_TIME:
            self._aside(category, NO_TIME_SAID)
        else:
            self.flows.add([(category, number)], [phase], [place], [time_ns])

    def _typed_flows(self, records: list[Record]) -> None:
        times = times_ns([one.ts for one in records])
        self.account.read += len(records)
        if (times == NO_TIME).any():
            for one, ns in zip(records, times.tolist(), strict=True):
                self._flow(one.cat, one.id, one.ph, self.place_of[one.pid, one.tid], ns)
            return
        places = [self.place_of[one.pid, one.tid] for one in records]
        self.flows.add([(one.cat, one.id) for one in records], [one.ph for one in records], places, times.tolist())

    def _end(self, record: dict[str, Any], category: str, place: int) -> None:
        begun = self.begun[place]
        if not begun:
            self._aside(category, "an end without its begin")
            return
        first = begun.pop()
        start_ns, end_ns = ns_or_none(first.get("ts")), ns_or_none(record.get("ts"))
        duration_ns = NO_TIME if NO_TIME in (start_ns, end_ns) else end_ns - start_ns
        both = {**first, "args": {**_arguments(first), **_arguments(record)}}
        self._plain(both, str(first.get("cat", category)), place, start_ns, duration_ns, 2)

    # --- records with a duration --------------------------------------------------------------------------------------

    def _complete(self, records: list[Record]) -> None:
        if not records:
            return
        names, categories, place_of = self.names, self.categories, self.place_of
        numbers = _numbers(list(map(_ALL_ARGUMENTS, [one.args or _NONE for one in records])))
        self.account.read += len(records)
        self._add(
            None,
            name=np.array([names[one.name] for one in records], np.int64),
            category=np.array([categories[one.cat] for one in records], np.int64),
            place=np.array([place_of[one.pid, one.tid] for one in records], np.int64),
            start_ns=times_ns([one.ts for one in records]),
            duration_ns=times_ns([one.dur for one in records]),
            **dict(zip(_ARGUMENTS, numbers.T, strict=True)),
        )

    def _plain(
        self, record: dict[str, Any], category: str, place: int, start_ns: int, duration_ns: int, records: int
    ) -> None:
        """One that becomes part of the columns with others; it stands for so many `records` of the file."""
        times = self.categories[category], place, start_ns, duration_ns
        self.pending.append((self.names[str(record.get("name", ""))], *times, records, _arguments(record)))
        if len(self.pending) >= CHUNK:
            self._flush()

    def _flush(self) -> None:
        if not self.pending:
            return
        *columns, records, arguments = zip(*self.pending, strict=True)
        self.pending = []
        own = dict(zip(_RAW, (np.array(column, np.int64) for column in columns), strict=True))
        said = dict(zip(Arguments.__struct_fields__, Arguments.__struct_encode_fields__, strict=True))
        numbers = _numbers([tuple(one.get(said[name], ABSENT) for name in _ARGUMENTS) for one in arguments])
        self._add(np.array(records), **own, **dict(zip(_ARGUMENTS, numbers.T, strict=True)))

    def _add(self, records: np.ndarray | None, **columns: np.ndarray) -> None:
        """Keep what has a time and is shown or a frame, and count the rest; so many `records` of the file are one of them."""
        kinds = [category.casefold() for category in self.categories]
        category = columns["category"]
        no_time = (columns["start_ns"] == NO_TIME) | (columns["duration_ns"] < 0)
        is_aside = np.array([kind in ASIDE for kind in kinds])[category]
        is_frame = np.array([kind == FRAME for kind in kinds])[category]
        for chosen, is_shown in ((no_time, False), (is_aside & ~no_time, False), (~is_aside & ~no_time, True)):
            counts = np.bincount(category[chosen], None if records is None else records[chosen], len(kinds))
            for name, kind, count in zip(self.categories, kinds, counts.astype(int).tolist(), strict=True):
                if count and is_shown:
                    self.account.shown[name] += count
                elif count:
                    self._aside(name, NO_TIME_SAID if chosen is no_time else ASIDE[kind], count)
        kept = ~no_time & (~is_aside | is_frame)
        for name, column in columns.items():
            self.parts[name].append(column[kept])

    # --- when all is read ---------------------------------------------------------------------------------------------

    def finished(self, base_ns: int) -> tuple[Events, Events, np.ndarray, tuple[int, int]]:
        """Events, frames, the forward row of each event, and how many of the profiler's numbers the file has, of how many;
        `base_ns` is added to times."""
        for place, begun in self.begun.items():
            for record in begun:
                where = list(self.places)[place]
                self._aside(str(record.get("cat", "none")), f"a begin without its end, on {where}")
        self._flush()
        columns = {name: np.concatenate(parts) for name, parts in self.parts.items()} or {
            name: np.zeros(0, np.int64) for name in (*_RAW, *_ARGUMENTS)
        }
        self.parts.clear()
        kinds = [category.casefold() for category in self.categories]
        is_frame = np.array([kind == FRAME for kind in kinds] or [False])[columns["category"]]
        index = columns["index"]
        counts_of_numbers = numbered(index[index >= 0])
        self._number_threads(columns)
        events, places = self._events(columns, ~is_frame, kinds)
        frames, _ = self._events(columns, is_frame, kinds)
        pairs, counts = self.flows.joined(events, places)
        self.account.aside += counts
        _correlate(events, pairs.get("ac2g"))
        joined = pairs.get("fwdbwd")
        forward_of = by_sequence(events) if joined is None or not len(joined) else of_pairs(joined, len(events))
        for one in (events, frames):
            one.start_ns += base_ns
        return events, frames, forward_of, counts_of_numbers

    def _number_threads(self, columns: Mapping[str, np.ndarray]) -> None:
        """Threads of the host have numbers in the order in which the file names them."""
        on_gpu = np.array([name.casefold() in GPU_WORK for name in self.categories] or [False])[columns["category"]]
        found, first = np.unique(columns["place"][~on_gpu], return_index=True)
        self.threads = found[np.argsort(first)].tolist()

    def _events(
        self, columns: Mapping[str, np.ndarray], chosen: np.ndarray, kinds: list[str]
    ) -> tuple[Events, np.ndarray]:
        """The chosen rows as events, and the place of each."""
        own = {name: column[chosen] for name, column in columns.items()}
        on_gpu = np.array([kind in GPU_WORK for kind in kinds] or [False])[own["category"]]
        is_call = np.array([kind in CALLS for kind in kinds] or [False])[own["category"]]
        places = list(self.places)
        pids, tids = (np.array([_whole(place[at]) for place in places] or [0]) for at in (0, 1))
        thread = np.zeros(max(len(places), 1), np.int64)
        thread[self.threads] = np.arange(len(self.threads))
        numbers = {
            "device": np.where(on_gpu, _or(own["device"], pids[own["place"]]), 0),
            "resource": np.where(on_gpu, _or(own["stream"], tids[own["place"]]), thread[own["place"]]),
            "start_ns": own["start_ns"],
            "duration_ns": own["duration_ns"],
            "correlation": _or(np.where(on_gpu | is_call, own["correlation"], own["external"]), 0),
            "operator": np.where(on_gpu | is_call, _or(own["external"], 0), 0),
            "sequence": _or(own["sequence"], -1),
            "forward_thread": _or(own["forward_thread"], 0),
            "nbytes": _or(own["nbytes"], 0),
        }
        order = np.lexsort((-own["duration_ns"], own["start_ns"]))
        sorted_numbers = {name: column[order] for name, column in numbers.items()}
        name, category = own["name"][order].astype(np.uint32), own["category"][order].astype(np.uint16)
        events = Events(tuple(self.names), tuple(kinds), name, category, on_gpu[order], sorted_numbers)
        return events, own["place"][order]

    def thread_names(self) -> tuple[str, ...]:
        places = list(self.places)
        return tuple(self.thread_name.get(place, f"thread {places[place][1]}") for place in self.threads)


def _correlate(events: Events, pairs: np.ndarray | None) -> None:
    """Give work without a number that of the call that a flow joins it to."""
    if pairs is not None and len(pairs):
        call, work = pairs.T
        lacking = events.correlation[work] == 0
        events.correlation[work[lacking]] = events.correlation[call[lacking]]


def _or(column: np.ndarray, otherwise: Any) -> np.ndarray:
    return np.where(column == ABSENT, otherwise, column)


def _plain(record: Record) -> dict[str, Any]:
    """A typed record as Python reads JSON."""
    found = {
        "ph": record.ph, "cat": record.cat, "name": record.name, "pid": record.pid, "tid": record.tid, "id": record.id,
        "ts": _number_of(record.ts), "dur": _number_of(record.dur),
    }  # fmt: skip
    arguments = record.args or _NONE
    names = zip(Arguments.__struct_fields__, Arguments.__struct_encode_fields__, strict=True)
    found["args"] = {said: value for name, said in names if (value := getattr(arguments, name)) not in (None, ABSENT)}
    return found


def _number_of(text: msgspec.Raw) -> Any:
    return json.loads(bytes(text), parse_float=Decimal)


def _arguments(record: Mapping[str, Any]) -> dict[str, Any]:
    found = record.get("args")
    return found if isinstance(found, dict) else {}


def _numbers(rows: list[tuple[Any, ...]]) -> np.ndarray:
    """Rows of integers, which may be written as text; `ABSENT` for what is none."""
    try:
        found = np.array(rows)
    except (ValueError, OverflowError):  # a list among them
        found = np.zeros(0)
    if found.dtype == np.int64 and (found < _MOST).all():
        return found
    return np.array([list(map(_integer, row)) for row in rows], np.int64)


_MOST = -ABSENT


def _integer(value: Any) -> int:
    try:
        found = int(value)
    except (TypeError, ValueError, OverflowError):
        return ABSENT
    return found if abs(found) < _MOST else ABSENT


def _whole(text: str) -> int:
    """The number of a process or thread; 0 for a name."""
    found = _integer(text)
    return 0 if found == ABSENT else found
