"""Gradients of an embedding added to a total: registers what the operator does, and has its text for exported files.

The operator is that of `tracefuse.optimizers.decompose.embeddings`; what it does is `embedding_gradient_runtime`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tracefuse.optimizers.decompose.embeddings import ADD_EMBEDDING_GRADIENT

OPERATOR = ADD_EMBEDDING_GRADIENT._opname

_MARK = "# --- copied into exported files that add gradients of embeddings to others ---\n"
RUNTIME = Path(__file__).with_name("embedding_gradient_runtime.py").read_text().split(_MARK)[1].strip("\n")
"""What a file needs besides torch and triton to call the operator."""

_CALL = re.compile(rf"(?<![\w.]){OPERATOR}\(")


def _run(*operands: Any) -> Tensor:
    """The operator on tensors. Its text imports Triton, so that it is imported where it first runs."""
    from tracefuse.device.embedding_gradient_runtime import add_embedding_gradient

    return add_embedding_gradient(*operands)


_IMPLEMENTATION = torch.library.Library("tracefuse", "IMPL")
_IMPLEMENTATION.impl(OPERATOR, _run, "CompositeExplicitAutograd")


def is_called(text: str) -> bool:
    """Whether `text` calls the operator, other than in a comment."""
    return _CALL.search(re.sub(r"#.*", "", text)) is not None


def support(text: str) -> str:
    """What stands above `text` in a file, if it calls the operator; empty if it does not."""
    return RUNTIME if is_called(text) else ""
