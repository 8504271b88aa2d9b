"""Launches of Triton kernels that no operator wraps: they write to memory behind the back of the recorder, so it must hear
of them."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import torch

# Where Triton launches: on a GPU, and interpreted (TRITON_INTERPRET=1).
_CLASSES = (("triton.runtime.jit", "JITFunction"), ("triton.runtime.interpreter", "InterpretedFunction"))


class LaunchHook:
    """Tells its listeners the name of every kernel that is launched, in place while there is a listener."""

    _lock = threading.Lock()
    _listeners: ClassVar[list[Callable[[str], None]]] = []
    _restore: ClassVar[list[tuple[type, Any]]] = []

    @classmethod
    def enter(cls, listener: Callable[[str], None]) -> None:
        with cls._lock:
            if not cls._listeners and ("triton" in sys.modules or torch.cuda.is_available()):
                cls._restore = [_wrap(getattr(importlib.import_module(m), name), cls._tell) for m, name in _CLASSES]
            cls._listeners.append(listener)

    @classmethod
    def leave(cls, listener: Callable[[str], None]) -> None:
        with cls._lock:
            cls._listeners.remove(listener)
            if not cls._listeners:
                for kind, run in cls._restore:
                    kind.run = run
                cls._restore = []

    @classmethod
    def _tell(cls, kernel: Any) -> None:
        for listener in list(cls._listeners):
            listener(getattr(kernel, "__name__", type(kernel).__name__))


def _wrap(kind: Any, tell: Callable[[Any], None]) -> tuple[type, Any]:
    run = kind.run

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("warmup"):
            tell(self)
        return run(self, *args, **kwargs)

    kind.run = launch
    return kind, run
