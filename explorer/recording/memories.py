"""Which values lie in which memory: tensors that are one value although they are several Python objects.

A tensor subclass is a new object for every result, and `w.data = …` gives an object new memory; no operator tells of either.
What tells is the memory. A storage is one Python object as long as anything lies in it (torch keeps the object with the
storage, 2.11 to 2.15), so it can be known weakly, and nothing is kept: a `StorageWeakRef` keeps the storage's own record,
which lies between the user's tensors and makes malloc take more pages for the next ones.
"""

from __future__ import annotations

import weakref

import torch

from tracefuse.recording.calls import Value, kind_of
from tracefuse.recording.weak_map import WeakMap


class Memories:
    """The memory of tensors as numbers that are never given again, and the values that a program made there."""

    def __init__(self) -> None:
        self._numbers: WeakMap[int] = WeakMap()
        self._count = 0
        self._at: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._values: dict[int, Value] = {}
        self._further: dict[int, list[Value]] = {}

    def of(self, tensor: torch.Tensor) -> int | None:
        """Equal for tensors that share memory; None for tensors that have none of their own (sparse)."""
        if tensor.layout is not torch.strided:
            return None
        try:
            storage = tensor.untyped_storage()
        except (
            NotImplementedError,
            ValueError,
        ):  # a tensor of torch's first vmap; a parameter that is not initialised yet
            return None
        number = self._numbers.get(storage)
        return self._number(storage) if number is None else number

    def _number(self, storage: torch.UntypedStorage) -> int:
        """A new number, unless another storage that is still there begins at the same address: DLPack and `torch.from_numpy`
        make a storage of their own of memory that has one."""
        try:
            address = storage.data_ptr()
        except RuntimeError:  # there is no memory: a wrapper's, fake ones, zeros that are only said to be there
            address = 0
        known = self._at.get(address)
        is_shared = known is not None and known() is not None and address != 0
        number = self._numbers[storage] = self._numbers.get(known()) if is_shared else self._count
        self._count += not is_shared
        self._at[address] = weakref.ref(storage)
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
        if memory is None or memory not in self._values or kind_of(tensor) is not None:
            return None
        layout = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
        found = [self._values[memory], *self._further.get(memory, ())]
        return next((value for value in found if value.layout == layout), None)
