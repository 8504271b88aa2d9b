"""The half of its step, forward or backward, that an op belongs to.

Of a program with several steps, all that comes after the first gradient is in the second half of the trace. A later forward
is told apart by where its ops come from: no autograd node ran them, and a later one is their twin, or a module ran them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from tracefuse.execution.one_step import computed_from_gradients
from tracefuse.optimizers.facts import once_per_trace
from tracefuse.optimizers.trace import Phase, Trace, origin, phase, recomputes


@once_per_trace
def halves(trace: Trace) -> Mapping[fx.Node, Phase]:
    """The half of each op: its phase, but "forward" for later forwards."""
    found = {node: phase(node) for node in trace.ops}
    if not computed_from_gradients(trace.halves()[1]):
        return found
    first = {_place(node) for node, half in found.items() if half == "forward"}
    differentiated: set[int | None] = set()
    for node in reversed(found):
        where = origin(node)
        if where.autograd:
            differentiated.add(where.seq)
        elif _place(node) in first or recomputes(node) is not None:
            continue
        elif where.module_type or where.seq in differentiated:
            found[node] = "forward"
    return found


def _place(node: fx.Node) -> tuple[Any, ...]:
    """Equal for an op and for the copy of it that a backward computes again."""
    where = origin(node)
    return where.seq, where.module, where.source
