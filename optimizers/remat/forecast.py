"""What it would come to if the backward of a trace computed some values again: the static peak, and the seconds.

`Forecast` tells the peak without editing the trace. It is `liveness.peak_bytes` of what `schedule.recompute` and dead code
elimination make of it, by the same rules: each copy runs right before its first reader, a view lies in its operand's memory,
and memory dies with the last reader of any of its aliases. Many choices of what to recompute can so be compared in the time of
one rewrite. `Outcomes` has the peaks of programs that were really made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.costs.cost import Peaks, bytes_written, roofline_seconds, touched_nbytes
from tracefuse.optimizers.facts import storage_id
from tracefuse.optimizers.liveness import lifetimes, live_bytes, peak_bytes
from tracefuse.optimizers.ops import behind_views, does_work, is_getitem, is_random, is_view
from tracefuse.optimizers.remat.choice import Choice
from tracefuse.optimizers.remat.forward import Forward
from tracefuse.optimizers.remat.schedule import needed_by
from tracefuse.optimizers.trace import Trace, human_bytes, phase, tensors, val
from tracefuse.optimizers.trace import nbytes as nbytes_of

Home = tuple[int, ...]
"""The storages of a value, by number: one, or one per item of a tuple."""


class Forecast:
    """Peaks of one joint trace, which recomputes nothing yet.

    Ops are numbers, since they are looked at for every peak: `i` is an op where it stands, `i + count` its copy in the
    backward.
    """

    def __init__(self, trace: Trace) -> None:
        nodes = [*trace.placeholders, *trace.ops]
        self._count = len(nodes)
        self._index = {n: i for i, n in enumerate(nodes)}
        self._reads = [[self._index[a] for a in n.all_input_nodes] for n in nodes]
        self._inputs = range(len(trace.placeholders))
        ops = [(i, phase(nodes[i])) for i in range(len(self._inputs), self._count)]
        self._forward = [i for i, half in ops if half == "forward"]
        self._backward = [i for i, half in ops if half == "backward"]
        # From this number on ops are in the backward: originals, then copies.
        self._backward_from = self._backward[0] if self._backward else self._count
        self._draws = {i for i, n in enumerate(nodes) if n.op == "call_function" and is_random(n) and not is_getitem(n)}
        self._item = {i: _part(n) for i, n in enumerate(nodes) if is_getitem(n)}
        self._free = {i: len(_values(val(n))) for i, n in enumerate(nodes) if not does_work(n)}
        self._storages = {i: _storages(n) for i, n in enumerate(nodes) if i not in self._free}

        pairs = [(out, self._index[node]) for out, node in trace.output_pairs]
        self._results = [i for out, i in pairs if out.kind != "gradient"]
        self._gradients = [i for out, i in pairs if out.kind == "gradient"]
        self._peaks: dict[frozenset[fx.Node], int] = {}

    def peak(self, again: frozenset[fx.Node]) -> int:
        """Bytes at the peak if the forward values `again` are recomputed in the backward."""
        if again not in self._peaks:
            self._peaks[again] = self._peak({self._index[n] for n in again})
        return self._peaks[again]

    def _peak(self, again: set[int]) -> int:
        late = list(self._late(again))
        memory = _Memory()
        homes: dict[int, Home] = {}
        for i in self._inputs:
            homes[i] = memory.allocate(self._storages[i], 0, shared=True)
        for time, run in enumerate([*self._needed(late, again), *late]):
            reads = self._reads[run % self._count]
            if run >= self._backward_from:
                reads = [a + self._count if a in again else a for a in reads]
            for source in reads:
                memory.read(homes[source], time)
            homes[run] = self._home(run % self._count, [homes[a] for a in reads[:1]], memory, time)
            memory.read(homes[run], time)
        copies = [i + self._count if i in again else i for i in self._gradients]
        for run in (*self._inputs, *self._results, *copies):
            memory.read(homes[run], memory.last)
        return memory.peak()

    def _home(self, op: int, source: list[Home], memory: _Memory, time: int) -> Home:
        if op in self._item:
            return source[0][self._item[op]]
        if op in self._free:
            return source[0][:1] * self._free[op]
        return memory.allocate(self._storages[op], time)

    def _late(self, again: set[int]) -> Iterator[int]:
        """What runs in the backward, in order; copies right before their first reader."""
        placed: set[int] = set()
        for op in self._backward:
            if not again.isdisjoint(self._reads[op]):
                yield from (i + self._count for i in needed_by(op, self._reads.__getitem__, again, placed))
            yield op
        for op in self._gradients:
            if op in again and op not in placed:
                yield from (i + self._count for i in needed_by(op, self._reads.__getitem__, again, placed))
                placed.add(op)
                yield op + self._count

    def _needed(self, late: list[int], again: Collection[int]) -> list[int]:
        """The forward's ops that dead code elimination leaves, in order."""
        needed = {a for run in late for a in self._reads[run % self._count] if a not in again}
        needed |= {*self._results, *(i for i in self._gradients if i not in again)}
        found, draws_later = [], False
        for op in reversed(self._forward):
            draws = op in self._draws
            if op in needed or (draws and draws_later):
                needed.update(self._reads[op])
                found.append(op)
                draws_later = draws_later or draws
        return found[::-1]


