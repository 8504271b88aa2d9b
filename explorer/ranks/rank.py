"""One rank: its run, its collectives, and what it did in any stretch of time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tracefuse.profiling.attribution import Costs
from tracefuse.profiling.run import Run
from tracefuse.ranks.exchanges import Exchanges
from tracefuse.ranks.memories import Peak
from tracefuse.ranks.started import ENGINE, HOOK, Fsdp, asked_of_gloo, before
from tracefuse.timeline.columns import Events
from tracefuse.timeline.host_calls import by_thread
from tracefuse.timeline.spans import NONE, Interval, Piece, Spans

_COLLECTIVE = re.compile(r"nccl|^gloo:|^c10d::|^_c10d_functional::|record_param_comms", re.I)
# By torch's ExperimentalConfig(record_python_gc_info=True), and by ranges of the user's.
_GARBAGE = re.compile(
    r"\bpython gc\b|garbage collect|^gc\.collect|^gc$|\(\d+\): collect$|built-in function collect", re.I
)

KERNEL, COPY, GARBAGE, HOST, PYTHON = "kernel", "copy", "garbage collection", "operators on the host", "Python"
"""What a rank's time is spent on, beside the causes of `tracefuse.timeline.named` and `tracefuse.timeline.host_calls`."""


class Doing(NamedTuple):
    """What a stretch of time was spent on: one of the kinds above or a named cause, an operator or a range, its module, and
    the function of the user's."""

    kind: str
    what: str
    module: str
    line: str

    def __str__(self) -> str:
        parts = (self.what, self.module and f"in {self.module}", self.line and f"({self.line})")
        return " ".join(filter(None, (f"{self.kind}:", *parts)))


