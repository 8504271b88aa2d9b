"""What cuDNN copies around a convolution whose images lie channel by channel: its tensor-core kernels take channels-last.

    convolution             copies x in and y out
    convolution_backward    copies g in and dx out for the input's gradient, g and x in for the weight's

Nothing is copied where the operands lie channels-last already, where no tensor core runs (float64, and float32 without TF32),
and around a 1 × 1 convolution whose places lie along aligned rows: that is a matmul, which takes either order. A depthwise
convolution copies nothing, and has kernels for the order channel by channel that read an image again for its taps. Volumes
(`conv3d`) are copied in both orders.

Fitted to convolutions of both orders on an H200 (torch 2.11, cuDNN 9): channels-last operands save what such copies take.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import fx

from tracefuse.optimizers.facts import lies_channels_last, once_per_kind
from tracefuse.optimizers.ops import arguments
from tracefuse.optimizers.trace import HALVES, shape_of, val

_FORWARDS, _BACKWARDS = ({f"{by}convolution{of}" for by in ("", "searched_")} for of in ("", "_backward"))
"""The names of the operators: ATen's, and those that have their algorithm searched (`decompose.searched`)."""

ALIGNED_BYTES = 16
"""What a row is a multiple of where a matmul loads it fast."""
FEW_CHANNELS = 8
"""With fewer, the gradient of the input has no kernel on tensor cores in float32."""


def image_arguments(node: fx.Node) -> tuple[str, ...]:
    """The arguments of a convolution, or of its backward, that are images."""
    return ("input",) if is_forward(node) else ("grad_output", "input")


def is_forward(node: fx.Node) -> bool:
    """Whether it is a convolution."""
    return _name(node) in _FORWARDS


def is_backward(node: fx.Node) -> bool:
    """Whether it is the backward of a convolution."""
    return _name(node) in _BACKWARDS


def is_convolution(node: fx.Node) -> bool:
    """Whether it is a convolution or the backward of one."""
    return is_forward(node) or is_backward(node)


def _name(node: fx.Node) -> str:
    return node.target.overloadpacket.__name__ if isinstance(node.target, torch._ops.OpOverload) else ""


def is_depthwise(node: fx.Node) -> bool:
    """Whether each channel is convolved by itself."""
    args = arguments(node)
    return 1 < args["groups"] == shape_of(args["input"])[1]


def taps(node: fx.Node) -> int:
    """How many elements the window of a convolution has."""
    return math.prod(shape_of(arguments(node)["weight"])[2:])


@once_per_kind
def copied_bytes(node: fx.Node) -> int:
    """Bytes of the images that are copied around the op, each time that it is; 0 for what is no such convolution."""
    return sum(tensor.numel() * tensor.element_size() for tensor in copied_images(node))


def copied_images(node: fx.Node, computed: Collection[int] = (0, 1)) -> list[torch.Tensor]:
    """The images that are copied around the op, for those of its gradients that are `computed`: one that two of them read is
    copied for each."""
    if not is_convolution(node):
        return []
    args = arguments(node)
    x = val(args["input"])
    if x.dim() != 4 or x.dtype not in (*HALVES, torch.float32) or _is_matmul(node):
        return []
    if is_depthwise(node):
        return []
    if lies_channels_last(x):  # then so do the results
        return [val(args[name]) for name in image_arguments(node) if not lies_channels_last(val(args[name]))]
    if is_forward(node):
        return [x, val(node)]
    g, (dx, dw) = val(args["grad_output"]), (bool(args["output_mask"][i]) and i in computed for i in (0, 1))
    has_kernel = x.dtype in HALVES or x.shape[1] >= FEW_CHANNELS
    return [g, x] * (dx and has_kernel) + [g, x] * dw


def _is_matmul(node: fx.Node) -> bool:
    """Whether a convolution multiplies the channels of each place, all places of a channel lying along an aligned row."""
    args, x = arguments(node), val(arguments(node)["input"])
    plain = all(s == 1 for s in args["stride"]) and all(p == 0 for p in args["padding"]) and args["groups"] == 1
    return taps(node) == 1 and plain and math.prod(x.shape[2:]) * x.element_size() % ALIGNED_BYTES == 0
