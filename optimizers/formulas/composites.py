"""Activations that are several operators: what has two results, or reads its operand at two places.

    log_sigmoid_forward(x)          -softplus(-x)                            its buffer is for nobody: see the backward
    log_sigmoid_backward(g, x, _)   g * sigmoid(-x)
    glu(x), halves a and b of x     a * sigmoid(b)
    glu_backward(g, x)              cat(g * s, g * a * s * (1 - s))          s = sigmoid(b)
    _prelu_kernel_backward(g, x, w) where(x > 0, g, g * w), where(x > 0, 0, g * x)
    rrelu_with_noise(x), not training   leaky_relu(x, middle of its slopes)

A row inserts its operators before the one that they stand for, and returns a value for each result.

Sources: `aten/src/ATen/native/Activation.cpp`, `GatedLinearUnit.cpp`, and their CUDA kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from tracefuse.optimizers.ops import arguments, aten
from tracefuse.optimizers.trace import call, shape_of

EXACT_BELOW = 50.0
"""Where `softplus(z)` is z to the last digit of a float64."""
LEAST_SPREAD = 1e-6
"""Slopes of `rrelu` that are nearer to each other count as one, as in ATen."""


def _log_sigmoid(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    x = arguments(node)["self"]
    soft = call(node, aten.softplus.default, call(node, aten.neg.default, x), 1, EXACT_BELOW)
    return call(node, aten.neg.default, soft), x


def _log_sigmoid_backward(node: fx.Node) -> tuple[fx.Node]:
    args = arguments(node)
    gate = call(node, aten.sigmoid.default, call(node, aten.neg.default, args["self"]))
    return (call(node, aten.mul.Tensor, args["grad_output"], gate),)


def _halves(node: fx.Node) -> tuple[fx.Node, fx.Node, int]:
    """The two halves of a gated unit's operand, the second through the sigmoid, and the dimension."""
    args = arguments(node)
    x = args["self"]
    dim = args["dim"] % len(shape_of(x))
    half = shape_of(x)[dim] // 2
    a, b = (call(node, aten.slice.Tensor, x, dim, start, start + half) for start in (0, half))
    return a, call(node, aten.sigmoid.default, b), dim


def _glu(node: fx.Node) -> tuple[fx.Node]:
    a, gate, _ = _halves(node)
    return (call(node, aten.mul.Tensor, a, gate),)


def _glu_backward(node: fx.Node) -> tuple[fx.Node]:
    a, gate, dim = _halves(node)
    first = call(node, aten.mul.Tensor, arguments(node)["grad_output"], gate)
    slope = call(node, aten.mul.Tensor, a, call(node, aten.rsub.Scalar, gate, 1))
    return (call(node, aten.cat.default, [first, call(node, aten.mul.Tensor, first, slope)], dim),)


def _prelu_backward(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    args = arguments(node)
    grad, x = args["grad_output"], args["self"]
    is_above = call(node, aten.gt.Scalar, x, 0)
    scaled = call(node, aten.mul.Tensor, grad, args["weight"])
    of_x = call(node, aten.where.self, is_above, grad, scaled)
    of_weight = call(node, aten.where.ScalarSelf, is_above, 0.0, call(node, aten.mul.Tensor, grad, x))
    return of_x, of_weight


def _slope(args: dict[str, Any]) -> float:
    return (args["lower"] + args["upper"]) / 2


def _rrelu(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    args = arguments(node)
    return call(node, aten.leaky_relu.default, args["self"], _slope(args)), args["noise"]


def _rrelu_backward(node: fx.Node) -> tuple[fx.Node]:
    args = arguments(node)
    if args["training"] and args["upper"] - args["lower"] > LEAST_SPREAD:
        return (call(node, aten.mul.Tensor, args["grad_output"], args["noise"]),)
    operands = args["grad_output"], args["self"], _slope(args), args["self_is_result"]
    return (call(node, aten.leaky_relu_backward.default, *operands),)


Build = Callable[[fx.Node], tuple[fx.Node, ...]]

APART: dict[Any, tuple[Build, str]] = {
    aten.log_sigmoid_forward.default: (_log_sigmoid, "-softplus(-x)"),
    aten.log_sigmoid_backward.default: (_log_sigmoid_backward, "grad * sigmoid(-x)"),
    aten.glu.default: (_glu, "one half times the sigmoid of the other"),
    aten.glu_backward.default: (_glu_backward, "the gradients of both halves, side by side"),
    aten._prelu_kernel_backward.default: (_prelu_backward, "two selections by the sign of x"),
    aten.rrelu_with_noise_functional.default: (_rrelu, "leaky_relu by the middle slope, since nothing is drawn"),
    aten.rrelu_with_noise_backward.default: (_rrelu_backward, "the gradient times the slope"),
}
"""By operator: what inserts the operators that it stands for, and those in words."""


def apart(node: fx.Node) -> tuple[Build, str] | None:
    """The row of an op; None for other ops, and for `rrelu` where it draws its slopes."""
    draws = node.target is aten.rrelu_with_noise_functional.default and arguments(node)["training"]
    return None if draws else APART.get(node.target)
