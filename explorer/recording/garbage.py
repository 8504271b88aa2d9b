"""Python's collections of garbage while a program is recorded.

They come by the number of objects that were made, and a recording makes some ten for each operator. A full one visits every
object of the process, most of them torch's own. So while a recorder is entered, what was there before is set aside
(`gc.freeze`), and collections visit what the program and the recorder made since.
`gc.collect()`, which a cell calls for what was there before, collects all the same.

What is set aside also tells which tensors are older than the recording, on whatever thread they were made (`made_since`).
"""

from __future__ import annotations

import gc
from typing import ClassVar, Protocol

import torch

from tracefuse.recording.memories import WeakMap
from tracefuse.recording.shield import Attached


class Collected(Protocol):
    """Who wants to know, before `gc.collect` visits what was set aside."""

    def collects(self) -> None: ...


class SetAside(Attached[Collected]):
    """Objects that were there when the first recorder was entered, until the last one is left."""

    _is_ours: ClassVar[bool] = False
    _mark: ClassVar[list[None]] = []
    """An object that we set aside: a collection that visits it visits everything. To ask how many are set aside would take
    longer, since Python counts them."""
    _older: ClassVar[WeakMap[bool]] = WeakMap()
    """Where the program set objects aside by itself: the other tensors that were there."""
    _younger: ClassVar[WeakMap[bool]] = WeakMap()
    """Tensors that were made since and were set aside all the same, by a collection."""

    @classmethod
    def _put_on(cls) -> None:
        cls._is_ours = gc.get_freeze_count() == 0
        if cls._is_ours:  # else the program set objects aside by itself, and may want them to stay there
            cls._mark = []
            gc.freeze()
            gc.collect = _collect_all
        else:
            cls._older = _weakly(_tensors_among(gc.get_objects()))

    @classmethod
    def _take_off(cls) -> None:
        if cls._is_ours:
            if gc.collect is _collect_all:
                gc.collect = _collect
            gc.unfreeze()
            cls._is_ours = False
        cls._older, cls._younger = WeakMap(), WeakMap()

    @classmethod
    def made_since(cls) -> WeakMap[bool]:
        """The tensors that are there and were made since the first recorder was entered, by any thread. Of a program that
        calls `gc.unfreeze` nothing is known, and the answer is empty."""
        if not cls._listeners:
            return WeakMap()
        visited, mark = gc.get_objects(), cls._mark
        if any(one is mark for one in visited) if cls._is_ours else gc.get_freeze_count() == 0:
            return WeakMap()
        younger = [tensor for tensor, _ in cls._younger.items()]
        return _weakly([*(one for one in _tensors_among(visited) if one not in cls._older), *younger])

    @classmethod
    def tell_of_collection(cls) -> None:
        for listener in cls._listeners:
            listener.collects()

    @classmethod
    def keep_ages(cls) -> None:
        """Know which tensors are young, although all are about to be set aside."""
        cls._younger = cls.made_since()


_collect = gc.collect


def _collect_all(generation: int = 2) -> int:
    SetAside.tell_of_collection()
    gc.unfreeze()
    try:
        return _collect(generation)
    finally:
        gc.freeze()


def _tensors_among(objects: list[object]) -> list[torch.Tensor]:
    """The tensors among objects, which are asked for their type only: `isinstance` may run their code."""
    return [one for one in objects if issubclass(type(one), torch.Tensor)]


def _weakly(tensors: list[torch.Tensor]) -> WeakMap[bool]:
    found: WeakMap[bool] = WeakMap()
    for tensor in tensors:
        found[tensor] = True
    return found
