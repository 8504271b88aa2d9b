"""What a recorded step would take on a described machine of several ranks, as recorded and with other choices about its
collectives. Nothing runs: ops have the times of a roofline or those that were measured, links those of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tracefuse.errors import MeasureError
from tracefuse.measure.op_times import OpTimes, modelled, roofline_of
from tracefuse.optimizers.costs.cost import Peaks
from tracefuse.optimizers.costs.datasheets import TARGETS
from tracefuse.optimizers.facts import once_per_trace
from tracefuse.optimizers.ops import is_collective, is_of_ranks, is_recorded
from tracefuse.optimizers.overlap import model
from tracefuse.optimizers.overlap.links import HERE, Mesh
from tracefuse.optimizers.overlap.model import Modelled
from tracefuse.optimizers.overlap.options import Options
from tracefuse.optimizers.overlap.schedule import Schedule, schedule_of
from tracefuse.optimizers.trace import Trace, human_bytes
from tracefuse.text import aligned, share_text, time_text

T = TypeVar("T")
_SHOWN = 12
BUCKETS_MB, DEPTHS = (1.0, 5.0, 25.0, 100.0), (0, 1, 2, 4)


@dataclass(frozen=True, repr=False)
class Overlap:
    """A step on a described machine, with each choice: the first is as recorded. Print it."""

    machine: Mesh
    schedule: Schedule
    steps: tuple[Modelled, ...]

    @property
    def best(self) -> Modelled:
        """The shortest step; of equal ones what holds the fewest bytes."""
        return min(self.steps, key=lambda one: (round(one.step_us, 3), one.held_nbytes))

    @property
    def unbeaten(self) -> tuple[Modelled, ...]:
        """The choices that no other one beats in both time and bytes held, from the shortest step on."""
        return unbeaten(self.steps, lambda step: (step.step_us, step.held_nbytes))

    def __str__(self) -> str:
        recorded, best = self.steps[0], self.best
        parts = [
            f"a step of one rank on {self.machine.text}: modelled for it, not measured\n"
            f"ops: {self.schedule.how}\n{link_text(self.machine)}",
            aligned(self._rows()),
            "bounds: " + "; ".join(_bounds(recorded)),
        ]
        exposed = [
            (kind, module or "-", phase, time_text(us))
            for (kind, module, phase), us in best.by_module().items()
            if us > 0
        ]
        if exposed:
            head = [("collective", "module", "phase", "exposed")]
            parts.append(f"exposed communication by module, {best.options}\n" + aligned(head + exposed[:_SHOWN]))
        return "\n\n".join(parts)

    __repr__ = __str__

    def _rows(self) -> list[tuple[str, ...]]:
        best = {id(one) for one in self.unbeaten}
        rows = [("choice", "step", "exposed", "transfer", "calls", "held at most", "")]
        for one in self.steps:
            exposed = f"{time_text(one.exposed_us)} ({share_text(one.exposed_us, one.step_us)})"
            held, calls = human_bytes(one.held_nbytes), str(len(one.collectives))
            mark = "no other is both faster and smaller" if id(one) in best else ""
            rows.append(
                (str(one.options), time_text(one.step_us), exposed, time_text(one.transfer_us), calls, held, mark)
            )
        return rows


def link_text(machine: Mesh) -> str:
    """The links of a machine, and what its model takes for granted."""
    links = {machine.near.name: machine.near, machine.far.name: machine.far}
    by = "; ".join(f"{one.name}: {one.bytes_per_s / 1e9:.4g} GB/s, {one.source}" for one in links.values())
    return f"links: {by}\nno rank is late, the host is ahead, and computing is as fast beside a transfer as alone"


def _bounds(one: Modelled) -> tuple[str, str]:
    return (
        f"with infinite bandwidth the step as recorded takes {time_text(one.latency_only_us)}",
        f"without any exchange {time_text(one.computing_us)}",
    )


def overlapped(
    trace: Trace, times: OpTimes, machine: Mesh, choices: Sequence[Options] = (), tf32: bool = False
) -> Overlap:
    """`trace`, a whole step, on `machine`: as recorded, and with each of the choices; those of `tried` where there are none.
    `times` are those of its ops on the GPU that the machine calls "here"; with `tf32` the program lets tensor cores multiply
    float32. Raises `MeasureError` for a step without collectives that can be modelled."""
    check_recorded(trace)
    if machine.gpu != HERE:
        times = modelled(trace, peaks_on(machine, trace, tf32))
    schedule = schedule_of(trace, times.us, times.provenance)
    options = (Options(), *(one for one in choices or tried(schedule) if not one.is_as_recorded))
    return Overlap(machine, schedule, tuple(model.modelled(schedule, machine, one) for one in options))


def check_recorded(trace: Trace) -> None:
    """Raise `MeasureError` for a step without collectives, and for a graph that starts them itself, which is not modelled."""
    if has_recorded_collectives(trace):
        return
    if has_collectives(trace):
        raise MeasureError(
            "a graph of torch.compile starts the collectives of this step itself, and such a graph is not modelled: capture "
            "the step without torch.compile (`tracefuse.capture_step`) on a rank, and model that"
        )
    raise MeasureError(
        "this step exchanges nothing with other ranks: record it under `torchrun`, with DDP, `fully_shard` or a tensor "
        "parallel model"
    )


@once_per_trace
def has_collectives(trace: Trace) -> bool:
    """Whether a program exchanges tensors with other ranks, as it was recorded or as a graph starts collectives itself."""
    return any(map(is_collective, trace.ops))


@once_per_trace
def has_recorded_collectives(trace: Trace) -> bool:
    """Whether a step was recorded with collectives, which can be modelled on another machine."""
    return any(map(is_recorded, trace.ops))


def peaks_on(machine: Mesh, trace: Trace, tf32: bool) -> Peaks:
    """The peaks of the GPU of a machine; of the one that is "here" those of `roofline_of`."""
    return roofline_of(trace) if machine.gpu == HERE else TARGETS[machine.gpu].peaks(tf32)


def on_mesh(trace: Trace, machine: Mesh, tf32: bool) -> OpTimes:
    """The times of a whole step's ops on a machine, by a roofline; a collective's is for how long computing waits for it, so
    that their sum is the modelled step. With `tf32` the program lets tensor cores multiply float32."""
    return _on_mesh(machine, peaks_on(machine, trace, tf32), trace)


@once_per_trace
def _on_mesh(machine: Mesh, peaks: Peaks, trace: Trace) -> OpTimes:
    ops = modelled(trace, peaks)
    found = model.modelled(schedule_of(trace, ops.us, ops.provenance), machine)
    us = {node.name: ops.us[node.name] for node in trace.ops if node.name in ops.us and not is_of_ranks(node)}
    us |= {one.collective.name: one.exposed_us for one in found.collectives if one.exposed_us > 0}
    roofline = ops.provenance.removeprefix("modelled: ")
    return OpTimes(us, f"modelled: {roofline}; collectives: what is exposed on {machine.text}")


def tried(schedule: Schedule) -> tuple[Options, ...]:
    """The choices that change something about a step."""
    roles = {one.role for one in schedule.collectives}
    found = [Options(bucket_mb=size) for size in BUCKETS_MB if "reduction" in roles]
    if "gather" in roles:
        found += [Options(prefetch=depth) for depth in DEPTHS]
        found += [Options(prefetch=1, second_group=True), Options(prefetch=1, reshard=False)]
        found += [Options(prefetch=1, second_group=True, reshard=False)]
        found += [Options(bucket_mb=25.0, prefetch=2, second_group=True)]
    return tuple(found)


def unbeaten(tried: Iterable[T], cost: Callable[[T], tuple[float, float]]) -> tuple[T, ...]:
    """Those that no other one beats, in the order of the first of their two costs. One choice beats another where it has less
    of one cost and no more of the other; of choices that are equal in both the first is taken."""
    found: list[T] = []
    least = float("inf")
    for one in sorted(tried, key=cost):
        second = cost(one)[1]
        if second < least:
            found.append(one)
            least = second
    return tuple(found)
