"""What was computed and never used: ops whose results reached no output, no variable and no line of Python.

The trace has none of it, being the program that the outputs need. What the program still holds when it ends counts as
wanted, whether it was read or not.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from tracefuse.assembly.functional import Built
from tracefuse.optimizers.costs.cost import H100_SXM_DATASHEET, packet_name, roofline_seconds
from tracefuse.optimizers.ops import does_work
from tracefuse.optimizers.trace import Origin, nbytes, origin
from tracefuse.recording.calls import Recording, Value

# Bookkeeping, mostly autograd's, costs no kernel that a user could spare.
_BOOKKEEPING = {"detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


@dataclass(frozen=True)
class Dropped:
    """One op: its name, where it comes from, the bytes that it wrote, and its time by a roofline. Autograd's have its node in
    `origin.autograd`."""

    op: str
    origin: Origin
    nbytes: int
    modelled_us: float


def dropped(built: Built, recording: Recording, wanted: Collection[Value]) -> tuple[Dropped, ...]:
    """The ops that none of `wanted`, no overwritten input and no number that Python read depends on."""
    read = {value for call in recording.calls if not call.out_values() for value in call.reads()}
    pending = [*built.mutated.values(), *(built.nodes[v] for v in {*wanted, *read} if v in built.nodes)]
    live = set(pending)
    while pending:
        new = [a for a in pending.pop().all_input_nodes if a not in live]
        live.update(new)
        pending += new
    dead = (n for n in built.graph.nodes if n.op == "call_function" and n not in live)
    return tuple(_dropped(n) for n in dead if does_work(n) and packet_name(n) not in _BOOKKEEPING)


def _dropped(node: fx.Node) -> Dropped:
    us = 1e6 * roofline_seconds(node, H100_SXM_DATASHEET)
    assert isinstance(node.target, torch._ops.OpOverload)
    return Dropped(str(node.target), origin(node), nbytes(node), us)
