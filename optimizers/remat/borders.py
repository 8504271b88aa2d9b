"""Borders between the regions of a trace, and what crosses them: the facts that `between` chooses by."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import fx

from tracefuse.optimizers.fuse.compared import compared_values
from tracefuse.optimizers.fuse.regions import form_regions
from tracefuse.optimizers.fuse.remaking import is_copyable
from tracefuse.optimizers.kernels.fusible import is_constant, refusal
from tracefuse.optimizers.ops import behind_views, is_view, read_by, readers
from tracefuse.optimizers.trace import phase

_LOOPS = "its op is not pointwise, and would need loops of its own there"
_COMPARED = "it is compared with what was computed from it, which it would equal no more where it is rounded otherwise"


class Borders:
    """The regions of a graph and the values that cross from one to another of the same phase.

    `region_of`: the number of an op's region, in the order of the trace; `memory`: whose memory a value lies in; `reading`:
    for each region that reads others, the values that it reads of them; `crossing`: their memory, each with the regions that
    read it; `chosen`: of that what nothing else reads; `outside`: the memory that each region reads; `copyable`: what a reader
    can compute itself, but for what is `compared` (`compared_values`); `idle`: the regions that compute only what others may;
    `stored`: the values that are in memory whatever is chosen here, with the reason; `runs_at`: the place in the trace of a
    region's last op.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.position = {node: at for at, node in enumerate(graph.nodes)}
        self.region_of = self._numbered(form_regions(graph, {n for n in graph.nodes if refusal(n) is None}))
        self.memory = {node: behind_views(node) for node in graph.nodes}
        self.compared = compared_values(graph)
        self.copyable = {n for n in self.region_of if is_copyable(n) and n not in self.compared}
        self.reading: dict[int, dict[fx.Node, None]] = {}
        self.crossing: dict[fx.Node, dict[int, None]] = {}
        self.outside: dict[int, set[fx.Node]] = {}
        for node, region in self.region_of.items():
            self._note_operands(node, region)
        self.stored = {n: reason for n in graph.nodes if (reason := self._stored(n))}
        self.chosen = [n for n in self.crossing if self.stored.get(n, _LOOPS) in (_LOOPS, _COMPARED)]
        kept = {region for node, region in self.region_of.items() if node in self.stored or node not in self.copyable}
        self.idle = set(self.region_of.values()) - kept
        self.runs_at = {region: self.position[node] for node, region in self.region_of.items()}
        self._lives_to: dict[fx.Node, float] = {}

    def is_stored(self, value: fx.Node) -> bool:
        return self.memory[value] in self.stored

    def lives_to(self, value: fx.Node) -> float:
        """The place up to which a value is in memory, if it is stored."""
        if value not in self._lives_to:
            self._lives_to[value] = self._last_read(value)
        return self._lives_to[value]

    def keep(self, value: fx.Node, to: float) -> None:
        """Let a value be in memory up to a place, if it is not longer."""
        self._lives_to[value] = max(self.lives_to(value), to)

    def _numbered(self, regions: Iterable[set[fx.Node]]) -> dict[fx.Node, int]:
        """Each op's region, in the order of the trace; what every reader makes itself is in none."""
        number = {node: at for at, region in enumerate(regions) for node in region if not is_constant(node)}
        in_order = {at: new for new, at in enumerate(dict.fromkeys(number[n] for n in self.position if n in number))}
        return {n: in_order[number[n]] for n in self.position if n in number}

    def _note_operands(self, node: fx.Node, region: int) -> None:
        for operand in read_by(node):
            other = self.region_of.get(operand)
            if other == region or is_constant(operand):
                continue
            self.outside.setdefault(region, set()).add(self.memory[operand])
            if other is not None and phase(operand) == phase(node):
                self.reading.setdefault(region, {})[operand] = None
                self.crossing.setdefault(self.memory[operand], {})[region] = None

    def _stored(self, node: fx.Node) -> str | None:
        """Why a value is in memory anyway; None if only regions of its own phase compute and read it."""
        if node.op == "placeholder":
            return "it is an input"
        if node not in self.region_of:
            return "no kernel holds the op that computes it"
        for reader in () if is_view(node) else readers(node):
            if reader.op == "output":
                return "it is returned"
            if phase(reader) != phase(node):
                return f"{reader.name} reads it in the backward"
            if reader not in self.region_of:
                return f"{reader.name} reads it from memory"
        if node in self.crossing and node not in self.copyable:
            return _COMPARED if node in self.compared else _LOOPS
        return None

    def _last_read(self, value: fx.Node) -> float:
        if value.op == "placeholder":
            return math.inf
        return max((math.inf if r.op == "output" else self.position[r] for r in readers(value)), default=0)
