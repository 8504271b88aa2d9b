"""Merging: kernels beside each other, or one after the other, become one where that moves fewer bytes.

    a = f(x)                         a, b = fg(x, y)         `x` is read once
    b = g(x, y)

    a = f(x)                         b = gf(x)               `a` is neither written nor read
    b = g(a)

Growing regions from operands to readers (`regions`) joins neither ops that only share an input, nor ops whose operands lie
behind different numbers of borders. Here pairs are tried greedily, by the bytes that they could save, the most first:

    legal      one phase and device, one size of domain, equal rows where both reduce, no path between the two through a third
               (`unit_order`)
    small      at most `MOST_TENSORS` inputs and outputs
    near       at most `WINDOW` units apart in the schedule, and what the first would have freed and now waits for the second
               is no more than what the merge saves: memory is not traded for bandwidth at a loss
    cheaper    the kernel that was really made for both moves fewer bytes than the two did
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import fx

from tracefuse.optimizers.fuse.pieces import LEAST_SHARE, Piece, Traits, Unit, unit_order, with_views
from tracefuse.optimizers.fuse.rebuild import UnitOrder
from tracefuse.optimizers.fuse.regions import agree
from tracefuse.optimizers.ops import behind_views, readers
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.trace import human_bytes, nbytes

MOST_TENSORS = 24
WINDOW = 32

Attempt = Callable[[Iterable[fx.Node]], Piece | None]


def merge_pieces(
    graph: fx.Graph, pieces: Sequence[Piece], fusible: set[fx.Node], attempt: Attempt, decide: Decide
) -> list[Piece]:
    """`pieces` with those merged that are cheaper together, each after those it reads.

    `attempt` makes one piece of nodes, or None where they have no kernel; `fusible` are the ops that it may be given. Each
    merge, and each pair that could have saved bytes and is refused, is told to `decide`.
    """
    owner = {node: piece for piece in pieces for node in piece.nodes}
    merger = _Merger(unit_order(graph, pieces, owner), owner, fusible, attempt, decide)
    merger.run(pieces)
    return sorted((unit for unit in merger.order.at if isinstance(unit, Piece)), key=merger.order.at.__getitem__)


@dataclass
class _Merger:
    """Pairs of pieces in a queue, by what they could save. `reading` are the pieces that read a value's memory, and `read` the
    ops that do, of values for which that was asked."""

    order: UnitOrder[Unit]
    owner: dict[fx.Node, Piece]
    fusible: set[fx.Node]
    attempt: Attempt
    decide: Decide
    queue: list[tuple[int, bool, int, int, Piece, Piece]] = field(default_factory=list)
    reading: dict[fx.Node, dict[Piece, None]] = field(default_factory=dict)
    traits: dict[Piece, Traits] = field(default_factory=dict)
    read: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    count: Iterator[int] = field(default_factory=itertools.count)

    def run(self, pieces: Iterable[Piece]) -> None:
        for piece in sorted(pieces, key=self.order.at.__getitem__):
            self._add(piece)
        while self.queue:
            *_, one, other = heapq.heappop(self.queue)
            if one in self.order.at and other in self.order.at:
                self._consider(*self._in_order(one, other))
        self._tell_misfits()

    def _in_order(self, one: Piece, other: Piece) -> tuple[Piece, Piece]:
        return (one, other) if self.order.at[one] < self.order.at[other] else (other, one)

    # --- pairs ---

    def _add(self, piece: Piece) -> None:
        """Queue the pairs that `piece` makes with pieces that were added before it."""
        at, own, around = self.order.at, piece.traits, list(self.order.near(piece, WINDOW))
        near = {unit: None for unit in (*self.order.needs[piece], *self.order.readers[piece]) if unit in self.traits}
        for value, size in own.reads.items():
            beside = self.reading.setdefault(value, {})
            if beside and size * LEAST_SHARE >= own.nbytes:
                near |= dict.fromkeys(filter(beside.__contains__, around))
            beside[piece] = None
        self.traits[piece] = own
        for other in sorted(near, key=at.__getitem__):
            theirs = self.traits[other]
            if abs(at[other] - at[piece]) > WINDOW or _misfit(own, theirs):
                continue
            saving = self._saving(*self._in_order(piece, other))
            if saving * LEAST_SHARE >= own.nbytes + theirs.nbytes:
                is_beside = piece not in self.order.needs[other] and other not in self.order.needs[piece]
                heapq.heappush(self.queue, (-saving, is_beside, at[other], next(self.count), piece, other))

    def _saving(self, first: Piece, second: Piece) -> int:
        """The most bytes that one kernel could save: what both read, and what one hands to the other."""
        reads, owner, saved = self.traits[first].reads, self.owner, self._vanishing(first, second)
        for value, size in self.traits[second].reads.items():
            if value in reads:
                saved += min(size, reads[value])
            if owner.get(value) is first:
                saved += size
        return saved

    def _vanishing(self, first: Piece, second: Piece) -> int:
        """The bytes of those outputs of `first` that only `second` reads."""
        return sum([nbytes(v) for v in first.outputs if {second}.issuperset(map(self.owner.get, self._readers(v)))])

    def _readers(self, value: fx.Node) -> tuple[fx.Node, ...]:
        if value not in self.read:
            self.read[value] = tuple(readers(value))
        return self.read[value]

    # --- merging ---

    def _consider(self, first: Piece, second: Piece) -> None:
        reason = self._refusal(first, second)
        below = None if reason else self.order.between(first, second)
        if below is None:
            self._tell("apart", first, second, reason or "one needs what is made of the other by an op between them")
            return
        merged = self.attempt(with_views((*first.nodes, *second.nodes), self.fusible))
        apart = first.effort + second.effort
        if merged is None or (apart - merged.effort) * LEAST_SHARE < apart:
            moved = "there is no such kernel" if merged is None else f"it would move {human_bytes(merged.nbytes)}"
            if merged and merged.effort > merged.nbytes:
                moved += f", and compute values again for as long as {human_bytes(merged.effort - merged.nbytes)} take"
            self._tell("apart", first, second, f"{moved}, apart they move {human_bytes(apart)}")
            return
        own = set(merged.nodes)
        if (view := next((v for v in merged.inputs if behind_views(v) in own), None)) is not None:
            shows = f"{view.name} shows memory of the one, and no kernel can compute that view"
            self._tell("apart", first, second, shows)
            return
        self._replace(first, second, merged, below)
        moved = f"{merged.name} moves {human_bytes(merged.nbytes)}, apart they move {human_bytes(apart)}"
        self._tell("merge", first, second, moved, apart - merged.nbytes)

    def _refusal(self, first: Piece, second: Piece) -> str | None:
        tensors = len({*first.inputs, *second.inputs, *first.outputs, *second.outputs})
        if tensors > MOST_TENSORS:
            return f"one kernel would take {tensors} tensors, more than {MOST_TENSORS}"
        if self.order.at[second] - self.order.at[first] > WINDOW:
            return f"more than {WINDOW} kernels and ops run between them"
        waiting, saving = self._waiting(first, second), self._saving(first, second)
        if waiting > saving:
            return f"{human_bytes(waiting)} would have to wait in memory, to save {human_bytes(saving)}"
        return None

    def _waiting(self, first: Piece, second: Piece) -> int:
        """Bytes that are dead after `first` and would live until `second`, less those that would not exist any more."""
        at = self.order.at
        if at[second] == at[first] + 1:
            return 0
        dying = (v for v in self.traits[first].reads if v.op == "call_function" and not self._outlives(v, at[first]))
        return sum(map(nbytes, dying)) - self._vanishing(first, second)

    def _outlives(self, value: fx.Node, place: int) -> bool:
        """Whether a value has a reader behind `place`; what is returned has readers outside."""
        at, owner, outside = self.order.at, self.owner, len(self.owner)
        return any(at.get(owner.get(reader, reader), outside) > place for reader in reversed(self._readers(value)))

    def _replace(self, first: Piece, second: Piece, merged: Piece, below: set[Unit]) -> None:
        self.order.merge(first, second, merged, below)
        for old in (first, second):
            for value in self.traits.pop(old).reads:
                self.reading[value].pop(old, None)
        self.owner |= dict.fromkeys(merged.nodes, merged)
        self._add(merged)

    def _tell(self, action: str, first: Piece, second: Piece, reason: str, saved: int = 0) -> None:
        both = f"{first.name} and {second.name}"
        if first.name == second.name:
            both = f"two calls of {first.name}, for {first.outputs[-1].name} and {second.outputs[-1].name}"
        self.decide(Decision(second.outputs[-1].name, action, f"{both}: {reason}", saved))

    def _tell_misfits(self) -> None:
        """Each kernel that reads what another writes, and was not even tried together with it although that would save."""
        for second, own in self.traits.items():
            above = [unit for unit in self.order.needs[second] if isinstance(unit, Piece)]
            for first in sorted(above, key=self.order.at.__getitem__):
                other = self.traits[first]
                is_worth = self._saving(first, second) * LEAST_SHARE >= first.nbytes + second.nbytes
                if is_worth and other.place == own.place and (reason := _misfit(other, own)):
                    self._tell("apart", first, second, reason)


def _misfit(one: Traits, other: Traits) -> str | None:
    """Why two pieces can be no kernel, whatever their ops; None if they run in one place, over as many elements, and reduce
    the same rows and columns where they do."""
    if one.place != other.place:
        return "they run in different phases or on different devices"
    if one.numel != other.numel:
        return f"their programs share out {one.numel} and {other.numel} elements"
    if not agree(one.rows | other.rows, one.columns | other.columns):
        return f"the one reduces {_loops(one)}, the other {_loops(other)}"
    return None


def _loops(traits: Traits) -> str:
    rows = [f"rows of {n_cols}" for _, _, n_cols in sorted(traits.rows)]
    shared = "rows of {} that several programs share"
    columns = [("columns of {}" if cols > 1 else shared).format(rows) for _, rows, cols in sorted(traits.columns)]
    return " and ".join([*rows, *columns])
