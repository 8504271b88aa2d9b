"""Reading less in the backward: a saved value is computed from what its kernel reads anyway, instead of being read too.

    forward     y = conv(x, w)                        saved, as are `mean` and `rstd`
                z = relu((y - mean) * rstd * g + b)   saved: the next convolution reads it
    backward    dn = threshold_backward(dz, z, 0)     dn = threshold_backward(dz, z_again, 0)    z_again computed from y
                sum(dn), sum(dn * (y - mean))         sum(dn), sum(dn * (y - mean))
                reads dz, z, y                        reads dz, y

Such a value stays saved, since something that is no kernel, such as a matmul, reads it in the backward too. The ops are
cheap (`remaking.is_cheap`), and all that the kernel reads for them beyond what it read before is a small part of the value,
such as a number for each channel. Nothing is saved for it: new reads are of parameters and of what the backward reads
somewhere else already.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cache

from torch import fx

from tracefuse.optimizers.fuse.compared import compared_values
from tracefuse.optimizers.fuse.remaking import is_cheap, nbytes_read
from tracefuse.optimizers.kernels.fusible import is_constant, is_free
from tracefuse.optimizers.ops import behind_views, is_view, producer, reached, read_by, readers
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.remat.schedule import copy_again
from tracefuse.optimizers.trace import Trace, human_bytes, phase

MOST_OPS = 12
FARTHEST = 2 * MOST_OPS
"""Ops and views in a row."""
SMALL = 16
"""What is read instead is at most 1 / SMALL of the value."""


def compute_from_what_is_read(trace: Trace, region_of: Mapping[fx.Node, int], decide: Decide) -> list[fx.Node]:
    """Edit `trace` so that the regions of its backward compute saved values that cost no reads to speak of. Returns copies.

    `region_of` is the number of an op's region. Each such value is told to `decide`. The copies stand where their originals
    do (`schedule.just_in_time` brings them to their readers).
    """
    parameters = {p for entry, p in trace.input_pairs if entry.kind == "parameter" or entry.trainable}
    members: dict[int, list[fx.Node]] = {}
    for node, region in region_of.items():
        if phase(node) == "backward":
            members.setdefault(region, []).append(node)
    compared = cache(lambda: compared_values(trace.graph))  # of the trace as it is given: of most none is asked
    made: list[fx.Node] = []
    for region, ops in members.items():
        saved = {a: None for node in ops for a in read_by(node) if _may_be(a) and _is_kept(a, region_of)}
        reads = _reads(ops, region, region_of) if saved else ()
        copies: dict[fx.Node, fx.Node] = {}
        # In the order of the trace: what a later value is computed from is then a copy too, if it is one at all.
        for value in sorted(saved):
            again = _Chain(value, reads, parameters).found()
            if again is None or not compared().isdisjoint(map(producer, again)):
                continue
            _copy(again, value, ops, copies)
            spared = nbytes_read(value)
            said = (
                f"computed again from what its reader {ops[0].name} reads anyway: that spares it {human_bytes(spared)}"
            )
            decide(Decision(value.name, "duplicate", said, spared))
        made += copies.values()
    return made


def _reads(ops: Iterable[fx.Node], region: int, region_of: Mapping[fx.Node, int]) -> dict[fx.Node, None]:
    """The values that a region's ops read of others, as they read them."""
    read = (operand for node in ops for operand in read_by(node))
    return {operand: None for operand in read if region_of.get(operand) != region and not is_constant(operand)}


def _may_be(value: fx.Node) -> bool:
    is_forward_op = value.op == "call_function" and phase(value) == "forward"
    return is_forward_op and not is_view(value) and is_cheap(value) and not is_constant(value)


def _is_kept(value: fx.Node, region_of: Mapping[fx.Node, int]) -> bool:
    """Whether something in the backward that no kernel holds reads the value, so that it stays saved."""
    return any(one not in region_of and one.op != "output" and phase(one) == "backward" for one in readers(value))


class _Chain:
    """The ops that compute a saved `value` from what a region reads besides."""

    def __init__(self, value: fx.Node, reads: Iterable[fx.Node], parameters: set[fx.Node]) -> None:
        self._value, self._parameters = value, parameters
        self._there = {behind_views(one) for one in reads} - {value}
        self._computed: dict[fx.Node, float] = {}
        """The fewest bytes that are read where a node is computed."""
        for node in sorted(self._nearest()):
            self._computed[node] = math.fsum(map(self._least, node.all_input_nodes))

    def found(self) -> list[fx.Node] | None:
        """In the order of the trace; None if there is no such chain, or one that is too long or reads too much."""
        if self._computed[self._value] * SMALL > nbytes_read(self._value):
            return None
        again = reached([self._value], lambda n: filter(self._is_computed, n.all_input_nodes))
        work = sum(not is_free(node) for node in again)
        return sorted(again) if work <= MOST_OPS else None

    def _nearest(self) -> set[fx.Node]:
        """Forward ops, cheap ones, that lead to the value in at most `FARTHEST` steps."""
        near, edge = set[fx.Node](), [self._value]
        for _ in range(FARTHEST):
            edge = [n for n in edge if n.op == "call_function" and phase(n) == "forward" and is_cheap(n)]
            near.update(edge)
            edge = [n for n in dict.fromkeys(a for node in edge for a in node.all_input_nodes) if n not in near]
        return near

    def _least(self, node: fx.Node) -> float:
        """The fewest bytes that are read for `node`, or infinitely many."""
        return 0.0 if is_constant(node) else min(self._as_it_is(node), self._computed.get(node, math.inf))

    def _as_it_is(self, node: fx.Node) -> float:
        root = behind_views(node)
        if root in self._there:
            return 0.0
        is_kept = root in self._parameters or any(
            phase(one) == "backward" for one in readers(root) if one.op != "output"
        )
        return nbytes_read(node) if is_kept and root is not self._value else math.inf

    def _is_computed(self, node: fx.Node) -> bool:
        return not is_constant(node) and self._computed.get(node, math.inf) < self._as_it_is(node)


def _copy(again: Iterable[fx.Node], value: fx.Node, ops: Iterable[fx.Node], copies: dict[fx.Node, fx.Node]) -> None:
    """Let `ops` read a copy of `value`, and note in their `copies` what is copied that was not yet."""
    for node in again:
        if node not in copies:
            with node.graph.inserting_after(node):
                copies[node] = copy_again(node, copies, phase="backward", for_reader=True)
    for op in ops:
        op.replace_input_with(value, copies[value])
