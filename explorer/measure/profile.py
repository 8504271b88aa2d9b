"""One run under the profiler, apart from every timed run: which kernels ran, how often and for how long.

The driver may drop kernel records when its buffers are full; launches are counted on the host and compared, so that a
table that misses some says so.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import DeviceType

from tracefuse.execution.replays import Replays
from tracefuse.measure.step_work import Part, StepWork
from tracefuse.optimizers.errors import NotSupported
from tracefuse.text import aligned
from tracefuse.timeline.events import LAUNCHES, NOT_KERNELS

if TYPE_CHECKING:
    pass

# Kineto writes a line to stderr whenever a profiler starts or stops, which a notebook shows under the cell (seen on torch
# 2.13); it reads this setting when the first profiler starts.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")


@dataclass(frozen=True)
class KernelTime:
    """All runs of one kernel (or kind of copy) in the profiled run."""

    name: str
    calls: int
    total_us: float


@dataclass(frozen=True)
class Profile:
    """The kernels of one run, longest first; `launches` on the host against `records` from the GPU.

    `window_us` is from the first start to the last end of what the GPU did.
    """

    device: str
    kernels: tuple[KernelTime, ...]
    launches: int
    records: int
    window_us: float = 0.0

    @property
    def is_complete(self) -> bool:
        return self.launches == self.records

    @property
    def total_us(self) -> float:
        return sum(k.total_us for k in self.kernels)

    def __str__(self) -> str:
        rows = [(k.name[:80], str(k.calls), f"{k.total_us:.1f}") for k in self.kernels]
        note = f"{self.launches} launches, {self.records} kernel records"
        if not self.is_complete:
            note += ": they differ, so the times are incomplete; profile a shorter run, or none inside a CUDA graph"
        return "\n".join([f"profiled once, {self.device}; {note}", aligned([("kernel", "calls", "total µs"), *rows])])


def profile(run: Callable[[], Any]) -> Profile:
    """Profile `run()` after one unprofiled run of it. Raises `NotSupported` without a GPU."""
    if not torch.cuda.is_available():
        raise NotSupported("kernel profiles need a CUDA GPU: on the CPU use measure(), or torch.profiler for ATen ops")
    run()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    return summarise(profiler.events(), f"measured on {torch.cuda.get_device_name()}")


def profile_step(program: Replays) -> Profile:
    """Profile one forward and backward of `program`. Raises `NotSupported` without a GPU."""

    def run() -> None:
        state = program.forward()
        if program.backward is not None:
            program.backward(state)

    return profile(run)


def step_work(found: Profile, triton_names: Iterable[str]) -> StepWork:
    """What a profiled step is made of; `triton_names` are those of the program's own kernels."""
    stems = tuple(f"{name}_{step}" for name in triton_names for step in ("kernel", "finish"))
    ours = [one for one in found.kernels if one.name.startswith(stems)]
    moved = [one for one in found.kernels if one.name.startswith(NOT_KERNELS)]
    rest = [one for one in found.kernels if one not in ours and one not in moved]
    return StepWork(*map(_part, (ours, rest, moved)), found.window_us, found.launches, found.records)


def _part(kernels: Sequence[KernelTime]) -> Part:
    return Part(sum(one.calls for one in kernels), sum(one.total_us for one in kernels))


def summarise(events: Iterable[Any], device: str) -> Profile:
    """The profile that `events` (as `torch.profiler.profile.events()` gives them) add up to."""
    calls: dict[str, int] = defaultdict(int)
    total_us: dict[str, float] = defaultdict(float)
    launches = 0
    starts, ends = [], []
    for event in events:
        if _is_launch(event):
            launches += 1
        elif event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            calls[event.name] += 1
            total_us[event.name] += event.time_range.elapsed_us()
            starts.append(event.time_range.start)
            ends.append(event.time_range.end)
    kernels = (KernelTime(name, calls[name], total_us[name]) for name in calls)
    records = sum(count for name, count in calls.items() if not name.startswith(NOT_KERNELS))
    window_us = max(ends, default=0.0) - min(starts, default=0.0)
    return Profile(device, tuple(sorted(kernels, key=lambda k: -k.total_us)), launches, records, window_us)


def _is_launch(event: Any) -> bool:
    return event.device_type == DeviceType.CPU and event.name.startswith(LAUNCHES)
