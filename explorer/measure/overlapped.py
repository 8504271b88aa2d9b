"""What a recorded step would take on a described machine of several ranks, as recorded and with other choices about its
collectives. Nothing runs: ops have the times of a roofline or those that were measured, links those of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tracefuse.errors import MeasureError
from tracefuse.measure.op_times import OpTimes, modelled
from tracefuse.optimizers.costs.datasheets import TARGETS
from tracefuse.optimizers.overlap import model
from tracefuse.optimizers.overlap.links import HERE, Mesh
from tracefuse.optimizers.overlap.model import Modelled
from tracefuse.optimizers.overlap.options import Options
from tracefuse.optimizers.overlap.schedule import Schedule, schedule_of
from tracefuse.optimizers.trace import Trace, human_bytes
from tracefuse.text import aligned, share_text, time_text

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
    def frontier(self) -> tuple[Modelled, ...]:
        """The choices that no other one beats in both time and bytes held, from the shortest step on."""
        found: list[Modelled] = []
        for one in sorted(self.steps, key=lambda step: (step.step_us, step.held_nbytes)):
            if not found or one.held_nbytes < found[-1].held_nbytes:
                found.append(one)
        return tuple(found)

    def __str__(self) -> str:
        links = {self.machine.near.name: self.machine.near, self.machine.far.name: self.machine.far}
        by = "; ".join(f"{one.name}: {one.bytes_per_s / 1e9:.4g} GB/s, {one.source}" for one in links.values())
        recorded, best = self.steps[0], self.best
        parts = [
            f"a step of one rank on {self.machine.text}: modelled for it, not measured\n"
            f"ops: {self.schedule.how}\nlinks: {by}\n"
            "no rank is late, the host is ahead, and computing is as fast beside a transfer as alone",
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
        on_frontier = {id(one) for one in self.frontier}
        rows = [("choice", "step", "exposed", "transfer", "calls", "held at most", "")]
        for one in self.steps:
            exposed = f"{time_text(one.exposed_us)} ({share_text(one.exposed_us, one.step_us)})"
            held, calls = human_bytes(one.held_nbytes), str(len(one.collectives))
            mark = "no other is both faster and smaller" if id(one) in on_frontier else ""
            rows.append(
                (str(one.options), time_text(one.step_us), exposed, time_text(one.transfer_us), calls, held, mark)
            )
        return rows


def _bounds(one: Modelled) -> tuple[str, str]:
    return (
        f"with infinite bandwidth the step as recorded takes {time_text(one.latency_only_us)}",
        f"without any exchange {time_text(one.computing_us)}",
    )


def overlapped(trace: Trace, times: OpTimes, machine: Mesh, choices: Sequence[Options] = ()) -> Overlap:
    """`trace`, a whole step, on `machine`: as recorded, and with each of the choices; those of `tried` where there are none.
    `times` are those of its ops on the GPU that the machine calls "here". Raises `MeasureError` for a step without
    collectives."""
    if machine.gpu != HERE:
        times = modelled(trace, TARGETS[machine.gpu].peaks(torch.backends.cuda.matmul.allow_tf32))
    schedule = schedule_of(trace, times.us, times.provenance)
    if not schedule.collectives:
        raise MeasureError(
            "this step exchanges nothing with other ranks: record it under `torchrun`, with DDP, `fully_shard` or a tensor "
            "parallel model"
        )
    options = (Options(), *(one for one in choices or tried(schedule) if not one.is_as_recorded))
    return Overlap(machine, schedule, tuple(model.modelled(schedule, machine, one) for one in options))


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