class Outcomes:
    """The programs that choices come to, each made once, and their peaks."""

    def __init__(self, outcome: Callable[[Choice], Trace]) -> None:
        self._outcome = outcome
        self._made: dict[frozenset[fx.Node], tuple[int, Choice, Trace]] = {}

    def knows(self, choice: Choice) -> bool:
        return choice.again in self._made

    def peak(self, choice: Choice) -> int:
        """The static peak of what `choice` comes to."""
        if choice.again not in self._made:
            trace = self._outcome(choice)
            self._made[choice.again] = peak_bytes(trace), choice, trace
        return self._made[choice.again][0]

    @property
    def least(self) -> Choice:
        """The one of the lowest peak; of equal ones that which saves most."""
        return min(self._made.values(), key=lambda one: (one[0], -one[1].nbytes))[1]

    def why_missed(self, limit: int) -> str:
        """What the least peak is, where, and what is alive there."""
        peak, _, trace = self._made[self.least.again]
        live, known = live_bytes(trace), lifetimes(trace)
        at = live.index(peak)
        alive = [life for life in known if life.start <= at <= life.end]
        inputs = sum(life.nbytes for life in alive if life.is_input)
        others = sorted((life for life in alive if not life.is_input), key=lambda life: -life.nbytes)
        largest = "; ".join(f"{life.name} ({human_bytes(life.nbytes)}, {life.kind})" for life in others[:3])
        return (
            f"the peak budget of {human_bytes(limit)} cannot be met: the least static peak that was found is "
            f"{human_bytes(peak)}, at {trace.ops[at].name}, where {human_bytes(inputs)} of inputs and parameters are alive, "
            f"which nothing lowers, beside {largest or 'nothing else'}; pass peak_budget={peak} or more"
        )


class _Memory:
    """Storages by number, in the order of allocation: their bytes, and when they live. Time only goes on."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._known: dict[int, int] = {}
        self.last = 0

    def allocate(self, storages: list[tuple[int, int]], time: int, *, shared: bool = False) -> Home:
        """New storages, one for each different id of (id, bytes); those of inputs may be `shared`."""
        known = self._known if shared else {}
        for key, nbytes in storages:
            if key not in known:
                known[key] = len(self._sizes)
                self._sizes.append(nbytes)
                self._starts.append(time)
                self._ends.append(time)
        return tuple(known[key] for key, _ in storages)

    def read(self, home: Home, time: int) -> None:
        for number in home:
            self._ends[number] = time
        self.last = time

    def peak(self) -> int:
        change = [0] * (self.last + 2)
        for nbytes, start, end in zip(self._sizes, self._starts, self._ends, strict=True):
            change[start] += nbytes
            change[end + 1] -= nbytes
        return max(accumulate(change))


def _values(value: Any) -> list[Any]:
    """The single values of what an op yields, in order: a fused optimizer yields lists of tensors."""
    return [one for part in value for one in _values(part)] if isinstance(value, (tuple, list)) else [value]


def _part(item: fx.Node) -> slice:
    """Where the value that a getitem takes stands among the `_values` of its source."""
    source, index = item.args
    start = len(_values(val(source)[:index]))  # type: ignore[arg-type,index]
    return slice(start, start + len(_values(val(item))))


def _storages(node: fx.Node) -> list[tuple[int, int]]:
    """(id, bytes) of the storage of each value that an op yields; no bytes for what is no tensor."""
    values = _values(val(node))
    return [(storage_id(v), v.untyped_storage().nbytes()) if isinstance(v, torch.Tensor) else (0, 0) for v in values]


# --- what it takes to compute a value again -----------------------------------------------------------------------------


def fused_seconds(forward: Forward, node: fx.Node, peaks: Peaks) -> float:
    """Modelled seconds that the backward takes longer if it computes `node` again, in the program with kernels.

    An op that no kernel holds runs alone, and what it reads of others must be written for it. One that a kernel holds is
    charged the memory that it moves beyond loading the value itself, or, where the value is read from memory again, all
    that it reads and writes; and an operation per element, so that nothing is free.
    """
    if node.op == "placeholder" or is_view(node):
        return 0.0
    written = nbytes_of(node) if node in forward.read_from_memory else 0
    if is_getitem(node):
        return written / peaks.bytes_per_s if node in forward.fused else 0.0
    if node not in forward.fused:
        return roofline_seconds(node, peaks) + _written_for(forward, node) / peaks.bytes_per_s
    loaded = sum(touched_nbytes(a) for a in node.all_input_nodes if behind_views(a) not in forward.fused)
    moved = written + loaded if written else max(0, loaded - bytes_written(node))
    return moved / peaks.bytes_per_s + sum(t.numel() for t in tensors(node)) / peaks.flops_per_s


def _written_for(forward: Forward, node: fx.Node) -> int:
    """Bytes of the operands of a lone op that kernels compute, and would keep to themselves but for it."""
    operands = {behind_views(a) for a in node.all_input_nodes} & forward.fused
    return sum(nbytes_of(a) for a in operands - forward.read_from_memory.keys())


def recompute_seconds(forward: Forward, choice: Choice, peaks: Peaks) -> float:
    """Modelled seconds that the backward takes longer for what it computes again; see `fused_seconds`."""
    return math.fsum(fused_seconds(forward, n, peaks) for n in choice.again)
