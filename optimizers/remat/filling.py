"""Filling a budget: what is left of it is spent on the values that are worth the most seconds for their bytes.

The cuts at the corners of the curve leave a gap where nothing lies between two of them: in a chain each value is cheap to
compute from the one before, so that all are recomputed or none. To keep one of them spares the ops that only it needs:
those that it dominates, on the way from what is kept to what the backward reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from tracefuse.optimizers.facts import stored_bytes
from tracefuse.optimizers.remat.choice import Choice, CutNetwork
from tracefuse.optimizers.remat.forward import Forward

Above = dict[fx.Node, fx.Node | None]


def fill(forward: Forward, network: CutNetwork, choice: Choice, seconds: Mapping[fx.Node, float], limit: int) -> Choice:
    """`choice` with more kept, up to `limit` bytes, the greatest number of seconds per byte first."""
    above = dominators(forward, choice.again)
    spared = _spared(forward, above, seconds)
    tied = {n for n, ops in forward.tied.items() if not choice.again.isdisjoint(ops)}
    worth = {n: s / choice.weights[n] for n, s in spared.items() if 0 < choice.weights[n] < float("inf") and s > 0}
    worth = {n: s for n, s in worth.items() if n not in tied}
    left, added = limit - choice.nbytes, set()
    for node in sorted(worth, key=lambda n: (-worth[n], forward.index[n])):
        if stored_bytes(node) <= left and not _is_below(node, added, above):
            left -= stored_bytes(node)
            added.add(node)
    if not added:
        return choice
    kept, again = network.demanded(choice.kept | added)
    return replace(choice, kept=kept, again=again, nbytes=network.kept_bytes(kept))


def dominators(forward: Forward, again: frozenset[fx.Node]) -> Above:
    """For each recomputed value the nearest one that is computed from it wherever it is needed; None if there is none.

    By the least common ancestor of its readers, in one sweep: the graph has no cycles.
    """
    above: Above = {}
    depth: dict[Any, int] = {None: 0}
    for node in reversed(forward.nodes):
        if node not in again:
            continue
        readers = [u for u in forward.readers(node) if u in again]
        nearest = None if node in forward.read or not readers else readers[0]
        for other in readers[1:]:
            nearest = _common(nearest, other, above, depth)
        above[node] = nearest
        depth[node] = depth[nearest] + 1
    return above


def _common(one: fx.Node | None, other: fx.Node | None, above: Above, depth: dict[Any, int]) -> fx.Node | None:
    while one is not other:
        if depth[one] >= depth[other]:
            one = above[one]  # type: ignore[index]
        else:
            other = above[other]  # type: ignore[index]
    return one


def _spared(forward: Forward, above: Above, seconds: Mapping[fx.Node, float]) -> dict[fx.Node, float]:
    """The seconds of each value's op and of all that it dominates."""
    spared = {node: seconds[node] for node in above}
    for node in (n for n in forward.nodes if n in above):
        if (nearest := above[node]) is not None:
            spared[nearest] += spared[node]
    return spared


def _is_below(node: fx.Node, added: set[fx.Node], above: Above) -> bool:
    """Whether `node` is needed for nothing but what was added."""
    current: fx.Node | None = node
    while current is not None and current not in added:
        current = above[current]
    return current is not None