@dataclass(frozen=True, eq=False)
class Rank:
    """`number` is the rank, `run` what its profiler recorded, `exchanges` its collectives, `memory` the peaks of its devices,
    where allocations were recorded."""

    number: int
    path: Path
    run: Run
    exchanges: Exchanges
    memory: Mapping[str, Peak] = field(default_factory=dict)

    @property
    def events(self) -> Events:
        return self.run.recording.events

    @cached_property
    def has_gpu(self) -> bool:
        return bool((self.events.is_work & ~self.is_collective).any())

    @cached_property
    def is_collective(self) -> np.ndarray:
        """Which records are collectives, or the operators that start them."""
        return self.events.named(_COLLECTIVE.search)

    @cached_property
    def window(self) -> Interval:
        """From its first record to its last."""
        return self.run.window

    @cached_property
    def computing(self) -> Spans:
        """What the GPUs computed, one stream after another where several did."""
        return Spans.of(self.events, np.flatnonzero(self.events.is_work & ~self.is_collective))

    @cached_property
    def garbage(self) -> Spans:
        """Where Python collected garbage."""
        columns = [
            (table.start_ns[rows], table.end_ns[rows])
            for table in (self.events, self.run.recording.frames)
            if len(rows := np.flatnonzero(table.named(_GARBAGE.search)))
        ]
        starts, ends = (
            np.concatenate([one[at] for one in columns]) if columns else np.zeros(0, np.int64) for at in (0, 1)
        )
        order = np.lexsort((-ends, starts))
        return Spans(starts[order], ends[order], np.zeros(len(order), np.int64))

    @cached_property
    def operators(self) -> tuple[Spans, ...]:
        """The outermost operators and calls of each thread that are no collectives; those that launch work first."""
        host = self.run.host
        order = sorted(host.threads, key=lambda thread: (thread not in host.launching, thread))
        chosen = by_thread(self.events, ~self.events.on_gpu & ~self.events.is_range & ~self.is_collective)
        return tuple(Spans.of(self.events, chosen[thread]) for thread in order if thread in chosen)

    @cached_property
    def talking(self) -> Spans:
        """Its collectives."""
        return Spans(self.exchanges.start_ns, self.exchanges.end_ns, np.arange(len(self.exchanges)))

    def doing(self, start_ns: int, end_ns: int) -> Counter[Doing]:
        """For how many ns of a stretch it did what: what the GPU computed, and while that was idle, what the host did. What
        only a collective ran in is left out."""
        found: Counter[Doing] = Counter()
        rest: Sequence[Interval] = [(start_ns, end_ns)]
        if self.has_gpu:
            pieces, rest = self.computing.cut(rest)
            self._add(found, pieces, "")
        else:
            running, rest = self._running(rest)
            for pieces in running:
                self._add(found, pieces, HOST)
        rest = self.talking.cut(rest)[1]
        pieces, rest = self.garbage.cut(rest)
        for start, end, _ in pieces:
            found[Doing(GARBAGE, "", "", self.line_of(start, end))] += end - start
        host = self.run.host
        for spans in host.named_on.values():
            pieces, rest = spans.cut(rest)
            for start, end, at in pieces:
                found[Doing(host.named[at].cause, "", "", self.line_of(start, end))] += end - start
        for thread in host.threads.values():
            pieces, rest = thread.blocking.cut(rest)
            for start, end, row in pieces:
                doing = Doing(host.cause(row), host.operator(row) or self.events.name_at(row), "", "")
                found[doing._replace(line=self.line_of(start, end))] += end - start
        running, rest = self._running(rest)
        for pieces in running:
            self._add(found, pieces, HOST)
        for start, end in rest:
            for line, ns in self._lines(start, end):
                found[Doing(PYTHON, "", "", line)] += ns
        return found

    def _running(self, rest: Sequence[Interval]) -> tuple[list[list[Piece]], Sequence[Interval]]:
        """Which operators ran on its host, by thread, and what is left."""
        found = []
        for spans in self.operators:
            pieces, rest = spans.cut(rest)
            found.append(pieces)
        return found, rest

    def _add(self, found: Counter[Doing], pieces: Sequence[Piece], kind: str) -> None:
        rows = np.array([row for _, _, row in pieces], np.int64)
        for (start, end, row), (what, module, line) in zip(pieces, self.whose(rows), strict=True):
            own = kind or (COPY if self.events.name_at(row).startswith("Mem") else KERNEL)
            found[Doing(own, what, module, line)] += end - start

    def whose(self, rows: np.ndarray) -> list[tuple[str, str, str]]:
        """The operator, module and line of records of the GPU, or of outermost operators of the host."""
        places, names, which = self._whose
        at = places[rows].tolist()
        return [tuple(one[number[row]] for one, number in zip(names, which, strict=True)) for row in at]  # type: ignore[misc]

    @cached_property
    def _whose(self) -> tuple[np.ndarray, list[list[str]], list[list[int]]]:
        """The place of each record in three columns; the names of operators, modules and lines; and the columns, their
        numbers."""
        events, host = self.events, self.run.host
        is_asked = np.zeros(len(events), bool)
        is_asked[[row for spans in self.operators for row in spans.rows]] = True
        rows = np.flatnonzero(is_asked | events.is_work | self.is_collective)
        places = np.full(len(events), NONE, np.int64)
        places[rows] = np.arange(len(rows))
        asked = np.where(events.on_gpu[rows], host.launch_of[rows], rows)
        costs = Costs(self.run, rows, events.duration_ns[rows], asked, np.zeros(0, np.int64))
        names, which = zip(*(costs.by(key) for key in ("operator", "module", "line")), strict=True)
        said = map(names[0].__getitem__, which[0].tolist())
        own = [name or events.name_at(row) for name, row in zip(said, rows.tolist(), strict=True)]
        numbers = {name: at for at, name in enumerate(dict.fromkeys(own))}
        operators = [numbers[name] for name in own]
        return places, [list(numbers), *names[1:]], [operators, *(one.tolist() for one in which[1:])]

    @cached_property
    def computed(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """When it computed (from, to), and the row that did: its GPUs or, without one, the operators of its host. No moment is
        counted twice where several threads or streams computed."""
        if self.has_gpu:
            spans = self.computing
            return np.array(spans.starts, np.int64), np.array(spans.ends, np.int64), np.array(spans.rows, np.int64)
        pieces = [piece for running in self._running([self.window])[0] for piece in running]
        starts, ends, rows = np.array(pieces, np.int64).reshape(-1, 3).T
        return starts, ends, rows

    @property
    def computing_ns(self) -> int:
        starts, ends, _ = self.computed
        return int((ends - starts).sum())

    @cached_property
    def by_module(self) -> Counter[str]:
        """The ns that it computed in each module, together `computing_ns`; "" is not known."""
        places, names, which = self._whose
        starts, ends, rows = self.computed
        modules = np.array(which[1], np.int64)[places[rows]]
        sums_ns = np.bincount(modules, ends - starts, len(names[1])).tolist()
        return +Counter({name: round(ns) for name, ns in zip(names[1], sums_ns, strict=True)})

    def line_of(self, start_ns: int, end_ns: int) -> str:
        return self.run.line_of(start_ns, end_ns)

    def _lines(self, start_ns: int, end_ns: int) -> list[tuple[str, int]]:
        """The functions of the user's that a stretch without any operator was spent in; "" of what no frame says."""
        totals: Counter[str] = Counter()
        for thread in self.run.lines.threads:
            for line, ns in self.run.lines.shares(thread, start_ns, end_ns):
                totals[line] += ns
        rest = end_ns - start_ns - totals.total()
        return [*totals.items(), *([("", rest)] if rest > 0 else [])]

    @cached_property
    def _asked(self) -> tuple[np.ndarray, np.ndarray]:
        """When the host asked for each thing that a GPU computed, in order, and when all that was asked for until then was
        done."""
        rows = np.flatnonzero(self.events.is_work & ~self.is_collective)
        calls = self.run.host.launch_of[rows]
        rows, calls = rows[calls != NONE], calls[calls != NONE]
        order = np.argsort(self.events.start_ns[calls], kind="stable")
        return self.events.start_ns[calls[order]], np.maximum.accumulate(self.events.end_ns[rows[order]])

    def ready_ns(self, row: int) -> int:
        """When this rank could have begun a collective: the host had asked for it, and what it had asked for before was
        done. That is its start where it did not queue behind another collective."""
        return self._ready[row]

    @cached_property
    def _ready(self) -> list[int]:
        starts, events, calls = self.exchanges.start_ns, self.events, self._calls
        is_known = calls != NONE
        asked, done = self._asked
        before = np.searchsorted(asked, events.start_ns[calls])
        done_ns = np.where(before > 0, done[before - 1], 0) if len(done) else np.zeros(len(calls), np.int64)
        ready_ns = np.maximum(events.end_ns[calls], done_ns)
        return np.where(is_known, np.minimum(starts, ready_ns), starts).tolist()

    def launched_ns(self, row: int) -> int | None:
        """When the host had asked for the collective in this row; None where no call was recorded."""
        call = self._calls[row]
        return None if call == NONE else int(self.events.end_ns[call])

    @cached_property
    def _calls(self) -> np.ndarray:
        """The call that asked for each collective, or `NONE`."""
        return np.where(self._rows == NONE, NONE, self.run.host.launch_of[self._rows])

    @cached_property
    def _rows(self) -> np.ndarray:
        """The record of each collective among the events, or `NONE`."""
        events, own = self.events, np.flatnonzero(self.is_collective)
        own = own[np.argsort(~events.is_work[own], kind="stable")][
            ::-1
        ]  # the first of those of a GPU comes last, and stays
        ends = zip(events.start_ns[own].tolist(), events.end_ns[own].tolist(), strict=True)
        at = dict(zip(ends, own.tolist(), strict=True))
        pairs = zip(self.exchanges.start_ns.tolist(), self.exchanges.end_ns.tolist(), strict=True)
        return np.array([at.get(pair, NONE) for pair in pairs], np.int64)

    @cached_property
    def _asking(self) -> np.ndarray:
        """The call that asked for each collective, of gloo the operator that did, or `NONE`. Gloo's ranges do not say their
        group, and each group has an order of its own: with several nobody knows."""
        found, exchanges = self._calls.copy(), self.exchanges
        said = self.run.recording.header.get("distributedInfo")
        if not self.has_gpu and isinstance(said, dict) and said.get("pg_count") == 1:
            for number, kind in enumerate(exchanges.kinds):
                own = np.flatnonzero((exchanges.kind == number) & (found == NONE))
                rows = asked_of_gloo(self.events, kind, exchanges.start_ns[own])
                found[own[: len(rows)]] = rows
        return found

    @cached_property
    def _saying(self) -> np.ndarray:
        """The record of each collective that belongs to a module and a line; gloo's own are on threads that know neither."""
        return self._rows if self.has_gpu else np.where(self._asking == NONE, self._rows, self._asking)

    def line_of_call(self, row: int) -> str:
        """The function of the user's that started a collective."""
        at = self._saying[row]
        return self.whose(np.array([at]))[0][2] if at != NONE else ""

    def module_of(self, row: int) -> str:
        """The module whose forward or backward started a collective, or that it is for."""
        return self._modules[row]

    @cached_property
    def _modules(self) -> list[str]:
        is_known = self._saying != NONE
        found = iter(self.whose(self._saying[is_known]))
        modules = [next(found)[1] if known else "" for known in is_known.tolist()]
        calls = zip(self._asking.tolist(), self._operators_asking, strict=True)
        return [
            one or ("" if call == NONE else self._behind(call, row))
            for one, (call, row) in zip(modules, calls, strict=True)
        ]

    @cached_property
    def _operators_asking(self) -> list[int]:
        """The outermost operator that each collective was asked for in; `NONE` where none is known."""
        is_known = self._asking != NONE
        rows = np.full(len(self._asking), NONE, np.int64)
        rows[is_known] = self.run.host.operators_of(self._asking[is_known])
        return rows.tolist()

    def _behind(self, call: int, operator: int) -> str:
        """The module that a collective is for whose operator belongs to none."""
        if operator != NONE and HOOK in self.events.name_at(operator):
            return before(self.events, *self._in_engine, call)
        return self._fsdp.module(call)

    @cached_property
    def _in_engine(self) -> tuple[np.ndarray, list[str]]:
        """The outermost operators, and the module of each."""
        rows = np.sort(np.concatenate([np.array(spans.rows, np.int64) for spans in self.operators]))
        return rows, [module for _, module, _ in self.whose(rows)]

    @cached_property
    def _fsdp(self) -> Fsdp:
        return Fsdp.of(self.events)

    def phase_of(self, row: int) -> str:
        """ "backward" of a collective that autograd's engine started, or FSDP2 behind it, "forward" of any other, an
        optimizer's too; "" where no operator is known that did."""
        return self._phases[row]

    @cached_property
    def _phases(self) -> list[str]:
        names = ["" if row == NONE else self.events.name_at(row) for row in self._operators_asking]
        pairs = zip(names, self._asking.tolist(), strict=True)
        is_backward = (name.startswith(ENGINE) or (name and self._fsdp.is_backward(call)) for name, call in pairs)
        return [name and ("backward" if back else "forward") for name, back in zip(names, is_backward, strict=True)]
