"""Batch norm, instance norm and group norm as statistics and what is pointwise, which its neighbours join.

With `sums` over all dimensions but the channels' (of a group norm: over the channels of a group and the image), n elements:

    forward       var, mean = var_mean(x)        rstd = 1 / sqrt(var + eps)        y = (x - mean) * (rstd * w) + b
    new averages  (1 - momentum) * running + momentum * (mean, var * n / (n - 1))
    backward      dw = rstd * sum(g * (x - mean))        db = sum(g)
                  dx = (g - db / n - (x - mean) * rstd * dw / n) * (rstd * w)
    in eval mode  mean and var are the averages, and dx = g * rstd * w

ATen's kernels read x for the statistics and again for y, and g and x twice for dx. So does what they become, but the ReLU, the
residual and the casts around them are in the same kernels, and of few elements a kernel reads x once. Where nothing beside a
norm could join it, it stays. Statistics are computed in f32 for halves (f64 for f64), in one pass (`column_moments`).

cuDNN's batch norm hands an opaque `reserve` to its backward, so that its forward is replaced only together with that.

Sources: `aten/src/ATen/native/cuda/Normalization.cuh` and `group_norm_kernel.cu` for what is computed, and Ioffe and Szegedy,
"Batch normalization", 2015.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.decompose.group_norms import group_norm, group_norm_backward, holds_its_rows, is_whole
from tracefuse.optimizers.decompose.writing import cast as cast_to
from tracefuse.optimizers.decompose.writing import channelwise, per_channel, read_behind_view, take_name, wide
from tracefuse.optimizers.kernels.fusible import has_fusible_neighbour
from tracefuse.optimizers.lowering.geometry import MAX_ROW
from tracefuse.optimizers.ops import arguments, aten, is_getitem
from tracefuse.optimizers.rewrite import replace_value
from tracefuse.optimizers.trace import HALVES, call, shape_of, val

Parts = dict[int, fx.Node]
"""What a norm's results become, by their place."""

RESERVES = {aten._batch_norm_with_update_functional.default: 3, aten.cudnn_batch_norm.default: 3}
"""The result of a forward that only its own backward understands."""

AVERAGES = {aten._native_batch_norm_legit_functional.default: 3, aten._batch_norm_with_update_functional.default: 4}
"""The first of the results that are the new running averages of the mean and the variance."""

BATCH_FORWARDS = {
    *AVERAGES, aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_no_training.default,
}  # fmt: skip

BATCH_BACKWARDS = {
    aten.native_batch_norm_backward.default, aten.cudnn_batch_norm_backward.default, aten.batch_norm_backward.default,
}  # fmt: skip

GROUP_FORWARD, GROUP_BACKWARD = aten.native_group_norm.default, aten.native_group_norm_backward.default

FORWARDS, BACKWARDS = {*BATCH_FORWARDS, GROUP_FORWARD}, {*BATCH_BACKWARDS, GROUP_BACKWARD}

NORMS: dict[Any, str] = {
    **dict.fromkeys(BATCH_FORWARDS, "var_mean(x), and pointwise (x - mean) * (rstd * weight) + bias"),
    **dict.fromkeys(BATCH_BACKWARDS, "sum(g) and sum(g * (x - mean)), and a pointwise gradient"),
    GROUP_FORWARD: "var_mean(x) of each group, and pointwise (x - mean) * rstd * weight + bias",
    GROUP_BACKWARD: "sum(g) and sum(g * (x - mean)) of each channel, and a pointwise gradient",
}


def rewrite_norm(node: fx.Node) -> str | None:
    """Replace a norm by what it becomes. Returns None when done, else the reason why it stays."""
    if reason := _refusal(node):
        return reason
    parts = {user.args[1]: user for user in node.users if is_getitem(user) and user.users}
    with node.graph.inserting_before(node):
        found = _build(node)({part for part in parts if isinstance(part, int)})
    for which in sorted(parts, key=int):  # type: ignore[arg-type]
        old, new = parts[which], found[which]  # type: ignore[index]
        if reason := replace_value(old, new):
            return reason
        take_name(new, old)
        read_behind_view(new)
    return None


def _build(node: fx.Node) -> Callable[[set[int]], Parts]:
    if node.target in BATCH_FORWARDS:
        return lambda wanted: batch_norm(node)
    if node.target in BATCH_BACKWARDS:
        return lambda wanted: batch_norm_backward(node, wanted)
    if node.target is GROUP_FORWARD:
        return lambda wanted: group_norm(node)
    return lambda wanted: group_norm_backward(node, wanted)


# --- choosing ---------------------------------------------------------------------------------------------------------


