"""The solver against enumeration, and what it promises about ties, scales and infinity."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from tracefuse.optimizers.remat.mincut import Edge, Network, min_cut


def weight_of(edges: list[Edge], side: set[int]) -> float:
    return sum(c for a, b, c in edges if a in side and b not in side)


def all_sides(count: int, source: int, sink: int) -> list[set[int]]:
    others = [n for n in range(count) if n not in (source, sink)]
    chosen = itertools.chain.from_iterable(itertools.combinations(others, k) for k in range(len(others) + 1))
    return [{source, *c} for c in chosen]


def random_network(seed: int) -> tuple[list[Edge], int]:
    choice = random.Random(seed)
    count = choice.randint(3, 8)
    pairs = [(a, b) for a in range(count) for b in range(count) if a < b]
    edges = [(a, b, choice.choice([0, 1, 2, 3.5, 100, math.inf])) for a, b in pairs if choice.random() < 0.6]
    return edges, count


@pytest.mark.parametrize("seed", range(60))
def test_is_a_minimum_and_of_the_minima_the_smallest(seed: int) -> None:
    edges, count = random_network(seed)
    sides = all_sides(count, 0, count - 1)
    least = min(weight_of(edges, side) for side in sides)
    cut = min_cut(edges, count, 0, count - 1)
    if least == math.inf:
        assert cut is None
        return
    assert cut is not None
    assert weight_of(edges, set(cut)) == pytest.approx(least)
    minima = [side for side in sides if weight_of(edges, side) == least]
    assert cut == set.intersection(*minima)


def test_order_of_edges_does_not_matter_and_parallel_edges_add_up() -> None:
    edges = [(0, 1, 2.0), (0, 1, 3.0), (1, 2, 5.0), (2, 3, 5.0)]
    assert min_cut(edges, 4, 0, 3) == min_cut(edges[::-1], 4, 0, 3) == {0}


def test_a_known_cut_lets_bytes_be_told_apart_beside_terabytes() -> None:
    edges = [(0, 1, 1e15), (1, 2, 1e9 + 8), (2, 3, 1e9), (3, 4, 1e15)]
    pairs, capacities = [(a, b) for a, b, _ in edges], np.array([capacity for _, _, capacity in edges])
    side = Network(pairs, 5, 0, 4).cut(capacities, bound=1e9 + 8)
    assert side is not None
    assert side.tolist() == [True, True, True, False, False]


def test_two_infinite_paths_do_not_overflow() -> None:
    inf = math.inf
    assert min_cut([(0, 1, inf), (1, 3, inf), (0, 2, inf), (2, 3, inf)], 4, 0, 3) is None


@pytest.mark.parametrize("capacity", [-1.0, math.nan])
def test_refuses_what_is_no_capacity(capacity: float) -> None:
    with pytest.raises(ValueError, match="0 -> 1"):
        min_cut([(0, 1, capacity)], 2, 0, 1)


def test_a_network_without_edges_is_cut_where_it_is() -> None:
    """As of a graph that holds no op, which Dynamo gives a backend after a graph break."""
    assert min_cut([], 2, 0, 1) == {0}
