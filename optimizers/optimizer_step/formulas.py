"""The fused optimizers of torch as pointwise ops on one parameter.

All are computed in float32 where the parameter is a half, and rounded once, as torch's CUDA kernels do. Numbers that depend on
the step count, such as `1 - beta ** step`, are float64, as they are there.

    adam        m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g g
                p = p - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)
    adamw       the same, with p = p - lr wd p before, where adam has g = g + wd p
    sgd         b = mu b + (1 - dampening) g        p = p - lr (g + mu b if nesterov else b)
    adagrad     s = s + g g        p = p - lr / (1 + (t - 1) decay) g / (sqrt(s) + eps)

Sources: the update rules in the documentation of `torch.optim`; Kingma and Ba, "Adam", 2015; Loshchilov and Hutter,
"Decoupled weight decay regularization", 2019; Duchi, Hazan and Singer, "Adaptive subgradient methods", 2011.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.lowering.literals import HALVES
from tracefuse.optimizers.ops import arguments, aten
from tracefuse.optimizers.optimizer_step.calls import Call
from tracefuse.optimizers.trace import val

Place = tuple[int, ...]
"""Of a tensor among an op's results: `(1,)`, or `(0, 1)` where there are several lists."""
Places = dict[Place, fx.Node]
Formula = Callable[[Call, fx.Node, int], Places]
"""`formula(call, op, at)` writes the ops for the tensor at a position of the op's lists: its results by their place."""
Number = float | fx.Node


@dataclass(frozen=True)
class _Update:
    """One parameter's update: its op's arguments by name, and the position of the parameter in the lists."""

    call: Call
    given: dict[str, Any]
    at: int

    def one(self, name: str) -> fx.Node:
        """The tensor of this parameter in the list `name`, as it is stored."""
        return self.given[name][self.at]

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in."""
        dtype = val(self.one("self")).dtype
        return torch.float32 if dtype in HALVES else dtype

    def wide(self, name: str) -> fx.Node:
        return self.call.cast(self.one(name), self.dtype)

    def stored(self, value: fx.Node, name: str) -> fx.Node:
        """`value` as the list `name` stores it; what it was where the scaler found infinities."""
        found = self.call.cast(value, val(self.one(name)).dtype)
        return self.unless_infinite(found, self.one(name))

    def unless_infinite(self, new: fx.Node, old: fx.Node) -> fx.Node:
        found_inf = self.given.get("found_inf")
        if found_inf is None or new is old:
            return new
        return self.call(aten.where.self, self.call(aten.eq.Scalar, found_inf, 1), old, new)

    def gradient(self) -> tuple[fx.Node, fx.Node]:
        """The gradient to compute with, unscaled and turned round where it is climbed; and as it is stored."""
        gradient = self.wide("grads")
        stored = self.one("grads")
        if self.given.get("grad_scale") is not None:
            gradient = self.call(aten.div.Tensor, gradient, self.number(self.given["grad_scale"], self.dtype))
            stored = self.stored(gradient, "grads")
        return (self.call(aten.neg.default, gradient) if self.given["maximize"] else gradient), stored

    def number(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        """A tensor of one element as a 0-dim one of `dtype`."""
        flat = value if val(value).dim() == 0 else self.call(aten.squeeze.default, value)
        return self.call.cast(flat, dtype)

    @property
    def lr(self) -> Number:
        lr = self.given["lr"]
        return self.number(lr, self.dtype) if isinstance(lr, fx.Node) else lr

    def times(self, value: fx.Node, factor: Number) -> fx.Node:
        if isinstance(factor, fx.Node):
            return self.call(aten.mul.Tensor, value, factor)
        return value if factor == 1 else self.call(aten.mul.Scalar, value, factor)

    def decayed(self, parameter: fx.Node, gradient: fx.Node) -> fx.Node:
        """The gradient with the weights' own, of their decay."""
        decay = self.given["weight_decay"]
        return self.call(aten.add.Tensor, gradient, parameter, alpha=decay) if decay else gradient

    def average(self, old: fx.Node, new: fx.Node, beta: float) -> fx.Node:
        """`beta * old + (1 - beta) * new`."""
        return self.call(aten.add.Tensor, self.times(old, beta), self.times(new, 1 - beta))


