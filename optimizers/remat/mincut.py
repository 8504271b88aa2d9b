"""Minimum s-t cut, solved by `scipy.sparse.csgraph.maximum_flow`.

scipy counts flow in int32, so capacities are scaled and rounded. The scale comes from the weight of a cut that the
caller already knows: no edge above it can be in a minimum cut, so such edges become infinite, and all the precision
goes to those that can. With it, weights are told apart down to 2**-29 of that cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # half a second of imports, spent where the first cut is made
    from scipy.sparse import csr_matrix

# A finite cut and an infinite edge together stay below 2**31, whatever is added or subtracted in scipy.
_FINITE = 2**29
_INFINITE = 2**30

Edge = tuple[int, int, float]


class Network:
    """A network whose edges stay while their capacities change: it is sorted once, and cut as often as wanted.

    Edges are pairs `(from, to)` of nodes `0 .. count-1`; parallel ones add up. There may be none.
    """

    def __init__(self, edges: Sequence[tuple[int, int]] | np.ndarray, count: int, source: int, sink: int) -> None:
        starts, ends = np.array(edges, dtype=np.int64).reshape(-1, 2).T
        self._edges, self._edge_of = np.unique(starts * count + ends, return_inverse=True)
        self._ends = (self._edges // count, self._edges % count)
        self.edge_count, self.count, self.source, self.sink = len(edges), count, source, sink

    def cut(self, capacities: np.ndarray, *, bound: float | None = None) -> np.ndarray | None:
        """Which nodes are on the source's side of the minimum cut (bool, one per node), or None if every cut is infinite.

        `capacities` are f64, one per edge, from 0 up, inf allowed. `bound` is the weight of any one cut, if one is known;
        the result is exact up to a relative rounding of `count / 2**29`. Of several minimum cuts it is the one nearest to
        the source: the smallest source side.
        """
        from scipy.sparse.csgraph import maximum_flow

        merged = np.bincount(self._edge_of, weights=capacities, minlength=len(self._edges))
        limit = bound if bound is not None else float(merged[merged < math.inf].sum())
        integers = _integers(merged, limit)
        # Asked first, because flow along two infinite paths would overflow.
        if self._reachable(self._matrix(np.where(integers == _INFINITE, 1, 0)))[self.sink]:
            return None
        capacity = self._matrix(integers)
        return self._reachable(capacity - maximum_flow(capacity, self.source, self.sink, method="dinic").flow)

    def _matrix(self, capacities: np.ndarray) -> csr_matrix:
        from scipy.sparse import csr_matrix

        return csr_matrix((capacities.astype(np.int32), self._ends), shape=(self.count, self.count))

    def _reachable(self, residual: csr_matrix) -> np.ndarray:
        """The nodes that the source reaches along edges of positive capacity."""
        from scipy.sparse.csgraph import breadth_first_order

        residual.data[residual.data < 0] = 0
        residual.eliminate_zeros()
        found = np.zeros(self.count, dtype=bool)
        found[breadth_first_order(residual, self.source, directed=True, return_predecessors=False)] = True
        return found


def min_cut(edges: Sequence[Edge], count: int, source: int, sink: int) -> frozenset[int] | None:
    """The source side of the cut of `edges`, each `(from, to, capacity)`. Raises `ValueError` for what is no capacity."""
    for start, end, capacity in edges:
        if not capacity >= 0:
            raise ValueError(f"capacity {capacity} of the edge {start} -> {end} is not a number from 0 up")
    network = Network([(start, end) for start, end, _ in edges], count, source, sink)
    capacities = np.array([e[2] for e in edges], dtype=np.float64)
    side = network.cut(capacities)
    return None if side is None else frozenset(np.flatnonzero(side).tolist())


def _integers(capacities: np.ndarray, limit: float) -> np.ndarray:
    """Scaled to whole numbers, by a power of 2, so that what weighs the same in sum still does. Rounding a small capacity down
    to 0 would make a value free."""
    scale = 2.0 ** math.floor(math.log2(_FINITE / limit)) if limit > 0 else 1.0
    finite = np.where(capacities > limit, 0.0, capacities)
    whole = np.where(finite > 0, np.maximum(1, np.rint(finite * scale)), 0)
    return np.where(capacities > limit, _INFINITE, whole).astype(np.int64)
