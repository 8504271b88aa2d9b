"""Why a rank came late to a collective: what it did since the one before, beside what the others did meanwhile. Pure.

Between two collectives all ranks do the same work, each when it comes to it. The cause is what the late rank did for longer
than the others from when it was ready for the one to when it was ready for the other: a kernel, a copy, loading data, a wait,
garbage collection, or operators and Python on its host. A rank that did nothing for longer is still late by the cause before:
the others did the same work while they waited.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tracefuse.ranks.rank import Doing, Rank
from tracefuse.ranks.splitting import Split
from tracefuse.timeline.causes import LATENCY_NS

LEAST_NS = 100_000
"""What is shorter than that is no lateness, but the noise of launches."""

EXPLAINED = 0.3
"""A cause explains at least that share of a lateness."""

FOLLOWED = 400
"""So many latenesses, the longest, are followed back; the others have the cause of the one before, or are counted."""

NEW = 0.5
"""Where a rank is late already, a cause that explains less than that is none of its own."""

UNKNOWN = Doing("not known", "", "", "")
BEFORE = Doing("what came before its recording", "", "", "")
"""Of a rank whose profiler was started when the others waited for it already."""


@dataclass(frozen=True)
class Late:
    """A lateness with its cause: what `rank` did `extra_ns` longer than the others before `split`. `launched_late_ns` is how
    much of it its GPU was idle for, since the host had not launched the collective yet."""

    split: Split
    rank: int
    doing: Doing
    extra_ns: int
    launched_late_ns: int


def latenesses(ranks: Mapping[int, Rank], splits: Sequence[Split]) -> list[Late]:
    """The cause of each lateness that is longer than noise, of many the longest. What a call takes is known by each rank's own
    clock, so the clocks' uncertainty is no part of it. Of a rank that is not in `ranks` no cause is known."""
    longest = sorted((one.late_ns for one in splits if one.late_ns >= LEAST_NS), reverse=True)[:FOLLOWED]
    least = longest[-1] if longest else LEAST_NS
    ready: dict[int, int] = {}
    behind: dict[int, tuple[Doing, int]] = {}
    found = []
    for split in splits:
        rows = {rank: row for rank, row in split.call.rows.items() if rank in ranks}
        now = {rank: ranks[rank].ready_ns(row) for rank, row in rows.items()}
        cause = None
        if split.late_ns >= least and split.last in rows:
            since = {rank: (ready.get(rank, ranks[rank].window[0]), now[rank]) for rank in rows}
            cause = _cause(ranks, split, since)
            recorded_ns = since[split.last][1] - since[split.last][0]
            if cause is None and split.last not in ready and recorded_ns < split.late_ns:
                cause = BEFORE, split.late_ns - recorded_ns
        inherited = behind.get(split.last) if split.late_ns >= LEAST_NS else None
        if inherited is not None and (cause is None or cause[1] < NEW * split.late_ns):
            cause = inherited
        behind = {split.last: cause} if cause is not None else {}
        if cause is not None or split.late_ns >= least:
            doing, extra_ns = cause or (UNKNOWN, 0)
            is_read = split.last in rows
            late_ns = _launched_late(ranks[split.last], rows[split.last], split.late_ns) if is_read else 0
            found.append(Late(split, split.last, doing, extra_ns, late_ns))
        ready |= now
    return found


def _cause(ranks: Mapping[int, Rank], split: Split, since: Mapping[int, tuple[int, int]]) -> tuple[Doing, int] | None:
    """What the last rank did for longer than the others, and by how many ns; None where that explains too little.

    Files begin at any time: before a first collective only as much is looked at as all of them have.
    """
    longest = min(end - start for start, end in since.values()) + split.late_ns + LEAST_NS
    doing = {
        rank: ranks[rank].doing(max(start, end - longest), end) if end > start else Counter()
        for rank, (start, end) in since.items()
    }
    others = [found for rank, found in doing.items() if rank != split.last]
    if not others:
        return None
    extra = {what: ns - int(np.median([one[what] for one in others])) for what, ns in doing[split.last].items()}
    cause = max(extra, key=lambda what: extra[what], default=UNKNOWN)
    return (cause, extra[cause]) if extra.get(cause, 0) >= EXPLAINED * split.late_ns else None


def _launched_late(rank: Rank, row: int, late_ns: int) -> int:
    """For how long of the lateness before the launch of a collective the GPU had nothing to compute."""
    launched = rank.launched_ns(row)
    if launched is None or not rank.has_gpu or int(rank.exchanges.start_ns[row]) - launched > LATENCY_NS:
        return 0
    start_ns = max(launched - late_ns, rank.window[0])
    return max(0, launched - start_ns - rank.computing.total_ns(start_ns, launched)) if launched > start_ns else 0
