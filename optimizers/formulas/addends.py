"""Sums of several values: a tree of additions, and what it adds up.

add_2 = (p + q) + (r + s)        addends p, q, r, s, where nothing but add_2 reads the inner sums
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from tracefuse.optimizers.facts import once_per_kind
from tracefuse.optimizers.ops import arguments, aten
from tracefuse.optimizers.trace import call, phase, shape_of, val

_ADD = aten.add.Tensor


def as_sum(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two operands of an addition without broadcasting, promotion or scaling."""
    return node.args if node.target is _ADD and _is_sum(node) else None  # type: ignore[return-value]


@once_per_kind
def _is_sum(node: fx.Node) -> bool:
    operands = node.args
    if len(operands) != 2 or arguments(node)["alpha"] != 1 or not all(isinstance(n, fx.Node) for n in operands):
        return False
    return len({(shape_of(n), val(n).dtype, val(n).device) for n in (node, *operands)}) == 1  # type: ignore[arg-type]


def is_root(node: fx.Node) -> bool:
    """Whether the node is a sum, and no addend of another one of its phase that alone reads it."""
    return as_sum(node) is not None and not (
        _is_inner(node, phase(node)) and phase(next(iter(node.users))) == phase(node)
    )


def _is_inner(node: fx.Node, root_phase: str) -> bool:
    """Whether the node is a sum that only one other sum reads."""
    if len(node.users) != 1 or as_sum(node) is None or phase(node) != root_phase:
        return False
    return as_sum(next(iter(node.users))) is not None


def addends(root: fx.Node) -> list[fx.Node]:
    """What `root` adds up, in the order in which it is written."""
    found, pending = [], [root]
    while pending:
        node = pending.pop()
        if node is root or _is_inner(node, phase(root)):
            pending += reversed(as_sum(node))  # type: ignore[arg-type]
        else:
            found.append(node)
    return found


def sum_of(root: fx.Node, terms: Iterable[fx.Node]) -> fx.Node:
    """The sum of `terms`, inserted in place of `root`, one after the other."""
    first, *rest = terms
    for term in rest:
        first = call(root, aten.add.Tensor, first, term)
    return first
