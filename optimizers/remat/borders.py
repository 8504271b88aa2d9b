"""Borders between the regions of a trace, and what crosses them: the facts that `between` chooses by."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property

from torch import fx

from tracefuse.optimizers.fuse.compared import compared_values
from tracefuse.optimizers.fuse.regions import regions_of
from tracefuse.optimizers.fuse.remaking import is_copyable
from tracefuse.optimizers.kernels.fusible import is_constant
from tracefuse.optimizers.ops import behind_views, grouped, is_view, read_by, readers
from tracefuse.optimizers.trace import Trace, phase

_LOOPS = "its op is not pointwise, and would need loops of its own there"
_COMPARED = "it is compared with what was computed from it, which it would equal no more where it is rounded otherwise"


class Borders:
    """The regions of a trace and the values that cross from one to another of the same phase.

    `position`: of a node in the trace; `region_of`: the number of an op's region, in the order of the trace; `reading`: for
    each region that reads others, the values that it reads of them; `crossing`: their memory, each with the regions that read
    it; `outside`: the memory that each region reads; `runs_at`: the place in the trace of a region's last op; `compared`: what
    no reader computes again (`compared_values`).
    """

    def __init__(self, trace: Trace) -> None:
        self.position = {node: at for at, node in enumerate(trace.graph.nodes)}
        self.region_of = self._numbered(regions_of(trace))
        self.compared = compared_values(trace.graph)
        self.reading: dict[int, dict[fx.Node, None]] = {}
        self.crossing: dict[fx.Node, dict[int, None]] = {}
        self.outside: dict[int, set[fx.Node]] = {}
        for node, region in self.region_of.items():
            for operand in read_by(node):
                if self.region_of.get(operand) != region and not is_constant(operand):
                    self._note(node, region, operand)
        self.runs_at = {region: self.position[node] for node, region in self.region_of.items()}
        self._anyway: dict[fx.Node, str | None] = {}
        self._chosen: dict[fx.Node, str] = {}
        self._lives_to: dict[fx.Node, float] = {}
        self._idle: dict[int, bool] = {}

    @cached_property
    def members(self) -> dict[int, list[fx.Node]]:
        """The ops of each region."""
        return grouped(self.region_of, self.region_of.__getitem__)

    # What follows is asked of few values of a large trace, those at borders and near them, and worked out when it is.

    def is_copyable(self, node: fx.Node) -> bool:
        """Whether a reader can compute the value itself."""
        return node in self.region_of and is_copyable(node) and node not in self.compared

    def is_idle(self, region: int) -> bool:
        """Whether a region computes only what others may."""
        if region not in self._idle:
            members = self.members[region]
            self._idle[region] = all(self.is_copyable(node) and self._why_anyway(node) is None for node in members)
        return self._idle[region]

    def only_crosses(self, value: fx.Node) -> bool:
        """Whether nothing but regions of its own phase reads a value."""
        return self._why_anyway(value) in (None, _LOOPS, _COMPARED)

    def is_stored(self, value: fx.Node) -> bool:
        return self.why_stored(behind_views(value)) is not None

    def why_stored(self, memory: fx.Node) -> str | None:
        """Why what is no view is in memory; None if it is not."""
        return self._chosen.get(memory) or self._why_anyway(memory)

    def store(self, memory: fx.Node, reason: str) -> None:
        """Let a value be in memory from now on, if it is not anyway."""
        if self.why_stored(memory) is None:
            self._chosen[memory] = reason

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
        region_of = {node: at for at, region in enumerate(regions) for node in region}
        number: dict[int, int] = {}
        ops = [node for node in self.position if node in region_of and not is_constant(node)]
        return {node: number.setdefault(region_of[node], len(number)) for node in ops}

    def _note(self, node: fx.Node, region: int, operand: fx.Node) -> None:
        memory = behind_views(operand)
        self.outside.setdefault(region, set()).add(memory)
        if operand in self.region_of and phase(operand) == phase(node):
            self.reading.setdefault(region, {})[operand] = None
            self.crossing.setdefault(memory, {})[region] = None

    def _why_anyway(self, node: fx.Node) -> str | None:
        """Why a value is in memory whatever is chosen here; None if only regions of its own phase compute and read it."""
        if node not in self._anyway:
            self._anyway[node] = self._found_anyway(node)
        return self._anyway[node]

    def _found_anyway(self, node: fx.Node) -> str | None:
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
        if node in self.crossing and not self.is_copyable(node):
            return _COMPARED if node in self.compared else _LOOPS
        return None

    def _last_read(self, value: fx.Node) -> float:
        if value.op == "placeholder":
            return math.inf
        return max((math.inf if r.op == "output" else self.position[r] for r in readers(value)), default=0)
