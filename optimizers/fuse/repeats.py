"""Repeats: what a kernel computes several times, because the windows of a pool overlap there, and what that costs.

    max_pool(tanh(x)), windows of 3 x 3, 2 apart     reads each element of tanh(x) 2.25 times
                                                     in one kernel: tanh 2.25 times for each x, and tanh(x) is never stored
                                                     in two:        tanh once, written and read

Instructions and bytes are set beside each other by what an H100 does in the same time. Reading a stored value several times
costs nothing here: it comes from the cache.
"""

from __future__ import annotations

from torch import fx

from tracefuse.optimizers.formulas.windows import WINDOW_OPS, again, is_shape_only
from tracefuse.optimizers.lowering.expressions import POINTWISE, TRANSCENDENTAL
from tracefuse.optimizers.ops import is_getitem, is_view
from tracefuse.optimizers.trace import Trace, tensors

INSTRUCTIONS_PER_BYTE = 10
"""Of an H100 SXM: 132 processors x 128 lanes x 1.98 GHz over 3.35e12 bytes a second, by its data sheet."""
COSTLY, PLAIN = 20, 2
"""Instructions an element, about: of an exponential with its division, and of a product with its address."""


def times_computed(body: Trace) -> dict[fx.Node, float]:
    """How often a kernel computes each element of each value of its body."""
    times: dict[fx.Node, float] = {}
    for node in reversed(body.graph.nodes):
        times[node] = max(
            (times[user] * again(user) for user in node.users if not is_shape_only(node, user)),
            default=1.0,
        )
    return times


def repeated_nbytes(body: Trace) -> int:
    """The bytes that memory moves while a kernel computes again what it has computed; 0 where windows do not overlap."""
    if not any(node.target in WINDOW_OPS for node in body.ops):
        return 0
    times = times_computed(body)
    extra = sum((times[node] - 1) * _instructions(node) for node in body.ops if times[node] > 1)
    return int(extra / INSTRUCTIONS_PER_BYTE)


def _instructions(node: fx.Node) -> int:
    if is_view(node) or is_getitem(node):
        return 0
    is_plain = node.target in POINTWISE and node.target not in TRANSCENDENTAL
    return sum(t.numel() for t in tensors(node)) * (PLAIN if is_plain else COSTLY)


def repeated_value(body: Trace) -> int | None:
    """The place in the body's graph of the last value computed there that overlapping windows read; None without one."""
    found = None
    for at, node in enumerate(body.graph.nodes):
        if node.op == "call_function" and not is_view(node) and _overlapping_reader(node) is not None:
            found = at
    return found


def _overlapping_reader(node: fx.Node) -> fx.Node | None:
    """The op that reads the value, as it is or through views, in windows that overlap; None without one."""
    for user in node.users:
        if is_view(user):
            if (found := _overlapping_reader(user)) is not None:
                return found
        elif again(user) > 1 and not is_shape_only(node, user):
            return user
    return None


def in_words(body: Trace, at: int) -> str:
    """How often the value at a place of the body's graph would be computed."""
    node = list(body.graph.nodes)[at]
    reader = _overlapping_reader(node)
    assert reader is not None
    return f"{reader.name} reads each element of {node.name} {again(reader):.3g} times, and would have it computed as often"
