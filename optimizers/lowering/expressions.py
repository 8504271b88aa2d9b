"""Pointwise ATen operators as Triton expressions: one row per operator, its formula beside it.

A rule takes its operands in the order of the operator's schema, each already text that may stand in any expression (a name
or a literal in parentheses), and returns the text of the result. Operands are in the compute type of the operator: f32 for
f16 and bf16, the promoted type for comparisons, otherwise the result's own type. NaN goes where ATen lets it go, which is
why `where` stands where `tl.maximum` would drop it.

Sources: ATen's formulas in `aten/src/ATen/native/cuda/Activation*.cu`, `BinaryMiscBackwardOpsKernels.cu` and `Unary*.cu`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tracefuse.optimizers.lowering.random_ops import APPLY
from tracefuse.optimizers.ops import aten

Rule = Callable[..., str | None]

SQRT_HALF = repr(0.5**0.5)
INV_SQRT_2PI = "0.3989422804014327"
SQRT_2_OVER_PI = "0.7978845608028654"
GELU_CUBIC = "0.044715"
NAN = "float('nan')"


def sigmoid(x: str) -> str:
    return f"1.0 / (1.0 + tl.exp(-{x}))"


def _tanh(x: str, limit: float = 0.3) -> str:
    """`1 - 2 / (exp(2x) + 1)`, and below `limit`, where that cancels, the Taylor series to x**9."""
    square = f"{x} * {x}"
    series = f"{x} * (1.0 + {square} * (-1.0 / 3 + {square} * (2.0 / 15 + {square} * (-17.0 / 315 + {square} * 62.0 / 2835))))"
    return f"tl.where(tl.abs({x}) < {limit}, {series}, 1.0 - 2.0 / (tl.exp(2.0 * {x}) + 1.0))"


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


def _gelu(x: str, approximate: str = "none") -> str:
    if approximate == "none":
        return f"0.5 * {x} * (1.0 + tl.erf({x} * {SQRT_HALF}))"
    return f"{x} * ({sigmoid(_twice_gelu_inner(x))})"


def _gelu_inner(x: str) -> str:
    return f"({SQRT_2_OVER_PI} * ({x} + {GELU_CUBIC} * {x} * {x} * {x}))"


def _twice_gelu_inner(x: str) -> str:
    return f"(2.0 * {_gelu_inner(x)})"


def _gelu_backward(grad: str, x: str, approximate: str = "none") -> str:
    if approximate == "none":
        return f"{grad} * (0.5 * (1.0 + tl.erf({x} * {SQRT_HALF})) + {x} * tl.exp(-0.5 * {x} * {x}) * {INV_SQRT_2PI})"
    gate = f"({sigmoid(_twice_gelu_inner(x))})"
    slope = f"({SQRT_2_OVER_PI} * (1.0 + 3.0 * {GELU_CUBIC} * {x} * {x}))"
    return f"{grad} * {gate} * (1.0 + 2.0 * {x} * (1.0 - {gate}) * {slope})"


def _gelu_rounded(x: str, approximate: str = "none") -> str:
    """GELU to the precision of f16: `x * cdf(x)`."""
    return _gelu(x, approximate) if approximate != "none" else f"{x} * {_cdf(x)}"


def _gelu_rounded_backward(grad: str, x: str, approximate: str = "none") -> str:
    if approximate != "none":
        return _gelu_backward(grad, x, approximate)
    return f"{grad} * ({_cdf(x)} + {x} * tl.exp(-0.5 * {x} * {x}) * {INV_SQRT_2PI})"


def _cdf(x: str) -> str:
    """The normal distribution function to 1e-7, with an exponential and a division where `erf` takes thirty instructions."""
    # Abramowitz and Stegun, "Handbook of mathematical functions", 7.1.26: `erfc(z) = poly(t) * exp(-z * z)` with
    # `t = 1 / (1 + p * z)` and `z = |x| / sqrt(2)`.
    t = f"(1.0 / (1.0 + {0.3275911 * 0.5**0.5!r} * tl.abs({x})))"
    tail = "0.5307027145"
    for coefficient in ("-0.7265760135", "0.7107068705", "-0.142248368", "0.127414796"):
        tail = f"({coefficient} + {t} * {tail})"
    tail = f"({t} * {tail} * tl.exp(-0.5 * {x} * {x}))"
    return f"tl.where({x} < 0, {tail}, 1.0 - {tail})"


def _silu_backward(grad: str, x: str) -> str:
    gate = f"({sigmoid(x)})"
    return f"{grad} * {gate} * (1.0 + {x} * (1.0 - {gate}))"


def _sign(x: str) -> str:
    """1, 0 or -1 in the type of `x`; ATen's sign of NaN and of -0.0 is 0."""
    return f"({x} > 0).to({x}.dtype) - ({x} < 0).to({x}.dtype)"


