"""A topological order that survives merging, beside a search of the whole graph."""

from __future__ import annotations

import random

import pytest

from tracefuse.optimizers.fuse.order import UnitOrder

Needs = dict[int, set[int]]


def random_needs(choose: random.Random, count: int) -> Needs:
    return {unit: {one for one in range(max(0, unit - 6), unit) if choose.random() < 0.3} for unit in range(count)}


def reaches(needs: Needs, first: int, second: int) -> bool:
    """Whether a path leads from `first` to `second` through others."""
    stack, seen = [one for one in needs[second] if one != first], set()
    while stack:
        unit = stack.pop()
        if unit == first:
            return True
        if unit not in seen:
            seen.add(unit)
            stack += needs[unit]
    return False


@pytest.mark.parametrize("seed", range(20))
def test_it_merges_what_makes_no_cycle_and_stays_an_order(seed: int) -> None:
    choose = random.Random(seed)
    order = UnitOrder(random_needs(choose, 30), place=lambda unit: unit)
    merges = 0
    for merged in range(30, 60):
        first, second = sorted(choose.sample(sorted(order.at), 2), key=order.at.__getitem__)
        below = order.between(first, second)
        assert (below is None) == reaches(order.needs, first, second)
        if below is not None:
            order.merge(first, second, merged, below)
            merges += 1
        for unit, operands in order.needs.items():
            assert all(order.at[one] < order.at[unit] and unit in order.readers[one] for one in operands)
        assert order.at.keys() == order.needs.keys() == order.readers.keys()
    assert merges > 3


def test_of_what_could_be_next_the_least_place_is() -> None:
    order = UnitOrder({3: set(), 1: set(), 2: {3}}, place=lambda unit: unit)
    assert sorted(order.at, key=order.at.__getitem__) == [1, 3, 2]


def test_a_cycle_is_no_order() -> None:
    with pytest.raises(ValueError, match="each other in a cycle: group ops so that"):
        UnitOrder({1: {2}, 2: {1}}, place=lambda unit: unit)
