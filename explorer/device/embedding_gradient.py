"""Gradients of an embedding added to a total: registers what the operator does, and has its text for exported files.

The operator is that of `tracefuse.optimizers.decompose.embeddings`; what it does is `embedding_gradient_runtime`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tracefuse.device.copied import OperatorText, below_mark
from tracefuse.optimizers.decompose.embeddings import ADD_EMBEDDING_GRADIENT

TEXT = OperatorText(
    ADD_EMBEDDING_GRADIENT._opname, below_mark(Path(__file__).with_name("embedding_gradient_runtime.py"))
)


def _run(*operands: Any) -> Tensor:
    """The operator on tensors. Its text imports Triton, so that it is imported where it first runs."""
    from tracefuse.device.embedding_gradient_runtime import add_embedding_gradient

    return add_embedding_gradient(*operands)


_IMPLEMENTATION = torch.library.Library("tracefuse", "IMPL")
_IMPLEMENTATION.impl(TEXT.name, _run, "CompositeExplicitAutograd")
