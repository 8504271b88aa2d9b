"""Which updates make one step: the shortest sequence of optimizers' steps that repeats.

adam adam adam                              a step is one update
D G D G                                     a step is one of D and one of G
D D D G D D D G                             a step is three of D and one of G
warmup adam adam adam                       the first update belongs to no step

An update before which no backward ran is another one than those after a backward: with `optimizer.step()` called twice after
each backward, a step is two updates.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

FEW = 512  # updates; what repeats is looked for in the last so many


@dataclass(frozen=True)
class Period:
    """From the update number `start` (0 is the first) on, every `length` updates are a step."""

    start: int = 0
    length: int = 1

    def whole(self, updates: int) -> int:
        """How many whole steps that many updates are."""
        return max(updates - self.start, 0) // self.length

    def is_end(self, updates: int) -> bool:
        """Whether a step ends with the last of that many updates."""
        return updates > self.start and (updates - self.start) % self.length == 0

    def is_step(self, first: int, end: int) -> bool:
        """Whether the updates from number `first` to before number `end` are a step."""
        return first >= self.start and (first - self.start) % self.length == 0 and end == first + self.length

    def end(self, step: int) -> int:
        """How many updates there have been when the step number `step` (1 is the first) ends."""
        return self.start + step * self.length


class UpdateSequence:
    """The optimizers' steps of a run, in order, and the period that explains them best so far."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.period = Period()

    def add(self, update: Hashable) -> bool:
        """Note an update, as whose it is and of which kind; whether the period is another one because of it."""
        self.seen.append(update)
        before, last = self.period, len(self.seen) - 1
        if last < before.start + before.length or update == self.seen[last - before.length]:
            return False
        self.period = shortest_period(self.seen)
        return self.period != before

    @property
    def steps(self) -> int:
        return self.period.whole(len(self.seen))

    def is_end(self) -> bool:
        return self.period.is_end(len(self.seen))


def shortest_period(seen: Sequence[Hashable]) -> Period:
    """The period that explains `seen` with the fewest updates: those before its start and those of one step. Of equal ones the
    earliest is taken, so that D, D, G begins with a step of three, not with two updates of no step."""
    first = max(0, len(seen) - FEW)
    recent = seen[first:]
    found = (Period(_start(recent, length), length) for length in range(1, len(recent) + 1))
    best = min(found, key=lambda period: (period.start + period.length, period.start))
    return Period(first + best.start, best.length)


def _start(seen: Sequence[Hashable], length: int) -> int:
    """From where on `seen` repeats after every `length` updates."""
    for last in range(len(seen) - 1, length - 1, -1):
        if seen[last] != seen[last - length]:
            return last - length + 1
    return 0