def _adam(update: _Update, is_decoupled: bool) -> Places:
    call, given = update.call, update.given
    gradient, stored = update.gradient()
    parameter = update.wide("self")
    if is_decoupled and given["weight_decay"]:
        parameter = call(aten.sub.Tensor, parameter, _decay(update, parameter))
    elif not is_decoupled:
        gradient = update.decayed(parameter, gradient)
    mean = update.average(update.wide("exp_avgs"), gradient, given["beta1"])
    square = update.average(update.wide("exp_avg_sqs"), call(aten.mul.Tensor, gradient, gradient), given["beta2"])
    step_size, correction = _corrections(update)
    places, largest = {(1, update.at): stored}, square
    if given["amsgrad"]:
        largest = call(aten.maximum.default, update.wide("max_exp_avg_sqs"), square)
        places[4, update.at] = update.stored(largest, "max_exp_avg_sqs")
    root = call(aten.div.Tensor, call(aten.sqrt.default, largest), correction)
    denominator = call(aten.add.Scalar, root, given["eps"])
    step = call(aten.div.Tensor, call(aten.mul.Tensor, mean, step_size), denominator)
    places[0, update.at] = update.stored(call(aten.sub.Tensor, parameter, step), "self")
    places[2, update.at] = update.stored(mean, "exp_avgs")
    places[3, update.at] = update.stored(square, "exp_avg_sqs")
    return places


def _decay(update: _Update, parameter: fx.Node) -> fx.Node:
    """lr * decay * parameter."""
    lr, decay = update.lr, update.given["weight_decay"]
    factor = update.call(aten.mul.Scalar, lr, decay) if isinstance(lr, fx.Node) else lr * decay
    return update.times(parameter, factor)


def _corrections(update: _Update) -> tuple[fx.Node, fx.Node]:
    """`lr / (1 - beta1 ** step)` and `sqrt(1 - beta2 ** step)`, computed in float64."""
    call, given = update.call, update.given
    step = update.number(update.one("state_steps"), torch.float64)
    first, second = (call(aten.rsub.Scalar, call(aten.pow.Scalar, given[beta], step), 1) for beta in ("beta1", "beta2"))
    lr = given["lr"]
    return call.cast(_over(update, lr, first), update.dtype), call.cast(call(aten.sqrt.default, second), update.dtype)


def _over(update: _Update, lr: Number, divisor: fx.Node) -> fx.Node:
    """`lr / divisor` in float64."""
    if isinstance(lr, fx.Node):
        return update.call(aten.div.Tensor, update.number(lr, torch.float64), divisor)
    return update.times(update.call(aten.reciprocal.default, divisor), lr)


def _sgd(update: _Update) -> Places:
    call, given = update.call, update.given
    gradient, stored = update.gradient()
    parameter = update.wide("self")
    gradient = update.decayed(parameter, gradient)
    places = {(1, update.at): stored}
    if given["momentum_buffer_list"]:
        momentum = given["momentum"]
        buffer = gradient
        if not given["is_first_step"]:
            kept = update.times(update.wide("momentum_buffer_list"), momentum)
            buffer = call(aten.add.Tensor, kept, update.times(gradient, 1 - given["dampening"]))
        places[2, update.at] = update.stored(buffer, "momentum_buffer_list")
        gradient = call(aten.add.Tensor, gradient, update.times(buffer, momentum)) if given["nesterov"] else buffer
    places[0, update.at] = update.stored(call(aten.sub.Tensor, parameter, update.times(gradient, update.lr)), "self")
    return places


def _adagrad(update: _Update) -> Places:
    call, given = update.call, update.given
    gradient, stored = update.gradient()
    parameter = update.wide("self")
    gradient = update.decayed(parameter, gradient)
    total = call(aten.add.Tensor, update.wide("state_sums"), call(aten.mul.Tensor, gradient, gradient))
    denominator = call(aten.add.Scalar, call(aten.sqrt.default, total), given["eps"])
    step = call(aten.div.Tensor, call(aten.mul.Tensor, gradient, _decayed_rate(update)), denominator)
    return {
        (0, update.at): update.stored(call(aten.sub.Tensor, parameter, step), "self"),
        (1, update.at): stored,
        (2, update.at): update.stored(total, "state_sums"),
        (3, update.at): update.one("state_steps"),
    }


def _decayed_rate(update: _Update) -> fx.Node:
    """`lr / (1 + (step - 1) * lr_decay)`, computed in float64."""
    call, lr = update.call, update.given["lr"]
    step = update.number(update.one("state_steps"), torch.float64)
    waited = call(aten.mul.Scalar, call(aten.sub.Scalar, step, 1), update.given["lr_decay"])
    return call.cast(_over(update, lr, call(aten.add.Scalar, waited, 1)), update.dtype)


def _of_each(formula: Callable[[_Update], Places]) -> Formula:
    return lambda call, node, at: formula(_Update(call, arguments(node), at))


FORMULAS: dict[str, Formula] = {
    "_fused_adam": _of_each(lambda update: _adam(update, is_decoupled=False)),
    "_fused_adamw": _of_each(lambda update: _adam(update, is_decoupled=True)),
    "_fused_sgd": _of_each(_sgd),
    "_fused_adagrad": _of_each(_adagrad),
}
"""By the operator's name."""
