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
    """The exposed part of each collective of `rank`."""
    spans = [rank.computing] if rank.has_gpu else list(rank.operators)
    for split in splits:
        row = split.call.rows.get(rank.number)
        if row is None:
            continue
        start, end = int(rank.exchanges.start_ns[row]), int(rank.exchanges.end_ns[row])
        middle = max(start, end - split.transfer_ns)
        parts = []
        for interval in ((middle, end), (start, middle)):
            rest: Sequence[Interval] = [interval] if interval[0] < interval[1] else []
            for one in spans:
                rest = one.cut(rest)[1]
            parts.append(sum(stop - begin for begin, stop in rest))
        yield Exposed(split, row, *parts)
