"""Pieces: ops that are carved out of a region together, as one kernel or left to ATen.

Units are what a trace schedules once its regions are carved: pieces, and the ops that stay outside of all of them. Views are
no units: who reads a view reads the memory behind it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from tracefuse.optimizers.costs.cost import bytes_moved
from tracefuse.optimizers.fuse.rebuild import Carved, UnitOrder, keeping_order, last_of
from tracefuse.optimizers.fuse.regions import Sizes, loops_of
from tracefuse.optimizers.fuse.remaking import reads_of
from tracefuse.optimizers.fuse.repeats import repeated_nbytes
from tracefuse.optimizers.kernels.fusible import is_free, is_remade, slow_in_aten
from tracefuse.optimizers.ops import behind_views, is_getitem, is_random, is_view, read_by
from tracefuse.optimizers.passes import Decision
from tracefuse.optimizers.trace import human_bytes, phase, tensors

LEAST_SHARE = 16
"""Pieces are changed if that saves at least 1 / LEAST_SHARE of what they move: less is lost in noise."""


@dataclass(frozen=True, eq=False)
class Piece:
    """`nodes` in the order of the trace, of which `outputs` are read elsewhere.

    `carved` is their kernel; without it each op is ATen's, for the `reason`. What follows from the forms of its ops (`alike`)
    is known of the piece that it is `like`.
    """

    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    carved: Carved | None
    reason: str = ""
    like: Piece | None = None

    @cached_property
    def work(self) -> list[fx.Node]:
        """The ops that compute something."""
        return [self.nodes[at] for at in self._working]

    @cached_property
    def _working(self) -> list[int]:
        return self.like._working if self.like else [at for at, n in enumerate(self.nodes) if not is_free(n)]

    @cached_property
    def alone(self) -> int:
        """Bytes that ATen's ops move, each on its own."""
        return self.like.alone if self.like else sum(map(bytes_moved, self.work))

    @cached_property
    def inputs(self) -> list[fx.Node]:
        """The values that the piece takes from outside, each once."""
        if self.carved:
            return list(self.carved.inputs)
        inside, reading = set(self.nodes), (n for n in self.nodes if not is_remade(n))
        return list(dict.fromkeys(a for n in reading for a in read_by(n) if a not in inside))

    @cached_property
    def traits(self) -> Traits:
        device, *domain = self._domain
        return Traits((phase(self.work[0]), device), *domain, reads_of(self.inputs), self.nbytes)

    @cached_property
    def _domain(self) -> tuple[torch.device | None, int, set[Sizes], set[Sizes]]:
        if self.like:
            return self.like._domain
        loops = [loops_of(node) for node in (*self.work, *filter(is_getitem, self.nodes))]
        rows, columns = {rows for rows, _ in loops if rows}, {columns for _, columns in loops if columns}
        values = [tensor for node in self.work for tensor in tensors(node)]
        numel = max([t.numel() for t in values] + [math.prod(sizes) for sizes in rows | columns])
        return next((t.device for t in values), None), numel, rows, columns

    @property
    def nbytes(self) -> int:
        """Bytes that the piece moves."""
        return self.carved.kernel.nbytes if self.carved else self.alone

    @cached_property
    def effort(self) -> int:
        """Those bytes, and the ones that could be moved in the time in which its kernel computes values again."""
        return self.nbytes + (repeated_nbytes(self.carved.kernel.body) if self.carved else 0)

    @property
    def name(self) -> str:
        """What the user is told that it is."""
        return self.carved.kernel.name if self.carved else self.work[-1].name

    @property
    def decision(self) -> Decision:
        if self.carved is None:
            return Decision(self.work[-1].name, "leave", self.reason)
        kernel, saved = self.carved.kernel, max(0, self.alone - self.carved.kernel.nbytes)
        holds = f"{len(self.work)} op{'s' * (len(self.work) != 1)} in {kernel.name}"
        moved = f"it reads {human_bytes(kernel.nbytes_read)} and writes {human_bytes(kernel.nbytes_written)}"
        return Decision(self.outputs[-1].name, "fuse", f"{holds}: {moved}, {self._instead}", saved)

    @property
    def _instead(self) -> str:
        """What would be without the kernel, said so that it is seen why there is one."""
        if len(self.work) == 1:
            return slow_in_aten(self.work[0]) or f"ATen's kernel moves {human_bytes(self.alone)}"
        return f"one by one they move {human_bytes(self.alone)}"


Unit = Piece | fx.Node


def with_views(nodes: Iterable[fx.Node], fusible: set[fx.Node]) -> set[fx.Node]:
    """`nodes` and the fusible views through which they read, so that what they read of one memory is one input."""
    found = set(nodes)
    waiting = list(found)
    while waiting:
        views = [a for a in read_by(waiting.pop()) if a not in found and a in fusible and is_view(a)]
        found.update(views)
        waiting += views
    return found


def unit_order(graph: fx.Graph, pieces: Sequence[Piece], owner: Mapping[fx.Node, Piece]) -> UnitOrder[Unit]:
    """The units of a graph in an order close to the graph's own, random ops and collectives among themselves in it. `owner` is
    the piece that a node is in."""
    position = {node: at for at, node in enumerate(graph.nodes)}

    def operands(values: Iterable[fx.Node]) -> set[Unit]:
        return {owner.get(m, m) for m in map(behind_views, values) if m.op == "call_function"}

    needs: dict[Unit, set[Unit]] = {piece: operands(piece.inputs) - {piece} for piece in pieces}
    for node in position:
        if node not in owner and node.op == "call_function" and not is_view(node):
            needs[node] = operands(read_by(node))
    drawn, collectives = keeping_order(graph)
    with_parts = [one for one in needs if isinstance(one, fx.Node) and is_random(one)] if drawn else []
    for ordered in (with_parts, [one for one in collectives if one in needs]):
        for earlier, later in itertools.pairwise(ordered):
            needs[later].add(earlier)
    places = {unit: last_of(unit.outputs if isinstance(unit, Piece) else (unit,), position) for unit in needs}
    return UnitOrder(needs, places.__getitem__)


@dataclass(frozen=True)
class Traits:
    """What decides whether two pieces can be one kernel: where they run, the elements that their programs share out, the
    sizes of the rows and columns that they reduce, and the bytes that they read of each memory, and move in all."""

    place: tuple[str, torch.device | None]
    numel: int
    rows: set[Sizes]
    columns: set[Sizes]
    reads: dict[fx.Node, int]
    nbytes: int
