"""The static peak that a trace would have if its backward computed some values again, without editing the trace.

It is `liveness.peak_bytes` of what `schedule.recompute` and dead code elimination make of a trace, by the same rules: each
copy runs right before its first reader, a view lies in its operand's memory, and memory dies with the last reader of any
of its aliases. Many choices of what to recompute can so be compared in the time of one rewrite.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.facts import storage_id
from tracefuse.optimizers.ops import does_work, is_getitem, is_random
from tracefuse.optimizers.remat.schedule import needed_by
from tracefuse.optimizers.trace import Trace, phase, val

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

        pairs = [(out, self._index[node]) for out, node in zip(trace.outputs, trace.returned, strict=True)]
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
