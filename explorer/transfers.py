"""What a copy between host and GPU consists of, from what the profiler recorded while the op that made it ran.

    op     |--------------------------------------------|   its range on the host: `event_us`
    calls       |----------------------------------|        cudaMemcpyAsync, cudaStreamSynchronize: the host is in the driver
    GPU       kernels |====| copy |=================|       `wait_us` of kernels, `copy_us` of copies, after the first call

`host_us` is the range without the calls: memory is allocated, dispatched, computed. The three come from records of their own,
so that nothing makes them add up to the event; `other_us` says what they leave.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tracefuse.profiled import Event

_DIRECTION = re.compile(r"Memcpy (HtoD|DtoH)")


@dataclass(frozen=True)
class Transfer:
    """One op's copies to or from the host. `memory` is what they are to or from: "pageable" or "pinned"."""

    event_us: float
    wait_us: float
    copy_us: float
    host_us: float
    memory: str
    to_host: bool

    @property
    def blocks(self) -> bool:
        """Whether the host waits for it: to pageable memory always."""
        return self.to_host and self.memory == "pageable"

    @property
    def other_us(self) -> float:
        return self.event_us - self.wait_us - self.copy_us - self.host_us

    @property
    def own_us(self) -> float:
        """The event without the work that it waits for, which takes its time anyway."""
        return self.event_us - self.wait_us


def transfers(
    ranges: Iterable[Event], events: Sequence[Event], owned: Iterable[tuple[Event, str]]
) -> dict[str, Transfer]:
    """The transfers of a run by the value whose op made them. `ranges` are the ops', `events` all that was recorded, `owned`
    tells whose each event of the GPU is, "" for nobody's. Pure."""
    copies: dict[str, list[Event]] = defaultdict(list)
    for event, owner in owned:
        if event.on_gpu and owner and _DIRECTION.match(event.name):
            copies[owner].append(event)
    return {one.mark: _transfer(one, copies[one.mark], events) for one in ranges if one.mark in copies}


def _transfer(around: Event, copies: Sequence[Event], events: Sequence[Event]) -> Transfer:
    calls = [e for e in events if e.is_cuda_call and around.start_ns <= e.start_ns < around.end_ns]
    asked = [call for call in calls if call.correlation in {copy.correlation for copy in copies}]
    start, first = min((call.start_ns for call in asked), default=around.start_ns), min(c.start_ns for c in copies)
    device = copies[0].device
    busy = ((max(e.start_ns, start), min(e.end_ns, first)) for e in events if e.on_gpu and e.device == device)
    in_calls = _covered((call.start_ns, min(call.end_ns, around.end_ns)) for call in calls)
    return Transfer(
        event_us=around.duration_ns / 1e3,
        wait_us=_covered(busy) / 1e3,
        copy_us=_covered((copy.start_ns, copy.end_ns) for copy in copies) / 1e3,
        host_us=(around.duration_ns - in_calls) / 1e3,
        memory="pinned" if "Pinned" in copies[0].name else "pageable",
        to_host="DtoH" in copies[0].name,
    )


def _covered(spans: Iterable[tuple[int, int]]) -> int:
    """How much time lies in any of the spans."""
    total, reached = 0, None
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        begin = start if reached is None else max(start, reached)
        total += max(0, end - begin)
        reached = end if reached is None else max(reached, end)
    return total
