"""Zero-padded values, for R3 of `cat`: what is 0 along an axis but for its segments.

    Padded    value = 0 but for its segments along axis      slice_backward, select_backward, constant_pad_nd, slice_scatter
                                                             into zeros, cat with zeros

neg, casts and products with a number keep zeros, so they are noted on the segments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from tracefuse.optimizers.axes import cat_parts, clamp, is_elementwise, is_every
from tracefuse.optimizers.ops import arguments, aten
from tracefuse.optimizers.trace import shape_of, val


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
    """A value that is 0 along `axis` but for its segments, which do not overlap and are in order.

    With a `step`, they are places of the second of the two axes that it sees in `axis`.
    """

    axis: int
    segments: tuple[Segment, ...]
    step: int = 1


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
    length = shape_of(node)[axis]
    start, count = clamp(a["start"], length, 0), shape_of(a["grad_output"])[axis]
    if a["step"] == 1:
        return Padded(axis, (Segment(start, start + count, a["grad_output"]),))
    if not is_every(a["step"], start, count, length):
        return None
    return Padded(axis, (Segment(start, start + 1, a["grad_output"], unsqueezes=True),), a["step"])


def _select_backward(node: fx.Node, a: dict[str, Any]) -> Padded | None:
    axis = a["dim"] % val(node).dim()
    index = a["index"] % shape_of(node)[axis]
    return Padded(axis, (Segment(index, index + 1, a["grad_output"], unsqueezes=True),))


def _constant_pad(node: fx.Node, a: dict[str, Any]) -> Padded | None:
    pads, dims = a["pad"], val(node).dim()
    axes = [dims - 1 - i for i in range(len(pads) // 2) if pads[2 * i] or pads[2 * i + 1]]
    if a["value"] != 0 or min(pads) < 0 or len(axes) != 1:
        return None
    start = pads[2 * (dims - 1 - axes[0])]
    return Padded(axes[0], (Segment(start, start + shape_of(a["self"])[axes[0]], a["self"]),))


def _slice_scatter(node: fx.Node, a: dict[str, Any]) -> Padded | None:
    axis = a["dim"] % val(node).dim()
    start = clamp(a["start"], shape_of(node)[axis], 0)
    segment = Segment(start, start + shape_of(a["src"])[axis], a["src"])
    return Padded(axis, (segment,)) if a["step"] == 1 and is_zeros(a["self"]) else None


def _cat_with_zeros(node: fx.Node, a: dict[str, Any]) -> Padded | None:
    axis, parts = cat_parts(node)
    segments = tuple(Segment(start, stop, n) for n, start, stop in parts if not is_zeros(n))
    return Padded(axis, segments) if 0 < len(segments) < len(parts) else None


PADDINGS = {
    aten.slice_backward.default: _slice_backward,
    aten.select_backward.default: _select_backward,
    aten.constant_pad_nd.default: _constant_pad,
    aten.slice_scatter.default: _slice_scatter,
    aten.cat.default: _cat_with_zeros,
}
