"""Numbers as Triton text, rounded as ATen rounds a Python number that meets a tensor."""

from __future__ import annotations

import math

import torch
from torch import fx

from tracefuse.optimizers.formulas import activations
from tracefuse.optimizers.lowering.expressions import COMPARING, ROUNDING
from tracefuse.optimizers.trace import HALVES

COMPUTE_TYPE = {
    torch.float64: "float64", torch.float32: "float32", torch.float16: "float32", torch.bfloat16: "float32",
    torch.int64: "int64", torch.int32: "int32", torch.int16: "int16", torch.int8: "int8", torch.uint8: "uint8",
    torch.bool: "int1",
}  # fmt: skip
"""The type in which a kernel computes values of a dtype."""

IN_OWN_TYPE = ROUNDING | activations.IN_OWN_TYPE
"""Ops whose numbers ATen turns to the type of the operands, also where it computes in a wider one."""

SMALL_INTEGERS = (torch.int32, torch.int16, torch.int8, torch.uint8)


def number_text(node: fx.Node, number: float, dtype: torch.dtype) -> str:
    """The text of a number among operands of `dtype`, which ATen turns to that type: 0.1 > x is 0.10009765625 > x in bf16.

    Triton rounds a literal to f32 where it is compared with f64, and takes none that an integer type does not hold.
    """
    text = literal(number, COMPUTE_TYPE[dtype])
    if dtype is torch.float64 and node.target in COMPARING and math.isfinite(number):
        return text if _held(number, torch.float32) == number else f"tl.full((), {text}, tl.float64)"
    if (dtype in HALVES and node.target in IN_OWN_TYPE) or dtype in SMALL_INTEGERS:
        return literal(_held(number, dtype), COMPUTE_TYPE[dtype])
    return text


def _held(number: float, dtype: torch.dtype) -> float:
    """The number as a value of `dtype`."""
    exact = torch.float64 if isinstance(number, float) else torch.int64
    return torch.tensor(number, dtype=exact, device="cpu").to(dtype).item()


def literal(number: float, dtype: str) -> str:
    """A number as Triton text that may stand in any expression."""
    if dtype == "int1":
        return str(bool(number))
    if "int" in dtype:
        return str(int(number)) if number >= 0 else f"({int(number)})"
    number = float(number)
    if math.isnan(number) or math.isinf(number):
        return f"float('{number}')"
    return repr(number) if number >= 0 else f"({number!r})"
