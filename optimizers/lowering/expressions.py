"""Pointwise ATen operators as Triton expressions: one row per operator, its formula beside it.

A rule takes its operands in the order of the operator's schema, each already text that may stand in any expression (a name
or a literal in parentheses), and returns the text of the result. Operands are in the compute type of the operator: f32 for
f16 and bf16, the promoted type for comparisons, otherwise the result's own type. NaN goes where ATen lets it go, which is
why `where` stands where `tl.maximum` would drop it.

Activations are in `formulas.activations`. Sources: ATen's formulas in `aten/src/ATen/native/cuda/Unary*.cu`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tracefuse.optimizers.formulas import activations
from tracefuse.optimizers.formulas.activations import ACTIVATIONS, Rule
from tracefuse.optimizers.formulas.elementary import clamp, clamp_to_tensors, expm1, log1p_anywhere, truncated
from tracefuse.optimizers.lowering.random_ops import APPLY
from tracefuse.optimizers.ops import aten


def _power(x: str, exponent: str) -> str | None:
    chains = {1.0: x, 2.0: f"{x} * {x}", 3.0: f"{x} * {x} * {x}", 4.0: f"({x} * {x}) * ({x} * {x})"}
    roots = {0.5: f"tl.sqrt({x})", -0.5: f"1.0 / tl.sqrt({x})", -1.0: f"1.0 / {x}", -2.0: f"1.0 / ({x} * {x})"}
    return (chains | roots).get(float(exponent.strip("()")))


def _exponential(base: str, x: str) -> str | None:
    """`base ** x` of the base in float32, as ATen takes it, by way of float64: what is near 1 is mostly taken from 1
    afterwards, as in Adam's `1 - beta ** step`. The float32 next to 0.999 alone changes that by 1.3e-5 of it, at any step."""
    number = float(base.strip("()"))
    return (
        _wide_exponential(repr(torch.tensor(number, dtype=torch.float32).item()), x) if 0 < number < math.inf else None
    )


def _wide_exponential(base: str, x: str) -> str | None:
    number = float(base.strip("()"))
    return f"tl.exp2({x}.to(tl.float64) * {math.log2(number)!r}).to({x}.dtype)" if 0 < number < math.inf else None


def _sign(x: str) -> str:
    """1, 0 or -1 in the type of `x`; ATen's sign of NaN and of -0.0 is 0."""
    return f"({x} > 0).to({x}.dtype) - ({x} < 0).to({x}.dtype)"


def _scaled(b: str, alpha: str) -> str:
    return b if alpha.strip("()") in ("1", "1.0") else f"{b} * {alpha}"


def _either(a: str, b: str, alpha: str = "True") -> str:
    return f"{a} | {b}" if alpha == "True" else a


def _with_scalar(name: str, rule: Rule) -> dict[Any, Rule]:
    """The rows of an operator of two tensors, and of a tensor and a number."""
    return dict.fromkeys((getattr(aten, name).Tensor, getattr(aten, name).Scalar), rule)


ARITHMETIC: dict[Any, Rule] = {
    **_with_scalar("add", lambda a, b, alpha="1": f"{a} + {_scaled(b, alpha)}"),
    **_with_scalar("sub", lambda a, b, alpha="1": f"{a} - {_scaled(b, alpha)}"),
    **_with_scalar("rsub", lambda a, b, alpha="1": f"{b} - {_scaled(a, alpha)}"),
    **_with_scalar("mul", lambda a, b: f"{a} * {b}"),
    **_with_scalar("div", lambda a, b: f"{a} / {b}"),
    aten.neg.default: lambda a: f"-{a}",
    **{
        getattr(aten, name).default: lambda a, name=name: f"tl.{name}({a})"
        for name in ("abs", "sqrt", "exp", "exp2", "log", "log2", "sin", "cos", "erf", "floor", "ceil")
    },
    aten.sgn.default: _sign,
    aten.sign.default: _sign,
    aten.reciprocal.default: lambda a: f"1.0 / {a}",
    aten.square.default: lambda a: f"{a} * {a}",
    aten.rsqrt.default: lambda a: f"1.0 / tl.sqrt({a})",
    aten.expm1.default: expm1,
    aten.log1p.default: log1p_anywhere,
    aten.trunc.default: truncated,
    aten.pow.Tensor_Scalar: _power,
    aten.pow.Scalar: _exponential,
    aten.maximum.default: lambda a, b: f"tl.where(({a} > {b}) | ({a} != {a}), {a}, {b})",
    aten.minimum.default: lambda a, b: f"tl.where(({a} < {b}) | ({a} != {a}), {a}, {b})",
    aten.clamp.default: clamp,
    aten.clamp_min.default: clamp,
    aten.clamp_max.default: lambda a, high: clamp(a, None, high),
    aten.clamp.Tensor: clamp_to_tensors,
    aten.clamp_min.Tensor: clamp_to_tensors,
    aten.clamp_max.Tensor: lambda a, high: clamp_to_tensors(a, None, high),
    aten.addcmul.default: lambda a, b, c, value="1": f"{a} + {_scaled(f'{b} * {c}', value)}",
    aten.addcdiv.default: lambda a, b, c, value="1": f"{a} + {_scaled(f'({b} / {c})', value)}",
    aten.lerp.Scalar: lambda a, b, weight: f"{a} + {weight} * ({b} - {a})",
    aten.lerp.Tensor: lambda a, b, weight: f"{a} + {weight} * ({b} - {a})",
    aten.native_dropout_backward.default: lambda grad, mask, scale: f"{grad} * ({mask} * {scale})",
    APPLY: lambda x, mask, scale: f"{x} * ({mask} * {scale})",
    **ACTIVATIONS,
}

