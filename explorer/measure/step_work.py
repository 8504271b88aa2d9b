"""Kernels, regions and the whole step in one table: what the GPU did, how long it was at it, and what the step took.

    part                 calls  µs
    Triton kernels       79     4210     a region each
    ATen's kernels       220    17800
    copies and fills     6      31
    the GPU's work       305    22041    in one profiled step
    first to last        305    22900    of it 859 µs idle
    step, end to end            22950    unprofiled, median of 40 rounds

The first five are of one profiled step: the profiler slows the host, so that idle time is more than in the timed rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

from tracefuse.text import figure

Row = tuple[str, int | None, float, str]
"""Part, calls, microseconds, remark."""


@dataclass(frozen=True)
class Part:
    """So many calls and their microseconds together."""

    calls: int
    us: float


@dataclass(frozen=True)
class StepWork:
    """One profiled step of the program that the measurement is about. `window_us` is from the first start to the last end of
    what the GPU did; `launches` were counted on the host, `records` are the kernels that the GPU reported."""

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

    def rows(self, step_ms: float, rounds: int) -> list[Row]:
        """The table, for a step that took `step_ms` in the median of `rounds` rounds."""
        all_of_it = self.together
        idle_us = self.window_us - all_of_it.us
        # Streams that run at once add up to more than the time that they take.
        apart = f"{figure(abs(idle_us), 4)} µs"
        gaps = f"of it {apart} idle" if idle_us >= 0 else f"{apart} of it at once, on several streams"
        of = "one sample" if rounds == 1 else f"median of {rounds} rounds"
        return [
            ("Triton kernels", self.triton.calls, self.triton.us, "a region each"),
            ("ATen's kernels", self.aten.calls, self.aten.us, ""),
            ("copies and fills", self.copies.calls, self.copies.us, ""),
            ("the GPU's work", all_of_it.calls, all_of_it.us, "in one profiled step"),
            ("first to last", None, self.window_us, gaps),
            ("step, end to end", None, 1e3 * step_ms, f"unprofiled, {of}"),
        ]

    @property
    def note(self) -> str:
        """Whether the profile has all that was launched."""
        counts = f"{self.launches} launches, {self.records} kernel records"
        return (
            counts
            if self.launches == self.records
            else f"{counts}: they differ, so that the GPU's times are incomplete"
        )
