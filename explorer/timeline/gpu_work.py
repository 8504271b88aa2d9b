"""What the GPU did in one profiled replay, as a table whose parts add up, with the whole step below it.

    part                 calls  µs
    Triton kernels       79     4210     a region each
    ATen's kernels       220    17800
    copies and fills     6      31
    the GPU's work       305    22041    in one profiled replay, op by op
    first to last               22900    of it 859 µs idle
    step, end to end            22950    unprofiled, median of 40 rounds

The first five are of one replay op by op: the profiler slows the host, so that idle time is more than in the timed rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracefuse.measure.switched import Switched
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.text import aligned, figure
from tracefuse.timeline.events import NOT_KERNELS
from tracefuse.timeline.lanes import ProgramTimeline

Row = tuple[str, int | None, float, str]
"""Part, calls, microseconds, remark."""


@dataclass(frozen=True)
class Part:
    """So many calls and their microseconds together."""

    calls: int
    us: float


@dataclass(frozen=True)
class GpuWork:
    """What one replay is made of. `window_us` is from the first start to the last end of what the GPU did; `launches` were
    counted on the host, `records` are the kernels that the GPU reported."""

    triton: Part
    aten: Part
    copies: Part
    window_us: float
    launches: int
    records: int

    @property
    def together(self) -> Part:
        parts = self.triton, self.aten, self.copies
        return Part(sum(one.calls for one in parts), sum(one.us for one in parts))

    def rows(self, step_ms: float | None = None, rounds: int = 0) -> list[Row]:
        """The table; its last row is there where the step was timed too: `step_ms` in the median of `rounds` rounds."""
        all_of_it = self.together
        idle_us = self.window_us - all_of_it.us
        # Streams that run at once add up to more than the time that they take.
        apart = f"{figure(abs(idle_us), 4)} µs"
        gaps = f"of it {apart} idle" if idle_us >= 0 else f"{apart} of it at once, on several streams"
        of = "one sample" if rounds == 1 else f"median of {rounds} rounds"
        step: list[Row] = [] if step_ms is None else [("step, end to end", None, 1e3 * step_ms, f"unprofiled, {of}")]
        return [
            ("Triton kernels", self.triton.calls, self.triton.us, "a region each"),
            ("ATen's kernels", self.aten.calls, self.aten.us, ""),
            ("copies and fills", self.copies.calls, self.copies.us, ""),
            ("the GPU's work", all_of_it.calls, all_of_it.us, "in one profiled replay, op by op"),
            ("first to last", None, self.window_us, gaps),
            *step,
        ]

    @property
    def note(self) -> str:
        """Whether the profile has all that was launched."""
        counts = f"{self.launches} launches, {self.records} kernel records"
        is_whole = self.launches == self.records
        return counts if is_whole else f"{counts}: they differ, so that the GPU's times are incomplete"

    def __str__(self) -> str:
        rows = [(part, str(calls or ""), figure(us, 4), remark) for part, calls, us, remark in self.rows()]
        return f"{aligned([('part of the step', 'calls', 'µs', ''), *rows])}\n{self.note}"


def gpu_work(program: ProgramTimeline, variant: Switched) -> GpuWork | None:
    """The parts of a replay of `variant`; None where no GPU did anything. Pure.

    Whose a kernel is follows from the op that asked for it, whatever the kernel is called, on whichever stream it ran.
    """
    on_gpu = np.array([lane.kind in ("gpu", "copy") for lane in program.lanes], bool)[program.lane]
    if not on_gpu.any():
        return None
    moved = np.array([name.startswith(NOT_KERNELS) for name in program.names], bool)[program.name]
    triton = np.array([False, *map(_triton_values(variant).__contains__, program.values)])[program.value]
    ends = program.start_us + program.duration_us
    return GpuWork(
        *(_part(program, on_gpu & chosen) for chosen in (triton & ~moved, ~triton & ~moved, moved)),
        window_us=float(ends[on_gpu].max() - program.start_us[on_gpu].min()),
        launches=program.launches,
        records=program.records,
    )


def _triton_values(variant: Switched) -> frozenset[str]:
    kernels = ((node.name, node.target) for node in variant.trace.ops)
    return frozenset(n for n, one in kernels if isinstance(one, Kernel) and one.name not in variant.fallbacks)


def _part(program: ProgramTimeline, chosen: np.ndarray) -> Part:
    return Part(int(chosen.sum()), float(program.duration_us[chosen].sum(dtype=np.float64)))
