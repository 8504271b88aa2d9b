"""The backward of `max` and `min` along a dimension, as a comparison of places.

    zeros = new_zeros(x.shape)                                        place == arange(n)
    grad = scatter(zeros, dim, place, g)             becomes          grad = where(place == arange(n), g, 0)

ATen fills the whole gradient with zeros before it writes a few elements of it. The comparison writes each once, joins what is
beside it, and needs no memory of zeros. It is for places that an extremum found, which are in range.
"""

from __future__ import annotations

import torch
from torch import fx

from tracefuse.optimizers.lowering.composites import CONSTANTS, fill_value
from tracefuse.optimizers.ops import arguments, aten, behind_views, is_getitem
from tracefuse.optimizers.rewrite import replace_under_name
from tracefuse.optimizers.trace import call, shape_of, val

SCATTER = aten.scatter.src
FOUND_PLACES = {aten.max.dim, aten.min.dim}


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
