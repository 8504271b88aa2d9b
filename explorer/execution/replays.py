"""What is timed: the forward and the backward of a program as two closures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Replays:
    """What is timed: `forward()` returns a state whose first item is the tuple of results, `backward(state)` gradients.

    Both close over their inputs, cotangents and generator states. A state holds what the backward needs and is dropped
    after each replay. `backward` is None for a program that has none.

    `gradients` names what `backward` returns, for a program that returns fewer gradients than the reference does (freeze
    drops some); without it they are compared by position. `compared` is False for a yardstick that computes something
    else, such as a copy. `held_nbytes` is GPU memory that it keeps between replays, part of its peak.
    """

    forward: Callable[[], Sequence[Any]]
    backward: Callable[[Any], Sequence[torch.Tensor | None]] | None = None
    gradients: tuple[str, ...] | None = None
    compared: bool = True
    held_nbytes: int = 0
