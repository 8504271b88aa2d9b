"""What a GPU runs, on the device "meta": fused attention, and autocast to bfloat16 as CUDA's lists of operators say.

Their frames count as torch's own, so that an op has the line that called it. Source of the lists: "CUDA Ops that can autocast"
in torch's documentation of automatic mixed precision.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from tracefuse.recording import frames

_LOWER = {
    F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, torch.conv1d, torch.conv2d,
    torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.mm, torch.bmm, Tensor.bmm, torch.addmm,
    torch.baddbmm, torch.einsum,
}  # fmt: skip
_FLOAT32 = {
    F.layer_norm, F.group_norm, F.rms_norm, F.softmax, torch.softmax, Tensor.softmax, F.log_softmax, F.cross_entropy,
    F.nll_loss, F.mse_loss, F.l1_loss, torch.exp, torch.log, torch.rsqrt, torch.pow, Tensor.pow, Tensor.exp, Tensor.log,
    Tensor.rsqrt, torch.cumsum, torch.logsumexp, torch.norm, F.binary_cross_entropy_with_logits,
}  # fmt: skip


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """The kernel that a GPU picks: flash attention, or the memory-efficient one for a mask."""
    if has_torch_function((q, k, v)):
        return handle_torch_function(
            fused_attention, (q, k, v), q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is None or attn_mask.dtype == torch.bool:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    bias = attn_mask.to(q.dtype).expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    run = torch.ops.aten._scaled_dot_product_efficient_attention
    return run(q, k, v, bias, True, dropout_p, is_causal, scale=scale)[0]


class Autocast(TorchFunctionMode):
    """`torch.autocast("cuda", torch.bfloat16)` for tensors of no device; casts of leaves are kept until it ends."""

    def __enter__(self) -> Autocast:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LOWER or func is fused_attention:
            args, kwargs = self._cast(args, torch.bfloat16), self._cast(kwargs, torch.bfloat16)
        elif func in _FLOAT32:
            args, kwargs = self._cast(args, torch.float32), self._cast(kwargs, torch.float32)
        return func(*args, **kwargs)

    def _cast(self, tree: Any, dtype: torch.dtype) -> Any:
        if isinstance(tree, Tensor):
            return self._as(tree, dtype)
        if isinstance(tree, dict):
            return {name: self._cast(one, dtype) for name, one in tree.items()}
        return type(tree)(self._cast(one, dtype) for one in tree) if isinstance(tree, (tuple, list)) else tree

    def _as(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if tensor.dtype == dtype or tensor.dtype not in (torch.float32, torch.bfloat16):
            return tensor
        if not (tensor.is_leaf and tensor.requires_grad and dtype == torch.bfloat16):
            return tensor.to(dtype)
        if id(tensor) not in self._kept:
            self._kept[id(tensor)] = (tensor, tensor.to(dtype))
        return self._kept[id(tensor)][1]


def native_dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """The operator that a GPU runs."""
    return torch.native_dropout(x, p, training)[0] if training and p else x


def install(patch: pytest.MonkeyPatch) -> None:
    """Let torch run what a GPU would."""
    patch.setattr(F, "scaled_dot_product_attention", fused_attention)
    patch.setattr(F, "dropout", native_dropout)
    patch.setattr(frames, "_LIBRARIES", (*frames._LIBRARIES, __file__))
    frames.is_torchs_or_ours.cache_clear()
