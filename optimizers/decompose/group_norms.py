"""Group norm as statistics of each group and what is pointwise: see the table of `norms`.

The image is seen as `[N, groups, channels of a group, ...]`, which is a view of it in any order of memory. The backward first
sums over each channel of each image, of which weight, bias and groups need different sums, as ATen's does:

    a = sum(g * (x - mean))        b = sum(g)        of each channel
    dw = sum over images of a * rstd        db = sum over images of b
    dx = (g * w - sum of b * w / n - (x - mean) * rstd ** 2 * sum of a * w / n) * rstd        summed over a group's channels

Where no gradient of weight or bias is read, and a program holds the rows, the sums over a group are one kernel with dx.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from typing import Any

from torch import fx

from tracefuse.optimizers.decompose.writing import cast, wide
from tracefuse.optimizers.lowering.geometry import MAX_ROW
from tracefuse.optimizers.ops import arguments, aten
from tracefuse.optimizers.trace import call, shape_of, val

Shape = tuple[int, ...]


def holds_its_rows(node: fx.Node) -> bool:
    """Whether a program holds a group of one image."""
    args = arguments(node)
    return args["C"] // args["group"] * args["HxW"] <= MAX_ROW and args["HxW"] * args["C"] > args["group"]


def is_whole(node: fx.Node, read: Collection[Any]) -> bool:
    """Whether a program holds all that the sums of a backward are of, of which these results are read: for those of weight and
    bias it would need other images too."""
    return not {1, 2} & {*read} and holds_its_rows(node)


def group_norm(node: fx.Node) -> dict[int, fx.Node]:
    """The result and the statistics of a group norm, before `node`."""
    args, dtypes = arguments(node), [tensor.dtype for tensor in val(node)]
    shape = _grouped(node)
    x = _viewed(node, wide(node, args["input"]), shape)
    pair = call(node, aten.var_mean.correction, x, [*range(2, len(shape))], correction=0, keepdim=True)
    var, mean = (call(node, operator.getitem, pair, at, name=name) for at, name in ((0, "var"), (1, "mean")))
    rstd = call(node, aten.rsqrt.default, call(node, aten.add.Scalar, var, args["eps"]), name="rstd")
    y = call(node, aten.mul.Tensor, call(node, aten.sub.Tensor, x, mean), rstd)
    for name, op in (("weight", aten.mul.Tensor), ("bias", aten.add.Tensor)):
        if args[name] is not None:
            y = call(node, op, y, _of_channels(node, args[name], shape))
    result = _viewed(node, cast(node, y, dtypes[0]), shape_of(args["input"]))
    statistics = (_viewed(node, value, shape[:2]) for value in (mean, rstd))
    return {0: result} | {at: cast(node, value, dtypes[at]) for at, value in enumerate(statistics, 1)}


def group_norm_backward(node: fx.Node, wanted: set[int]) -> dict[int, fx.Node]:
    """Those of the gradients of input, weight and bias that are `wanted`, before `node`."""
    args, dtypes = arguments(node), [None if tensor is None else tensor.dtype for tensor in val(node)]
    shape = _grouped(node)
    g, x = (_viewed(node, wide(node, args[name]), shape) for name in ("grad_out", "input"))
    ones = (*shape[:2], *[1] * (len(shape) - 2))
    mean, rstd = (_viewed(node, wide(node, args[name]), ones) for name in ("mean", "rstd"))
    weight = None if args["weight"] is None else _of_channels(node, args["weight"], shape)
    product = call(node, aten.mul.Tensor, g, call(node, aten.sub.Tensor, x, mean))
    parts: dict[int, fx.Node] = {}
    held = is_whole(node, wanted)
    slopes, totals = (value if held else _over_image(node, value) for value in (product, g))
    if 0 in wanted:
        slope, total = (_over_group(node, value, weight, shape) for value in (slopes, totals))
        # `x - mean` anew: one value that two kernels read would be written.
        centred = call(node, aten.sub.Tensor, x, mean)
        grad = _gradient(node, g, centred, weight, slope, total, rstd)
        parts[0] = _viewed(node, cast(node, grad, dtypes[0]), shape_of(args["input"]))
    if 1 in wanted:
        parts[1] = cast(node, _over_images(node, call(node, aten.mul.Tensor, slopes, rstd)), dtypes[1])
    if 2 in wanted:
        parts[2] = cast(node, _over_images(node, totals), dtypes[2])
    return parts


def _gradient(
    node: fx.Node,
    g: fx.Node,
    centred: fx.Node,
    weight: fx.Node | None,
    slope: fx.Node,
    total: fx.Node,
    rstd: fx.Node,
) -> fx.Node:
    count = val(g).numel() // val(total).numel()
    tilt = call(node, aten.mul.Tensor, call(node, aten.mul.Tensor, rstd, rstd), slope)
    tilt, shift = (call(node, aten.mul.Scalar, value, 1 / count) for value in (tilt, total))
    scaled = g if weight is None else call(node, aten.mul.Tensor, g, weight)
    inner = call(node, aten.sub.Tensor, scaled, shift)
    inner = call(node, aten.sub.Tensor, inner, call(node, aten.mul.Tensor, centred, tilt))
    return call(node, aten.mul.Tensor, inner, rstd)


def _grouped(node: fx.Node) -> Shape:
    """`[N, groups, channels of a group, ...]`."""
    args = arguments(node)
    whole = shape_of(args["input"])
    return whole[0], args["group"], whole[1] // args["group"], *whole[2:]


def _viewed(node: fx.Node, value: fx.Node, shape: Shape) -> fx.Node:
    return value if shape_of(value) == tuple(shape) else call(node, aten.view.default, value, list(shape))


def _of_channels(node: fx.Node, value: fx.Node, shape: Shape) -> fx.Node:
    """A weight or bias in a shape that is broadcast over `shape`."""
    return _viewed(node, wide(node, value), (*shape[1:3], *[1] * (len(shape) - 3)))


def _over_image(node: fx.Node, value: fx.Node) -> fx.Node:
    """The sum over each channel of each image, in as many dimensions."""
    if math.prod(shape_of(value)[3:]) == 1:
        return value
    return call(node, aten.sum.dim_IntList, value, [*range(3, val(value).dim())], True)


def _over_group(node: fx.Node, value: fx.Node, weight: fx.Node | None, shape: Shape) -> fx.Node:
    """The sum of `value * weight` over each group, in as many dimensions."""
    scaled = value if weight is None else call(node, aten.mul.Tensor, value, weight)
    dims = [d for d in range(2, len(shape)) if shape_of(value)[d] > 1]
    return call(node, aten.sum.dim_IntList, scaled, dims, True) if dims else scaled


def _over_images(node: fx.Node, value: fx.Node) -> fx.Node:
    """The sum over all images, one number for each channel."""
    images, groups, channels = shape_of(value)[:3]
    flat = _viewed(node, value, (images, groups * channels))
    return call(node, aten.sum.dim_IntList, flat, [0]) if images > 1 else _viewed(node, flat, (groups * channels,))