def _clamp(x: str, low: str | None = None, high: str | None = None) -> str:
    if NAN in (low, high):
        return f"{x} * {NAN}"
    above = x if low is None else f"tl.where({x} < {low}, {low}, {x})"
    return above if high is None else f"tl.where({above} > {high}, {high}, {above})"


def _scaled(b: str, alpha: str) -> str:
    return b if alpha.strip("()") in ("1", "1.0") else f"{b} * {alpha}"


def _log1p(u: str) -> str:
    """`log(1 + u)` for `u` in [0, 1]; the quotient makes up for what 1 + u rounds off.

    Source: Goldberg, "What every computer scientist should know about floating-point arithmetic", theorem 4.
    """
    return f"tl.where(1.0 + {u} == 1.0, {u}, tl.log(1.0 + {u}) * ({u} / ((1.0 + {u}) - 1.0)))"


def _softplus(x: str, beta: str = "1.0", threshold: str = "20.0") -> str:
    """`log(1 + exp(z)) = max(z, 0) + log(1 + exp(-|z|))` for z = beta * x."""
    is_plain = beta.strip("()") in ("1", "1.0")
    z = x if is_plain else f"({x} * {beta})"
    soft = f"tl.where({z} > 0, {z}, 0) + {_log1p(f'tl.exp(-tl.abs({z}))')}"
    return f"tl.where({z} > {threshold}, {x}, {soft if is_plain else f'({soft}) / {beta}'})"


def _either(a: str, b: str, alpha: str = "True") -> str:
    return f"{a} | {b}" if alpha == "True" else a


