"""Launches of kernels that no operator wraps, by Triton or `torch.cuda.jiterator`: they write to memory behind the back of the
recorder, so it must hear of them.

Private to torch, seen on 2.11 and 2.13: `torch.cuda.jiterator._JittedFunction` and its `kernel_name`.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import torch

# Where kernels are launched: Triton's on a GPU, and interpreted (TRITON_INTERPRET=1); the module, the class and its method.
_LAUNCHERS = (
    ("triton.runtime.jit", "JITFunction", "run"),
    ("triton.runtime.interpreter", "InterpretedFunction", "run"),
    ("torch.cuda.jiterator", "_JittedFunction", "__call__"),
)


class LaunchHook:
    """Tells its listeners the name of every kernel that is launched, in place while there is a listener."""

    _lock = threading.Lock()
    _listeners: ClassVar[list[Callable[[str], None]]] = []
    _restore: ClassVar[list[tuple[type, str, Any]]] = []

    @classmethod
    def enter(cls, listener: Callable[[str], None]) -> None:
        with cls._lock:
            if not cls._listeners and ("triton" in sys.modules or torch.cuda.is_available()):
                cls._restore = [
                    _wrap(getattr(importlib.import_module(module), name), method, cls._tell)
                    for module, name, method in _LAUNCHERS
                ]
            cls._listeners.append(listener)

    @classmethod
    def leave(cls, listener: Callable[[str], None]) -> None:
        with cls._lock:
            cls._listeners.remove(listener)
            if not cls._listeners:
                for kind, method, run in cls._restore:
                    setattr(kind, method, run)
                cls._restore = []

    @classmethod
    def _tell(cls, kernel: Any) -> None:
        for listener in list(cls._listeners):
            listener(getattr(kernel, "kernel_name", None) or getattr(kernel, "__name__", type(kernel).__name__))


def _wrap(kind: type, method: str, tell: Callable[[Any], None]) -> tuple[type, str, Any]:
    run = getattr(kind, method)

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("warmup"):
            tell(self)
        return run(self, *args, **kwargs)

    setattr(kind, method, launch)
    return kind, method, run
