"""Which collectives of several ranks are one: by NCCL's number in the group, else by their order there.

Files rarely begin with the same call. Where calls have no number, each rank's are moved against the first one's by the few
places that make most of their kinds and sizes agree. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tracefuse.optimizers.trace import human_bytes
from tracefuse.ranks.exchanges import Exchanges

MOST_MOVED = 24
"""So many calls may be missing where a file begins."""

AGREEING, FEWEST, CLEARER = 0.98, 4, 4.0
"""Of the best places to begin, those count that agree nearly as well; so many calls tell whether ends are evenly apart, and a
place further on is taken where they are so many times as evenly."""

Signature = tuple[str, int, str]
"""The kind, bytes and dtype of a call, as all of its ranks must have it; "" of a dtype that a file does not say."""


@dataclass(frozen=True)
class Call:
    """One collective on all ranks that have it: `rows` are its rows in each rank's `Exchanges`. `missing` are the ranks of the
    group that no file is of."""

    kind: str
    group: str
    nbytes: int
    dtype: str
    rows: Mapping[int, int]
    missing: tuple[int, ...] = ()


@dataclass(frozen=True)
class Disorder:
    """Two ranks that call different collectives at the same place of a group's order: that hangs, or mixes numbers up."""

    group: str
    place: int
    said: Mapping[int, Signature]
    rows: Mapping[int, int]

    @property
    def odd(self) -> Mapping[int, int]:
        """The rows of the ranks that call what the fewest call."""
        counts = Counter(self.said.values())
        rarest = min(self.said.values(), key=counts.__getitem__)
        return {rank: row for rank, row in self.rows.items() if self.said[rank] == rarest}


def called(signature: Signature) -> str:
    """`all_reduce of 4 MiB, float32`"""
    kind, nbytes, dtype = signature
    return ", ".join(filter(None, (f"{kind} of {human_bytes(nbytes)}", dtype)))


def matched(ranks: Mapping[int, Exchanges]) -> tuple[list[Call], list[Disorder]]:
    """The collectives of all ranks, by time on the first rank that has them, and where their orders differ."""
    calls: list[Call] = []
    disorders: list[Disorder] = []
    for group, members in _groups(ranks).items():
        places = _places(ranks, members)
        everybody = next(
            filter(None, (_ranks_of(ranks[rank], rows[0]) for rank, rows in members.items() if len(rows))), ()
        )
        missing = tuple(rank for rank in everybody if rank not in ranks)
        for place in sorted(set().union(*(set(found) for found in places.values()))):
            rows = {rank: found[place] for rank, found in places.items() if place in found}
            said = {rank: _signature(ranks[rank], row) for rank, row in rows.items()}
            if len(set(said.values())) > 1:
                disorders.append(Disorder(_name(group), place, said, rows))
                break
            kind, nbytes, dtype = said[min(rows)]
            calls.append(Call(kind, _name(group), nbytes, dtype, rows, missing))
    return sorted(calls, key=lambda call: ranks[min(call.rows)].start_ns[call.rows[min(call.rows)]]), disorders


def _name(group: tuple[str, tuple[int, ...]]) -> str:
    name, members = group
    return name if not members else f"{name} [{', '.join(map(str, members))}]" if len(members) <= 8 else name


def _groups(ranks: Mapping[int, Exchanges]) -> dict[tuple[str, tuple[int, ...]], dict[int, np.ndarray]]:
    found: dict[tuple[str, tuple[int, ...]], dict[int, np.ndarray]] = {}
    for rank, exchanges in ranks.items():
        is_shown = np.array([kind not in ("send", "receive") for kind in exchanges.kinds] or [True])
        for at, group in enumerate(exchanges.groups):
            rows = np.flatnonzero((exchanges.group == at) & is_shown[exchanges.kind])
            found.setdefault(group, {})[rank] = rows
    return found


def _ranks_of(exchanges: Exchanges, row: int) -> tuple[int, ...]:
    return exchanges.groups[exchanges.group[row]][1]


def _signature(exchanges: Exchanges, row: int) -> Signature:
    return exchanges.kind_of(row), int(exchanges.nbytes[row]), exchanges.dtypes[exchanges.dtype[row]]


def _places(ranks: Mapping[int, Exchanges], members: Mapping[int, np.ndarray]) -> dict[int, dict[int, int]]:
    """By rank, the row at each place of the group's order."""
    if all((ranks[rank].sequence[rows] >= 0).all() for rank, rows in members.items()):
        return {rank: _by_number(ranks[rank], rows) for rank, rows in members.items()}
    ordered = {
        rank: ([_signature(ranks[rank], row) for row in rows.tolist()], ranks[rank].end_ns[rows])
        for rank, rows in members.items()
    }
    longest = max(ordered, key=lambda rank: len(ordered[rank][0]))
    moved = {rank: _moved(ordered[longest], own) for rank, own in ordered.items()}
    return {rank: {at + moved[rank]: row for at, row in enumerate(rows.tolist())} for rank, rows in members.items()}


def _by_number(exchanges: Exchanges, rows: np.ndarray) -> dict[int, int]:
    """Of several kernels of one number, as where a call is split, the first."""
    found: dict[int, int] = {}
    for row in rows.tolist():
        found.setdefault(int(exchanges.sequence[row]), row)
    return found


def _moved(longest: tuple[list[Signature], np.ndarray], own: tuple[list[Signature], np.ndarray]) -> int:
    """By how many places `own` begins later than `longest`, each the signatures and the ends of its calls: where all but few
    agree, and of those where the ends are apart by always the same."""
    agree: dict[int, float] = {}
    spread: dict[int, float] = {}
    shorter = min(len(longest[0]), len(own[0]))
    for by in range(-MOST_MOVED, MOST_MOVED + 1):
        first, second = max(by, 0), max(-by, 0)
        pairs = list(zip(longest[0][first:], own[0][second:], strict=False))
        if pairs and len(pairs) >= shorter / 2:
            agree[by] = sum(one == other for one, other in pairs) / len(pairs)
            apart = own[1][second : second + len(pairs)] - longest[1][first : first + len(pairs)]
            spread[by] = float(np.median(np.abs(apart - np.median(apart)))) if len(pairs) >= FEWEST else math.inf
    enough = AGREEING * max(agree.values(), default=0.0)
    likely = [by for by in agree if agree[by] >= enough]
    best = min(likely, key=lambda by: (spread[by], abs(by)), default=0)
    least = min(likely, key=abs, default=0)
    return best if spread.get(best, math.inf) < spread.get(least, math.inf) / CLEARER else least
