"""The memory that a node's values lie in: storages by id, so that views and the items of a tuple count once."""

from __future__ import annotations

import torch
from torch import fx

from tracefuse.optimizers.trace import tensors


def storage_id(tensor: torch.Tensor) -> int:
    """An id shared by all tensors of the same memory."""
    return tensor.untyped_storage()._cdata


def storages(node: fx.Node) -> dict[int, int]:
    """Id -> bytes of each storage that the node's tensors lie in."""
    return {storage_id(t): t.untyped_storage().nbytes() for t in tensors(node)}


def stored_bytes(node: fx.Node) -> int:
    """Bytes of the storages that the node's values keep alive."""
    return sum(storages(node).values())
