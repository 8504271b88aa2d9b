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

from tracefuse.profiling.run import Run, inside
from tracefuse.timeline.events import Event
from tracefuse.timeline.lanes import Lane, LaneKey, ProgramTimeline, lane_of, with_idle_lanes

_ENGINE = "autograd::engine::evaluate_function: "
# In place of a thread's number: before them.
_RANGES = -1


@dataclass(frozen=True)
class RunLanes:
    """`program` has the columns, `operators` the operator that each value is a call of, `twins` the values that are forward
    and backward of each other."""

    program: ProgramTimeline
    operators: Mapping[str, Event]
    twins: Mapping[str, tuple[str, ...]]


def run_lanes(run: Run) -> RunLanes:
    """What of `run` is in its window, as lanes."""
    shown = sorted(
        (event for event in run.events if not event.mark), key=lambda event: (event.start_ns, -event.duration_ns)
    )
    operators = _operators(run)
    names = {event: name for name, event in operators.items()}
    owners = [names.get(event) or _owner(run, event, names) for event in shown]
    return RunLanes(_program(run, shown, owners, tuple(operators)), operators, _twins(run, names))


def _operators(run: Run) -> dict[str, Event]:
    """Outermost operators by what they are called, in order."""
    counts: Counter[str] = Counter()
    found: dict[str, Event] = {}
    ran = [e for thread in run.host.threads.values() for e in inside(thread.operators.events, run.window)]
    for event in sorted(ran, key=lambda one: one.start_ns):
        name = event.name.removeprefix(_ENGINE).removeprefix("aten::")
        counts[name] += 1
        found[f"{name} #{counts[name]}"] = event
    return found


def _owner(run: Run, event: Event, names: Mapping[Event, str]) -> str:
    """The outermost operator that asked for what the GPU did; "" of all else: what is inside an operator has its own name."""
    call = run.host.calls.get(event.correlation) if event.on_gpu else None
    return names.get(around, "") if call and (around := outermost(run, call)) else ""


def outermost(run: Run, event: Event) -> Event | None:
    """The outermost operator of the host that `event`, of the host too, runs in."""
    thread = run.host.threads.get(event.resource)
    return thread.operators.at(event.start_ns) if thread else None


def _twins(run: Run, names: Mapping[Event, str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, dict[str, None]] = {}
    for backward, forward in run.recording.backward.items():
        ends = [names.get(around, "") if (around := outermost(run, end)) else "" for end in (backward, forward)]
        if all(ends) and ends[0] != ends[1]:
            found.setdefault(ends[0], {})[ends[1]] = None
            found.setdefault(ends[1], {})[ends[0]] = None
    return {name: tuple(others) for name, others in found.items()}


def _program(run: Run, shown: Sequence[Event], owners: Sequence[str], values: tuple[str, ...]) -> ProgramTimeline:
    keys = sorted({_lane(event) for event in shown})
    lanes, gpus = {key: at for at, key in enumerate(keys)}, len({key.device for key in keys if not key.is_host})
    names = {name: at for at, name in enumerate(dict.fromkeys(event.name for event in shown))}
    numbers = {name: at for at, name in enumerate(values, 1)} | {"": 0}
    origin_ns = run.window[0]
    # What began before the window is cut there, as the window is what was measured.
    starts = [max(event.start_ns, origin_ns) for event in shown]
    ends = [min(event.end_ns, run.window[1]) for event in shown]
    calls = [run.host.calls.get(event.correlation) if event.on_gpu else None for event in shown]
    delays = [
        (event.start_ns - call.start_ns) / 1e3 if call else np.nan for event, call in zip(shown, calls, strict=True)
    ]
    works = [event for event in shown if event.on_gpu and event.category == "kernel"]
    program = ProgramTimeline(
        label="run",
        config=None,
        lanes=tuple(_shown(key, gpus, run.recording.threads) for key in keys),
        names=tuple(names),
        values=values,
        start_us=np.array([(start - origin_ns) / 1e3 for start in starts], "<f8"),
        duration_us=np.array([max(0, end - start) / 1e3 for start, end in zip(starts, ends, strict=True)], "<f4"),
        name=np.array([names[event.name] for event in shown], "<u4"),
        value=np.array([numbers[owner] for owner in owners], "<u4"),
        lane=np.array([lanes[_lane(event)] for event in shown], "<u2"),
        delay_us=np.array(delays, "<f4"),
        op_us={},
        launches=sum(call is not None for call, event in zip(calls, shown, strict=True) if event.category == "kernel"),
        records=len(works),
    )
    return with_idle_lanes(program, run.idle, dict(zip(shown, owners, strict=True)), origin_ns)


def _lane(event: Event) -> LaneKey:
    return lane_of(event) if event.on_gpu else LaneKey(True, 0, False, _RANGES if event.is_range else event.resource)


def _shown(key: LaneKey, gpus: int, threads: Sequence[str]) -> Lane:
    if not key.is_host:
        return key.shown(gpus)
    return Lane("ranges", "range") if key.stream == _RANGES else Lane(threads[key.stream], "cpu")
