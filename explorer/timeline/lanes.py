"""A program's timeline as events on lanes: what ran, which lane an event of the profiler is on, and the gaps between. Pure.

Idle time has lanes of its own, one per GPU: each gap is an event that is called after its cause.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np

from tracefuse.config.configuration import Config
from tracefuse.measure.op_times import Transfer
from tracefuse.timeline.causes import IDLING
from tracefuse.timeline.events import Event
from tracefuse.timeline.idle import Idle, Stretch

COPY = "Memcpy"
COPY_KERNEL = re.compile(r"\bat::native::.*copy_kernel")
"""ATen's own kernels that copy one tensor into another, as CUPTI names them: `…at::native::direct_copy_kernel_cuda…`."""


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


@dataclass(frozen=True, eq=False)
class ProgramTimeline:
    """The events of one program, sorted by start, the first at 0 µs.

    Columns of equal length: `start_us` (f8), `duration_us` (f4), and as indices `name` (u4, into `names`), `value` (u4: 0 for
    none, else one more than the index into `values`) and `lane` (u2, into `lanes`); `delay_us` (f4) is the time from a launch
    to the start on the GPU, NaN where no launch is known. On a lane of the kind "idle" stand the gaps of a GPU, called after
    their cause, and the value is that of the op that then starts.

    `op_us` is the time of each value's op: that of its kernels and copies, or of its range where it computes on the CPU; ops
    without work are absent. `launches` were counted on the host, `records` are the kernels that the GPU reported. `config` is
    None of a run of the user's own, which no passes have changed. `transfers` takes copies to and from the host apart.
    """

    label: str
    config: Config | None
    lanes: tuple[Lane, ...]
    names: tuple[str, ...]
    values: tuple[str, ...]
    start_us: np.ndarray
    duration_us: np.ndarray
    name: np.ndarray
    value: np.ndarray
    lane: np.ndarray
    delay_us: np.ndarray
    op_us: Mapping[str, float]
    launches: int
    records: int
    transfers: Mapping[str, Transfer] = field(default_factory=dict)

    @property
    def span_us(self) -> float:
        """From the first start to the last end."""
        return float((self.start_us + self.duration_us).max(initial=0.0))

    @property
    def is_complete(self) -> bool:
        return self.launches == self.records

    @cached_property
    def laid_out_us(self) -> dict[str, float]:
        """By value what an op of several kernels spends on copies of its operands, which a library reads otherwise than they
        lie: a gradient of NCHW before a convolution of channels_last. Ops that do nothing but copy are absent."""
        on_gpu = np.array([lane.kind == "gpu" for lane in self.lanes], bool)[self.lane] & (self.value > 0)
        is_copy = np.array([COPY_KERNEL.search(name) is not None for name in self.names], bool)[self.name]
        whole, copies = (
            np.bincount(self.value[rows], self.duration_us[rows], len(self.values) + 1)
            for rows in (on_gpu, on_gpu & is_copy)
        )
        shares = {self.values[at - 1]: copies[at] / whole[at] for at in np.flatnonzero(copies).tolist()}
        return {name: share * self.op_us[name] for name, share in shares.items() if share < 1 and name in self.op_us}


# --- idle time --------------------------------------------------------------------------------------------------------


def with_idle_lanes(
    program: ProgramTimeline, idle: Sequence[Idle], owners: Mapping[int, str], origin_ns: int
) -> ProgramTimeline:
    """`program` with a lane of gaps for each GPU of `idle`, before the host's; the value of a gap is the one that waits.

    A gap's name is its cause, and behind a colon the operator of the host and the call that held it up. `owners` has the
    value of each event of the GPU by its row; by the profiler's clock, `program` begins at `origin_ns`.
    """
    if not any(one.stretches for one in idle):
        return program
    first_host = next(
        (at for at, lane in enumerate(program.lanes) if lane.kind in ("range", "cpu")), len(program.lanes)
    )
    own = [_lane(one, len(idle)) for one in idle]
    lanes = (*program.lanes[:first_host], *own, *program.lanes[first_host:])
    moved = np.where(program.lane >= first_host, program.lane + len(own), program.lane)
    gaps = [(gap, first_host + at) for at, one in enumerate(idle) for gap in one.stretches]
    names = {name: at for at, name in enumerate(program.names)}
    named = [names.setdefault(gap_name(one, gap), len(names)) for one in idle for gap in one.stretches]
    values = {name: at for at, name in enumerate(program.values, 1)} | {"": 0}
    waiting = [values[owners.get(gap.after, "")] for gap, _ in gaps]
    start_us = _joined(program.start_us, [(gap.start_ns - origin_ns) / 1e3 for gap, _ in gaps])
    order = np.argsort(start_us, kind="stable")
    return replace(
        program,
        lanes=lanes,
        names=tuple(names),
        start_us=start_us[order],
        duration_us=_joined(program.duration_us, [gap.duration_ns / 1e3 for gap, _ in gaps])[order],
        name=_joined(program.name, named)[order],
        value=_joined(program.value, waiting)[order],
        lane=_joined(moved.astype(program.lane.dtype), [lane for _, lane in gaps])[order],
        delay_us=_joined(program.delay_us, [np.nan] * len(gaps))[order],
    )


def idle_us(program: ProgramTimeline) -> dict[str, float]:
    """The idle time of the program's GPUs by cause, the longest first."""
    found: dict[str, float] = defaultdict(float)
    is_idle = np.array([program.lanes[at].kind == "idle" for at in program.lane], bool)
    for name, us in zip(program.name[is_idle].tolist(), program.duration_us[is_idle].tolist(), strict=True):
        found[program.names[name].partition(": ")[0]] += us
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def gap_name(idle: Idle, gap: Stretch) -> str:
    """`synchronization: aten::item, cudaStreamSynchronize`, `data loading: enumerate(DataLoader)#…`."""
    said = [idle.operator(gap), idle.called(gap), idle.within(gap) if gap.cause in IDLING else ""]
    return f"{gap.cause}: {', '.join(dict.fromkeys(filter(None, said)))}" if any(said) else gap.cause


def _lane(idle: Idle, gpus: int) -> Lane:
    return Lane(f"GPU {idle.device} idle" if gpus > 1 else "idle", "idle")


def _joined(column: np.ndarray, more: list[float]) -> np.ndarray:
    return np.concatenate([column, np.array(more, column.dtype)])