def _leaky_relu_backward(grad: str, x: str, slope: str, _is_result: Any = False) -> str:
    return f"tl.where({x} > 0, {grad}, {grad} * {slope})"


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
    aten.abs.default: lambda a: f"tl.abs({a})",
    aten.sgn.default: _sign,
    aten.sign.default: _sign,
    aten.reciprocal.default: lambda a: f"1.0 / {a}",
    aten.square.default: lambda a: f"{a} * {a}",
    aten.sqrt.default: lambda a: f"tl.sqrt({a})",
    aten.rsqrt.default: lambda a: f"1.0 / tl.sqrt({a})",
    aten.exp.default: lambda a: f"tl.exp({a})",
    aten.exp2.default: lambda a: f"tl.exp2({a})",
    aten.log.default: lambda a: f"tl.log({a})",
    aten.log2.default: lambda a: f"tl.log2({a})",
    aten.sin.default: lambda a: f"tl.sin({a})",
    aten.cos.default: lambda a: f"tl.cos({a})",
    aten.erf.default: lambda a: f"tl.erf({a})",
    aten.floor.default: lambda a: f"tl.floor({a})",
    aten.ceil.default: lambda a: f"tl.ceil({a})",
    aten.pow.Tensor_Scalar: _power,
    aten.pow.Scalar: _exponential,
    aten.maximum.default: lambda a, b: f"tl.where(({a} > {b}) | ({a} != {a}), {a}, {b})",
    aten.minimum.default: lambda a, b: f"tl.where(({a} < {b}) | ({a} != {a}), {a}, {b})",
    aten.clamp.default: _clamp,
    aten.clamp_min.default: _clamp,
    aten.clamp_max.default: lambda a, high: _clamp(a, None, high),
    aten.addcmul.default: lambda a, b, c, value="1": f"{a} + {_scaled(f'{b} * {c}', value)}",
    aten.addcdiv.default: lambda a, b, c, value="1": f"{a} + {_scaled(f'({b} / {c})', value)}",
    aten.lerp.Scalar: lambda a, b, weight: f"{a} + {weight} * ({b} - {a})",
    aten.lerp.Tensor: lambda a, b, weight: f"{a} + {weight} * ({b} - {a})",
    aten.sigmoid.default: sigmoid,
    aten.sigmoid_backward.default: lambda grad, y: f"{grad} * {y} * (1.0 - {y})",
    aten.tanh.default: _tanh,
    aten.tanh_backward.default: lambda grad, y: f"{grad} * (1.0 - {y} * {y})",
    aten.relu.default: lambda a: f"tl.where({a} <= 0, 0, {a})",
    aten.threshold_backward.default: lambda grad, x, threshold: f"tl.where({x} <= {threshold}, 0, {grad})",
    aten.leaky_relu.default: lambda a, slope="0.01": f"tl.where({a} > 0, {a}, {a} * {slope})",
    aten.leaky_relu_backward.default: _leaky_relu_backward,
    aten.silu.default: lambda a: f"{a} / (1.0 + tl.exp(-{a}))",
    aten.silu_backward.default: _silu_backward,
    aten.gelu.default: _gelu,
    aten.gelu_backward.default: _gelu_backward,
    aten.softplus.default: _softplus,
    aten.native_dropout_backward.default: lambda grad, mask, scale: f"{grad} * ({mask} * {scale})",
    APPLY: lambda x, mask, scale: f"{x} * ({mask} * {scale})",
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
INTEGRAL: dict[Any, Rule] = {aten.floor.default: lambda a: a, aten.ceil.default: lambda a: a}

# Rows for halves, where fewer instructions give the same rounded numbers.
ROUNDED: dict[Any, Rule] = {aten.gelu.default: _gelu_rounded, aten.gelu_backward.default: _gelu_rounded_backward}

# Rows for f64, where a series is exact for less of the axis.
WIDE: dict[Any, Rule] = {aten.tanh.default: lambda x: _tanh(x, 0.02), aten.pow.Scalar: _wide_exponential}

# The operand called `condition` or `mask` stays boolean.
SELECTION: dict[Any, Rule] = {
    aten.where.self: lambda condition, a, b: f"tl.where({condition}, {a}, {b})",
    aten.where.ScalarSelf: lambda condition, a, b: f"tl.where({condition}, {a}, {b})",
    aten.where.ScalarOther: lambda condition, a, b: f"tl.where({condition}, {a}, {b})",
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

# Ops whose text compares with a number.
COMPARING = {
    *COMPARISON, aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.threshold_backward.default,
    aten.softplus.default,
}  # fmt: skip


def rule_of(target: Any, dtype: torch.dtype) -> Rule | None:
    """The row of a pointwise operator with a result of `dtype`; None where it has no Triton form."""
    if target in ARITHMETIC and dtype is torch.bool:
        return BOOLEAN.get(target)
    if target in INTEGRAL and not dtype.is_floating_point:
        return INTEGRAL[target]
    if target in ROUNDED and dtype in (torch.float16, torch.bfloat16):
        return ROUNDED[target]
    return WIDE.get(target) if target in WIDE and dtype is torch.float64 else POINTWISE.get(target)


# Many instructions per element: worth computing once where the value is broadcast.
TRANSCENDENTAL = frozenset({
    aten.sin.default, aten.cos.default, aten.exp.default, aten.exp2.default, aten.log.default, aten.log2.default,
    aten.erf.default, aten.tanh.default, aten.sigmoid.default, aten.silu.default, aten.gelu.default, aten.sqrt.default,
    aten.rsqrt.default, aten.softplus.default, aten.pow.Scalar,
})  # fmt: skip
