"""Strands, for R2 of `cat`: the operands of a concatenation traced back to ranges of a base, and the way of an axis through.

strand    one operand of the cat: a range of a base, then a chain of views and elementwise ops
path      the axis of the cat at each link of the chain, from the base's axis to the cat's
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from tracefuse.optimizers.axes import RESHAPES, Range, as_interleaved, as_range, axes_after, is_replayable, shape
from tracefuse.optimizers.ops import is_view, op_name, producer
from tracefuse.optimizers.trace import phase

Path = tuple[int, ...]


@dataclass(frozen=True)
class Strand:
    """One operand: `chain` (first link first) on the range `part`, yielding the shape `end`."""

    part: Range
    chain: tuple[fx.Node, ...]
    end: tuple[int, ...]


def strand_of(operand: fx.Node, cat: fx.Node) -> Strand | str:
    """The operand traced back to a range, or the reason why that fails."""
    chain: list[fx.Node] = []
    node = operand
    while node.op == "call_function":
        part = as_range(node) or as_interleaved(node)
        if part is not None:
            return Strand(part, tuple(reversed(chain)), shape(operand))
        if not is_replayable(node) or not isinstance(node.args[0], fx.Node):
            return f"{operand.name} comes from {node.name} = {op_name(producer(node))}, no slice"
        if phase(node) != phase(cat):
            return f"{operand.name} comes from {node.name}, computed in the {phase(node)}"
        if not is_view(node) and len(node.users) > 1:
            return f"{node.name} is read elsewhere too and would be computed twice"
        chain.append(node)
        node = node.args[0]
    return f"{operand.name} comes from the input {node.name}, no slice"


def why_apart(first: Strand, second: Strand) -> str | None:
    """Why `second` does not continue `first`; None if it does."""
    a, b = first.part, second.part
    if a.base is not b.base:
        return f"operands come from different bases, {a.base.name} and {b.base.name}"
    if (a.squeezes, a.step) != (b.squeezes, b.step):
        return f"operands are slices of {a.base.name} of different kinds"
    if a.axis != b.axis:
        return f"operands are slices of {a.base.name} along axes {a.axis} and {b.axis}"
    if a.stop != b.start:
        return f"{a.base.name}[{a.start}:{a.stop}] is followed by [{b.start}:{b.stop}], not by what comes next"
    if [_link(n) for n in first.chain] != [_link(n) for n in second.chain]:
        return f"the slices of {a.base.name} go through different ops"
    if a.squeezes and any(shape(n) != shape(m) for n, m in zip(first.chain, second.chain, strict=True)):
        return f"the slices of {a.base.name} go through views of different sizes"
    return None


def _link(node: fx.Node) -> tuple[Any, ...]:
    """What a link does, its operand and, for a reshape, its sizes left out."""
    if node.target in RESHAPES:
        return (node.target,)
    return node.target, fx.node.map_arg((node.args, node.kwargs), lambda _: None)


def path_of(strands: Sequence[Strand], axis: int, target: int) -> Path | None:
    """The axis after each link when the first link's operand varies along `axis` and the last must along `target`.

    An axis with nothing but axes of length 1 between it and `target` is as good: a view makes it that one.
    """
    if not strands[0].chain:
        end = strands[0].end
        return () if math.prod(end[:axis]) == math.prod(end[:target]) else None
    links = [s.chain[0] for s in strands]
    rest = [replace(s, chain=s.chain[1:]) for s in strands]
    for after in axes_after(links[0], axis):
        if not all(after in axes_after(n, axis) for n in links) or not _agree_but_along(links, after):
            continue
        path = path_of(rest, after, target)
        if path is not None:
            return (after, *path)
    return None


def _agree_but_along(links: Sequence[fx.Node], axis: int) -> bool:
    return len({(shape(n)[:axis], shape(n)[axis + 1 :]) for n in links}) == 1