# Rows for boolean results: Triton adds and multiplies one-bit integers without a carry, so True + True would be False.
BOOLEAN: dict[Any, Rule] = {
    **_with_scalar("add", _either),
    **_with_scalar("mul", lambda a, b: f"{a} & {b}"),
    aten.maximum.default: _either,
    aten.minimum.default: lambda a, b: f"{a} & {b}",
    aten.sgn.default: lambda a: a,
    aten.sign.default: lambda a: a,
}

# Rows for integer results, where they differ.
INTEGRAL: dict[Any, Rule] = dict.fromkeys((aten.floor.default, aten.ceil.default, aten.trunc.default), lambda a: a)

# Rows for f64, where a series is exact for less of the axis.
WIDE: dict[Any, Rule] = activations.WIDE | {
    aten.pow.Scalar: _wide_exponential,
    aten.expm1.default: lambda x: expm1(x, activations.NEAR_ZERO),
}

# The operand called `condition` or `mask` stays boolean.
SELECTION: dict[Any, Rule] = {
    **dict.fromkeys(
        (aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther),
        lambda condition, a, b: f"tl.where({condition}, {a}, {b})",
    ),
    aten.masked_fill.Scalar: lambda a, mask, value: f"tl.where({mask}, {value}, {a})",
    aten.masked_fill.Tensor: lambda a, mask, value: f"tl.where({mask}, {value}, {a})",
}

COMPARISON: dict[Any, Rule] = {
    op: rule
    for name, sign in (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="))
    for op, rule in _with_scalar(name, lambda a, b, sign=sign: f"{a} {sign} {b}").items()
} | {
    aten.isnan.default: lambda a: f"{a} != {a}",
    aten.isinf.default: lambda a: f"tl.abs({a}) == float('inf')",
    aten.logical_not.default: lambda a: f"{a} == 0",
}

# Integers and booleans only.
BITWISE: dict[Any, Rule] = {
    aten.bitwise_and.Tensor: lambda a, b: f"{a} & {b}",
    aten.bitwise_or.Tensor: lambda a, b: f"{a} | {b}",
    aten.bitwise_xor.Tensor: lambda a, b: f"{a} ^ {b}",
    aten.bitwise_not.default: lambda a: f"~{a}",
}

LOGICAL: dict[Any, Rule] = {
    aten.logical_and.default: lambda a, b: f"{a} & {b}",
    aten.logical_or.default: lambda a, b: f"{a} | {b}",
    aten.logical_xor.default: lambda a, b: f"{a} ^ {b}",
}

POINTWISE: dict[Any, Rule] = ARITHMETIC | SELECTION | COMPARISON | BITWISE | LOGICAL

# Their numbers are compared or stored as they are: ATen rounds them to the operands' type first.
ROUNDING = {*SELECTION, *COMPARISON}

# Comparisons of two tensors: one may be made of the other.
COMPARED = {op for op in COMPARISON if op._overloadname == "Tensor"}

# Ops whose text compares with a number.
COMPARING = {
    *COMPARISON, *activations.COMPARED, aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default,
}  # fmt: skip


def rule_of(target: Any, dtype: torch.dtype) -> Rule | None:
    """The row of a pointwise operator with a result of `dtype`; None where it has no Triton form."""
    if target in ARITHMETIC and dtype is torch.bool:
        return BOOLEAN.get(target)
    if target in INTEGRAL and not dtype.is_floating_point:
        return INTEGRAL[target]
    if target in activations.ROUNDED and dtype in (torch.float16, torch.bfloat16):
        return activations.ROUNDED[target]
    return WIDE.get(target) if target in WIDE and dtype is torch.float64 else POINTWISE.get(target)


# Many instructions per element: worth computing once where the value is broadcast.
TRANSCENDENTAL = frozenset({
    *activations.COSTLY, aten.sin.default, aten.cos.default, aten.exp.default, aten.exp2.default, aten.log.default,
    aten.log2.default, aten.erf.default, aten.expm1.default, aten.log1p.default, aten.sqrt.default, aten.rsqrt.default,
    aten.pow.Scalar,
})  # fmt: skip

# Of those, with a branch for large arguments, which are reduced in memory of the thread.
PERIODIC = frozenset({aten.sin.default, aten.cos.default})