def comes_apart(node: fx.Node) -> bool:
    """Whether the pass takes the op apart: a norm that neither itself nor the backward of its `reserve` holds back."""
    if node.target not in NORMS:
        return False
    reserves = [part for part in node.users if is_getitem(part) and part.args[1] == RESERVES.get(node.target)]
    return _reason(node) is None and all(comes_apart(backward) for part in reserves for backward in part.users)


def read_again(node: fx.Node) -> list[fx.Node]:
    """The images that what a norm becomes reads for its sums, and then once more: no program holds all that a sum is of."""
    args, read = arguments(node), _read(node)
    x, grad = args["input"], args.get("grad_out", args.get("grad_output"))
    if 0 not in read or not _trains(node):
        return []
    if node.target in (GROUP_FORWARD, GROUP_BACKWARD):
        is_held = holds_its_rows(node) if grad is None else is_whole(node, read)
    else:
        is_held = shape_of(x)[0] == 1 and val(x).numel() <= MAX_ROW * shape_of(x)[1]
    return [] if is_held else [x] if grad is None else [grad, x]


def _refusal(node: fx.Node) -> str | None:
    """Why a norm stays as it is, when its backward has had its turn."""
    if node.target in RESERVES and RESERVES[node.target] in _read(node):
        return "its backward stays, and reads what only cuDNN understands"
    return _reason(node)


def _read(node: fx.Node) -> set[Any]:
    """The places of the results that are read."""
    return {user.args[1] for user in node.users if is_getitem(user) and user.users}


def _reason(node: fx.Node) -> str | None:
    """Why a norm stays by what it is, and what is beside it."""
    x = arguments(node)["input"]
    if val(x).numel() == 0 or not val(x).is_floating_point():
        return "it has no elements of floating point"
    if node.target in BATCH_FORWARDS and not _trains(node) and _read(node) - {0}:
        return "it does not train, and its statistics are read"
    if node.target in BATCH_FORWARDS and _read(node) & {1, 2} and _is_miscalled(node):
        return "its statistics are read, which are float32, and halves by torch's fake tensors of a CPU"
    if _gains(node):
        return None
    return "no op beside it could join it: ATen's kernels move the same bytes"


def _is_miscalled(node: fx.Node) -> bool:
    """Whether fake tensors have the statistics of a batch norm in another type than the operator yields them in: that of a
    weight that is wider than the images."""
    weight = arguments(node)["weight"]
    return val(node)[1].dtype in HALVES and weight is not None and val(weight).dtype is torch.float32


def _gains(node: fx.Node) -> bool:
    """Whether what a norm becomes moves fewer bytes: with neighbours that join it, or with its rows in registers."""
    args, first = arguments(node), next((u for u in node.users if is_getitem(u) and u.args[1] == 0), None)
    grad = args.get("grad_out", args.get("grad_output"))
    if node.target is GROUP_FORWARD and holds_its_rows(node):
        return True
    if first is not None and has_fusible_neighbour(first, args["input"] if grad is None else grad):
        return True
    forward = _forward_of(node)
    return forward is not None and _gains(forward)


def _forward_of(backward: fx.Node) -> fx.Node | None:
    """The forward that hands a backward its `reserve`."""
    reserve = arguments(backward).get("reserveSpace", arguments(backward).get("reserve"))
    is_part = isinstance(reserve, fx.Node) and is_getitem(reserve) and reserve.args[0].target in RESERVES  # type: ignore[union-attr]
    return reserve.args[0] if is_part else None  # type: ignore[union-attr, return-value]


def _trains(node: fx.Node) -> bool:
    args = arguments(node)
    return bool(args.get("training", args.get("train", args.get("update", _is_training_only(node)))))


def _is_training_only(node: fx.Node) -> bool:
    return node.target is not aten._native_batch_norm_legit_no_training.default


# --- batch norm -------------------------------------------------------------------------------------------------------


def batch_norm(node: fx.Node) -> Parts:
    """The result, the statistics and the new averages of a batch norm, before `node`."""
    args, dtypes = arguments(node), [tensor.dtype for tensor in val(node)]
    x = wide(node, args["input"])
    dims, eps = _reduced(x), args.get("eps", args.get("epsilon"))
    if _trains(node):
        pair = call(node, aten.var_mean.correction, x, dims, correction=0, keepdim=True)
        var, mean = (call(node, operator.getitem, pair, at, name=name) for at, name in ((0, "var"), (1, "mean")))
    else:
        mean, var = (channelwise(node, wide(node, args[name]), x) for name in ("running_mean", "running_var"))
    rstd = call(node, aten.rsqrt.default, call(node, aten.add.Scalar, var, eps), name="rstd")
    parts = {0: cast_to(node, _normed(node, x, mean, rstd, args), dtypes[0])}
    if not _trains(node):
        return parts
    for at, value in ((1, mean), (2, rstd)):
        parts[at] = cast_to(node, per_channel(node, value, dims), dtypes[at])
    if node.target in AVERAGES:
        count = val(x).numel() // shape_of(x)[1]
        unbiased = call(node, aten.mul.Scalar, var, count / max(count - 1, 1))
        news = (("running_mean", mean), ("running_var", unbiased))
        for at, (name, value) in enumerate(news, AVERAGES[node.target]):
            momentum = args.get("momentum", args.get("exponential_average_factor"))
            old = call(node, aten.mul.Scalar, wide(node, args[name]), 1 - momentum)
            new = call(node, aten.mul.Scalar, per_channel(node, value, dims), momentum)
            parts[at] = cast_to(node, call(node, aten.add.Tensor, old, new), dtypes[at])
    return parts


