"""Which values lie in which memory: tensors that are one value although they are several Python objects.

A tensor subclass is a new object for every result, and `w.data = …` gives an object new memory; no operator tells of either.
What tells is the memory. A storage is one Python object as long as anything lies in it (torch keeps the object with the
storage, 2.11 to 2.15), so it can be known weakly, and nothing is kept: a `StorageWeakRef` keeps the storage's own record,
which lies between the user's tensors and makes malloc take more pages for the next ones.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from tracefuse.recording.calls import Value, kind_of

T = TypeVar("T")


class _Entry(weakref.ref):  # type: ignore[type-arg]
    __slots__ = ("value",)


class WeakMap(Generic[T]):
    """A mapping by identity that keeps nothing alive: what is known of tensors and modules while they live.

    `torch.utils.weak.WeakIdKeyDictionary` compares keys in Python, up to 2 µs for each look-up, in each op of a recorded
    program; here a look-up is one of an `int` in a `dict`. A value goes with its key, before the key's `id` can be another's.
    """

    __slots__ = ("_entries", "_forget")

    def __init__(self) -> None:
        self._entries: dict[int, Any] = {}
        self._forget = self._entries.pop

    def __del__(self) -> None:
        self._entries.clear()  # entries know how to forget themselves: a cycle, which would wait for a collection of garbage

    def get(self, key: object) -> T | None:
        entry = self._entries.get(id(key))
        return None if entry is None else entry.value

    def __contains__(self, key: object) -> bool:
        return id(key) in self._entries

    def __setitem__(self, key: object, value: T) -> None:
        number = id(key)
        entry = self._entries.get(number)
        if entry is None:
            entry = self._entries[number] = _Entry(key, partial(self._forget, number))
        entry.value = value

    def pop(self, key: object) -> None:
        self._entries.pop(id(key), None)

    def values(self) -> list[T]:
        # Copied at once: any allocation may collect garbage, and with it keys.
        return [entry.value for entry in list(self._entries.values())]


class Memories:
    """The memory of tensors as numbers that are never given again, and the values that a program made there."""

    def __init__(self) -> None:
        self._numbers: WeakMap[int] = WeakMap()
        self._sources: WeakMap[int] = WeakMap()
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
        return self.number_of(storage)

    def number_of(self, storage: torch.UntypedStorage) -> int:
        number = self._numbers.get(storage)
        return self._number(storage) if number is None else number

    def _number(self, storage: torch.UntypedStorage) -> int:
        """A new number, unless another storage that is still there begins at the same address: DLPack and `torch.from_numpy`
        make a storage of their own of memory that has one. One that was resized has left the address where it was met."""
        address = _address(storage)
        reference = self._at.get(address)
        known = None if reference is None else reference()
        is_shared = address != 0 and known is not None and _address(known) == address
        number = self._numbers[storage] = self._numbers.get(known) if is_shared else self._count
        self._count += not is_shared
        self._at[address] = weakref.ref(storage)
        return number

    def note_copy(self, target: torch.UntypedStorage, source: torch.UntypedStorage) -> None:
        """All of `source` is about to be copied to `target` by no operator."""
        self._sources[target] = self.number_of(source)

    def copied_from(self, storage: torch.UntypedStorage) -> int | None:
        return self._sources.get(storage)

    def add(self, value: Value) -> None:
        memory = value.memory
        if memory is None:
            return
        if self._values.setdefault(memory, value) is not value:
            self._further.setdefault(memory, []).append(value)

    def find(self, tensor: torch.Tensor) -> Value | None:
        """A value that has this tensor's memory and layout."""
        return self.find_in(self.of(tensor), tensor)

    def find_in(self, memory: int | None, tensor: torch.Tensor) -> Value | None:
        """A value that lies in `memory` as this tensor does in its own."""
        if memory is None or memory not in self._values or kind_of(tensor) is not None:
            return None
        layout = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
        found = [self._values[memory], *self._further.get(memory, ())]
        return next((value for value in found if value.layout == layout), None)


def _address(storage: torch.UntypedStorage) -> int:
    try:
        return storage.data_ptr()
    except RuntimeError:  # there is no memory: a wrapper's, fake ones, zeros that are only said to be there
        return 0


def is_there(tensor: torch.Tensor) -> bool:
    """Whether a tensor may be read: the storage of one whose memory was given back (`resize_(0)`) is shorter than the tensor,
    and torch reads it all the same."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return True
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    try:
        return tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + last + 1) * tensor.element_size()
    except (NotImplementedError, ValueError):
        return True  # it has no storage of its own
