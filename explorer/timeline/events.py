"""The events that torch's profiler records of one run, as plain tuples. The private names of torch that this takes stand here.

Seen on torch 2.13: `torch._C._profiler._RecordFunctionFast`, a range that costs less than the public `record_function`, and
`profiler.kineto_results.events()`, of which `profiler.events()` builds a tree.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import DeviceType

# Host calls that start one kernel each, as CUPTI names them. Seen on torch 2.11 to 2.15 with CUDA 12 and 13.
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchCooperativeKernel", "cuLaunchKernel", "cuLaunchCooperativeKernel")


MARK = "tracefuse::"
"""What the name of each range of ours begins with, so that no operator is taken for one."""

NOT_KERNELS = ("Memcpy", "Memset")

# Kineto writes a line to stderr whenever a profiler starts or stops, which a notebook shows under the cell (seen on torch
# 2.13); it reads this setting when the first profiler starts.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

_BEGIN = "# begin"

# "cudaLaunchKernel", "cuLaunchKernelEx", "cudaMemcpyAsync": what the host asks of CUDA, as CUPTI names it.
_CUDA_CALL = re.compile(r"(cu(da)?|hip)[A-Z]")


class Event(NamedTuple):
    """One record. `resource` is the thread of the host or the stream of the GPU called `device`.

    `correlation` is an operator's own number; of a CUDA call, and of what the GPU did for it, the one that they share.
    `operator` is the number of the operator that made the call, or 0. A record that was read from a file (see
    `tracefuse.profiling.kineto`) also has its `category` there, the `sequence` number of an operator and the thread that its
    forward ran on, and the `nbytes` of a copy.
    """

    name: str
    on_gpu: bool
    device: int
    resource: int
    start_ns: int
    duration_ns: int
    correlation: int
    operator: int
    category: str = ""
    sequence: int = -1
    forward_thread: int = 0
    nbytes: int = 0

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns

    @property
    def mark(self) -> str:
        """The name that `marked` was given; "" of what is no range of ours."""
        return "" if self.on_gpu else mark_of(self.name)

    @property
    def is_range(self) -> bool:
        """A stretch that somebody named, on the host or as it appears on the GPU: nothing ran by it."""
        return is_range_of(self.category) or bool(self.mark)

    @property
    def is_cuda_call(self) -> bool:
        return not self.on_gpu and is_cuda_call_name(self.name)


def mark_of(name: str) -> str:
    return name.removeprefix(MARK) if name.startswith(MARK) else ""


def is_range_of(category: str) -> bool:
    """Whether records of a category are ranges: those of `record_function`, and of NVTX as nsys2json writes them."""
    return "annotation" in category or "nvtx" in category.casefold()


def is_cuda_call_name(name: str) -> bool:
    return _CUDA_CALL.match(name) is not None


def marked(name: str) -> Any:
    """A context manager: what runs inside is a range on the host called `name` where a profiler watches."""
    return _RecordFunctionFast(MARK + name)


def recorded(run: Callable[[], Any]) -> list[Event]:
    """The events of one call of `run`, those of the GPU too where one is in use.

    It is called once more before, watched too: of the first run after a profiler starts, the first ops take longer.
    """
    with _profiler() as profiler:
        _finished(run)
        with marked(_BEGIN):
            pass
        _finished(run)
    inner = getattr(profiler, "profiler", profiler)
    events = [_event(e) for e in inner.kineto_results.events() if not e.is_user_annotation()]
    begin_ns = next(event.end_ns for event in events if event.mark == _BEGIN)
    return [event for event in events if event.start_ns >= begin_ns]


@functools.cache
def prepare() -> None:
    """Start and stop a first profiler, in the main thread: Kineto writes a line to stderr where that is another one, which a
    notebook shows under its last cell (seen on torch 2.13)."""
    if threading.current_thread() is threading.main_thread() and not torch.autograd._profiler_enabled():
        with _profiler():
            pass


def _profiler() -> Any:
    """A profiler of the host, and of the GPU where one is in use. On a CPU it is the one that `torch.profiler` is built on,
    which imports torch's compiler first: seconds in which a notebook could not go on."""
    if not torch.cuda.is_initialized():
        return torch.autograd.profiler.profile(use_cpu=True, use_kineto=True, acc_events=True)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    return torch.profiler.profile(activities=activities, acc_events=True)  # without the events, torch 2.11 warns


def _finished(run: Callable[[], Any]) -> None:
    """Run it, and wait for the GPU."""
    run()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _event(one: Any) -> Event:
    return Event(
        one.name(),
        one.device_type() == DeviceType.CUDA,
        one.device_index(),
        one.device_resource_id(),
        one.start_ns(),
        one.duration_ns(),
        one.correlation_id(),
        one.linked_correlation_id(),
    )
