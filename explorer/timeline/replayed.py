"""When each op of a program ran and for how long: a profiled replay, op by op, as columns of numbers.

    timeline(variant)      the captured program and the variant, the middle one of a few profiled replays each
    program timeline       lanes, names, values; per event its start, its duration, and which name, value and lane

The replay runs the joint trace as `Variant.compile` would, the same launchers under the same tunings and fallbacks, each op
in a range that is called after its value. What the GPU did belongs to the op inside whose range it was asked for, by an
operator or by a launch; what neither tells keeps its place on its lane, and belongs to no value.

The driver may drop records, so launches are counted on the host and compared with the kernels that the GPU reported.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import fx

from tracefuse.config.configuration import Config
from tracefuse.device.clocks import device_label
from tracefuse.execution.program import spared
from tracefuse.measure.alone import alone
from tracefuse.measure.op_times import OpTimes
from tracefuse.measure.switched import Switched
from tracefuse.optimizers.gc_pause import uncollected
from tracefuse.optimizers.kernels.lists import overwritten
from tracefuse.optimizers.ops import does_work, op_name
from tracefuse.optimizers.render import INDENT, last_uses, render_op
from tracefuse.optimizers.trace import Trace, tensors
from tracefuse.text import share, time_text
from tracefuse.timeline.events import LAUNCHES, NOT_KERNELS, Event, marked, recorded
from tracefuse.timeline.gaps import idle_of_devices
from tracefuse.timeline.lanes import ProgramTimeline, idle_us, lane_of, with_idle_lanes
from tracefuse.timeline.transfers import transfers

# On a CPU, one op of a few hundred is always interrupted: what an op takes is the middle of several replays.
RUNS = 3


@dataclass(frozen=True)
class Timeline:
    """One profiled replay of each program. `device` begins with "measured on"."""

    device: str
    programs: tuple[ProgramTimeline, ...]

    @property
    def provenance(self) -> str:
        """Where and how it was measured, and what is missing."""
        return f"{self.device}, op by op, the middle of {RUNS} profiled replays{''.join(map(_missing, self.programs))}"

    def op_times(self, program: int) -> OpTimes:
        """The times of one program's ops: "measured on X, op by op, the middle of 3 profiled replays"."""
        one = self.programs[program]
        waited = {name: found.own_us for name, found in one.transfers.items() if found.blocks}
        device = self.device.removeprefix("measured on ")
        return OpTimes({**one.op_us, **waited}, self.provenance, one.transfers, device, laid_out_us=one.laid_out_us)

    def __str__(self) -> str:
        """How long each program took, and for what its GPU was idle."""
        return "\n".join([self.provenance, *map(_idle_line, self.programs)])


def _idle_line(program: ProgramTimeline) -> str:
    causes = ", ".join(
        f"{cause} {share(round(1e3 * us), round(1e3 * program.span_us))}" for cause, us in idle_us(program).items()
    )
    return f"{program.label}: {time_text(program.span_us)}{f'; GPU idle by: {causes}' if causes else ''}"


def _missing(program: ProgramTimeline) -> str:
    if program.is_complete:
        return ""
    return f"; {program.label}: {program.launches} launches, {program.records} kernel records, so that times are incomplete"


# --- running ----------------------------------------------------------------------------------------------------------


def timeline(variant: Switched, baseline: Switched | None = None) -> Timeline:
    """Profile one replay of `baseline` (default: the program as captured) and one of `variant`.

    Raises `ExportError` for what is more than one differentiable step, as `Variant.compile` does.
    """
    label = "captured" if baseline is None else "baseline"
    programs = profiled(label, baseline or variant.baseline), profiled("optimised", variant)
    return Timeline(measured_on(programs), programs)


def measured_on(programs: Iterable[ProgramTimeline]) -> str:
    """The GPU if any program did anything there, whatever its inputs lie on; else the CPU."""
    kinds = {lane.kind for program in programs for lane in program.lanes}
    return device_label("cuda" if kinds - {"cpu"} else "cpu")


