"""Tensors that stand for others: the local tensor of a DTensor, the result of a collective that is not awaited yet, and the
whole parameters that FSDP shows a module while it runs.

Private names of torch, seen on 2.11, 2.13 and 2.15: `DTensor._local_tensor`, `AsyncCollectiveTensor.elem`,
`torch._C._get_dispatch_mode`, `torch._C._TorchDispatchModeKey.FAKE`, and the folder `torch/distributed/tensor`; on 2.11 and
2.13 `_get_fsdp_state` of what `fully_shard` wraps, `_fsdp_param_groups` (`_fsdp_param_group`), `fsdp_params` and
`_unsharded_param`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch

# By module and name, since `torch.distributed.tensor` takes a second to import; whoever has such a tensor has imported it.
_INSIDE = {
    ("torch.distributed.tensor", "DTensor"): "_local_tensor",
    ("torch.distributed._functional_collectives", "AsyncCollectiveTensor"): "elem",
}
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_FOLDER = os.path.join("torch", "distributed", "tensor", "")
_KNOWN: dict[type, str] = {torch.Tensor: "", torch.nn.Parameter: ""}


def _attribute(kind: type) -> str:
    """The attribute that holds the tensor inside; "" where there is none."""
    found = _KNOWN.get(kind)
    if found is None:
        names = ((one.__module__, one.__name__) for one in kind.__mro__)
        found = _KNOWN[kind] = next((_INSIDE[name] for name in names if name in _INSIDE), "")
    return found


def is_any_sharded(kinds: Iterable[type]) -> bool:
    """Whether a tensor of one of these classes stands for another, on which its operators run."""
    return any(_attribute(kind) for kind in kinds)


def local_of(tensor: Any) -> Any:
    """The tensor of this process that `tensor` stands for; anything else is its own."""
    while attribute := _attribute(type(tensor)):
        tensor = getattr(tensor, attribute)
    return tensor


def parameters_of(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The parameters of a model, and of those of which this process has a part also that part, and the whole ones that its
    modules read."""
    for parameter in model.parameters():
        yield parameter
        if (part := local_of(parameter)) is not parameter:
            yield part
    for module in model.modules():
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for one in (one for group in groups if group is not None for one in group.fsdp_params):
            if hasattr(one, "_unsharded_param"):  # from the first forward on
                yield one._unsharded_param


def is_placing() -> bool:
    """Whether a DTensor asks, on fake tensors, how an operator's results will lie: that is no part of the program."""
    if torch._C._get_dispatch_mode(_FAKE) is None:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _FOLDER in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
