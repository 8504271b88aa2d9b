"""Where a thread waits for a collective by `Work.wait`: operators that run there are part of it, as gloo's copies out of its
own buffers are."""

from __future__ import annotations

import functools
import threading
from typing import Any, ClassVar

import torch


class WaitHook:
    """Notes that a thread is inside `Work.wait`; in place while anybody is entered."""

    _lock = threading.Lock()
    _entered: ClassVar[int] = 0
    _own: ClassVar[list[Any]] = []  # which an attribute of the class would bind
    _waiting = threading.local()

    @classmethod
    def enter(cls) -> None:
        with cls._lock:
            cls._entered += 1
            if cls._entered == 1 and torch.distributed.is_available():
                work = torch.distributed.Work
                cls._own.append(vars(work)["wait"])
                work.wait = cls._noting(work.wait)  # type: ignore[method-assign]

    @classmethod
    def leave(cls) -> None:
        with cls._lock:
            cls._entered -= 1
            if cls._entered == 0 and cls._own:
                torch.distributed.Work.wait = cls._own.pop()  # type: ignore[method-assign]

    @classmethod
    def is_waiting(cls) -> bool:
        """Whether this thread is inside `Work.wait`."""
        return getattr(cls._waiting, "depth", 0) > 0

    @classmethod
    def _noting(cls, own: Any) -> Any:
        @functools.wraps(own)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            cls._waiting.depth = getattr(cls._waiting, "depth", 0) + 1
            try:
                return own(work, *args, **kwargs)
            finally:
                cls._waiting.depth -= 1

        return wait
