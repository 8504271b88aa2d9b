"""Python's collections of garbage while a program is recorded.

They come by the number of objects that were made, and a recording makes some ten for each operator. A full one visits every
object of the process, most of them torch's own. So while a recorder is entered, what was there before is set aside
(`gc.freeze`), and collections visit what the program and the recorder made since.
`gc.collect()`, which a cell calls for what was there before, collects all the same.
"""

from __future__ import annotations

import gc
import threading
from typing import ClassVar


class SetAside:
    """Objects that were there when the first recorder was entered, until the last one is left."""

    _lock = threading.Lock()
    _entered: ClassVar[int] = 0
    _is_ours: ClassVar[bool] = False

    @classmethod
    def enter(cls) -> None:
        with cls._lock:
            if cls._entered == 0:
                cls._is_ours = gc.get_freeze_count() == 0
                if cls._is_ours:  # else the program set objects aside by itself, and may want them to stay there
                    gc.freeze()
                    gc.collect = _collect_all
            cls._entered += 1

    @classmethod
    def leave(cls) -> None:
        with cls._lock:
            cls._entered -= 1
            if cls._entered == 0 and cls._is_ours:
                if gc.collect is _collect_all:
                    gc.collect = _collect
                gc.unfreeze()


_collect = gc.collect


def _collect_all(generation: int = 2) -> int:
    gc.unfreeze()
    try:
        return _collect(generation)
    finally:
        gc.freeze()
