"""The backward of a pool without the operand of its forward, of which it reads the type alone.

    dx = max_pool2d_with_indices_backward(g, x, ..., indices)      becomes      the same of zeros of x's type

Autograd saves x for that, and a kernel that computes x again would write it. The zeros are a constant: a kernel that reads no
element of them never makes them. A backward that no kernel holds, as of windows with gaps, keeps x: ATen would fill the zeros.
"""

from __future__ import annotations

from torch import fx

from tracefuse.optimizers.facts import is_dense
from tracefuse.optimizers.formulas.windows import WINDOW_OPS, is_shape_only
from tracefuse.optimizers.kernels.fusible import refusal
from tracefuse.optimizers.lowering.geometry import memory_order
from tracefuse.optimizers.ops import arguments, aten, behind_views, set_argument
from tracefuse.optimizers.trace import call, val


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
