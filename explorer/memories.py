"""Which values lie in which memory: tensors that are one value although they are several Python objects.

A tensor subclass is a new object for every result, and `w.data = …` gives an object new memory; no operator tells of either.
What tells is the memory. It is known by weak references: nothing is kept alive, and while a reference is there its identity is
not given to other memory.

Private names of torch that this file relies on, seen on 2.11, 2.13 and 2.15: `UntypedStorage._cdata`, `_weak_ref` and
`_free_weak_ref`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tracefuse.recording import Value


def memory_of(tensor: torch.Tensor | None) -> int | None:
    """Equal for tensors that share memory while both are alive; None for tensors that have none of their own (sparse)."""
    return tensor.untyped_storage()._cdata if tensor is not None and tensor.layout == torch.strided else None


class Memories:
    """The values that a program made, by their memory."""

    def __init__(self) -> None:
        self._values: dict[int, Value] = {}
        self._further: dict[int, list[Value]] = {}
        self._references: list[int] = []
        self._release = torch.UntypedStorage._free_weak_ref  # when Python ends, `torch` may go before we do

    def __del__(self) -> None:
        for reference in self._references:
            self._release(reference)

    def add(self, tensor: torch.Tensor, value: Value) -> None:
        memory = value.memory
        if memory is None:
            return
        if memory in self._values:
            self._further.setdefault(memory, []).append(value)
        else:
            self._values[memory] = value
            self._references.append(tensor.untyped_storage()._weak_ref())

    def find(self, tensor: torch.Tensor) -> Value | None:
        """A value that has this tensor's memory and layout."""
        memory = memory_of(tensor)
        if memory not in self._values:
            return None
        layout = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
        found = [self._values[memory], *self._further.get(memory, ())]
        return next((value for value in found if value.layout == layout), None)
