"""Windows: which elements a pool, an upsampling or the backward of one takes together, from the op's arguments.

Along each of the last one to three dimensions there are `count` windows, of which number o reads the elements
`o * step - pad + t * dilation` for its taps t. Adaptive pools have such windows where the sizes divide, and a nearest
upsampling is seen from its large side, each window being what one element becomes.

Sources: `aten/src/ATen/native/{Pool.h,UpSample.h}` for the sizes, and for what counts as an element of an average.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.facts import once_per_kind
from tracefuse.optimizers.ops import arguments, aten
from tracefuse.optimizers.trace import shape_of, val

MOST_TAPS = 64
"""Of one window: a kernel writes them out one by one."""


@dataclass(frozen=True)
class Axis:
    """The windows along one dimension: `count` of them over `length` elements, each of `size` taps `dilation` apart."""

    length: int
    count: int
    size: int
    step: int
    pad: int = 0
    dilation: int = 1

    @property
    def covering(self) -> int:
        """How many windows cover one element at most."""
        return -(-self.size // self.step)

    @property
    def again(self) -> float:
        """How often an element is read, over all windows."""
        return self.count * self.size / self.length


AVERAGE = {aten.avg_pool2d.default, aten.avg_pool3d.default}
AVERAGE_BACKWARD = {aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default}
ADAPTIVE = {aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default}
ADAPTIVE_BACKWARD = {aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default}
MAXIMUM = {aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default}
MAXIMUM_BACKWARD = {aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default}
ADAPTIVE_MAXIMUM = {aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default}
ADAPTIVE_MAXIMUM_BACKWARD = {aten.adaptive_max_pool2d_backward.default, aten.adaptive_max_pool3d_backward.default}
NEAREST = {aten.upsample_nearest1d.default, aten.upsample_nearest2d.default, aten.upsample_nearest3d.default}
NEAREST_BACKWARD = {
    aten.upsample_nearest1d_backward.default, aten.upsample_nearest2d_backward.default,
    aten.upsample_nearest3d_backward.default,
}  # fmt: skip

BACKWARD = AVERAGE_BACKWARD | ADAPTIVE_BACKWARD | MAXIMUM_BACKWARD | ADAPTIVE_MAXIMUM_BACKWARD | NEAREST_BACKWARD
WINDOW_OPS = AVERAGE | ADAPTIVE | MAXIMUM | ADAPTIVE_MAXIMUM | NEAREST | BACKWARD


def is_shape_only(node: fx.Node, user: fx.Node) -> bool:
    """Whether a pool's backward, `user`, takes `node` only to know the type of its result."""
    if user.target not in BACKWARD - NEAREST_BACKWARD:
        return False
    return [name for name, arg in arguments(user).items() if arg is node] == ["self"]


def _dims(target: Any) -> int:
    """The dimensions that the windows of an op run over."""
    return int(next(c for c in target.overloadpacket.__name__ if c.isdigit()))


