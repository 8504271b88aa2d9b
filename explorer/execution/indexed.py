"""Inputs that places are computed from: an index that arithmetic makes of several captured integers is a place only for those.

The lower edges of boxes minus their upper ones, a running sum of a mask: integers that are drawn one by one would make
another index, beyond the table's end. Moved, compared with a number or looked up, each by itself, they may be drawn.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from tracefuse.optimizers.costs.cost import op_class
from tracefuse.optimizers.ops import arguments, is_getitem
from tracefuse.optimizers.trace import Trace, tensors

aten = torch.ops.aten

_PLACES = {"index", "indices", "offsets", "target"}
"""What ATen's operators call an argument that says where in another one."""
_MOVES = (aten.where.self, aten.cat.default, aten.stack.default)


def behind_places(trace: Trace) -> frozenset[str]:
    """Names of the integer inputs of which an operator computes, several elements at once, where it reads or writes."""
    pending = [(place, False) for node in trace.ops for place in _places(node)]
    seen, found = set(pending), set()
    while pending:
        node, is_mixed = pending.pop()
        if node.op == "placeholder" and is_mixed and not _is_floating(node):
            found.add(node.name)
        new = {(n, is_mixed or _mixes(node)) for n in _followed(node)} - seen
        seen |= new
        pending += new
    return frozenset(found)


def _places(node: fx.Node) -> Iterator[fx.Node]:
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    for name, given in arguments(node).items():
        for one in given if isinstance(given, (list, tuple)) else [given]:
            if name in _PLACES and isinstance(one, fx.Node) and not _is_floating(one):
                yield one


def _followed(node: fx.Node) -> list[fx.Node]:
    """The operands whose numbers show in what `node` is: of a look-up the table, of a choice not the condition."""
    if node.op == "placeholder":
        return []
    skipped = {*_places(node), *([node.args[0]] if node.target is aten.where.self else [])}
    is_by_element = is_getitem(node) or _is_by_element(node)
    return [n for n in node.all_input_nodes if n not in skipped and (is_by_element or not _is_floating(n))]


def _mixes(node: fx.Node) -> bool:
    """Whether an element of `node` is computed from several: of one operand, or of one from each."""
    if is_getitem(node) or node.target in _MOVES or any(_places(node)):
        return False
    return not _is_by_element(node) or len(node.all_input_nodes) > 1


def _is_by_element(node: fx.Node) -> bool:
    return op_class(node) in ("view", "pointwise") or node.target is aten.floor_divide.default


def _is_floating(node: fx.Node) -> bool:
    return any(t.is_floating_point() or t.is_complex() for t in tensors(node)[:1])
