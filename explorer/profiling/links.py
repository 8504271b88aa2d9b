"""The flows of a trace file: which record each joins to which. A flow begins and ends at the place and time of a record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from tracefuse.timeline.columns import Events

JOINS, IS_OPEN = "a link: joins two events", "a link of which one end is not recorded"


@dataclass
class Flows:
    """The ends of flows, in the order of the file: whose (an index into `ids`), a start or not, the place and the time."""

    ids: dict[tuple[str, object], int] = field(default_factory=dict)
    whose: list[int] = field(default_factory=list)
    is_start: list[bool] = field(default_factory=list)
    place: list[int] = field(default_factory=list)
    time_ns: list[int] = field(default_factory=list)

    def add(
        self, ids: Iterable[tuple[str, object]], phases: Iterable[str], places: Iterable[int], times_ns: Iterable[int]
    ) -> None:
        """Ends of flows: their category and number, phase, place and time."""
        known = self.ids
        self.whose += [known.setdefault(one, len(known)) for one in ids]
        self.is_start += [phase == "s" for phase in phases]
        self.place += places
        self.time_ns += times_ns

    def joined(self, events: Events, places: np.ndarray) -> tuple[dict[str, np.ndarray], Counter[tuple[str, str]]]:
        """Per category, pairs of rows (from, to), and how many ends join two records or do not. `places` are those of rows."""
        if not self.whose:
            return {}, Counter()
        whose, is_start = np.array(self.whose), np.array(self.is_start, bool)
        rows = _rows_at(events, places, np.array(self.place), np.array(self.time_ns, np.int64))
        order = np.argsort(whose, kind="stable")
        starts, stops = order[is_start[order]], order[~is_start[order]]
        ends = np.bincount(whose, minlength=len(self.ids))
        froms, tos = _known(whose, rows, starts), _known(whose, rows, stops)
        number, pairs = _paired(froms, tos)
        has_pair = np.zeros(len(self.ids), bool)
        has_pair[number] = True
        return self._by_category(number, pairs, has_pair, ends)

    def _by_category(
        self, number: np.ndarray, pairs: np.ndarray, has_pair: np.ndarray, ends: np.ndarray
    ) -> tuple[dict[str, np.ndarray], Counter[tuple[str, str]]]:
        names = [category for category, _ in self.ids]
        known = {name: at for at, name in enumerate(dict.fromkeys(names))}
        category = np.array([known[name] for name in names])
        found = {name: pairs[category[number] == at] for name, at in known.items()}
        counts: Counter[tuple[str, str]] = Counter()
        for name, at in known.items():
            for reason, chosen in ((JOINS, has_pair), (IS_OPEN, ~has_pair)):
                count = int(ends[chosen & (category == at)].sum())
                counts.update({(name, reason): count} if count else {})
        return found, counts


def _known(whose: np.ndarray, rows: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    ends = ends[rows[ends] >= 0]
    return whose[ends], rows[ends]


def _paired(froms: tuple[np.ndarray, np.ndarray], tos: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Every start of a flow with every end of it: the flow's number, and the pairs of rows. Both are sorted by number."""
    first = np.searchsorted(tos[0], froms[0], side="left")
    count = np.searchsorted(tos[0], froms[0], side="right") - first
    whose = np.repeat(np.arange(len(froms[0])), count)
    offset = np.arange(len(whose)) - np.repeat(np.cumsum(count) - count, count)
    pairs = np.stack([froms[1][whose], tos[1][first[whose] + offset]], axis=1)
    return froms[0][whose], pairs


def _rows_at(events: Events, places: np.ndarray, place: np.ndarray, time_ns: np.ndarray) -> np.ndarray:
    """The row that starts at each place and time, of several the innermost; -1 where none does."""
    if not len(events):
        return np.full(len(place), -1, np.int64)
    is_new = np.concatenate([[True], np.diff(events.start_ns) != 0])
    times, rank = events.start_ns[is_new], np.cumsum(is_new) - 1
    most = int(max(places.max(), place.max())) + 1
    keys = rank * most + places
    order = np.argsort(keys, kind="stable")
    at_time = np.searchsorted(times, time_ns)
    is_time = (at_time < len(times)) & (times[np.minimum(at_time, len(times) - 1)] == time_ns)
    asked = at_time.astype(np.int64) * most + place
    at = np.searchsorted(keys[order], asked, side="right") - 1
    found = order[np.maximum(at, 0)]
    return np.where(is_time & (at >= 0) & (keys[found] == asked), found, -1)


def by_sequence(events: Events) -> np.ndarray:
    """The forward operator of each backward one, else -1: a backward operator has the sequence number of the last forward
    operator that was given it, and names its thread."""
    found = np.full(len(events), -1, np.int64)
    numbered = np.flatnonzero(events.sequence >= 0)
    is_backward = events.forward_thread[numbered] != 0
    forward, backward = numbered[~is_backward], numbered[is_backward]
    if len(forward) and len(backward):
        forward = forward[np.argsort(events.sequence[forward], kind="stable")]
        numbers = events.sequence[forward]
        at = np.searchsorted(numbers, events.sequence[backward], side="right") - 1
        is_it = (at >= 0) & (numbers[at] == events.sequence[backward])
        found[backward[is_it]] = forward[at[is_it]]
    return found


def of_pairs(pairs: np.ndarray, rows: int) -> np.ndarray:
    """The row that each row is joined from, else -1."""
    found = np.full(rows, -1, np.int64)
    found[pairs[:, 1]] = pairs[:, 0]
    return found


def numbered(indices: np.ndarray) -> tuple[int, int]:
    """How many records have a number of those that a profiler gives one after another ("Ev Idx"), and how many were given."""
    return len(indices), int(indices.max()) - int(indices.min()) + 1 if len(indices) else 0
