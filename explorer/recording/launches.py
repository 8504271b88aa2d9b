"""What touches memory behind the back of a dispatch mode: kernels that no operator wraps, launched by Triton or
`torch.cuda.jiterator`, and storages that are resized or copied into.

Private to torch, seen on 2.11 and 2.13: `torch.cuda.jiterator._JittedFunction` and its `kernel_name`.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from typing import Any, ClassVar, Protocol

import torch

# Module, class, method, what is told: kernels by Triton on a GPU, interpreted (TRITON_INTERPRET=1) and by torch.
_KERNELS = (
    ("triton.runtime.jit", "JITFunction", "run", "launched"),
    ("triton.runtime.interpreter", "InterpretedFunction", "run", "launched"),
    ("torch.cuda.jiterator", "_JittedFunction", "__call__", "launched"),
)
_STORAGES = (("torch", "UntypedStorage", "resize_", "resized"), ("torch", "UntypedStorage", "copy_", "copied"))


class Witness(Protocol):
    """Who wants to know, before it is done and when it is."""

    def launched(self, kernel: Any, *args: Any, **kwargs: Any) -> None: ...
    def resized(self, storage: torch.UntypedStorage, nbytes: int) -> None: ...
    def copied(self, target: torch.UntypedStorage, source: torch.UntypedStorage, *rest: Any) -> None: ...
    def done(self) -> None: ...


class LaunchHook:
    """Tells its witnesses of every such deed; in place while there is one."""

    _lock = threading.Lock()
    _witnesses: ClassVar[list[Witness]] = []
    _wrapped: ClassVar[list[tuple[type, str, Any]]] = []

    @classmethod
    def enter(cls, witness: Witness) -> None:
        with cls._lock:
            if not cls._witnesses:
                try:
                    cls._wrap_all()
                except BaseException:
                    cls._unwrap_all()
                    raise
            cls._witnesses = [*cls._witnesses, witness]

    @classmethod
    def leave(cls, witness: Witness) -> None:
        with cls._lock:
            cls._witnesses = [one for one in cls._witnesses if one is not witness]
            if not cls._witnesses:
                cls._unwrap_all()

    @classmethod
    def _wrap_all(cls) -> None:
        has_kernels = "triton" in sys.modules or torch.cuda.is_available()
        for module, name, method, told in (*_STORAGES, *(_KERNELS if has_kernels else ())):
            cls._wrap(getattr(importlib.import_module(module), name), method, told)

    @classmethod
    def _unwrap_all(cls) -> None:
        while cls._wrapped:
            kind, method, own = cls._wrapped.pop()
            delattr(kind, method) if own is None else setattr(kind, method, own)

    @classmethod
    def _wrap(cls, kind: type, method: str, told: str) -> None:
        run = getattr(kind, method)

        @functools.wraps(run)
        def tell_and_run(self: Any, *args: Any, **kwargs: Any) -> Any:
            witnesses = cls._witnesses
            for witness in witnesses:
                getattr(witness, told)(self, *args, **kwargs)
            try:
                return run(self, *args, **kwargs)
            finally:
                for witness in witnesses:
                    witness.done()

        own = vars(kind).get(method)
        setattr(kind, method, tell_and_run)
        cls._wrapped.append((kind, method, own))


def kernel_name(kernel: Any) -> str:
    return getattr(kernel, "kernel_name", None) or getattr(kernel, "__name__", type(kernel).__name__)