@once_per_kind
def axes_of(node: fx.Node) -> tuple[Axis, ...] | str:
    """The windows of an op along each of its last dimensions, or why it has none that a kernel can hold."""
    args, dims = arguments(node), _dims(node.target)
    whole, pooled = _sizes(node, args)
    lengths, counts = whole[-dims:], pooled[-dims:]
    if node.target in NEAREST | NEAREST_BACKWARD:
        return _upsampled(args, lengths, counts)
    if "kernel_size" not in args:
        if any(length % count for length, count in zip(lengths, counts, strict=True)):
            return f"{list(counts)} windows do not divide {list(lengths)} elements"
        factors = [length // count for length, count in zip(lengths, counts, strict=True)]
        axes = tuple(map(Axis, lengths, counts, factors, factors))
    else:
        size = _each(args["kernel_size"], dims)
        step, pad = _each(args["stride"] or size, dims), _each(args["padding"], dims)
        axes = tuple(map(Axis, lengths, counts, size, step, pad, _each(args.get("dilation", 1), dims)))
    return _window_refusal(node, axes) or axes


def _window_refusal(node: fx.Node, axes: Sequence[Axis]) -> str | None:
    taps = math.prod(a.covering if node.target in BACKWARD else a.size for a in axes)
    if taps > MOST_TAPS:
        return f"an element of it is made up of {taps} others, and a kernel writes out at most {MOST_TAPS}"
    if node.target in BACKWARD and any(a.dilation > 1 for a in axes):
        return "its windows are dilated: which of them cover an element is no plain division"
    return None if val(node.args[0]).dtype.is_floating_point else "it pools integers"  # type: ignore[arg-type]


def _sizes(node: fx.Node, args: dict[str, Any]) -> tuple[Sequence[int], Sequence[int]]:
    """The shapes that the windows lie in, and that they are counted in."""
    found = val(node)[0] if isinstance(val(node), tuple | list) else val(node)
    first: fx.Node = node.args[0]  # type: ignore[assignment]
    if node.target in NEAREST:
        return tuple(found.shape), shape_of(first)
    return (tuple(found.shape), shape_of(first)) if node.target in BACKWARD else (shape_of(first), tuple(found.shape))


def _each(given: int | Sequence[int], dims: int) -> tuple[int, ...]:
    given = (given,) if isinstance(given, int) else tuple(given)
    return given * dims if len(given) == 1 else given


def _upsampled(args: dict[str, Any], lengths: Sequence[int], counts: Sequence[int]) -> tuple[Axis, ...] | str:
    """Windows of as many elements of the large side as one of the small side becomes."""
    if "grad_output" in args:
        lengths, counts = counts, lengths
    scales = [value for name, value in args.items() if name.startswith("scales")]
    for length, count, scale in zip(lengths, counts, scales, strict=True):
        if length % count or not _repeats(count, length, scale):
            return f"{length} elements do not repeat {count} equally often"
    factors = [length // count for length, count in zip(lengths, counts, strict=True)]
    return tuple(map(Axis, lengths, counts, factors, factors))


@functools.lru_cache(maxsize=1024)
def _repeats(count: int, length: int, scale: float | None) -> bool:
    """Whether ATen takes element `o // (length // count)` for o, all of which it finds by a product in float32."""
    ratio = torch.tensor(1.0 / scale if scale else count / length, dtype=torch.float32)
    places = torch.arange(length, dtype=torch.float32) * ratio
    taken = places.floor().to(torch.int64).clamp(max=count - 1)
    return bool((taken == torch.arange(length) // (length // count)).all())


def window_refusal(node: fx.Node) -> str | None:
    """Why an op over windows stays with ATen; None for other ops, and where a kernel can hold it."""
    found = axes_of(node) if node.target in WINDOW_OPS else None
    return found if isinstance(found, str) else None


def places_indexed(node: fx.Node) -> int | None:
    """How many elements the indices of a maximum's backward choose among; None for other ops."""
    if node.target not in MAXIMUM_BACKWARD | ADAPTIVE_MAXIMUM_BACKWARD:
        return None
    return math.prod(shape_of(node)[-_dims(node.target) :])


def again(node: fx.Node) -> float:
    """How often an op over windows reads each element of its operand; 1 for all others."""
    axes = axes_of(node) if node.target in WINDOW_OPS else ()
    if isinstance(axes, str) or node.target in NEAREST_BACKWARD:
        return 1.0
    if node.target in NEAREST:
        return math.prod(a.size for a in axes)
    if node.target in BACKWARD:
        return math.prod(a.covering * a.length / a.count for a in axes)
    return math.prod(a.again for a in axes)


def counted(axis: Axis, window: int, with_pad: bool) -> int:
    """How many elements of an average the window counts for along an axis; `counted_text` says it of any window."""
    start = window * axis.step - axis.pad
    end = min(start + axis.size, axis.length + axis.pad)
    return end - start if with_pad else min(end, axis.length) - max(start, 0)


def counted_text(axis: Axis, window: str, with_pad: bool) -> str:
    start = f"({window}) * {axis.step} - {axis.pad}"
    limit = axis.length + axis.pad if with_pad else axis.length
    first = start if with_pad else f"tl.maximum({start}, 0)"
    return f"(tl.minimum({start} + {axis.size}, {limit}) - ({first}))"
