"""Which of several choices are worth a look: those that no other one beats in both time and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def unbeaten(tried: Iterable[T], cost: Callable[[T], tuple[float, float]]) -> tuple[T, ...]:
    """Those that no other one beats, in the order of the first of their two costs. One choice beats another where it has less
    of one cost and no more of the other; of choices that are equal in both the first is taken."""
    found: list[T] = []
    least = float("inf")
    for one in sorted(tried, key=cost):
        second = cost(one)[1]
        if second < least:
            found.append(one)
            least = second
    return tuple(found)