@uncollected()
def profiled(label: str, variant: Switched) -> ProgramTimeline:
    """The middle one of `RUNS` profiled replays of `variant`, and each op's middle time. Raises as `timeline` does."""
    run = stepwise_replay(variant)
    found = (alone.whole(lambda: recorded(run), in_reach=False) for _ in range(RUNS))
    runs = [attributed(label, variant.config, variant.whole_in_place, events) for events in found]
    middle = sorted(runs, key=lambda one: one.span_us)[RUNS // 2]
    # In the runs that have the op: the driver may drop a record.
    return replace(
        middle, op_us={name: median(one.op_us[name] for one in runs if name in one.op_us) for name in middle.op_us}
    )


def stepwise_replay(variant: Switched) -> Callable[[], tuple[Any, ...]]:
    """A replay of `variant` on the captured inputs, each op in a range called after its value; an update works in place, on
    copies. Raises as `timeline` does."""
    program, captured, update = variant.halves(), variant.program, variant.update
    names, trace = vars(program.module), variant.whole_in_place
    tensors = dict(zip((i.name for i in captured.trace.inputs), captured.example_inputs, strict=True))
    written = overwritten(trace)
    if update is not None and captured.update is not None:
        names = {**vars(update.halves().module), **names}
        written |= {out.of for out in update.trace.outputs if out.kind == "mutation"}
        theirs = zip((i.name for i in update.trace.inputs), captured.update.example_inputs, strict=True)
        tensors = {**dict(theirs), **tensors}
    step, restart = stepwise(trace, names), program.restarts(captured.rng_states)
    is_on_cpu = captured.device.type == "cpu"
    inputs = spared((i.name for i in trace.inputs), [tensors[i.name] for i in trace.inputs], written)

    @torch.no_grad()
    def run() -> tuple[Any, ...]:
        restart()
        return alone.within_reach(lambda: step(*inputs), is_on_cpu)

    return run


def stepwise(trace: Trace, names: Mapping[str, Any]) -> Callable[..., tuple[Any, ...]]:
    """The joint trace as one function of its inputs, each op in a range called after its value; `names` has its kernels.

    As text, since interpreting a graph would leave the GPU waiting between any two ops.
    """
    dying = last_uses(trace)
    lines = [f"def step({', '.join(entry.name for entry in trace.inputs)}):"]
    for node in trace.ops:
        lines += [f"{INDENT}with _marked({node.name!r}):", f"{INDENT * 2}{render_op(node)}"]
        if dying.get(node):
            lines.append(f"{INDENT}del {', '.join(dying[node])}")
    lines.append(f"{INDENT}return ({''.join(f'{node.name}, ' for node in trace.returned)})")
    around = {**names, "_marked": marked}
    exec(compile("\n".join(lines), f"<tracefuse timeline of {trace.name}>", "exec"), around)
    return around["step"]


# --- attributing ------------------------------------------------------------------------------------------------------


def attributed(label: str, config: Config, trace: Trace, events: Iterable[Event]) -> ProgramTimeline:
    """The timeline of a run of `trace` that the profiler recorded as `events`. Pure."""
    events = sorted(events, key=lambda event: (event.start_ns, -event.duration_ns))
    ranges = [event for event in events if event.mark]
    shown = [event for event in events if event.on_gpu or event.mark]
    find = _Attribution(ranges, events)
    owners = [event.mark or find(event) for event in shown]
    ops = {node.name: node for node in trace.ops}
    lanes = sorted({lane_of(event) for event in shown})
    gpus = len({lane.device for lane in lanes if not lane.is_host})
    values = {name: at for at, name in enumerate(ops, 1)} | {"": 0}
    called = [op_name(ops[event.mark]).removeprefix("aten.") if event.mark else event.name for event in shown]
    names = {name: at for at, name in enumerate(dict.fromkeys(called))}
    origin_ns = shown[0].start_ns if shown else 0
    program = ProgramTimeline(
        label=label,
        config=config,
        lanes=tuple(lane.shown(gpus) for lane in lanes),
        names=tuple(names),
        values=tuple(ops),
        start_us=np.array([(event.start_ns - origin_ns) / 1e3 for event in shown], "<f8"),
        duration_us=np.array([event.duration_ns / 1e3 for event in shown], "<f4"),
        name=np.array([names[name] for name in called], "<u4"),
        value=np.array([values[owner] for owner in owners], "<u4"),
        lane=np.array([lanes.index(lane_of(event)) for event in shown], "<u2"),
        delay_us=np.array([find.delay_us(event) for event in shown], "<f4"),
        op_us=_op_us(ops, shown, owners),
        launches=sum(event.is_cuda_call and event.name.startswith(LAUNCHES) for event in events),
        records=sum(event.on_gpu and not event.name.startswith(NOT_KERNELS) for event in events),
        transfers=transfers(ranges, events, zip(shown, owners, strict=True)),
    )
    idle = idle_of_devices(events, (origin_ns, max((event.end_ns for event in shown), default=0)))
    rows = [row for row, event in enumerate(events) if event.on_gpu or event.mark]  # as `Events` sorts them
    return with_idle_lanes(program, idle, dict(zip(rows, owners, strict=True)), origin_ns)


class _Attribution:
    """Tells whose work an event of the GPU is: the name of a value, or "" where nothing says it."""

    def __init__(self, ranges: Sequence[Event], events: Sequence[Event]) -> None:
        self.ranges = ranges
        self.starts = [one.start_ns for one in ranges]
        host = [event for event in events if not event.on_gpu]
        self.operators = {e.correlation: self.around(e) for e in host if not e.is_cuda_call}
        self.calls = {e.correlation: e for e in host if e.is_cuda_call}

    def __call__(self, event: Event) -> str:
        call = self.calls.get(event.correlation)
        # By time, since not every call is linked to an operator.
        return self.operators.get(event.operator) or (self.around(call) if call else "")

    def delay_us(self, event: Event) -> float:
        """From the launch of what the GPU did to its start; NaN of anything else."""
        call = self.calls.get(event.correlation) if event.on_gpu else None
        return (event.start_ns - call.start_ns) / 1e3 if call else math.nan

    def around(self, event: Event) -> str:
        """The range that `event` begins in; ranges follow one another, each op's on the thread that runs them all."""
        at = bisect.bisect_right(self.starts, event.start_ns) - 1
        return self.ranges[at].mark if at >= 0 and event.start_ns < self.ranges[at].end_ns else ""


def _op_us(ops: Mapping[str, fx.Node], shown: Sequence[Event], owners: Sequence[str]) -> dict[str, float]:
    on_gpu: dict[str, float] = defaultdict(float)
    for event, owner in zip(shown, owners, strict=True):
        if event.on_gpu and owner:
            on_gpu[owner] += event.duration_ns / 1e3
    on_host = {name for name, n in ops.items() if does_work(n) and all(t.device.type == "cpu" for t in tensors(n))}
    return {event.mark: event.duration_ns / 1e3 for event in shown if event.mark in on_host} | on_gpu
