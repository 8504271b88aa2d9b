"""Attention's backward into one buffer: what this machine can do of it, and its text for exported files.

The operator is that of `tracefuse.optimizers.cat.packed_attention`; what it does is `tracefuse.device.packed_runtime`.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tracefuse.device import packed_runtime
from tracefuse.device.copied import OperatorText, below_mark
from tracefuse.optimizers.cat.packed_attention import GPU_KINDS, PACKED_BACKWARD, Packing

AMPERE = (8, 0)
"""The first GPUs with bfloat16 and with the attention that cuDNN has."""

TEXT = OperatorText(
    PACKED_BACKWARD._opname, f"import threading\nimport warnings\n\n{below_mark(Path(packed_runtime.__file__))}"
)

_IMPLEMENTATION = torch.library.Library("tracefuse", "IMPL")
_IMPLEMENTATION.impl(
    TEXT.name, packed_runtime.packed_scaled_dot_product_attention_backward, "CompositeExplicitAutograd"
)


def share_graphs(module: ModuleType) -> None:
    """Let a generated `module` use what cuDNN has built for others of this process: building one is slow."""
    if hasattr(module, "_packing"):
        module._packing = packed_runtime._packing  # type: ignore[attr-defined]


def cat_options() -> dict[str, Any]:
    """What `Cat` must know to let attention write packed gradients; nothing where no GPU is in use yet."""
    if not torch.cuda.is_initialized():
        return {}
    refusal = _too_old() or packed_runtime.why_no_frontend()
    return {"packing": Packing(refusal=refusal) if refusal else Packing(GPU_KINDS)}


def _too_old() -> str | None:
    if torch.version.hip is not None:
        return "cuDNN packs gradients of attention on NVIDIA's GPUs: use one"
    capability = torch.cuda.get_device_capability()
    if capability >= AMPERE:
        return None
    return f"cuDNN packs gradients of attention from compute capability 8.0 on, not on {capability[0]}.{capability[1]}"
