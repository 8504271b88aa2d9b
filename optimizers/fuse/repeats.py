"""Repeats: what a kernel computes several times, and what that costs.

    max_pool(tanh(x)), windows of 3 x 3, 2 apart     reads each element of tanh(x) 2.25 times
                                                     in one kernel: tanh 2.25 times for each x, and tanh(x) is never stored
                                                     in two:        tanh once, written and read
    sum(x[N, 32, H, W] * tanh(y[N, 1, H, W]))        for each of 32 channels another program computes tanh(y)
    x[T, 320, 128] * cos(angles[T, 1, 128])          for each 32 rows another program computes cos(angles)

Instructions and bytes are set beside each other by what an H100 does in the same time. Reading a stored value several times
costs nothing here: it comes from the cache. What is broadcast is mostly cheap, so that it is computed while the memory is
waited for, and only what takes longer than that costs anything. Not so sines and cosines, whose branch for large angles holds
up the loads behind it: each repetition counts, and a large kernel is faster with a table of them, which another kernel makes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import fx

from tracefuse.optimizers.facts import once_per_trace
from tracefuse.optimizers.formulas.windows import ADAPTIVE_MAXIMUM, MAXIMUM, again, is_shape_only
from tracefuse.optimizers.kernels.blocking import choose_layouts
from tracefuse.optimizers.lowering.composites import REDUCTIONS
from tracefuse.optimizers.lowering.expressions import PERIODIC, POINTWISE, TRANSCENDENTAL
from tracefuse.optimizers.lowering.layouts import GUESS, Layout
from tracefuse.optimizers.ops import is_getitem, is_view, reached
from tracefuse.optimizers.trace import Trace, nbytes, tensors, val

INSTRUCTIONS_PER_BYTE = 10
"""Of an H100 SXM: 132 processors x 128 lanes x 1.98 GHz over 3.35e12 bytes a second, by its data sheet."""
COSTLY, PLAIN, COMPARED = 60, 4, 20
"""Instructions an element, about: of an exponential with its division, of a product with its address, and of one element of a
window in the search for the largest with its place. On an H200 a kernel that computed softplus 4 times for each of 24.8
million elements, to look for the largest in windows of 2 x 2, took 568 us, and one with a tanh for each of 65 million 240."""

LAUNCH_NBYTES = 8 << 20
"""What memory moves while one more kernel starts. Less than that is not worth a kernel that makes a table."""

Spread = Callable[[fx.Node, fx.Node], float]


@once_per_trace
def repeated_nbytes(body: Trace) -> int:
    """The bytes that memory moves while a kernel computes again what it has computed; 0 where nothing is repeated."""
    in_windows = broadcast = periodic = 0.0
    for node, (windows, broadcasts) in times_computed(body).items():
        if node.op == "call_function" and windows * broadcasts > 1:
            instructions = _instructions(node)
            in_windows += (windows - 1) * instructions
            if node.target in PERIODIC:
                periodic += windows * (broadcasts - 1) * instructions
            else:
                broadcast += windows * (broadcasts - 1) * instructions
    hidden = sum(map(nbytes, [*body.placeholders, *body.returned])) if broadcast else 0
    beside = max(0.0, broadcast / INSTRUCTIONS_PER_BYTE - hidden)
    return int(in_windows / INSTRUCTIONS_PER_BYTE + beside + max(0.0, periodic / INSTRUCTIONS_PER_BYTE - LAUNCH_NBYTES))


def times_computed(body: Trace) -> dict[fx.Node, tuple[float, float]]:
    """How often a kernel computes each element of each value: because windows overlap, and because it is broadcast."""
    spread = spread_of(body)
    times: dict[fx.Node, tuple[float, float]] = {}
    for node in reversed(body.graph.nodes):
        users = [user for user in node.users if not is_shape_only(node, user)]
        of_users = [(times[user][0] * again(user), times[user][1] * spread(node, user)) for user in users]
        times[node] = max(of_users, key=math.prod, default=(1.0, 1.0))
    return times


def spread_of(body: Trace) -> Spread:
    """How many elements a reader computes of one of its operand that its program has not at hand: 1 but where the kernel sums
    down columns, whose programs each have some of the columns, and for sines and cosines, of which each has a block."""
    if any(node.target in REDUCTIONS for node in body.ops):
        return _spread if choose_layouts(body, GUESS)[0].columns is not None else _no_spread
    if not (made := periodic(body)):
        return _no_spread
    rows = _rows_of(choose_layouts(body, GUESS)[0])
    return lambda node, user: max(1.0, _spread(node, user) / rows) if node in made else 1.0


def periodic(body: Trace) -> set[fx.Node]:
    """Sines and cosines, and what is computed of them."""
    return set(reached([node for node in body.ops if node.target in PERIODIC], lambda node: node.users))


def _no_spread(node: fx.Node, user: fx.Node) -> float:
    return 1.0


def _rows_of(layout: Layout) -> int:
    """Elements of a program that have one element of such a value, which lies along its columns."""
    return 1 if layout.is_flat else layout.blocks["row"]


def _spread(node: fx.Node, user: fx.Node) -> float:
    """The sizes of `user` outside of the last dimension that `node` has itself, where `node` has one element for all."""
    widens = user.target in POINTWISE or user.target is torch.ops.aten.expand.default
    if not (widens and isinstance(val(node), torch.Tensor) and isinstance(val(user), torch.Tensor)):
        return 1.0
    shape, out = val(node).shape, val(user).shape
    own = (1,) * (len(out) - len(shape)) + tuple(shape)
    last = max((at for at, size in enumerate(own) if size > 1), default=-1)
    return math.prod(size for at, size in enumerate(out) if at < last and own[at] == 1)


def _instructions(node: fx.Node) -> int:
    if is_view(node) or is_getitem(node):
        return 0
    if node.target in MAXIMUM | ADAPTIVE_MAXIMUM:
        operand = node.args[0]
        assert isinstance(operand, fx.Node)
        return int(val(operand).numel() * again(node) * COMPARED)
    is_plain = node.target in POINTWISE and node.target not in TRANSCENDENTAL
    return sum(t.numel() for t in tensors(node)) * (PLAIN if is_plain else COSTLY)


@once_per_trace
def repeated_values(body: Trace) -> tuple[int, ...]:
    """The places in the body's graph of what would rather be stored: of all tables of sines and cosines, else of the last
    value computed there that overlapping windows or a wider op read; () without one."""
    spread, made = spread_of(body), periodic(body)
    found = [
        (at, node)
        for at, node in enumerate(body.graph.nodes)
        if node.op == "call_function" and not is_view(node) and _repeating_reader(node, spread) is not None
    ]
    return tuple([at for at, node in found if node in made]) or tuple([at for at, _ in found[-1:]])


def _repeating_reader(node: fx.Node, spread: Spread) -> tuple[fx.Node, float] | None:
    """The op that reads the value, as it is or through views, in windows that overlap or more widely than it is, and how often
    it reads each element; None without one."""
    for user in node.users:
        if not is_shape_only(node, user) and (times := max(again(user), spread(node, user))) > 1:
            return user, times
        if is_view(user) and (found := _repeating_reader(user, spread)) is not None:
            return found
    return None


def in_words(body: Trace, at: int) -> str:
    """How often the value at a place of the body's graph would be computed."""
    node = list(body.graph.nodes)[at]
    found = _repeating_reader(node, spread_of(body))
    assert found is not None
    reader, times = found
    return f"{reader.name} reads each element of {node.name} {times:.3g} times, and would have it computed as often"
