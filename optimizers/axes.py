"""Axis algebra: where along an axis a value lies in another one, and where an axis goes when a view rearranges it.

    Range     value = base[start:stop] along axis            slice, a part of split or unbind, select
    Padded    value = 0 but for its segments along axis      slice_backward, select_backward, constant_pad_nd, slice_scatter
                                                             into zeros, cat with zeros; neg, casts and scaling commute with it
    axes_after(op, a)    the axes of op's result that axis a of its operand becomes, for concatenation along it

A view (reshape) reads its operand in row-major order. Concatenating along axis a stacks blocks of prod(shape[a:]) elements,
prod(shape[:a]) times over. So axis a becomes axis b of the result exactly where prod(out[:b]) == prod(in[:a]): an axis goes
through a merge as its outer factor only, and through a split if the part that varies is the outer one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.trace import aten, is_getitem, is_random, val


def arguments(node: fx.Node) -> dict[str, Any]:
    """The op's arguments by the names of its schema, defaults filled in."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((a.name for a in schema), node.args, strict=False)) | dict(node.kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in schema}


def shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(val(node).shape)


def clamp(index: int | None, length: int, default: int) -> int:
    """A slice's bound as an offset in [0, length]."""
    if index is None:
        return default
    return min(max(index + length if index < 0 else index, 0), length)


# --- ranges -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Range:
    """`base[start:stop]` along `axis`; `squeezes` if the axis, then of length 1, is dropped."""

    base: fx.Node
    axis: int
    start: int
    stop: int
    squeezes: bool = False

    @property
    def length(self) -> int:
        return self.stop - self.start


def as_range(node: fx.Node) -> Range | None:
    """What part of another value this view is, if it is a contiguous range along one axis."""
    if is_getitem(node):
        return _part_range(node.args[0], node.args[1])  # type: ignore[arg-type]
    if node.target is aten.slice.Tensor:
        return _slice_range(node)
    if node.target is aten.select.int:
        base, axis, index = node.args
        axis = axis % val(base).dim()  # type: ignore[operator]
        index = index % shape(base)[axis]  # type: ignore[arg-type, operator]
        return Range(base, axis, index, index + 1, squeezes=True)  # type: ignore[arg-type]
    return None


def _slice_range(node: fx.Node) -> Range | None:
    a = arguments(node)
    base, axis = a["self"], a["dim"] % val(a["self"]).dim()
    length = shape(base)[axis]
    start, stop = clamp(a["start"], length, 0), clamp(a["end"], length, length)
    return Range(base, axis, start, max(start, stop)) if a["step"] == 1 else None


def _part_range(parts: fx.Node, index: int) -> Range | None:
    if parts.target not in (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int):
        return None
    a = arguments(parts)
    base, axis = a["self"], a["dim"] % val(a["self"]).dim()
    if parts.target is aten.unbind.int:
        return Range(base, axis, index, index + 1, squeezes=True)
    sizes = [t.shape[axis] for t in val(parts)]
    return Range(base, axis, sum(sizes[:index]), sum(sizes[: index + 1]))


def cat_ranges(cat: fx.Node) -> tuple[int, list[tuple[fx.Node, int, int]]]:
    """(axis, [(operand, start, stop), ...]) of a `cat`; operands without elements left out."""
    operands = [n for n in cat.args[0] if val(n).numel()]  # type: ignore[union-attr]
    axis = arguments(cat)["dim"] % val(cat).dim()
    found, stop = [], 0
    for operand in operands:
        start, stop = stop, stop + shape(operand)[axis]
        found.append((operand, start, stop))
    return axis, found


# --- axes through ops -------------------------------------------------------------------------------------------------

RESHAPES = {aten.view.default, aten._unsafe_view.default}
ELEMENTWISE_COPIES = {aten.clone.default, aten._to_copy.default}


def permutation(node: fx.Node) -> tuple[int, ...] | None:
    """The operand's axis behind each axis of the result, for `t`, `transpose` and `permute`."""
    if node.target not in (aten.t.default, aten.transpose.int, aten.permute.default):
        return None
    dims = val(node).dim()
    order = list(range(dims))
    if node.target is aten.permute.default:
        return tuple(axis % dims for axis in node.args[1])  # type: ignore[union-attr]
    if node.target is aten.t.default:
        return tuple(reversed(order))
    a, b = (axis % dims for axis in node.args[1:])  # type: ignore[operator, union-attr]
    order[a], order[b] = order[b], order[a]
    return tuple(order)


