"""Garbage collection pauses while graphs are made."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Pause:
    """How many are inside, of all threads: collection is the process's, and begins again behind the last of them."""

    def __init__(self) -> None:
        self._lock, self._inside, self._was_enabled = threading.Lock(), 0, False

    def begin(self) -> None:
        with self._lock:
            if not self._inside:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._inside += 1

    def end(self) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._was_enabled:
                gc.enable()


_pause = _Pause()


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection inside: graphs are many small objects, and a full collection looks at all that torch loaded too.

    Made in one go they are looked at once, when it ends; else every 700 of them count towards a full collection, which can
    take longer than the passes of a toggle. Several threads may be inside.
    """
    _pause.begin()
    try:
        yield
    finally:
        _pause.end()
