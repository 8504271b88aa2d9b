"""Garbage collection pauses while graphs are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection inside: graphs are many small objects, and a full collection looks at all that torch loaded too.

    Made in one go they are looked at once, when it ends; else every 700 of them count towards a full collection, which can
    take longer than the passes of a toggle.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
