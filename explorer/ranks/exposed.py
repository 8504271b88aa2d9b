"""What of a rank's collectives nothing was computed beside: transfer and waiting that the step is longer by. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tracefuse.ranks.rank import Rank
from tracefuse.ranks.splitting import Split
from tracefuse.timeline.spans import Interval


@dataclass(frozen=True)
class Exposed:
    """One collective of a rank: its `row`, and of its transfer and its waiting what nothing was computed in."""

    split: Split
    row: int
    transfer_ns: int
    waiting_ns: int


def exposed_in(rank: Rank, splits: Sequence[Split]) -> Iterator[Exposed]:
    """The exposed part of each collective of `rank`, by start; of several that go on at once, time is of the first of them."""
    spans = [rank.computing] if rank.has_gpu else list(rank.operators)
    own = ((split.call.rows[rank.number], split) for split in splits if rank.number in split.call.rows)
    starts, ends = rank.exchanges.start_ns.tolist(), rank.exchanges.end_ns.tolist()
    reached = rank.window[0]
    for row, split in sorted(own, key=lambda one: (starts[one[0]], ends[one[0]])):
        end = ends[row]
        start, middle = max(starts[row], reached), max(starts[row], end - split.transfer_ns, reached)
        reached = max(reached, end)
        parts = []
        for interval in ((middle, end), (start, middle)):
            rest: Sequence[Interval] = [interval] if interval[0] < interval[1] else []
            for one in spans:
                rest = one.cut(rest)[1]
            parts.append(sum(stop - begin for begin, stop in rest))
        yield Exposed(split, row, *parts)
