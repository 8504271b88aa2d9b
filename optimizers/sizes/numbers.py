"""Numbers of a program at three sizes, and what each of them is at another one."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

COUNT = 3
"""How many sizes tell of another one."""
_POWERS = (1, 2)

_Made = Callable[[Any], float]
_MADE_OF: tuple[tuple[_Made, _Made], ...] = (
    (lambda count: 1 / count, lambda value: 1 / value),
    (lambda count: count / (count - 1), lambda value: value / (value - 1)),
)
"""Floats that programs make of a count of elements, and the way back: a mean's, and that of an unbiased variance, which batch
norm keeps. No two counts make the same float, as long as the way back finds them."""


class NotAlike(Exception):
    """Programs that differ in more than numbers, or numbers that do not follow the size."""


@dataclass(frozen=True)
class Sizes:
    """Three different sizes, for which programs are known, and another one, `new`, for which none is. All are positive."""

    known: tuple[int, ...]
    new: int

    def number(self, at: tuple[Any, ...]) -> Any:
        """What is `at[i]` at the size `known[i]`, at the size `new`. Raises `NotAlike` where it does not follow the size."""
        if all(type(one) is int for one in at):
            return _integer(self.known, self.new, at)
        if all(type(one) is float for one in at) and len(set(at)) == len(at):
            return self._float(at)
        return self.same(at)

    def _float(self, at: tuple[float, ...]) -> float:
        """A float that is made of an integer that follows the size, as those of `_MADE_OF` are."""
        for made, back in _MADE_OF:
            counts = tuple(_rounded(back, one) for one in at)
            if all(count > 1 and made(count) == one for count, one in zip(counts, at, strict=True)):
                return made(_integer(self.known, self.new, counts))
        raise NotAlike(f"{at} do not follow the sizes {self.known}")

    def same(self, at: tuple[Any, ...]) -> Any:
        """What is the same at all sizes. Raises `NotAlike` where it is not."""
        first = at[0]
        for one in at[1:]:
            if type(one) is not type(first) or (repr(one) != repr(first) if isinstance(one, float) else one != first):
                raise NotAlike(f"{first!r} is {one!r} at another size")
        return first

    def numbers(self, at: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
        """A shape, or strides, at the size `new`."""
        if len({len(one) for one in at}) > 1:
            raise NotAlike(f"{at[0]} has another number of dimensions at another size")
        return tuple(_integer(self.known, self.new, one) for one in zip(*at, strict=True))


def _rounded(back: Callable[[float], float], value: float) -> int:
    try:
        found = back(value)
    except ZeroDivisionError:
        return 0
    return round(found) if math.isfinite(found) else 0


@functools.lru_cache(maxsize=1 << 16)
def _integer(sizes: tuple[int, ...], new: int, at: tuple[int, ...]) -> int:
    if len(set(at)) == 1:
        return at[0]
    for power in _POWERS:
        first, second, *others = [size**power for size in sizes]
        slope = Fraction(at[1] - at[0], second - first)
        if all(at[0] + slope * (one - first) == value for one, value in zip(others, at[2:], strict=True)):
            found = at[0] + slope * (new**power - first)
            if found.denominator == 1:
                return int(found)
    raise NotAlike(f"the numbers {at} do not follow the sizes {sizes}")
