"""Numbers of a program at three sizes, and what each of them is at another one."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tracefuse.optimizers.rewrite import Layout

COUNT = 3
"""How many sizes tell of another one."""
_POWERS = (1, 2)
ROUNDED_TO = 32
"""To how many of them the rows of a normaliser are rounded up by `_scaled_dot_product_efficient_attention`."""

Shift = tuple[int, Fraction]
"""The power of the size in a number, and its constant over its slope."""

_Made = Callable[[Any], float]
_MADE_OF: tuple[tuple[_Made, _Made], ...] = (
    (lambda count: 1 / count, lambda value: 1 / value),
    (lambda count: count / (count - 1), lambda value: value / (value - 1)),
    (lambda count: 2 / (count - 1), lambda value: 2 / value + 1),
)
"""Floats that programs make of a count of elements, and the way back: a mean's, that of an unbiased variance, which batch norm
keeps, and that of the gradient of such a variance. No two counts make the same float, as long as the way back finds them."""


class NotAlike(Exception):
    """Programs that differ in more than numbers, or numbers that do not follow the size."""


@dataclass(frozen=True)
class Rule:
    """A number `slope * size ** power + constant`."""

    power: int
    slope: Fraction
    constant: Fraction

    @property
    def shift(self) -> Shift:
        """What is the same for all multiples of the number."""
        return self.power, self.constant / self.slope

    def at(self, size: int) -> Fraction:
        return self.slope * size**self.power + self.constant


@dataclass(frozen=True)
class Sizes:
    """Three different sizes, for which programs are known, and another one, `new`, for which none is. All are positive.

    `shifts` are those of the numbers that the program itself has, before anything rounds in it: see `shifts_of`. Only their
    multiples, and those of powers of the size, are told.
    """

    known: tuple[int, ...]
    new: int
    shifts: frozenset[Shift] = frozenset()

    def number(self, at: tuple[Any, ...]) -> Any:
        """What is `at[i]` at the size `known[i]`, at the size `new`. Raises `NotAlike` where it does not follow the size."""
        if all(type(one) is int for one in at):
            return self._integer(at)
        if all(type(one) is float for one in at) and len(set(at)) == len(at):
            return self._float(at)
        return self.same(at)

    def _integer(self, at: tuple[int, ...]) -> int:
        if len(set(at)) == 1:
            return at[0]
        rule = _rule(self.known, at)
        if rule is None:
            raise NotAlike(f"the numbers {at} do not follow the sizes {self.known}")
        if rule.constant and rule.shift not in self.shifts:
            raise NotAlike(f"the program itself has no numbers like {at}: something was rounded to them")
        found = rule.at(self.new)
        if found.denominator != 1 or (found < 0 <= min(at)):
            raise NotAlike(f"{at} would be {found} at the size {self.new}")
        return int(found)

    def _float(self, at: tuple[float, ...]) -> float:
        """A float that is made of an integer that follows the size, as those of `_MADE_OF` are."""
        for made, back in _MADE_OF:
            counts = tuple(_rounded(back, one) for one in at)
            if all(count > 1 and made(count) == one for count, one in zip(counts, at, strict=True)):
                with suppress(NotAlike):
                    return made(self._integer(counts))
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
        return tuple(map(self._extent, zip(*at, strict=True)))

    def _extent(self, at: tuple[int, ...]) -> int:
        """A size or a stride, which may be a multiple of the size rounded up, as ATen rounds some: torch tells of each tensor
        whether that is so, since no number in a program's text is told in this way."""
        with suppress(NotAlike):
            return self._integer(at)
        factors = {Fraction(one, _rounded_up(size)) for one, size in zip(at, self.known, strict=True)}
        if len(factors) > 1 or (factor := factors.pop()).denominator != 1:
            return self._integer(at)
        return int(factor) * _rounded_up(self.new)

    def layout(self, at: Iterable[Layout]) -> Layout:
        """The layout of a tensor at the size `new`."""
        shapes, strides, dtypes, devices = zip(*at, strict=True)
        return self.numbers(shapes), self.numbers(strides), self.same(dtypes), self.same(devices)


def _rounded_up(size: int) -> int:
    return -(-size // ROUNDED_TO) * ROUNDED_TO


def _rounded(back: Callable[[float], float], value: float) -> int:
    try:
        found = back(value)
    except ZeroDivisionError:
        return 0
    return round(found) if math.isfinite(found) else 0


def shifts_of(known: tuple[int, ...], numbers: Iterable[tuple[int, ...]]) -> frozenset[Shift]:
    """The shifts of those of the `numbers`, each at the sizes `known`, that vary and follow the size."""
    rules = (_rule(known, at) for at in numbers if len(set(at)) > 1)
    return frozenset(rule.shift for rule in rules if rule is not None)


@functools.lru_cache(maxsize=1 << 16)
def _rule(sizes: tuple[int, ...], at: tuple[int, ...]) -> Rule | None:
    """What numbers that vary follow; None where they do not follow the size."""
    for power in _POWERS:
        first, second, *_ = [size**power for size in sizes]
        slope = Fraction(at[1] - at[0], second - first)
        rule = Rule(power, slope, at[0] - slope * first)
        if slope and all(rule.at(size) == number for size, number in zip(sizes, at, strict=True)):
            return rule
    return None
