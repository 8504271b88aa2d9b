"""Backwards of what picks elements, `max`, `min`, embeddings and pools, as ops that kernels hold.

The backward of `max` and `min` along a dimension, as a comparison of places.

    zeros = new_zeros(x.shape)                                        place == arange(n)
    grad = scatter(zeros, dim, place, g)             becomes          grad = where(place == arange(n), g, 0)

ATen fills the whole gradient with zeros before it writes a few elements of it. The comparison writes each once, joins what is
beside it, and needs no memory of zeros. It is for places that an extremum found, which are in range.

The backward of an embedding of all its rows in turn, as of positions: nothing is added up.

    grad = embedding_dense_backward(g, arange(n), n, ...)         becomes         grad = g + 0

ATen sorts the places, fills the gradient with zeros, and adds to it. The 0 makes 0 of -0, as that does. Of fewer rows than
there are it stays: how many are left is no number of the program, which a trace at another size could be told by.

The backward of a pool without the operand of its forward, of which it reads the type alone.

    dx = max_pool2d_with_indices_backward(g, x, ..., indices)      becomes      the same of zeros of x's type

Autograd saves x for that, and a kernel that computes x again would write it. The zeros are a constant: a kernel that reads no
element of them never makes them. A backward that no kernel holds, as of windows with gaps, keeps x: ATen would fill the zeros.
"""

from __future__ import annotations

import torch
from torch import fx

from tracefuse.optimizers.facts import is_dense
from tracefuse.optimizers.formulas.windows import WINDOW_OPS, is_shape_only
from tracefuse.optimizers.kernels.fusible import refusal
from tracefuse.optimizers.lowering.composites import CONSTANTS, fill_value
from tracefuse.optimizers.lowering.geometry import memory_order
from tracefuse.optimizers.ops import arguments, aten, behind_views, is_getitem, set_argument
from tracefuse.optimizers.rewrite import replace_under_name
from tracefuse.optimizers.trace import call, shape_of, val

SCATTER = aten.scatter.src
FOUND_PLACES = {aten.max.dim, aten.min.dim}
GRADIENTS = {SCATTER, aten.embedding_dense_backward.default, *WINDOW_OPS}
"""The operators of what this module rewrites."""


def is_gradient_of_extremum(node: fx.Node) -> bool:
    """Whether the op scatters one number for each row to the place of the row's extremum, into zeros."""
    if node.target is not SCATTER:
        return False
    args = arguments(node)
    zeros, place, shape = args["self"], args["index"], shape_of(node)
    source = behind_views(place)
    is_found = is_getitem(source) and source.args[0].target in FOUND_PLACES and source.args[1] == 1  # type: ignore[union-attr]
    if not is_found or not shape or zeros.target not in CONSTANTS or fill_value(zeros) != 0:
        return False
    dim = args["dim"] % len(shape)
    one = (*shape[:dim], 1, *shape[dim + 1 :])
    return shape_of(place) == shape_of(args["src"]) == one and shape[dim] > 1


def rewrite_scatter(node: fx.Node) -> str | None:
    """Replace such an op. Returns None when done, else the reason why it stays."""
    args, rank = arguments(node), val(node).dim()
    dim, device = args["dim"] % rank, val(node).device

    def build() -> fx.Node:
        places = call(node, aten.arange.default, shape_of(node)[dim], dtype=torch.int64, device=device)
        column = call(node, aten.view.default, places, [shape_of(node)[dim], *[1] * (rank - 1 - dim)])
        is_place = call(node, aten.eq.Tensor, column, args["index"])
        return call(node, aten.where.ScalarOther, is_place, args["src"], 0.0)

    return replace_under_name(node, build)


def is_gradient_of_rows(node: fx.Node) -> bool:
    """Whether the op gives each row of an embedding, all of them in turn, the gradient of one place.

    A view of as many places along one dimension, without gaps, has all of them in turn: `arange(n)[:1].expand(n)` does not.
    """
    if node.target is not aten.embedding_dense_backward.default:
        return False
    args = arguments(node)
    places, rows = behind_views(args["indices"]), args["num_weights"]
    if places.target is not aten.arange.default or args["padding_idx"] in range(rows):
        return False
    end, shape = arguments(places)["end"], shape_of(args["indices"])
    is_in_turn = rows == max(shape, default=1) and is_dense(shape, val(args["indices"]).stride())
    return type(end) is int and end == rows == torch.Size(shape).numel() and is_in_turn


def rewrite_rows(node: fx.Node) -> str | None:
    """Replace such an op. Returns None when done, else the reason why it stays."""
    gradient = arguments(node)["grad_output"]

    def build() -> fx.Node:
        return call(node, aten.add.Scalar, call(node, aten.view.default, gradient, list(shape_of(node))), 0)

    return replace_under_name(node, build)


def reads_type_alone(node: fx.Node) -> bool:
    """Whether the op, which a kernel can hold, has an operand with elements that it does not read."""
    operand = arguments(node).get("self") if node.target in WINDOW_OPS else None
    if operand is None or not is_shape_only(operand, node) or refusal(node) is not None:
        return False
    return behind_views(operand).target is not aten.full.default


def rewrite_operand(node: fx.Node) -> str | None:
    """Give such an op zeros of its operand's type, in place. Returns None when done, else the reason why it stays."""
    x = val(arguments(node)["self"])
    if not is_dense(tuple(x.shape), x.stride()):
        return "its operand has gaps in memory"
    order = memory_order(x)
    with node.graph.inserting_before(node):
        zeros = call(node, aten.full.default, [x.shape[d] for d in order], 0, dtype=x.dtype, device=x.device)
        if order != sorted(order):
            zeros = call(node, aten.permute.default, zeros, [order.index(d) for d in range(x.dim())])
    set_argument(node, "self", zeros)
    return None
