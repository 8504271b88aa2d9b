"""Values that a kernel computes where it reads them, and what that costs: one model for all who decide so.

    constants, masks    every kernel makes them itself                           `kernels.fusible.is_remade`
    `regions`           an op sinks into the region that alone reads it                       within a phase
    `duplicating`       a value of one kernel is computed in the others too                   within a phase
    `between` (remat)   the same over chains of any length, as a minimum cut, before fusion   within a phase
    remat               a value of the forward is computed again in the backward              across phases

What it costs to compute a value is what the kernel must read for that; what it spares is reading the value. A kernel reads
of a memory what its views show, and no element twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import fx

from tracefuse.optimizers.costs.cost import touched_nbytes
from tracefuse.optimizers.kernels.fusible import is_constant, is_remade
from tracefuse.optimizers.lowering.expressions import POINTWISE, TRANSCENDENTAL
from tracefuse.optimizers.lowering.gathers import GATHERS
from tracefuse.optimizers.lowering.lowering import COPIES
from tracefuse.optimizers.ops import behind_views, is_view, once_per_operator
from tracefuse.optimizers.trace import nbytes


def is_for_reader(node: fx.Node) -> bool:
    """Whether the op is a copy for the kernel that reads it (`between`): it joins that one, never that of its operands."""
    return bool((node.meta.get("custom") or {}).get("for_reader"))


def is_copyable(node: fx.Node) -> bool:
    """Whether a kernel that reads the value can compute it: a pointwise op, a cast, a copy, a gather, or a view."""
    return is_view(node) or (isinstance(node.target, torch._ops.OpOverload) and _computes_places(node.target))


@once_per_operator
def _computes_places(target: torch._ops.OpOverload) -> bool:
    return any(target in known for known in (POINTWISE, COPIES, GATHERS))


def is_cheap(node: fx.Node) -> bool:
    """Whether the op costs next to nothing but what it reads: it is computed twice without a second thought."""
    return is_copyable(node) and node.target not in TRANSCENDENTAL and node.target not in GATHERS


def nbytes_read(value: fx.Node) -> int:
    """Bytes that a kernel reads of a value: what a view shows, at most all of its memory."""
    return min(touched_nbytes(value), nbytes(behind_views(value)))


def reads_of(values: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """The bytes that a kernel reads of each memory for `values`. What it makes itself it does not read."""
    found: dict[fx.Node, int] = {}
    for value in values:
        if not is_remade(value):
            root = behind_views(value)
            found[root] = min(nbytes(root), found.get(root, 0) + nbytes_read(value))
    return found


def sources(ops: Collection[fx.Node]) -> list[fx.Node]:
    """The values, each once, that `ops` are computed from."""
    return list(dict.fromkeys(a for op in ops if not is_constant(op) for a in op.all_input_nodes if a not in ops))
