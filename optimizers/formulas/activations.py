"""The activations of `torch.nn` and their backwards as Triton text, one row per operator.

A rule takes its operands in the order of the operator's schema, each text that may stand in any expression. NaN goes where
ATen lets it go. What has two results or reads its operand at two places (`glu`, `prelu` backward) is in `composites`.

Sources: ATen's formulas in `aten/src/ATen/native/cuda/Activation*Kernel.cu`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tracefuse.optimizers.formulas.elementary import clamp, expm1, sigmoid, softplus, tanh
from tracefuse.optimizers.ops import aten

Rule = Callable[..., str | None]

SQRT_HALF = repr(0.5**0.5)
INV_SQRT_2PI = "0.3989422804014327"
SQRT_2_OVER_PI = "0.7978845608028654"
GELU_CUBIC = "0.044715"
MISH_IS_PLAIN = "20.0"
"""Above it `mish(x)` is x to the last digit of a float64: `2 / exp(2 * 20)` is below its rounding."""

DENSITY_EXPONENT = 14
"""A GPU's `exp2` flushes subnormal numbers; scaled so, the density of what bf16 keeps of GELU, x > -14, is none."""

CDF_ROOT = (0.5513381362, 0.08550604433)
CDF_RATIO = (-7.546544075e-05, 0.1179771876, 0.1005799855, 0.1351957552, 0.009175064668, 0.1371474883)
"""The numbers of `_cdf`, those of the polynomial from the constant up: the least largest error relative to the tail, weighted
by 1 near 0 and by 1/5 from |x| = 3 on, under the condition that they are 0.5 together."""

A_SIXTH = "0.1666666716337204"
"""As the backward of ATen's `hardsigmoid` has it, in float64 too: the float32 next to it."""

# --- gelu and silu ----------------------------------------------------------------------------------------------------


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
    return f"{grad} * ({_cdf(x)} + {x} * {float(INV_SQRT_2PI) * 2.0**-DENSITY_EXPONENT!r} * {_scaled_density(x)})"


def _cdf(x: str) -> str:
    """The normal distribution function, by two instructions of the special function unit where `erf` takes thirty in all.

    Its value at -|x| is `density * polynomial(1 / sqrt(1 + b * |x| + c * x * x))`, as Mills' ratio is nearly of that form: to
    5e-7 of it where |x| < 3, and to 3e-6 up to 14. At 0 it is 0.5, in float32 too.
    """
    root = f"tl.rsqrt(1.0 + {CDF_ROOT[0]} * tl.abs({x}) + {CDF_ROOT[1]} * ({x} * {x}))"
    ratio = repr(CDF_RATIO[-1] * 2.0**-DENSITY_EXPONENT)
    for coefficient in CDF_RATIO[-2::-1]:
        ratio = f"({coefficient * 2.0**-DENSITY_EXPONENT!r} + {root} * {ratio})"
    tail = f"{_scaled_density(x)} * {ratio}"
    return f"tl.where({x} < 0, {tail}, 1.0 - {tail})"


def _scaled_density(x: str) -> str:
    """`exp(-x * x / 2) * 2**DENSITY_EXPONENT`."""
    return f"tl.exp2({DENSITY_EXPONENT}.0 - {0.5 / math.log(2)!r} * ({x} * {x}))"


def _silu_backward(grad: str, x: str) -> str:
    gate = f"({sigmoid(x)})"
    return f"{grad} * {gate} * (1.0 + {x} * (1.0 - {gate}))"


# --- mish -------------------------------------------------------------------------------------------------------------


def _mish(x: str) -> str:
    """`x * tanh(log(1 + e))` for e = exp(x), where the tangent is `n / (n + 2)` with n = e * (e + 2)."""
    n = f"(tl.exp({x}) * (tl.exp({x}) + 2.0))"
    return f"tl.where({x} > {MISH_IS_PLAIN}, {x}, {x} * ({n} / ({n} + 2.0)))"


def _mish_backward(grad: str, x: str) -> str:
    """`tanh + x * sigmoid(x) * (1 - tanh**2)`, the bracket being `4 * (n + 1) / (n + 2)**2`."""
    n = f"(tl.exp({x}) * (tl.exp({x}) + 2.0))"
    slope = f"{n} / ({n} + 2.0) + {x} * ({sigmoid(x)}) * (4.0 * ({n} + 1.0) / (({n} + 2.0) * ({n} + 2.0)))"
    return f"tl.where({x} > {MISH_IS_PLAIN}, {grad}, {grad} * ({slope}))"


# --- in pieces --------------------------------------------------------------------------------------------------------


def _hardsigmoid(x: str) -> str:
    return f"{clamp(f'({x} + 3.0)', '0.0', '6.0')} * (1.0 / 6)"


def _hardswish_backward(grad: str, x: str) -> str:
    within = f"tl.where({x} < 3.0, {grad} * ({x} / 3.0 + 0.5), {grad})"
    return f"tl.where({x} <= -3.0, 0, {within})"


def _softshrink(x: str, width: str = "0.5") -> str:
    outside = f"tl.where({x} > {width}, {x} - {width}, tl.where({x} < -{width}, {x} + {width}, 0))"
    return f"tl.where({x} != {x}, {x}, {outside})"


def _shrink_backward(grad: str, x: str, width: str) -> str:
    return f"tl.where(({x} >= -{width}) & ({x} <= {width}), 0, {grad})"


# --- exponential ------------------------------------------------------------------------------------------------------


