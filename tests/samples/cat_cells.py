"""What the tests of `cat` share: two tensors of one shape, padding with zeros, and the ops that the pass leaves of a cell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from traces import captured, tried

from tracefuse.optimizers.cat import Cat
from tracefuse.optimizers.simplify import Simplify

x, y = torch.randn(2, 6, 8, 4, dtype=torch.float64).unbind()

pad = torch.ops.aten.slice_backward


def left(fn: Callable[..., Any], *inputs: Tensor) -> list[str]:
    return tried([Cat(), Simplify()], captured(fn, *inputs)).ops
