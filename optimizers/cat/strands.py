"""Strands, for R2 of `cat`: the operands of a concatenation traced back to ranges of a base, and the way of an axis through.

strand    one operand of the cat: a range of a base, then a chain of views and elementwise ops
path      the axis of the cat at each link of the chain, from the base's axis to the cat's

The chain of consecutive ranges of one base is replayed on the base. Where a range drops its axis, as select does, that axis
has no path through the links before the one, an unsqueeze, that brings in the axis of the cat: there the strand *lands*.
Until then the axis lies in front of all others and the links are replayed behind it. A strand that lands nowhere ends so;
its axis then goes before that of the cat, and is merged with it:

    q, k, v = x.unbind(2)                           x f[b, t, 3, h, d]
    cat([q.view(b, t, h * d), …], 2)                x.permute(2, 0, 1, 3, 4).view(3, b, t, h * d).permute(1, 2, 0, 3).view(…)
    stack([q.transpose(1, 2), …], 1)                x.permute(2, 0, 1, 3, 4).transpose(2, 3).permute(1, 0, 2, 3, 4)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from tracefuse.optimizers.axes import (
    RESHAPES,
    Range,
    as_interleaved,
    as_range,
    axes_after,
    is_replayable,
    permutation,
    split_sizes,
)
from tracefuse.optimizers.ops import aten, is_view, op_name, producer
from tracefuse.optimizers.trace import call, phase, shape_of, val

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
            return Strand(part, tuple(reversed(chain)), shape_of(operand))
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
    if a.squeezes and any(shape_of(n) != shape_of(m) for n, m in zip(first.chain, second.chain, strict=True)):
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
    return len({(shape_of(n)[:axis], shape_of(n)[axis + 1 :]) for n in links}) == 1


# --- replaying --------------------------------------------------------------------------------------------------------


def replay_chain(cat: fx.Node, axis: int, strands: Sequence[Strand], path: Path) -> fx.Node:
    """Insert the chain on the base, or on the range of it that the strands cover, as an operand of `cat` along `axis`.

    `path` is where the axis of the ranges is after each link.
    """
    return _replay_links(cat, axis, strands, _covered(cat, strands), (strands[0].part.axis, *path))


def _replay_links(cat: fx.Node, axis: int, strands: Sequence[Strand], value: fx.Node, path: Path) -> fx.Node:
    for position, at in enumerate(path[1:]):
        value = _replay_link([s.chain[position] for s in strands], at, value)
    return value if path[-1] == axis else call(cat, aten.view.default, value, _joined_sizes(strands, axis))


def _covered(cat: fx.Node, strands: Sequence[Strand]) -> fx.Node:
    """The base, its axis split where the strands have a step, or the range of that which they cover."""
    first, last = strands[0].part, strands[-1].part
    value, axis = first.base, first.axis + (first.step > 1)
    if first.step > 1:
        value = call(cat, aten.view.default, value, split_sizes(shape_of(value), first.axis, first.step))
    if (first.start, last.stop) == (0, shape_of(value)[axis]):
        return value
    return call(cat, aten.slice.Tensor, value, axis, first.start, last.stop)


def _joined_sizes(strands: Sequence[Strand], axis: int) -> list[int]:
    """The shape of what the strands are concatenated to."""
    end = strands[0].end
    return [*end[:axis], sum(s.end[axis] for s in strands), *end[axis + 1 :]]


def _replay_link(links: Sequence[fx.Node], axis: int, value: fx.Node) -> fx.Node:
    link = links[0]
    if link.target in RESHAPES:
        sizes = list(shape_of(link))
        sizes[axis] = sum(shape_of(n)[axis] for n in links)
        return call(link, link.target, value, sizes)  # type: ignore[arg-type]
    args, kwargs = fx.node.map_arg((link.args, link.kwargs), lambda _: value)
    return call(link, link.target, *args, **kwargs)  # type: ignore[arg-type]


# --- ranges that drop their axis --------------------------------------------------------------------------------------


def replay_behind(cat: fx.Node, axis: int, strands: Sequence[Strand]) -> fx.Node:
    """Insert the chain on the base of strands that drop their axis, as an operand of `cat` along `axis`."""
    part, chain, found = strands[0].part, strands[0].chain, landing(strands, axis)
    value = _moved(cat, _covered(cat, strands), part.axis + (part.step > 1), 0)
    for link in chain[: found[0]] if found else chain:
        value = _replay_behind_front(link, value)
    if found is None:
        return call(cat, aten.view.default, _moved(cat, value, 0, axis), _joined_sizes(strands, axis))
    at, path = found
    value = _moved(cat, value, 0, path[0])
    return _replay_links(cat, axis, [_from(s, at + 1) for s in strands], value, path)


def landing(strands: Sequence[Strand], axis: int) -> tuple[int, Path] | None:
    """(position of the unsqueeze whose axis becomes that of the cat, the path from it on), or None."""
    for at, link in enumerate(strands[0].chain):
        new = _new_axis(link)
        path = None if new is None else path_of([_from(s, at + 1) for s in strands], new, axis)
        if path is not None:
            return at, (new, *path)  # type: ignore[arg-type]
    return None


def _from(strand: Strand, at: int) -> Strand:
    return replace(strand, chain=strand.chain[at:])


def _new_axis(node: fx.Node) -> int | None:
    return node.args[1] % val(node).dim() if node.target is aten.unsqueeze.default else None  # type: ignore[operator]


def _moved(cat: fx.Node, value: fx.Node, old: int, new: int) -> fx.Node:
    """`value` with one of its axes in another place."""
    order = list(range(val(value).dim()))
    order.insert(new, order.pop(old))
    return value if old == new else call(cat, aten.permute.default, value, order)


def _replay_behind_front(link: fx.Node, value: fx.Node) -> fx.Node:
    """`link` on a `value` with one more axis, in front."""
    order = permutation(link)
    if order is not None:
        return call(link, aten.permute.default, value, [0, *(axis + 1 for axis in order)])
    if link.target in RESHAPES:
        return call(link, aten.view.default, value, [shape_of(value)[0], *shape_of(link)])
    if (new := _new_axis(link)) is not None:
        return call(link, aten.unsqueeze.default, value, new + 1)
    if link.target is aten.squeeze.dim:
        gone = link.args[1] % val(link.args[0]).dim()  # type: ignore[operator, arg-type]
        return call(link, aten.squeeze.dim, value, gone + 1)
    args, kwargs = fx.node.map_arg((link.args, link.kwargs), lambda _: value)
    return call(link, link.target, *args, **kwargs)  # type: ignore[arg-type]
