"""The backward of attention as one operator that yields one tensor, in which the three gradients lie side by side.

    dq, dk, dv = aten._scaled_dot_product_…_attention_backward(…)
    dqkv       = tracefuse::packed_scaled_dot_product_attention_backward(…, size=[B, T, 3 * H * D], offsets=[0, …], …)

    dq is dqkv.as_strided(query.shape, query_stride, offsets[0]); so dk, with key_stride, and dv, with value_stride

`kind` names the ATen operator that it stands for, which computes the gradients where nothing can write them packed. It takes
what all of them take; no dropout, no bias. What it does is registered by `tracefuse.device.packed_attention`.
"""

from __future__ import annotations

from typing import Any

import torch

_NAME = "packed_scaled_dot_product_attention_backward"  # `cost` knows an attention's backward by its name

# A fragment, which a reload of this module may define again.
_LIBRARY = torch.library.Library("tracefuse", "FRAGMENT")
_LIBRARY.define(
    f"{_NAME}(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
    "Tensor? philox_seed, Tensor? philox_offset, *, str kind, bool is_causal, float? scale, int[] size, int[] stride, "
    "int[] offsets, int[] query_stride, int[] key_stride, int[] value_stride) -> Tensor"
)
PACKED_BACKWARD = torch.ops.tracefuse.packed_scaled_dot_product_attention_backward.default


@torch.library.register_fake(f"tracefuse::{_NAME}", lib=_LIBRARY)
def _(grad_out: torch.Tensor, query: torch.Tensor, *_: Any, **layout: Any) -> torch.Tensor:
    return torch.empty_strided(layout["size"], layout["stride"], dtype=query.dtype, device=query.device)
