"""A linear layer with its cross-entropy in chunks: registers what the operator does, and has its text for exported files.

The operator is that of `tracefuse.optimizers.linear_cross_entropy`; what it does is `linear_cross_entropy_runtime`.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from tracefuse.device import linear_cross_entropy_runtime
from tracefuse.optimizers.linear_cross_entropy.operator import LINEAR_CROSS_ENTROPY

OPERATOR = LINEAR_CROSS_ENTROPY._opname

_MARK = "# --- copied into exported files that chunk the loss of a linear layer ---\n"
RUNTIME = Path(linear_cross_entropy_runtime.__file__).read_text().split(_MARK)[1].strip("\n")
"""What a file needs besides torch and triton to call the operator."""

_CALL = re.compile(rf"(?<![\w.]){OPERATOR}\(")

_IMPLEMENTATION = torch.library.Library("tracefuse", "IMPL")
_IMPLEMENTATION.impl(OPERATOR, linear_cross_entropy_runtime.linear_cross_entropy, "CompositeExplicitAutograd")


def is_called(text: str) -> bool:
    """Whether `text` calls the operator, other than in a comment."""
    return _CALL.search(re.sub(r"#.*", "", text)) is not None


def support(text: str) -> str:
    """What stands above `text` in a file, if it calls the operator; empty if it does not."""
    return RUNTIME if is_called(text) else ""
