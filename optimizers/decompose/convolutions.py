"""A convolution's bias, and the bias's gradient, as ops of their own, which the kernels beside the convolution hold.

    y = convolution(x, w, b)                               y = convolution(x, w) + b
    dx, dw, db = convolution_backward(g, ..., [1, 1, 1])   dx, dw, _ = convolution_backward(g, ..., [1, 1, 0])
                                                           db = sum of g over images and places

cuDNN's convolution has no bias: ATen adds it in a second kernel, which reads and writes the whole image, and adds up g in
another, which reads it. A kernel that reads y anyway, as of a norm's statistics or an activation, adds the bias on the way,
and the kernel that computes g adds it up while it is there. The bias stays where anything else reads y, which is then written,
and its gradient where no kernel computes g.

Source: `aten/src/ATen/native/cudnn/ConvShared.cpp` (`cudnn_convolution` and what ATen does with its result).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from tracefuse.optimizers.axes import behind_permutations
from tracefuse.optimizers.decompose.writing import channelwise, take_name
from tracefuse.optimizers.kernels.fusible import has_fusible_neighbour, is_read_by_kernels_alone, refusal
from tracefuse.optimizers.lowering.geometry import SUMMED, rows_of
from tracefuse.optimizers.ops import arguments, aten, is_getitem, reached, set_argument
from tracefuse.optimizers.rewrite import replace_under_name, replace_value
from tracefuse.optimizers.trace import call, phase, shape_of, val

FORWARD, BACKWARD = aten.convolution.default, aten.convolution_backward.default

CONVOLUTIONS = {
    FORWARD: "a convolution without bias, and an addition",
    BACKWARD: "its gradients of input and weight, and a sum for the bias",
}
BIAS = 2
"""The place of the bias's gradient among the results of a backward."""


def has_bias(node: fx.Node) -> bool:
    """Whether the op is a convolution with a bias, or a backward that computes a bias's gradient."""
    if node.target is FORWARD:
        return isinstance(arguments(node)["bias"], fx.Node)
    return node.target is BACKWARD and _gradient_of_bias(node) is not None


def rewrite_bias(node: fx.Node) -> str | None:
    """Replace such an op. Returns None when done, else the reason why it stays."""
    return _rewrite_forward(node) if node.target is FORWARD else _rewrite_backward(node)


def _rewrite_forward(node: fx.Node) -> str | None:
    if not is_read_by_kernels_alone(node):
        return "its result is written for other ops than those of a kernel: ATen adds the bias as fast"
    bias = arguments(node)["bias"]

    def build() -> fx.Node:
        plain = node.graph.create_node("call_function", node.target, node.args, node.kwargs, name=f"{node.name}_plain")
        plain.meta = dict(node.meta)
        set_argument(plain, "bias", None)
        return call(node, aten.add.Tensor, plain, channelwise(node, bias, plain))

    return replace_under_name(node, build)


def _rewrite_backward(node: fx.Node) -> str | None:
    args, old = arguments(node), _gradient_of_bias(node)
    assert old is not None
    g = args["grad_output"]
    if not has_fusible_neighbour(old, g):
        return "no kernel computes the gradient that it reads: ATen adds it up as fast"
    with node.graph.inserting_before(node):
        # Of the value as it lies, the sum is one of columns that the kernel before it may have.
        summed, dims = behind_permutations(g, (dim for dim in range(val(g).dim()) if dim != 1))
        space = dims[1:]
        if _ends_rows_of(summed, space):
            # In float32, so that it is rounded once.
            wide = {"dtype": torch.promote_types(val(g).dtype, torch.float32)}
            of_each = call(node, aten.sum.dim_IntList, summed, space, **wide)
            total = call(node, aten.sum.dim_IntList, of_each, dims[:1], dtype=val(g).dtype)
        else:
            total = call(node, aten.sum.dim_IntList, summed, dims)
    if reason := replace_value(old, total):
        return reason
    take_name(total, old)
    mask = [*args["output_mask"][:BIAS], False]
    if any(mask):
        set_argument(node, "output_mask", mask)
        node.meta["val"] = (*val(node)[:BIAS], None)
    return None


def _ends_rows_of(g: fx.Node, space: Sequence[int]) -> bool:
    """Whether `g` is computed by a kernel that reduces each channel of each image, as an instance norm's backward is. Such a
    kernel can have the sum of each, but not the sum of a channel of all images."""
    if val(g).dim() < 3 or list(space) != list(range(2, val(g).dim())):
        return False
    images, channels, *sizes = shape_of(g)
    rows = (1, images * channels, math.prod(sizes))
    before = reached([g], _operands_in_kernels)
    return images > 1 and any(n.target in SUMMED and _rows(n) == rows for n in before)


def _operands_in_kernels(node: fx.Node) -> list[fx.Node]:
    """What a kernel that has `node` may compute too, as far as the next reduction."""
    if node.target in SUMMED:
        return []
    return [a for a in node.all_input_nodes if phase(a) == phase(node) and refusal(a) is None]


def _rows(node: fx.Node) -> tuple[int, int, int] | None:
    rows = rows_of(node)
    return rows.sizes if rows else None


def _gradient_of_bias(node: fx.Node) -> fx.Node | None:
    """The value that takes the bias's gradient out of a backward's results, if it is read."""
    parts = [user for user in node.users if is_getitem(user) and user.args[1] == BIAS and user.users]
    return parts[0] if len(parts) == 1 and arguments(node)["output_mask"][BIAS] else None
