"""Which ops a kernel over lists may hold: pointwise ones, on tensors that lie alike, and on numbers."""

from __future__ import annotations

import math

import torch
from torch import fx

from tracefuse.optimizers.facts import is_dense
from tracefuse.optimizers.lowering.expressions import POINTWISE, TRANSCENDENTAL, rule_of
from tracefuse.optimizers.lowering.literals import COMPUTE_TYPE
from tracefuse.optimizers.lowering.lowering import COPIES
from tracefuse.optimizers.trace import SHORT_DTYPE, val

aten = torch.ops.aten

LIKE = {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default}
"""Constants that take their shape from an operand."""

ROOTS = {aten.sqrt.default, aten.rsqrt.default}

Arrangement = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides, where the strides of dimensions of one element do not count."""


def arrangement(tensor: torch.Tensor) -> Arrangement:
    shape = tuple(tensor.shape)
    return shape, tuple(step if size > 1 else 0 for size, step in zip(shape, tensor.stride(), strict=True))


def refusal(node: fx.Node) -> str | None:
    """Why a kernel over lists cannot hold an op; None where it can."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return "it is a kernel already"
    if node.target not in POINTWISE and node.target not in COPIES and node.target not in LIKE:
        return "it is not pointwise"
    result, operands = val(node), [val(a) for a in node.all_input_nodes]
    if not all(isinstance(t, torch.Tensor) for t in (result, *operands)):
        return "it takes or yields lists"
    return _type_refusal(node, result, operands) or _order_refusal(result, operands) or _option_refusal(node)


def _type_refusal(node: fx.Node, result: torch.Tensor, operands: list[torch.Tensor]) -> str | None:
    for tensor in (result, *operands):
        if tensor.dtype not in COMPUTE_TYPE:
            return f"{SHORT_DTYPE.get(tensor.dtype, tensor.dtype)} has no Triton form"
        if tensor.layout is not torch.strided:
            return f"its layout is {tensor.layout}"
        if tensor.device != result.device:
            return f"it has values on {result.device} and {tensor.device}"
    if node.target in POINTWISE and rule_of(node.target, result.dtype) is None:
        return f"its result of {SHORT_DTYPE[result.dtype]} has no Triton form"
    return None


def _order_refusal(result: torch.Tensor, operands: list[torch.Tensor]) -> str | None:
    if result.numel() and not is_dense(tuple(result.shape), result.stride()):
        return "its elements do not fill one block of memory"
    for operand in operands:
        if operand.dim() and tuple(operand.shape) != tuple(result.shape):
            return "it broadcasts an operand"
        if operand.dim() and arrangement(operand) != arrangement(result):
            return "its operands lie in other orders of memory"
    return None


def _option_refusal(node: fx.Node) -> str | None:
    if node.target is aten.pow.Tensor_Scalar and node.args[1] not in (0.5, 1, 2, 3, 4, -0.5, -1, -2):
        return f"a power of {node.args[1]} has no Triton form"
    if node.target is aten.pow.Scalar and not (0 < node.args[0] < math.inf):  # type: ignore[operator]
        return f"a power of {node.args[0]} has no Triton form"
    if node.target is aten.div.Tensor and not val(node).is_floating_point():
        return "it divides integers"
    return None


def is_costly(node: fx.Node) -> bool:
    """Whether an op takes so many instructions that a number is better computed once than by every program."""
    return node.target in TRANSCENDENTAL and node.target not in ROOTS
