"""Which values lie in which memory: tensors that are one value although they are several Python objects.

A tensor subclass is a new object for every result, and `w.data = …` gives an object new memory; no operator tells of either.
What tells is the memory. It is known by weak references: nothing is kept alive, and while a reference is there its identity is
not given to other memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    from tracefuse.recording import Value


def memory_of(tensor: torch.Tensor | None) -> int | None:
    """Equal for tensors that share memory while both are alive; None for tensors that have none of their own (sparse)."""
    return tensor.untyped_storage()._cdata if tensor is not None and tensor.layout == torch.strided else None


class Memories:
    """The values that a program made, by their memory."""

    def __init__(self) -> None:
        self._values: dict[int, list[Value]] = {}
        self._references: list[StorageWeakRef] = []

    def add(self, tensor: torch.Tensor, value: Value) -> None:
        memory = value.memory
        if memory is None:
            return
        if memory not in self._values:
            self._references.append(StorageWeakRef(tensor.untyped_storage()))
        self._values.setdefault(memory, []).append(value)

    def find(self, tensor: torch.Tensor) -> Value | None:
        """A value that has this tensor's memory and layout."""
        memory = memory_of(tensor)
        if memory not in self._values:
            return None
        layout = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
        return next((v for v in self._values[memory] if v.layout == layout), None)