def _elu(x: str, alpha: str = "1.0", scale: str = "1.0", input_scale: str = "1.0", limit: float = 0.3) -> str:
    return f"tl.where({x} > 0, {x} * {scale}, {alpha} * {scale} * ({expm1(f'({x} * {input_scale})', limit)}))"


def _celu(x: str, alpha: str = "1.0", limit: float = 0.3) -> str:
    return _elu(x, alpha, "1.0", f"(1.0 / {alpha})", limit)


def _elu_backward(grad: str, alpha: str, scale: str, input_scale: str, is_result: str, x: str) -> str:
    """By the operand, or by the result where the op worked in place."""
    is_of_result = is_result.strip("()") in ("1.0", "True")
    slope = f"({x} + {alpha} * {scale})" if is_of_result else f"({alpha} * {scale} * tl.exp({x} * {input_scale}))"
    return f"tl.where({x} <= 0, {grad} * {input_scale} * {slope}, {grad} * {scale})"


def _softplus_backward(grad: str, x: str, beta: str, threshold: str) -> str:
    gate = sigmoid(f"({x} * {beta})")
    return f"tl.where({x} * {beta} > {threshold}, {grad}, {grad} * ({gate}))"


ACTIVATIONS: dict[Any, Rule] = {
    aten.sigmoid.default: sigmoid,
    aten.sigmoid_backward.default: lambda grad, y: f"{grad} * {y} * (1.0 - {y})",
    aten.tanh.default: tanh,
    aten.tanh_backward.default: lambda grad, y: f"{grad} * (1.0 - {y} * {y})",
    aten.relu.default: lambda a: f"tl.where({a} <= 0, 0, {a})",
    aten.threshold.default: lambda x, least, value: f"tl.where({x} <= {least}, {value}, {x})",
    aten.threshold_backward.default: lambda grad, x, threshold: f"tl.where({x} <= {threshold}, 0, {grad})",
    aten.leaky_relu.default: lambda a, slope="0.01": f"tl.where({a} > 0, {a}, {a} * {slope})",
    aten.leaky_relu_backward.default: lambda grad, x, slope, _=False: f"tl.where({x} > 0, {grad}, {grad} * {slope})",
    aten._prelu_kernel.default: lambda x, weight: f"tl.where({x} > 0, {x}, {x} * {weight})",
    aten.silu.default: lambda a: f"{a} / (1.0 + tl.exp(-{a}))",
    aten.silu_backward.default: _silu_backward,
    aten.gelu.default: _gelu,
    aten.gelu_backward.default: _gelu_backward,
    aten.mish.default: _mish,
    aten.mish_backward.default: _mish_backward,
    aten.softplus.default: softplus,
    aten.softplus_backward.default: _softplus_backward,
    aten.hardtanh.default: lambda x, low="(-1.0)", high="1.0": clamp(x, low, high),
    aten.hardtanh_backward.default: lambda g, x, low, high: f"tl.where(({x} <= {low}) | ({x} >= {high}), 0, {g})",
    aten.hardsigmoid.default: _hardsigmoid,
    aten.hardsigmoid_backward.default: lambda g, x: f"tl.where(({x} > -3.0) & ({x} < 3.0), {g} * {A_SIXTH}, 0)",
    aten.hardswish.default: lambda x: f"{x} * {_hardsigmoid(x)}",
    aten.hardswish_backward.default: _hardswish_backward,
    aten.hardshrink.default: lambda x, width="0.5": _shrink_backward(x, x, width),
    aten.hardshrink_backward.default: _shrink_backward,
    aten.softshrink.default: _softshrink,
    aten.softshrink_backward.default: _shrink_backward,
    aten.elu.default: _elu,
    aten.celu.default: _celu,
    aten.elu_backward.default: _elu_backward,
}

# Rows for halves, where fewer instructions give the same rounded numbers.
ROUNDED: dict[Any, Rule] = {aten.gelu.default: _gelu_rounded, aten.gelu_backward.default: _gelu_rounded_backward}

NEAR_ZERO = 0.02
"""Below it a series to the eighth or ninth power is exact in float64."""

# Rows for f64, where a series is exact for less of the axis.
WIDE: dict[Any, Rule] = {
    aten.tanh.default: lambda x: tanh(x, NEAR_ZERO),
    aten.elu.default: lambda *given: _elu(*given, *("1.0",) * (4 - len(given)), NEAR_ZERO),
    aten.celu.default: lambda x, alpha="1.0": _celu(x, alpha, NEAR_ZERO),
}

COMPARED = {
    aten.threshold.default, aten.threshold_backward.default, aten.softplus.default, aten.softplus_backward.default,
    aten.hardtanh.default, aten.hardtanh_backward.default, aten.hardshrink.default, aten.hardshrink_backward.default,
    aten.softshrink.default, aten.softshrink_backward.default,
}  # fmt: skip
"""Activations that compare with a number of their arguments."""

IN_OWN_TYPE = {
    aten.threshold.default, aten.threshold_backward.default, aten.hardshrink.default, aten.hardshrink_backward.default,
    aten.softshrink.default, aten.softshrink_backward.default,
}  # fmt: skip
"""Activations whose numbers ATen turns to the type of the tensor, also where it computes in a wider one."""

COSTLY = {
    aten.tanh.default, aten.sigmoid.default, aten.silu.default, aten.gelu.default, aten.softplus.default,
    aten.mish.default, aten.elu.default, aten.celu.default,
}  # fmt: skip
"""Activations of many instructions an element."""
