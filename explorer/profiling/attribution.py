"""Whose the time of a run is: for each record of a GPU, or each outermost operator of a run without one, the operator, module,
line and range that it is of, and the step that it was asked for in. Pure.

Modules are the frames that torch's profiler calls `nn.Module: Block_3` where stacks are recorded; what a backward does is of
the module and line of its forward operator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tracefuse.profiling.lanes import named_operator
from tracefuse.profiling.run import Run
from tracefuse.timeline.host_calls import by_thread
from tracefuse.timeline.spans import NONE, Nested

_MODULE = "nn.Module: "
_STEP = re.compile(r"ProfilerStep#\d+$")
_NUMBER = re.compile(r"#\d+$")

BY = ("operator", "kernel", "module", "line", "range")
"""What time can be told apart by."""


@dataclass(frozen=True, eq=False)
class Costs:
    """What took time in a run's window: rows of its events, and their ns. `asked` is the row of the host that each was asked
    for by, `NONE` where none is known; `steps` are the rows of the steps' ranges."""

    run: Run
    rows: np.ndarray
    ns: np.ndarray
    asked: np.ndarray
    steps: np.ndarray

    @property
    def on_gpu(self) -> bool:
        return self.run.has_gpu

    @cached_property
    def step(self) -> np.ndarray:
        """The number of the step that each was asked for in, `NONE` outside of any."""
        events = self.run.recording.events
        times = np.where(self.asked == NONE, events.start_ns[self.rows], events.start_ns[self.asked])
        starts, ends = events.start_ns[self.steps], events.end_ns[self.steps]
        if not len(starts):
            return np.full(len(times), NONE)
        at = np.searchsorted(starts, times, side="right") - 1
        return np.where((at >= 0) & (times < ends[at]), at, NONE)

    @cached_property
    def outermost(self) -> np.ndarray:
        """The row of the outermost operator of each."""
        found = np.full(len(self.rows), NONE, np.int64)
        known = self.asked != NONE
        found[known] = self.run.host.operators_of(self.asked[known])
        return found

    @cached_property
    def forward(self) -> np.ndarray:
        """The row of the host that says whose each is: of a backward operator its forward one, else what asked for it."""
        forward_of = self.run.recording.forward_of
        backward = np.flatnonzero(forward_of != NONE)
        of_outermost = np.full(len(forward_of), NONE, np.int64)
        of_outermost[self.run.host.operators_of(backward)] = forward_of[backward]
        found = np.where(self.outermost == NONE, NONE, of_outermost[self.outermost])
        return np.where(found == NONE, self.asked, found)

    def by(self, key: str) -> tuple[list[str], np.ndarray]:
        """The names of one of `BY`, and for each record which of them it is of; "" is none."""
        found = getattr(self, f"_{key}s")()
        names = {name: at for at, name in enumerate(dict.fromkeys(found))}
        return list(names), np.array([names[name] for name in found], np.int64)

    def _operators(self) -> list[str]:
        events = self.run.recording.events
        names = [named_operator(name) for name in events.names]
        return ["" if row == NONE else names[events.name[row]] for row in self.outermost.tolist()]

    def _kernels(self) -> list[str]:
        events = self.run.recording.events
        return [events.names[at] for at in events.name[self.rows].tolist()] if self.on_gpu else [""] * len(self.rows)

    def _lines(self) -> list[str]:
        found = [""] * len(self.rows)
        known = np.flatnonzero(self.forward != NONE)
        lines = self.run.lines.of_rows(self.run.recording.events, self.forward[known])
        for at, line in zip(known.tolist(), lines, strict=True):
            found[at] = line
        return found

    def _modules(self) -> list[str]:
        frames = self.run.recording.frames
        paths: dict[int, str] = {NONE: ""}

        def path(row: int, parents: dict[int, int]) -> str:
            if row not in paths:
                above, own = path(parents[row], parents), frames.name_at(row).removeprefix(_MODULE)
                paths[row] = f"{above}.{own}" if above else own
            return paths[row]

        found = [""] * len(self.rows)
        is_module = frames.named(lambda name: name.startswith(_MODULE))
        for here, rows, nested in self._inside(frames, is_module, self.forward):
            for at, row in zip(here.tolist(), rows.tolist(), strict=True):
                found[at] = path(row, nested.parents)
        return found

    def _ranges(self) -> list[str]:
        events = self.run.recording.events
        is_shown = events.is_range & ~events.on_gpu & ~events.is_marked & ~events.named(_STEP.search)
        found = [""] * len(self.rows)
        names = [_NUMBER.sub("", name) for name in events.names]
        for here, rows, _ in self._inside(events, is_shown, self.asked):
            for at, name in zip(here.tolist(), events.name[rows].tolist(), strict=True):
                found[at] = names[name]
        return found

    def _inside(
        self, table: object, chosen: np.ndarray, asked: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray, Nested]]:
        """Of the records with a known row of the host in `asked`, by thread, those that are in one of its chosen stretches,
        and the rows of the innermost."""
        events = self.run.recording.events
        for thread, rows in by_thread(table, chosen).items():  # type: ignore[arg-type]
            nested = Nested(table.start_ns[rows], table.end_ns[rows], rows)  # type: ignore[attr-defined]
            here = np.flatnonzero((asked != NONE) & (events.resource[asked] == thread))
            inner = nested.at(events.start_ns[asked[here]])
            yield here[inner != NONE], inner[inner != NONE], nested


def costs_of(run: Run) -> Costs:
    """What took time in the window of `run`: what its GPUs did, or its outermost operators where it has none."""
    events, host = run.recording.events, run.host
    steps = run.rows[(events.named(_STEP.search) & events.is_range & ~events.on_gpu)[run.rows]]
    if run.has_gpu:
        rows = run.rows[events.is_work[run.rows]]
        asked = host.launch_of[rows]
    else:
        rows = np.unique([row for thread in host.threads.values() for row in thread.operators.rows]).astype(int)
        rows = asked = rows[(events.end_ns[rows] >= run.window[0]) & (events.start_ns[rows] <= run.window[1])]
    ns = np.minimum(events.end_ns[rows], run.window[1]) - np.maximum(events.start_ns[rows], run.window[0])
    return Costs(run, rows, np.maximum(ns, 0), asked, steps)
