"""The static peak that a trace would have if its backward computed some values again, without editing the trace.

It is `liveness.peak_bytes` of what `schedule.recompute` and dead code elimination make of a trace, by the same rules: each
copy runs right before its first reader, a view lies in its operand's memory, and memory dies with the last reader of any
of its aliases. Many choices of what to recompute can so be compared in the time of one rewrite.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.crossing import is_free
from tracefuse.optimizers.schedule import needed_before
from tracefuse.optimizers.trace import Trace, is_getitem, is_random, phase, val

Run = tuple[fx.Node, bool]
"""An op, and whether it is its copy in the backward that runs."""


class Forecast:
    """Peaks of one joint trace, which recomputes nothing yet."""

    def __init__(self, trace: Trace) -> None:
        self._inputs = trace.placeholders
        self._forward = [n for n in trace.ops if phase(n) == "forward"]
        self._backward = [n for n in trace.ops if phase(n) == "backward"]
        pairs = list(zip(trace.outputs, trace.returned, strict=True))
        self._results = [node for out, node in pairs if out.kind != "gradient"]
        self._gradients = [node for out, node in pairs if out.kind == "gradient"]
        self._peaks: dict[frozenset[fx.Node], int] = {}

    def peak(self, again: frozenset[fx.Node]) -> int:
        """Bytes at the peak if the forward values `again` are recomputed in the backward."""
        if again not in self._peaks:
            self._peaks[again] = self._peak(again)
        return self._peaks[again]

    def _peak(self, again: frozenset[fx.Node]) -> int:
        late = list(self._late(again))
        runs = [*((n, False) for n in self._needed(late, again)), *late]
        memory = _Memory(self._inputs, last=max(len(runs) - 1, 0))
        for time, (node, is_copy) in enumerate(runs):
            is_late = is_copy or phase(node) == "backward"
            memory.run((node, is_copy), [(a, is_late and a in again) for a in node.all_input_nodes], time)
        memory.pin((node, False) for node in self._results)
        memory.pin((node, node in again) for node in self._gradients)
        return memory.peak()

    def _late(self, again: Collection[fx.Node]) -> Iterator[Run]:
        """What runs in the backward, in order; copies right before their first reader."""
        placed: set[fx.Node] = set()
        for node in self._backward:
            yield from ((copy, True) for copy in needed_before(node, again, placed))
            yield node, False
        for node in self._gradients:
            if node in again and node not in placed:
                yield from ((copy, True) for copy in needed_before(node, again, placed))
                placed.add(node)
                yield node, True

    def _needed(self, late: list[Run], again: Collection[fx.Node]) -> list[fx.Node]:
        """The forward's ops that dead code elimination leaves, in order."""
        needed = {a for node, _ in late for a in node.all_input_nodes if a not in again}
        needed |= {*self._results, *(n for n in self._gradients if n not in again)}
        found, draws_later = [], False
        for node in reversed(self._forward):
            draws = is_random(node) and not is_getitem(node)
            if node in needed or (draws and draws_later):
                needed.update(node.all_input_nodes)
                found.append(node)
                draws_later = draws_later or draws
        return found[::-1]


class _Memory:
    """Who lies where, and when: storages are numbered in the order of allocation."""

    def __init__(self, inputs: Iterable[fx.Node], last: int) -> None:
        self._sizes: list[int] = []
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._last = last
        self._homes: dict[Run, tuple[int, ...]] = {}
        known: dict[int, int] = {}
        for node in inputs:
            memory = val(node).untyped_storage()
            number = known.get(memory._cdata)
            home = (number,) if number is not None else self._allocate(memory.nbytes(), 0)
            known[memory._cdata], self._homes[node, False] = home[0], home
            self._ends[home[0]] = last

    def run(self, run: Run, sources: list[Run], time: int) -> None:
        for source in sources:
            for number in self._homes[source]:
                self._ends[number] = max(self._ends[number], time)
        self._homes[run] = home = self._home(run[0], sources, time)
        for number in home:
            self._ends[number] = max(self._ends[number], time)

    def pin(self, runs: Iterable[Run]) -> None:
        """Let the values live to the end."""
        for run in runs:
            for number in self._homes[run]:
                self._ends[number] = self._last

    def peak(self) -> int:
        change = [0] * (self._last + 2)
        for nbytes, start, end in zip(self._sizes, self._starts, self._ends, strict=True):
            change[start] += nbytes
            change[end + 1] -= nbytes
        return max(accumulate(change))

    def _home(self, node: fx.Node, sources: list[Run], time: int) -> tuple[int, ...]:
        if is_getitem(node):
            return (self._homes[sources[0]][node.args[1]],)  # type: ignore[index]
        value = val(node)
        if is_free(node):
            return self._homes[sources[0]] * (len(value) if isinstance(value, (tuple, list)) else 1)
        found: dict[int, int] = {}
        return tuple(self._storage(v, found, time) for v in (value if isinstance(value, (tuple, list)) else (value,)))

    def _storage(self, value: Any, found: dict[int, int], time: int) -> int:
        memory = value.untyped_storage() if isinstance(value, torch.Tensor) else None
        key = memory._cdata if memory is not None else 0
        if key not in found:
            found[key] = self._allocate(memory.nbytes() if memory is not None else 0, time)[0]
        return found[key]

    def _allocate(self, nbytes: int, time: int) -> tuple[int]:
        self._sizes.append(nbytes)
        self._starts.append(time)
        self._ends.append(time)
        return (len(self._sizes) - 1,)
