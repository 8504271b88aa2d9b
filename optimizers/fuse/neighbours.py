"""Whether an op that is about to be cut up for fusion has anything to fuse with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from tracefuse.optimizers.fuse.fusible import is_free, refusal
from tracefuse.optimizers.trace import phase


def has_fusible_neighbour(result: fx.Node, operand: Any) -> bool:
    """Whether an op of the same phase that reads `result`, or computes `operand`, could share the kernel between them."""
    near = [*_through_views(result, forward=True), *_through_views(operand, forward=False)]
    return any(refusal(n) is None and not is_free(n) and phase(n) == phase(result) for n in near)


def _through_views(node: fx.Node, forward: bool) -> Iterator[fx.Node]:
    """The ops next to a value, views skipped."""
    near = list(node.users) if forward else [node]
    while near:
        one = near.pop()
        if one.op == "call_function" and is_free(one):
            near += list(one.users) if forward else one.all_input_nodes
        elif one.op == "call_function":
            yield one
