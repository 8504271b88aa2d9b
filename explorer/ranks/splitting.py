"""The time of each collective on each rank: transfer | waiting for the last rank | its own late launch.

A rank that comes last does not wait: what the call takes there is the transfer, by that rank's own clock. The transfer is
compared with a baseline, what calls of the kind, group and size take undisturbed. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from tracefuse.ranks.clocks import Clock
from tracefuse.ranks.exchanges import MEETING, Exchanges
from tracefuse.ranks.matching import Call

UNDISTURBED = 0.25
"""A baseline is that quantile of the transfers of a size: a link that is slow in fewer than three quarters of them shows."""


@dataclass(frozen=True)
class Split:
    """One collective: `arrival_ns` and `waiting_ns` of each rank, by the reference's clock, the rank that came `last`, by how
    much later than the median of the others (`late_ns`), the `transfer_ns` once all were there, and what calls of its size
    take where nobody is late (`baseline_ns`)."""

    call: Call
    arrival_ns: Mapping[int, int]
    end_ns: int
    waiting_ns: Mapping[int, int]
    last: int
    late_ns: int
    transfer_ns: int
    baseline_ns: int = 0

    @property
    def slow_ns(self) -> int:
        """How much longer than its baseline the transfer took."""
        return max(0, self.transfer_ns - self.baseline_ns)


@dataclass(frozen=True)
class _Times:
    """The collectives of a rank by the reference's clock; what they take by its own."""

    starts: list[int]
    ends: list[int]
    durations: list[int]

    @classmethod
    def of(cls, exchanges: Exchanges, clock: Clock) -> _Times:
        starts, ends = exchanges.start_ns, exchanges.end_ns
        return cls(clock.aligned(starts).tolist(), clock.aligned(ends).tolist(), (ends - starts).tolist())


def splits_of(ranks: Mapping[int, Exchanges], calls: Sequence[Call], clocks: Mapping[int, Clock]) -> list[Split]:
    """The calls that at least two files have and that no rank leaves before all have come, by the time of the last arrival."""
    times = {rank: _Times.of(exchanges, clocks[rank]) for rank, exchanges in ranks.items()}
    found = [_split(call, times) for call in calls if len(call.rows) > 1 and (call.kind in MEETING or not call.missing)]
    by_size: dict[tuple[str, str, int], list[Split]] = defaultdict(list)
    for one in found:
        by_size[one.call.kind, one.call.group, one.call.nbytes].append(one)
    baseline = {size: _baseline(same) for size, same in by_size.items()}
    with_baseline = [
        replace(
            one,
            baseline_ns=baseline[one.call.kind, one.call.group, one.call.nbytes]
            if one.call.nbytes
            else one.transfer_ns,
        )
        for one in found
    ]  # where no sizes are said, calls cannot be compared
    return sorted(with_baseline, key=lambda one: one.end_ns)


def _split(call: Call, times: Mapping[int, _Times]) -> Split:
    arrival = {rank: times[rank].starts[row] for rank, row in call.rows.items()}
    duration = {rank: times[rank].durations[row] for rank, row in call.rows.items()}
    transfer = min(duration.values())
    last = min(duration, key=lambda rank: duration[rank])
    waiting = {rank: ns - transfer for rank, ns in duration.items()}
    late = int(median(ns for rank, ns in waiting.items() if rank != last))
    return Split(
        call,
        arrival,
        int(median(times[rank].ends[row] for rank, row in call.rows.items())),
        waiting,
        last,
        late,
        transfer,
    )


def _baseline(same: Sequence[Split]) -> int:
    """What calls of one size take where nothing disturbs them."""
    return int(np.quantile([one.transfer_ns for one in same], UNDISTURBED))
