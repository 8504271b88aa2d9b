"""Which values lie in which memory: tensors that are one value although they are several Python objects.

A tensor subclass is a new object for every result, and `w.data = …` gives an object new memory; no operator tells of either.
What tells is the memory. A storage is one Python object as long as anything lies in it (torch keeps the object with the
storage, 2.11 to 2.15), so it can be known weakly, and nothing is kept: a `StorageWeakRef` keeps the storage's own record,
which lies between the user's tensors and makes malloc take more pages for the next ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tracefuse.weak_map import WeakMap

if TYPE_CHECKING:
    from tracefuse.recording import Value


class Memories:
    """The memory of tensors as numbers that are never given again, and the values that a program made there."""

    def __init__(self) -> None:
        self._numbers: WeakMap[int] = WeakMap()
        self._count = 0
        self._values: dict[int, Value] = {}
        self._further: dict[int, list[Value]] = {}

    def of(self, tensor: torch.Tensor) -> int | None:
        """Equal for tensors that share memory; None for tensors that have none of their own (sparse)."""
        if tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage)
        if number is None:
            number = self._numbers[storage] = self._count
            self._count += 1
        return number

    def add(self, value: Value) -> None:
        memory = value.memory
        if memory is None:
            return
        if self._values.setdefault(memory, value) is not value:
            self._further.setdefault(memory, []).append(value)

    def find(self, tensor: torch.Tensor) -> Value | None:
        """A value that has this tensor's memory and layout."""
        memory = self.of(tensor)
        if memory is None or memory not in self._values:
            return None
        layout = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
        found = [self._values[memory], *self._further.get(memory, ())]
        return next((value for value in found if value.layout == layout), None)
