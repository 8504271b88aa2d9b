"""What a copy between host and GPU consists of, from what the profiler recorded while the op that made it ran.

    op     |--------------------------------------------|   its range on the host: `event_us`
    calls       |----------------------------------|        cudaMemcpyAsync, cudaStreamSynchronize: the host is in the driver
    GPU       kernels |====| copy |============|            `wait_us` of kernels, `copy_us` of copies, after the first call
    host   |----|                              |--------|   `host_us`: outside the calls, and in them once the copies are over

The host's part is memory that is allocated, and touched for the first time by the driver, which copies to pageable memory
through a buffer of its own. Each of the three comes from records of its own, so that nothing makes them add up to the event:
`other_us` says what they leave, such as what the driver needs before a copy starts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from tracefuse.measure.op_times import Transfer
from tracefuse.timeline.events import Event

_DIRECTION = re.compile(r"Memcpy (HtoD|DtoH)")


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
    asked = {copy.correlation for copy in copies}
    asked_ns = min((call.start_ns for call in calls if call.correlation in asked), default=around.start_ns)
    first_ns, over_ns = min(copy.start_ns for copy in copies), max(copy.end_ns for copy in copies)
    kernels = [e for e in events if e.on_gpu and e.device == copies[0].device]
    in_calls, at_last = (_covered(calls, start, around.end_ns) for start in (around.start_ns, over_ns))
    return Transfer(
        event_us=around.duration_ns / 1e3,
        wait_us=_covered(kernels, asked_ns, min(first_ns, around.end_ns)) / 1e3,
        copy_us=_covered(copies, around.start_ns, around.end_ns) / 1e3,
        host_us=(around.duration_ns - in_calls + at_last) / 1e3,
        memory="pinned" if "Pinned" in copies[0].name else "pageable",
        to_host="DtoH" in copies[0].name,
    )


def _covered(events: Iterable[Event], from_ns: int, to_ns: int) -> int:
    """How much of the time from `from_ns` to `to_ns` lies in any of the events."""
    total, reached = 0, from_ns
    for event in sorted(events, key=lambda one: one.start_ns):
        end = min(event.end_ns, to_ns)
        total += max(0, end - max(event.start_ns, reached))
        reached = max(reached, end)
    return total
