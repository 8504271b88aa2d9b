"""Replaying, for R2 of `cat`: the chain of consecutive ranges of one base, on the base.

Where a range drops its axis, as select does, that axis has no path through the links before the one, an unsqueeze, that brings
in the axis of the cat: there the strand *lands*. Until then the axis lies in front of all others and the links are replayed
behind it. A strand that lands nowhere ends so; its axis then goes before that of the cat, and is merged with it:

    q, k, v = x.unbind(2)                           x f[b, t, 3, h, d]
    cat([q.view(b, t, h * d), …], 2)                x.permute(2, 0, 1, 3, 4).view(3, b, t, h * d).permute(1, 2, 0, 3).view(…)
    stack([q.transpose(1, 2), …], 1)                x.permute(2, 0, 1, 3, 4).transpose(2, 3).permute(1, 0, 2, 3, 4)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from tracefuse.optimizers.axes import RESHAPES, permutation, shape, split_sizes
from tracefuse.optimizers.cat.strands import Path, Strand, path_of
from tracefuse.optimizers.ops import aten
from tracefuse.optimizers.trace import call, val


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
        value = call(cat, aten.view.default, value, split_sizes(shape(value), first.axis, first.step))
    if (first.start, last.stop) == (0, shape(value)[axis]):
        return value
    return call(cat, aten.slice.Tensor, value, axis, first.start, last.stop)


def _joined_sizes(strands: Sequence[Strand], axis: int) -> list[int]:
    """The shape of what the strands are concatenated to."""
    end = strands[0].end
    return [*end[:axis], sum(s.end[axis] for s in strands), *end[axis + 1 :]]


def _replay_link(links: Sequence[fx.Node], axis: int, value: fx.Node) -> fx.Node:
    link = links[0]
    if link.target in RESHAPES:
        sizes = list(shape(link))
        sizes[axis] = sum(shape(n)[axis] for n in links)
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
        return call(link, aten.view.default, value, [shape(value)[0], *shape(link)])
    if (new := _new_axis(link)) is not None:
        return call(link, aten.unsqueeze.default, value, new + 1)
    if link.target is aten.squeeze.dim:
        gone = link.args[1] % val(link.args[0]).dim()  # type: ignore[operator, arg-type]
        return call(link, aten.squeeze.dim, value, gone + 1)
    args, kwargs = fx.node.map_arg((link.args, link.kwargs), lambda _: value)
    return call(link, link.target, *args, **kwargs)  # type: ignore[arg-type]
