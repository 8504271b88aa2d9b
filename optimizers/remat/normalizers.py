"""Normalizers: statistics that fit only the very values that they were computed from.

    p = exp(x - logsumexp(x))

An op that no kernel holds, computed again, reads what another kernel may have rounded otherwise, and its own result may then
be the next number up or down: of a logit of 300 in bfloat16 that is 2 away. With the logsumexp of the first x, p is wrong by
a factor of exp(2); with that of the second it is a probability again. So they go together: where such an op behind x is
recomputed, the logsumexp is too. Differences of that size in what other statistics normalize stay as small as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import fx

from tracefuse.optimizers.ops import producer

NORMALIZERS = frozenset({torch.ops.aten.logsumexp.default})


def tied_ops(nodes: Iterable[fx.Node], fused: Collection[fx.Node]) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """For each normalizer among `nodes` the ops, not `fused`, whose results reach it through fused ones only."""
    found = {node: tuple(_behind(node, fused)) for node in nodes if node.target in NORMALIZERS}
    return {node: ops for node, ops in found.items() if ops}


def _behind(node: fx.Node, fused: Collection[fx.Node]) -> Iterable[fx.Node]:
    seen: set[fx.Node] = set()
    stack = list(node.all_input_nodes)
    while stack:
        current = stack.pop()
        if current in seen or current.op != "call_function":
            continue
        seen.add(current)
        if current in fused:
            stack += current.all_input_nodes
        else:
            yield producer(current)
