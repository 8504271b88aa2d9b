"""Python's collections of garbage while a program is recorded.

They come by the number of objects that were made, and a recording makes some ten for each operator. A full one visits every
object of the process, most of them torch's own. So while a recorder is entered, what was there before is set aside
(`gc.freeze`), and collections visit what the program and the recorder made since.
`gc.collect()`, which a cell calls for what was there before, collects all the same.
"""

from __future__ import annotations

import gc
from typing import ClassVar

from tracefuse.recording.shield import Attached


class SetAside(Attached[None]):
    """Objects that were there when the first recorder was entered, until the last one is left."""

    _is_ours: ClassVar[bool] = False

    @classmethod
    def _put_on(cls) -> None:
        cls._is_ours = gc.get_freeze_count() == 0
        if cls._is_ours:  # else the program set objects aside by itself, and may want them to stay there
            gc.freeze()
            gc.collect = _collect_all

    @classmethod
    def _take_off(cls) -> None:
        if cls._is_ours:
            if gc.collect is _collect_all:
                gc.collect = _collect
            gc.unfreeze()
            cls._is_ours = False


_collect = gc.collect


def _collect_all(generation: int = 2) -> int:
    gc.unfreeze()
    try:
        return _collect(generation)
    finally:
        gc.freeze()
