"""Minimum s-t cut, solved by `scipy.sparse.csgraph.maximum_flow`.

scipy counts flow in int32, so capacities are scaled and rounded. The scale comes from the weight of a cut that the
caller already knows: no edge above it can be in a minimum cut, so such edges become infinite, and all the precision
goes to those that can. With it, weights are told apart down to 2**-29 of that cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

# A finite cut and an infinite edge together stay below 2**31, whatever is added or subtracted in scipy.
_FINITE = 2**29
_INFINITE = 2**30

Edge = tuple[int, int, float]


@dataclass(frozen=True)
class Cut:
    """The `source_side` of a minimum cut and its `weight`, in the units of the capacities given."""

    source_side: frozenset[int]
    weight: float


def min_cut(edges: Iterable[Edge], count: int, source: int, sink: int, *, bound: float | None = None) -> Cut | None:
    """The minimum cut between `source` and `sink` among nodes `0 .. count-1`, or None if every cut is infinite.

    `edges` are `(from, to, capacity)`, capacities at least 0, `math.inf` allowed, parallel edges added up. `bound` is
    the weight of any one cut, if one is known; the result is exact up to a relative rounding of `count / 2**29`. Of
    several minimum cuts it is the one nearest to the source: the smallest source side, whatever the edges' order.
    """
    merged = _merge(edges)
    limit = bound if bound is not None else math.fsum(c for c in merged.values() if c < math.inf)
    scale = _FINITE / limit if limit > 0 else 1.0
    integers = {edge: _integer(c, limit, scale) for edge, c in merged.items()}
    # Asked first, because flow along two infinite paths would overflow.
    if sink in _reachable(_matrix({e: c for e, c in integers.items() if c == _INFINITE}, count), source):
        return None
    capacity = _matrix(integers, count)
    side = _reachable(capacity - maximum_flow(capacity, source, sink, method="dinic").flow, source)
    weight = math.fsum(c for (a, b), c in merged.items() if a in side and b not in side)
    return Cut(side, weight)


def _merge(edges: Iterable[Edge]) -> dict[tuple[int, int], float]:
    merged: dict[tuple[int, int], float] = {}
    for start, end, capacity in edges:
        if not capacity >= 0:
            raise ValueError(f"capacity {capacity} of the edge {start} -> {end} is not a number from 0 up")
        merged[start, end] = merged.get((start, end), 0.0) + capacity
    return merged


def _integer(capacity: float, limit: float, scale: float) -> int:
    if capacity > limit:
        return _INFINITE
    # Rounding a small capacity down to 0 would make a value free.
    return max(1, round(capacity * scale)) if capacity > 0 else 0


def _matrix(capacities: dict[tuple[int, int], int], count: int) -> csr_matrix:
    ends = np.array(list(capacities), dtype=np.int32).reshape(-1, 2)
    values = np.fromiter(capacities.values(), dtype=np.int32, count=len(capacities))
    return csr_matrix((values, (ends[:, 0], ends[:, 1])), shape=(count, count))


def _reachable(residual: csr_matrix, source: int) -> frozenset[int]:
    """Nodes that `source` reaches along edges of positive capacity."""
    residual.data[residual.data < 0] = 0
    residual.eliminate_zeros()
    order = breadth_first_order(residual, source, directed=True, return_predecessors=False)
    return frozenset(order.tolist())
