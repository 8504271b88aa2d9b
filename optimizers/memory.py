"""The memory that a node's values lie in: storages by id, so that views and the items of a tuple count once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tracefuse.optimizers.facts import once_per_value, tensors_in


def storage_id(tensor: torch.Tensor) -> int:
    """An id shared by all tensors of the same memory."""
    return tensor.untyped_storage()._cdata


@once_per_value
def storages(value: Any) -> Mapping[int, int]:
    """Id -> bytes of each storage that the node's tensors lie in."""
    return {storage_id(t): t.untyped_storage().nbytes() for t in tensors_in(value)}


@once_per_value
def stored_bytes(value: Any) -> int:
    """Bytes of the storages that the node's values keep alive."""
    return sum({storage_id(t): t.untyped_storage().nbytes() for t in tensors_in(value)}.values())
