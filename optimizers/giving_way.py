"""A pass that runs before anybody asks for it gives way in its midst to what somebody asked for.

    with giving_way(is_stale):        in the thread that works ahead
        ...                           raises `GaveWay` before the next fact of a value or an op once `is_stale()` says so

Facts (`optimizers.facts`) are what passes ask for all the time, and before one is worked out nothing of it is kept. A pass
edits a copy of its trace, so that nobody has what is half made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class GaveWay(BaseException):
    """What runs ahead is not needed now. No `Exception`: passes may catch those."""


class _Ahead(threading.local):
    is_stale: Callable[[], bool] | None = None


_ahead = _Ahead()


@contextmanager
def giving_way(is_stale: Callable[[], bool]) -> Iterator[None]:
    """Let what this thread does inside end by `GaveWay` once `is_stale()`, which is asked thousands of times."""
    before, _ahead.is_stale = _ahead.is_stale, is_stale
    try:
        yield
    finally:
        _ahead.is_stale = before


def look() -> None:
    """Raise `GaveWay` where this thread is to give way."""
    is_stale = _ahead.is_stale
    if is_stale is not None and is_stale():
        raise GaveWay
