"""Garbage collection pauses while graphs are made."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Pause:
    """How many are inside, of all threads: collection is the process's, and begins again behind the last of them.

    It is a threshold of 0, so that `gc.disable` and `gc.enable`, which are the program's own, stay what they are.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may come here
        self._inside, self._thresholds = 0, gc.get_threshold()

    def begin(self) -> None:
        with self._lock:
            if not self._inside:
                self._thresholds = gc.get_threshold()
                gc.set_threshold(0, *self._thresholds[1:])
            self._inside += 1

    def end(self) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._go_on()

    def end_in_child(self) -> None:
        """In a process that was forked meanwhile, where no thread goes on but one."""
        self._lock = threading.RLock()
        if self._inside:
            self._inside = 0
            self._go_on()

    def _go_on(self) -> None:
        if gc.get_threshold()[0] == 0:
            gc.set_threshold(*self._thresholds)


_pause = _Pause()
os.register_at_fork(after_in_child=_pause.end_in_child)


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
