"""Elementary functions as Triton text, exact where the plain formula cancels, as far as the type goes.

An operand is text that may stand in any expression: a name, or a literal in parentheses.
"""

from __future__ import annotations

INFINITY = "float('inf')"


def sigmoid(x: str) -> str:
    return f"1.0 / (1.0 + tl.exp(-{x}))"


def tanh(x: str, limit: float = 0.3) -> str:
    """`1 - 2 / (exp(2x) + 1)`, and below `limit`, where that cancels, the Taylor series to x**9."""
    square = f"{x} * {x}"
    series = f"{x} * (1.0 + {square} * (-1.0 / 3 + {square} * (2.0 / 15 + {square} * (-17.0 / 315 + {square} * 62.0 / 2835))))"
    return f"tl.where(tl.abs({x}) < {limit}, {series}, 1.0 - 2.0 / (tl.exp(2.0 * {x}) + 1.0))"


def expm1(x: str, limit: float = 0.3) -> str:
    """`exp(x) - 1`, and below `limit`, where that cancels, the Taylor series to x**8."""
    series = "(1.0 / 40320)"
    for factorial in (5040, 720, 120, 24, 6, 2):
        series = f"(1.0 / {factorial} + {x} * {series})"
    return f"tl.where(tl.abs({x}) < {limit}, {x} * (1.0 + {x} * {series}), tl.exp({x}) - 1.0)"


def log1p(u: str) -> str:
    """`log(1 + u)` for finite `u`; the quotient makes up for what 1 + u rounds off.

    Source: Goldberg, "What every computer scientist should know about floating-point arithmetic", theorem 4.
    """
    return f"tl.where(1.0 + {u} == 1.0, {u}, tl.log(1.0 + {u}) * ({u} / ((1.0 + {u}) - 1.0)))"


def log1p_anywhere(u: str) -> str:
    """`log(1 + u)`, also of infinity, where the quotient of `log1p` is none."""
    return f"tl.where({u} == {INFINITY}, {u}, {log1p(u)})"


def softplus(x: str, beta: str = "1.0", threshold: str = "20.0") -> str:
    """`log(1 + exp(z)) = max(z, 0) + log(1 + exp(-|z|))` for z = beta * x."""
    is_plain = beta.strip("()") in ("1", "1.0")
    z = x if is_plain else f"({x} * {beta})"
    soft = f"tl.where({z} > 0, {z}, 0) + {log1p(f'tl.exp(-tl.abs({z}))')}"
    return f"tl.where({z} > {threshold}, {x}, {soft if is_plain else f'({soft}) / {beta}'})"


def clamp(x: str, low: str | None = None, high: str | None = None) -> str:
    """`x` within numbers; NaN where it is one."""
    nan = "float('nan')"
    if nan in (low, high):
        return f"{x} * {nan}"
    above = x if low is None else f"tl.where({x} < {low}, {low}, {x})"
    return above if high is None else f"tl.where({above} > {high}, {high}, {above})"


def clamp_to_tensors(x: str, low: str | None = None, high: str | None = None) -> str:
    """`x` within other values; NaN where any of them is one, and the upper bound where that is below the lower."""
    above = x if low is None else f"tl.where(({x} < {low}) | ({low} != {low}), {low}, {x})"
    if high is None:
        return above
    return f"tl.where(({above} > {high}) | ({high} != {high}), {high}, {above})"


def truncated(x: str) -> str:
    return f"tl.where({x} < 0, tl.ceil({x}), tl.floor({x}))"
