"""What tells the time: CUDA events on the GPU, `time.perf_counter` on the CPU, in tests a list of numbers."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from tracefuse.optimizers.errors import NotSupported


class Clock(Protocol):
    """`mark()` stamps the device's queue; after `wait()`, `between_ms` reads two stamps; `now_s` is the host's time. `queues`
    says whether the host goes on while the device works."""

    queues: bool

    def mark(self) -> Any: ...
    def between_ms(self, start: Any, end: Any) -> float: ...
    def wait(self) -> None: ...
    def now_s(self) -> float: ...


class CpuClock:
    """`time.perf_counter`: operators on the CPU return when they are done."""

    queues = False

    def mark(self) -> float:
        return time.perf_counter()

    def between_ms(self, start: float, end: float) -> float:
        return (end - start) * 1e3

    def wait(self) -> None:
        """Nothing is queued."""

    def now_s(self) -> float:
        return time.perf_counter()


class CudaClock:
    """CUDA events on the current stream: the GPU's own time, with the gaps in which it waits for the host."""

    queues = True

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end)

    def wait(self) -> None:
        torch.cuda.synchronize()

    def now_s(self) -> float:
        return time.perf_counter()


def clock_of(device: str | torch.device) -> Clock:
    """The clock of a "cpu" or "cuda" device. Raises `NotSupported` for another one, or for a GPU that is not there."""
    kind = torch.device(device).type
    if kind == "cpu":
        return CpuClock()
    if kind != "cuda":
        raise NotSupported(f"there is no clock for {kind} devices yet: measure on cpu or cuda")
    if not torch.cuda.is_available():
        raise NotSupported("this machine has no CUDA GPU: measure with device='cpu', or run on a machine with a GPU")
    return CudaClock()


def device_label(device: str | torch.device) -> str:
    """`measured on NVIDIA H100 80GB HBM3`, `measured on CPU (2 threads)`."""
    if torch.device(device).type == "cuda":
        return f"measured on {torch.cuda.get_device_name(device)}"
    threads = torch.get_num_threads()
    return f"measured on CPU ({threads} thread{'s' * (threads > 1)})"
