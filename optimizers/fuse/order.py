"""A topological order of units that survives merging them two at a time.

Merging `first` and `second` keeps a graph acyclic if no path leads from one to the other through a third. With a valid order
only the units between the two can lie on such a path, so that the search is as short as the two are near, and so is the
repair of the order afterwards:

    before   first  d  x  d'  second         d, d': what `first` leads to in between
    after    x  merged  d  d'

Source of the idea: Pearce and Kelly, "A dynamic topological sort algorithm for directed acyclic graphs", 2007.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Unit = TypeVar("Unit", bound=Hashable)


class UnitOrder(Generic[Unit]):
    """Units in an order in which each stands after those it `needs`; `at` is a unit's place, `readers` what needs it.

    Of the units that could come next, the one with the least `place` does. Raises `ValueError` where `needs` has a cycle.
    """

    def __init__(self, needs: dict[Unit, set[Unit]], place: Callable[[Unit], int]) -> None:
        self.needs = needs
        self.readers: dict[Unit, set[Unit]] = {unit: set() for unit in needs}
        for unit, operands in needs.items():
            for operand in operands:
                self.readers[operand].add(unit)
        self._line: list[Unit | None] = [*self._sorted(place)]
        self.at = {unit: at for at, unit in enumerate(self._line) if unit is not None}

    def _sorted(self, place: Callable[[Unit], int]) -> list[Unit]:
        missing = {unit: len(operands) for unit, operands in self.needs.items()}
        count = itertools.count()
        ready = [(place(unit), next(count), unit) for unit in self.needs if not missing[unit]]
        heapq.heapify(ready)
        order: list[Unit] = []
        while ready:
            order.append(heapq.heappop(ready)[2])
            for reader in self.readers[order[-1]]:
                missing[reader] -= 1
                if not missing[reader]:
                    heapq.heappush(ready, (place(reader), next(count), reader))
        if len(order) < len(self.needs):
            remedy = "group ops so that no path leaves a unit and comes back"
            raise ValueError(f"the units need each other in a cycle: {remedy}")
        return order

    def between(self, first: Unit, second: Unit) -> set[Unit] | None:
        """What `first` leads to before `second`; None where a path leads through that to `second`."""
        limit, found = self.at[second], set()
        stack = [unit for unit in self.readers[first] if unit != second]
        while stack:
            unit = stack.pop()
            if unit == second:
                return None
            if unit not in found and self.at[unit] < limit:
                found.add(unit)
                stack += self.readers[unit]
        return found

    def merge(self, first: Unit, second: Unit, merged: Unit, below: set[Unit]) -> None:
        """Put `merged` in place of two units, `below` being what `between` found."""
        start, stop = self.at.pop(first), self.at.pop(second) + 1
        rest = [u for u in self._line[start:stop] if u is not None and u not in (first, second)]
        line = [*(u for u in rest if u not in below), merged, *(u for u in rest if u in below)]
        self._line[start:stop] = [*line, *[None] * (stop - start - len(line))]
        self.at |= {unit: at for at, unit in enumerate(line, start)}
        self._relink(first, second, merged)

    def _relink(self, first: Unit, second: Unit, merged: Unit) -> None:
        old = {first, second}
        self.needs[merged] = (self.needs.pop(first) | self.needs.pop(second)) - old
        self.readers[merged] = (self.readers.pop(first) | self.readers.pop(second)) - old
        for operand in self.needs[merged]:
            self.readers[operand] -= old
            self.readers[operand].add(merged)
        for reader in self.readers[merged]:
            self.needs[reader] -= old
            self.needs[reader].add(merged)
