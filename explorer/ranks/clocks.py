"""The clocks of hosts, aligned by the ends of collectives: all ranks leave one at nearly the same time.

Source: HolisticTraceAnalysis and PyTorch's own notes on merging traces; offsets of seconds were seen where ranks were 1.6 ms
apart. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from tracefuse.ranks.exchanges import MEETING, Exchanges
from tracefuse.ranks.matching import Call

FEWEST_FOR_DRIFT = 20


@dataclass(frozen=True)
class Clock:
    """What to subtract from a rank's times to have those of the reference rank: `offset_ns` at `at_ns` of its own clock, and
    `drift` ns more for each ns since. `uncertainty_ns` is the half of the middle 90 % of what the ends leave, `calls` how many
    there were; no call joins a rank of which `calls` is 0 to the reference."""

    offset_ns: int = 0
    at_ns: int = 0
    drift: float = 0.0
    uncertainty_ns: int = 0
    calls: int = 0

    def aligned(self, times_ns: np.ndarray) -> np.ndarray:
        """Times of this rank by the reference's clock."""
        return times_ns - self.offset_ns - np.round(self.drift * (times_ns - self.at_ns)).astype(np.int64)


def clocks_of(ranks: Mapping[int, Exchanges], calls: Sequence[Call]) -> dict[int, Clock]:
    """The clock of each rank, against that of the lowest."""
    ends: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    ends_of = {rank: exchanges.end_ns.tolist() for rank, exchanges in ranks.items()}
    for call in calls:
        if call.kind in MEETING:
            own = sorted((rank, ends_of[rank][row]) for rank, row in call.rows.items())
            for (one, end_ns), (other, other_end_ns) in combinations(own, 2):
                ends[one, other].append((end_ns, other_end_ns))
    found = {min(ranks): Clock()} if ranks else {}
    while True:
        joined = [
            (len(pairs), one, other) for (one, other), pairs in ends.items() if (one in found) != (other in found)
        ]
        if not joined:
            break
        _, one, other = max(joined)
        known, new = (one, other) if one in found else (other, one)
        pairs = np.array(ends[one, other], np.int64)
        own, theirs = (pairs[:, 1], pairs[:, 0]) if new == other else (pairs[:, 0], pairs[:, 1])
        found[new] = _clock(own, found[known].aligned(theirs), found[known].uncertainty_ns)
    return {rank: found.get(rank, Clock()) for rank in ranks}


def _clock(own_ns: np.ndarray, reference_ns: np.ndarray, known_ns: int) -> Clock:
    apart = own_ns - reference_ns
    at_ns = int(np.median(own_ns))
    offset_ns = int(np.median(apart))
    drift = 0.0
    if len(own_ns) >= FEWEST_FOR_DRIFT and np.ptp(own_ns) > 0:
        halves = own_ns <= at_ns
        first, last = np.median(apart[halves]), np.median(apart[~halves])
        drift = float((last - first) / (np.median(own_ns[~halves]) - np.median(own_ns[halves])))
    left = apart - offset_ns - drift * (own_ns - at_ns)
    low, high = np.quantile(left, [0.05, 0.95])
    return Clock(offset_ns, at_ns, drift, int((high - low) / 2) + known_ns, len(own_ns))
