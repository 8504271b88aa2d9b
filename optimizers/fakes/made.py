"""Fake tensors made without dispatch: to make one by an operator takes ten times as long.

Private: `FakeTensor(mode, meta tensor, device)`, seen on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tracefuse.optimizers.facts import span

_META = torch.device("meta")


def fake_tensor(
    mode: FakeTensorMode, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> FakeTensor:
    """A fake tensor in memory of its own, which holds just its elements."""
    return FakeTensor(mode, torch.empty_strided(shape, stride, dtype=dtype, device=_META), device)


def fake_view(
    mode: FakeTensorMode,
    memory: torch.UntypedStorage,
    offset: int,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> FakeTensor:
    """A fake tensor that lies in `memory`, from the element `offset` on."""
    meta = torch.empty(0, dtype=dtype, device=_META).set_(memory, offset, shape, stride)  # type: ignore[call-overload]
    return FakeTensor(mode, meta, device)


def fake_memory(nbytes: int) -> torch.UntypedStorage:
    """Memory of so many bytes, for several fake tensors to lie in."""
    return torch.empty(nbytes, dtype=torch.uint8, device=_META).untyped_storage()


def like(tensor: FakeTensor) -> FakeTensor:
    """A fake tensor with the type, strides and device of `tensor` in memory of its own."""
    return fake_tensor(tensor.fake_mode, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def holds_just(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, nbytes: int) -> bool:
    """Whether memory of `nbytes` is what `fake_tensor` makes for a tensor of that layout."""
    return span(shape, stride) * dtype.itemsize == nbytes