def _reduced(x: fx.Node) -> list[int]:
    """All dimensions but the channels'."""
    return [dim for dim in range(val(x).dim()) if dim != 1]


def _normed(node: fx.Node, x: fx.Node, mean: fx.Node, rstd: fx.Node, args: dict[str, Any]) -> fx.Node:
    y = call(node, aten.mul.Tensor, call(node, aten.sub.Tensor, x, mean), _scale(node, rstd, args["weight"], x))
    if args["bias"] is None:
        return y
    return call(node, aten.add.Tensor, y, channelwise(node, wide(node, args["bias"]), x))


def _scale(node: fx.Node, rstd: fx.Node, weight: fx.Node | None, x: fx.Node) -> fx.Node:
    """`rstd * weight`, one number for each channel."""
    if weight is None:
        return rstd
    return call(node, aten.mul.Tensor, rstd, channelwise(node, wide(node, weight), x), name="scale")


def batch_norm_backward(node: fx.Node, wanted: set[int]) -> Parts:
    """Those of the gradients of input, weight and bias that are `wanted`, before `node`."""
    args, dtypes = arguments(node), [None if tensor is None else tensor.dtype for tensor in val(node)]
    g, x = (wide(node, args["grad_out" if "grad_out" in args else "grad_output"]), wide(node, args["input"]))
    dims, trains = _reduced(x), _trains(node)
    mean, rstd = _saved(node, x, args, trains)
    total = call(node, aten.sum.dim_IntList, g, dims, True, name="sum_of_grad")
    slope: fx.Node | None = None
    if 1 in wanted or (0 in wanted and trains):
        product = call(node, aten.mul.Tensor, g, call(node, aten.sub.Tensor, x, mean))
        slope = call(node, aten.sum.dim_IntList, product, dims, True, name="sum_of_grad_x")
    parts: Parts = {}
    if 0 in wanted:
        # `x - mean` anew: one value that both kernels read would be written.
        centred = call(node, aten.sub.Tensor, x, mean)
        inner = _centred_gradient(node, g, centred, total, slope, rstd) if trains and slope is not None else g
        grad = call(node, aten.mul.Tensor, inner, rstd)
        if args["weight"] is not None:
            grad = call(node, aten.mul.Tensor, grad, channelwise(node, wide(node, args["weight"]), x))
        parts[0] = cast_to(node, grad, dtypes[0])
    if 1 in wanted and slope is not None:
        grad = call(node, aten.mul.Tensor, slope, rstd)
        parts[1] = cast_to(node, per_channel(node, grad, dims), dtypes[1])
    if 2 in wanted:
        parts[2] = cast_to(node, per_channel(node, total, dims), dtypes[2])
    return parts


def _saved(node: fx.Node, x: fx.Node, args: dict[str, Any], trains: bool) -> tuple[fx.Node, fx.Node]:
    """Mean and reciprocal deviation of each channel, as the forward used them."""
    if trains:
        names = "save_mean", "save_invstd" if "save_invstd" in args else "save_var"
        mean, rstd = (channelwise(node, wide(node, args[name]), x) for name in names)
        return mean, rstd
    mean, var = (channelwise(node, wide(node, args[name]), x) for name in ("running_mean", "running_var"))
    eps = args.get("eps", args.get("epsilon"))
    return mean, call(node, aten.rsqrt.default, call(node, aten.add.Scalar, var, eps), name="rstd")


def _centred_gradient(
    node: fx.Node, g: fx.Node, centred: fx.Node, total: fx.Node, slope: fx.Node, rstd: fx.Node
) -> fx.Node:
    """`g - mean(g) - (x - mean) * rstd ** 2 * mean(g * (x - mean))`."""
    count = val(g).numel() // val(total).numel()
    shift = call(node, aten.mul.Scalar, total, 1 / count)
    square = call(node, aten.mul.Tensor, rstd, rstd)
    tilt = call(node, aten.mul.Tensor, call(node, aten.mul.Scalar, slope, 1 / count), square)
    inner = call(node, aten.sub.Tensor, g, shift)
    return call(node, aten.sub.Tensor, inner, call(node, aten.mul.Tensor, centred, tilt))
