"""A linear layer with its cross-entropy in chunks: registers what the operator does, and has its text for exported files.

The operator is that of `tracefuse.optimizers.linear_cross_entropy`; what it does is `linear_cross_entropy_runtime`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tracefuse.device.copied import OperatorText, below_mark
from tracefuse.optimizers.linear_cross_entropy.operator import LINEAR_CROSS_ENTROPY

TEXT = OperatorText(
    LINEAR_CROSS_ENTROPY._opname, below_mark(Path(__file__).with_name("linear_cross_entropy_runtime.py"))
)


def _run(*operands: Any, **options: Any) -> tuple[Tensor, ...]:
    """The operator on tensors. Its text imports Triton, so that it is imported where it first runs."""
    from tracefuse.device.linear_cross_entropy_runtime import linear_cross_entropy

    return linear_cross_entropy(*operands, **options)


_IMPLEMENTATION = torch.library.Library("tracefuse", "IMPL")
_IMPLEMENTATION.impl(TEXT.name, _run, "CompositeExplicitAutograd")
