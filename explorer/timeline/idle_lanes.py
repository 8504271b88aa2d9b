"""Lanes of idle time beside those of what ran, one per GPU: each gap an event that is called after its cause. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tracefuse.timeline.events import Event
from tracefuse.timeline.gaps import Gap, Idle
from tracefuse.timeline.lanes import Lane

if TYPE_CHECKING:
    from tracefuse.timeline.replayed import ProgramTimeline


def with_idle_lanes(
    program: ProgramTimeline, idle: Sequence[Idle], owners: Mapping[Event, str], origin_ns: int
) -> ProgramTimeline:
    """`program` with a lane of gaps for each GPU of `idle`, before the host's; the value of a gap is the one that waits.

    A gap's name is its cause, and behind a colon the operator of the host and the call that held it up. `owners` has the
    value of each event of the GPU; by the profiler's clock, `program` begins at `origin_ns`.
    """
    if not any(one.gaps for one in idle):
        return program
    first_host = next(
        (at for at, lane in enumerate(program.lanes) if lane.kind in ("range", "cpu")), len(program.lanes)
    )
    own = [_lane(one, len(idle)) for one in idle]
    lanes = (*program.lanes[:first_host], *own, *program.lanes[first_host:])
    moved = np.where(program.lane >= first_host, program.lane + len(own), program.lane)
    gaps = [(gap, first_host + at) for at, one in enumerate(idle) for gap in one.gaps]
    names = {name: at for at, name in enumerate(program.names)}
    named = [names.setdefault(gap_name(gap), len(names)) for gap, _ in gaps]
    values = {name: at for at, name in enumerate(program.values, 1)} | {"": 0}
    waiting = [values[owners.get(gap.after, "")] if gap.after else 0 for gap, _ in gaps]
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


def gap_name(gap: Gap) -> str:
    """`synchronization: aten::item, cudaStreamSynchronize`."""
    held_by = [gap.operator, gap.call.name if gap.call else ""]
    return f"{gap.cause}: {', '.join(dict.fromkeys(filter(None, held_by)))}" if any(held_by) else gap.cause


def _lane(idle: Idle, gpus: int) -> Lane:
    return Lane(f"GPU {idle.device} idle" if gpus > 1 else "idle", "idle")


def _joined(column: np.ndarray, more: list[float]) -> np.ndarray:
    return np.concatenate([column, np.array(more, column.dtype)])
