"""Lanes of a timeline, and which one an event of the profiler belongs to. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tracefuse.timeline.events import Event

COPY = "Memcpy"


@dataclass(frozen=True)
class Lane:
    """Where events follow one another: a stream's kernels, its copies, idle time, named ranges, or a thread of the host."""

    name: str
    kind: Literal["gpu", "copy", "idle", "range", "cpu"]


@dataclass(frozen=True, order=True)
class LaneKey:
    """Sorted as lanes are shown: each GPU's streams, their copies, then the host."""

    is_host: bool
    device: int
    is_copy: bool
    stream: int

    def shown(self, gpus: int) -> Lane:
        if self.is_host:
            return Lane("CPU", "cpu")
        name = f"GPU {self.device} stream {self.stream}" if gpus > 1 else f"stream {self.stream}"
        return Lane(f"{name} copies", "copy") if self.is_copy else Lane(name, "gpu")


def lane_of(event: Event) -> LaneKey:
    if not event.on_gpu:
        return LaneKey(True, 0, False, 0)
    return LaneKey(False, event.device, event.name.startswith(COPY), event.resource)
