"""Formulas of torch's optimizers: the numbers that they compute in Python of a rate and a count, and what takes them.

    div.Tensor(sqrt, 0.0547)                     ROOT of Adam, at step 3:  (1 - 0.999 ** 3) ** 0.5
    addcdiv(p, m, denom, value=-0.00369)         SIZE of Adam, at step 3:  -(0.001 / (1 - 0.9 ** 3))

An optimizer that is neither fused nor capturable computes so. The formulas are those of `torch/optim` (2.11 to 2.15:
`adam.py`, `adamw.py`, `adamax.py`, `adagrad.py`, `sgd.py`, `rmsprop.py`, `adadelta.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

COUNT = "step"
"""What such an optimizer calls a parameter's count of steps in its state."""


@dataclass(frozen=True)
class Formula:
    """How a number is computed of a group's options and a count of steps.

    `text` is Python with `group` and `step`, `name` what an input is called that is such a number, and `is_counted` says
    whether it is made of the count.
    """

    text: str
    name: str
    is_counted: bool = False

    def evaluate(self, group: Mapping[str, Any], step: float) -> float:
        return float(eval(self.text, {"__builtins__": {}, "float": float}, {"group": group, "step": step}))


RATE = Formula("-float(group['lr'])", "rate")
DECAY = Formula("1 - float(group['lr']) * group['weight_decay']", "decay")
ROOT = Formula("(1 - group['betas'][1] ** step) ** 0.5", "root", is_counted=True)
SIZE = Formula("-(float(group['lr']) / (1 - group['betas'][0] ** step))", "size", is_counted=True)
SLOWER = Formula("-(float(group['lr']) / (1 + (step - 1) * group['lr_decay']))", "size", is_counted=True)


@dataclass(frozen=True)
class Use:
    """An operator that may take such a number, and where it `changes_weights` computes on the parameter itself: another one of
    that name may take an equal number for the optimizer's state, as `exp_avg_sq.mul_(0.999)` does."""

    operator: str
    formula: Formula
    changes_weights: bool = False


_ADAM = (Use("div", ROOT), Use("addcdiv", SIZE, True), Use("mul", DECAY, True))
OF_KIND: Mapping[str, tuple[Use, ...]] = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adamax": (Use("addcdiv", SIZE, True),),
    "Adagrad": (Use("addcdiv", SLOWER, True), Use("mul", SLOWER)),  # the second as lists
    "SGD": (Use("add", RATE, True),),
    "RMSprop": (Use("addcdiv", RATE, True), Use("add", RATE, True)),  # the second with momentum
    "Adadelta": (Use("add", RATE, True), Use("mul", RATE)),  # the second as lists
}
"""Of each optimizer of `torch.optim` what may take such a number."""


OF_FIRST_STEP = frozenset({"Rprop"})
"""The optimizers of `torch.optim` that read their rate in the first step of a parameter alone, to make its state of it."""


def uses_of(kind: str, options: Mapping[str, Any]) -> tuple[Use, ...]:
    """What may of an optimizer of this kind with a group's options."""
    is_decoupled = kind == "AdamW" or bool(options.get("decoupled_weight_decay"))
    decays = is_decoupled and bool(options.get("weight_decay"))
    return tuple(use for use in OF_KIND[kind] if use.formula != DECAY or decays)
