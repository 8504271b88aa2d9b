"""The timeline of a run as lanes and columns, in the form of a replay's: `tracefuse.timeline.lanes.ProgramTimeline`. Pure.

Streams, their copies, idle time, ranges that somebody named, then a lane for each thread of the host, where what runs inside
an operator lies on it. The values are the calls of outermost operators, "linear #3": what the GPU did belongs to the one that
asked for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tracefuse.profiling.run import Run
from tracefuse.timeline.columns import Events
from tracefuse.timeline.lanes import COPY, Lane, LaneKey, ProgramTimeline, with_idle_lanes
from tracefuse.timeline.spans import NONE

_ENGINE = "autograd::engine::evaluate_function: "
# In place of a thread's number: before them.
_RANGES = -1


@dataclass(frozen=True)
class RunLanes:
    """`program` has the columns, `operators` the row of the operator that each value is a call of, `twins` the values that are
    forward and backward of each other."""

    program: ProgramTimeline
    operators: Mapping[str, int]
    twins: Mapping[str, tuple[str, ...]]


def run_lanes(run: Run) -> RunLanes:
    """What of `run` is in its window, as lanes."""
    events = run.recording.events
    rows = run.rows[~events.is_marked[run.rows]]
    operators = _operators(run)
    # By row, the number of the value that the row is a call of: 0 for none.
    value = np.zeros(len(events), np.uint32)
    value[list(operators.values())] = np.arange(1, len(operators) + 1)
    owner = value.copy()
    works = np.flatnonzero(run.host.call_of != NONE)
    around = run.host.operators_of(run.host.call_of[works])
    owner[works] = np.where(around == NONE, 0, value[around])
    return RunLanes(_program(run, rows, owner, tuple(operators)), operators, _twins(run, value, tuple(operators)))


def named_operator(name: str) -> str:
    return name.removeprefix(_ENGINE).removeprefix("aten::")


def _operators(run: Run) -> dict[str, int]:
    """Outermost operators by what they are called, in order."""
    events = run.recording.events
    outermost = np.unique([row for thread in run.host.threads.values() for row in thread.operators.rows]).astype(int)
    is_inside = (events.end_ns[outermost] >= run.window[0]) & (events.start_ns[outermost] <= run.window[1])
    names = [named_operator(name) for name in events.names]
    counts: Counter[str] = Counter()
    found: dict[str, int] = {}
    for row in outermost[is_inside].tolist():
        name = names[events.name[row]]
        counts[name] += 1
        found[f"{name} #{counts[name]}"] = row
    return found


def _twins(run: Run, value: np.ndarray, values: Sequence[str]) -> dict[str, tuple[str, ...]]:
    forward_of = run.recording.forward_of
    backward = np.flatnonzero(forward_of >= 0)
    ends = [run.host.operators_of(rows) for rows in (backward, forward_of[backward])]
    pairs = np.stack([np.where(end == NONE, 0, value[end]) for end in ends], axis=1)
    found: dict[str, dict[str, None]] = {}
    for one, other in pairs[(pairs > 0).all(1) & (pairs[:, 0] != pairs[:, 1])].tolist():
        found.setdefault(values[one - 1], {})[values[other - 1]] = None
        found.setdefault(values[other - 1], {})[values[one - 1]] = None
    return {name: tuple(others) for name, others in found.items()}


def _program(run: Run, rows: np.ndarray, owner: np.ndarray, values: tuple[str, ...]) -> ProgramTimeline:
    events, host, (first_ns, last_ns) = run.recording.events, run.host, run.window
    keys, lane = _lanes(events, rows)
    gpus = len({key.device for key in keys if not key.is_host})
    used, name = np.unique(events.name[rows], return_inverse=True)
    # What began before the window is cut there, as the window is what was measured.
    starts, ends = np.maximum(events.start_ns[rows], first_ns), np.minimum(events.end_ns[rows], last_ns)
    calls = host.call_of[rows]
    delays = np.where(calls == NONE, np.nan, (events.start_ns[rows] - events.start_ns[calls]) / 1e3)
    is_kernel = (events.on_gpu & events.in_category(lambda one: one == "kernel"))[rows]
    program = ProgramTimeline(
        label="run",
        config=None,
        lanes=tuple(_shown(key, gpus, run.recording.threads) for key in keys),
        names=tuple(events.names[at] for at in used),
        values=values,
        start_us=((starts - first_ns) / 1e3).astype("<f8"),
        duration_us=(np.maximum(ends - starts, 0) / 1e3).astype("<f4"),
        name=name.astype("<u4"),
        value=owner[rows].astype("<u4"),
        lane=lane.astype("<u2"),
        delay_us=delays.astype("<f4"),
        op_us={},
        launches=int((is_kernel & (calls != NONE)).sum()),
        records=int(is_kernel.sum()),
    )
    owned = rows[events.on_gpu[rows]]
    named = ("", *values)
    owners = {row: named[at] for row, at in zip(owned.tolist(), owner[owned].tolist(), strict=True)}
    return with_idle_lanes(program, run.idle, owners, first_ns)


def _lanes(events: Events, rows: np.ndarray) -> tuple[list[LaneKey], np.ndarray]:
    """The lanes of some rows, as they are shown, and which of them each row is on."""
    on_gpu = events.on_gpu[rows]
    is_copy = events.named(lambda name: name.startswith(COPY))[rows] & on_gpu
    resource = np.where(~on_gpu & events.is_range[rows], _RANGES, events.resource[rows])
    places = np.stack([~on_gpu, np.where(on_gpu, events.device[rows], 0), is_copy, resource], axis=1)
    found, lane = np.unique(places, axis=0, return_inverse=True)
    keys = [LaneKey(bool(a), b, bool(c), d) for a, b, c, d in found.tolist()]
    return keys, lane.reshape(-1)


def _shown(key: LaneKey, gpus: int, threads: Sequence[str]) -> Lane:
    if not key.is_host:
        return key.shown(gpus)
    return Lane("ranges", "range") if key.stream == _RANGES else Lane(threads[key.stream], "cpu")
