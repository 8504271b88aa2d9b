"""A mapping by identity that keeps nothing alive: what is known of tensors and modules while they live.

`torch.utils.weak.WeakIdKeyDictionary` compares keys in Python, up to 2 µs for each look-up, in each op of a recorded program;
here a look-up is one of an `int` in a `dict`. A value goes with its key, before the key's `id` can be another's.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _Entry(weakref.ref):  # type: ignore[type-arg]
    __slots__ = ("value",)


class WeakMap(Generic[T]):
    """`get`, `in`, item assignment and `values`, by the identity of the key."""

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

    def values(self) -> list[T]:
        # Copied at once: any allocation may collect garbage, and with it keys.
        return [entry.value for entry in list(self._entries.values())]
