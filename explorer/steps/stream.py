"""A step as the operators it is made of: what each is, the shapes it reads and the Python values it is given, no tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tracefuse.optimizers.origins import Source
from tracefuse.recording.calls import Call, Value, map_tensors
from tracefuse.recording.operators import LOADER, facts_of

MAKES = torch.ops.aten.lift_fresh.default
"""What runs where Python makes a tensor of numbers."""
MOST_NUMBERS = 4_096
"""Of a tensor that Python makes, as of a list of labels: those of a larger one are not compared."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a step's operator says of a tensor."""

    dtype: torch.dtype
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.sizes)}"


@dataclass(frozen=True, slots=True)
class StepOp:
    """One operator; tensors in `args` and `kwargs` are `Shape`s."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    source: Source | None
    is_change: bool = False
    """Whether it writes, outside of modules and of autograd, to more than a single number that was there before the step."""
    read: tuple[int | None, ...] = ()
    """The memory of each tensor that it reads."""
    made: set[int | None] = field(default_factory=set)
    """The memory that it makes or writes to."""
    numbers: Any = None
    """Those that Python makes a tensor of (`torch.tensor(…)`): one, or the list of all."""
    in_optimizer: bool = False
    """Whether an optimizer's `step` ran it, as far as that is known: of a recorded one."""

    def is_like(self, other: StepOp) -> bool:
        """Whether the two may be one operator of two steps: those that no line is known of count by what they are."""
        return self.func is other.func and (None in (self.source, other.source) or self.source == other.source)

    def reads(self) -> int:
        """How many tensors it reads."""
        return sum(isinstance(one, Shape) for one in tree_leaves((self.args, self.kwargs)))

    def reads_tensors(self) -> bool:
        """Whether it reads a tensor of more than one number."""
        given = tree_leaves((self.args, self.kwargs))
        return any(isinstance(one, Shape) and math.prod(one.sizes) > 1 for one in given)


def noted_op(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    source: Source | None,
    is_change: bool = False,
    read: tuple[int | None, ...] = (),
) -> StepOp:
    facts = facts_of(func)
    of, args = (facts.func, args) if facts.becomes is None else facts.becomes(*args)
    given = {key: one for key, one in kwargs.items() if key != "generator"} if kwargs else {}
    numbers = numbers_in(args[0]) if of is MAKES else None
    return StepOp(of, map_tensors(_shape, args), map_tensors(_shape, given), source, is_change, read, numbers=numbers)


def noted_call(call: Call, outside: Mapping[Value, torch.Tensor] | None = None) -> StepOp:
    """The operator of a recorded call; `outside` are the values that were there before the step, as it read them."""
    outside = outside or {}
    given = {key: one for key, one in call.kwargs.items() if key != "generator"}
    is_outside = not call.in_engine and call.origin.module_type in ("", LOADER[1])
    written = [value for value in call.writes() if math.prod(value.shape) > 1] if is_outside else []
    is_change = any(value.base in outside for value in written)
    read = [value.memory for value in call.reads()]
    made = {value.memory for value in call.out_values()}.difference(read) | {value.memory for value in call.writes()}
    of_python = outside.get(call.args[0]) if call.func is MAKES else None
    numbers = None if of_python is None else numbers_in(of_python)
    places = call.origin.source, is_change, tuple(read), made
    return StepOp(call.func, _of_values(call.args), _of_values(given), *places, numbers, call.in_optimizer)


def numbers_in(made: torch.Tensor) -> Any:
    """The number of a tensor, or the list of all; None of a larger one. To read one on a GPU waits for it."""
    is_read = type(made) is torch.Tensor and made.device.type in ("cpu", "cuda") and made.numel() <= MOST_NUMBERS
    if not is_read or made.layout is not torch.strided:
        return None
    return made.item() if made.dim() == 0 else made.reshape(-1).tolist()


def _shape(tensor: torch.Tensor) -> Shape:
    return Shape(tensor.dtype, () if tensor.is_nested else tuple(tensor.shape))


def _of_values(tree: Any) -> Any:
    if isinstance(tree, Value):
        return Shape(tree.dtype, tree.shape)
    if isinstance(tree, (tuple, list)):
        found = [_of_values(one) for one in tree]
        return found if isinstance(tree, list) else tuple(found)
    if isinstance(tree, dict):
        return {key: _of_values(one) for key, one in tree.items()}
    return tree
