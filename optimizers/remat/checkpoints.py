"""What the captured program computes a second time itself, in its backward, as `torch.utils.checkpoint` does.

A checkpointed block is captured as it ran: its ops once in the forward, and once more in the backward, from the block's
inputs and from the random numbers that the forward drew. A trace has no marks for that, but it need not: an op of the
backward that has the target and the operands of a forward op, or operands that are such doubles, computes the same value.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from tracefuse.optimizers.ops import is_mutable, is_random, is_view
from tracefuse.optimizers.rewrite import views_of
from tracefuse.optimizers.trace import Trace, phase


def doubles(trace: Trace) -> dict[fx.Node, fx.Node]:
    """The forward op of each backward op that computes the same value again; random ops are none."""
    found: dict[fx.Node, fx.Node] = {}
    forward: dict[Any, list[fx.Node]] = {}
    for node in trace.ops:
        if is_random(node) or is_mutable(node):
            continue
        if phase(node) == "forward":
            forward.setdefault((node.target, *node.all_input_nodes), []).append(node)
            continue
        sources = [found.get(a, a) for a in node.all_input_nodes]
        alike = forward.get((node.target, *sources), ())
        if same := next((other for other in alike if _reads_alike(node, other, found)), None):
            found[node] = same
    return found


def dropped(trace: Trace, read: set[fx.Node]) -> dict[fx.Node, fx.Node]:
    """The forward values that the program does not keep since its backward computes them again: each with its double.

    `read` are the forward values that the backward reads, and so keeps, with all that shares their memory.
    """
    pairs = {first: second for second, first in doubles(trace).items() if not is_view(second)}
    return {first: second for first, second in pairs.items() if views_of(first).isdisjoint(read)}


def _reads_alike(node: fx.Node, other: fx.Node, found: dict[fx.Node, fx.Node]) -> bool:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda a: found.get(a, a))
    return args == other.args and kwargs == other.kwargs