def is_elementwise(node: fx.Node) -> bool:
    """Whether the op maps one tensor elementwise, its other arguments being numbers: it commutes with concatenation."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or is_random(node) or len(node.all_input_nodes) != 1:
        return False
    if target not in ELEMENTWISE_COPIES and torch.Tag.pointwise not in target.tags:
        return False
    return isinstance(val(node), torch.Tensor) and shape(node) == shape(node.all_input_nodes[0])


def axes_after(node: fx.Node, axis: int) -> Iterator[int]:
    """The axes of `node`'s value that concatenation along `axis` of its first operand becomes; none if it cannot follow."""
    before, after = shape(node.args[0]), shape(node)  # type: ignore[arg-type]
    order = permutation(node)
    if order is not None:
        yield order.index(axis)
    elif node.target in RESHAPES:
        outer = math.prod(before[:axis])
        yield from (b for b in range(len(after)) if math.prod(after[:b]) == outer)
    elif node.target is aten.unsqueeze.default:
        new = node.args[1] % len(after)  # type: ignore[operator]
        yield axis + (new <= axis)
    elif node.target is aten.squeeze.dim:
        gone = node.args[1] % len(before)  # type: ignore[operator]
        if len(before) == len(after):
            yield axis
        elif gone != axis:
            yield axis - (gone < axis)
    elif is_elementwise(node):
        yield axis


def is_replayable(node: fx.Node) -> bool:
    """Whether `axes_after` knows the op."""
    return (
        permutation(node) is not None
        or node.target in RESHAPES
        or node.target in (aten.unsqueeze.default, aten.squeeze.dim)
        or is_elementwise(node)
    )


# --- zero-padded values -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segment:
    """`value` at [start, stop) of the axis, after the elementwise ops of the nodes `maps`; `unsqueezes` gives it the axis."""

    start: int
    stop: int
    value: fx.Node
    unsqueezes: bool = False
    maps: tuple[fx.Node, ...] = ()


@dataclass(frozen=True)
class Padded:
    """A value that is 0 along `axis` but for its segments, which do not overlap and are in order."""

    axis: int
    segments: tuple[Segment, ...]


ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}
FULLS = {aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2}


def is_zeros(node: fx.Node) -> bool:
    if node.target in (aten.expand.default, aten.view.default):
        return is_zeros(node.args[0])  # type: ignore[arg-type]
    return node.target in ZEROS or (node.target in FULLS and node.args[FULLS[node.target]] == 0)


def as_padded(node: fx.Node) -> Padded | None:
    """The value as zero padding around segments, if it is that."""
    if node.target in PADDINGS:
        return PADDINGS[node.target](node, arguments(node))
    if not _keeps_zero(node):
        return None
    inner = as_padded(node.args[0])  # type: ignore[arg-type]
    if inner is None:
        return None
    return replace(inner, segments=tuple(replace(s, maps=(*s.maps, node)) for s in inner.segments))


def _keeps_zero(node: fx.Node) -> bool:
    """Whether the op is elementwise and maps 0 to 0."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.target in (aten.mul.Tensor, aten.mul.Scalar):
        return isinstance(node.args[1], (int, float)) and math.isfinite(node.args[1])
    if node.target in (aten.div.Tensor, aten.div.Scalar):
        return isinstance(node.args[1], (int, float)) and node.args[1] != 0 and not math.isnan(node.args[1])
    return node.target is aten.neg.default or (node.target is aten._to_copy.default and is_elementwise(node))


def _slice_backward(node: fx.Node, a: dict[str, Any]) -> Padded | None:
    axis = a["dim"] % val(node).dim()
    length = shape(node)[axis]
    start = clamp(a["start"], length, 0)
    segment = Segment(start, start + shape(a["grad_output"])[axis], a["grad_output"])
    return Padded(axis, (segment,)) if a["step"] == 1 else None


def _select_backward(node: fx.Node, a: dict[str, Any]) -> Padded | None:
    axis = a["dim"] % val(node).dim()
    index = a["index"] % shape(node)[axis]
    return Padded(axis, (Segment(index, index + 1, a["grad_output"], unsqueezes=True),))


def _constant_pad(node: fx.Node, a: dict[str, Any]) -> Padded | None:
    pads, dims = a["pad"], val(node).dim()
    axes = [dims - 1 - i for i in range(len(pads) // 2) if pads[2 * i] or pads[2 * i + 1]]
    if a["value"] != 0 or min(pads) < 0 or len(axes) != 1:
        return None
    start = pads[2 * (dims - 1 - axes[0])]
    return Padded(axes[0], (Segment(start, start + shape(a["self"])[axes[0]], a["self"]),))


def _slice_scatter(node: fx.Node, a: dict[str, Any]) -> Padded | None:
    axis = a["dim"] % val(node).dim()
    start = clamp(a["start"], shape(node)[axis], 0)
    segment = Segment(start, start + shape(a["src"])[axis], a["src"])
    return Padded(axis, (segment,)) if a["step"] == 1 and is_zeros(a["self"]) else None


def _cat_with_zeros(node: fx.Node, a: dict[str, Any]) -> Padded | None:
    axis, parts = cat_ranges(node)
    segments = tuple(Segment(start, stop, n) for n, start, stop in parts if not is_zeros(n))
    return Padded(axis, segments) if 0 < len(segments) < len(parts) else None


PADDINGS = {
    aten.slice_backward.default: _slice_backward,
    aten.select_backward.default: _select_backward,
    aten.constant_pad_nd.default: _constant_pad,
    aten.slice_scatter.default: _slice_scatter,
    aten.cat.default: _cat_with_zeros,
}
