"""Hooks on torch: where backwards start and end, and which `nn.Module`s are running.

Private names of torch that this file relies on, seen on 2.11, 2.13 and 2.15: `torch.autograd._engine_run_backward`. Of what is
compiled, on 2.13: `nn.Module._compiled_call_impl`, `_orig_mod`, and the frame `compile_wrapper`, which calls `fn`.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import ExitStack
from types import FrameType
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from tracefuse.recording.calls import is_in_engine
from tracefuse.recording.memories import WeakMap
from tracefuse.recording.shield import Shield, shielded

_DYNAMO = os.path.join("torch", "_dynamo", "eval_frame.py")


class Backwards(Protocol):
    """Who wants to know of backwards. It is asked on the thread that calls autograd, which need not be its own."""

    def backward_starts(self, outputs: Any, gradients: Any = ()) -> None: ...
    def backward_ended(self, inputs: Any, found: Any) -> None: ...


class BackwardHook:
    """Tells its listeners where a backward starts and ends; in place while there is one."""

    _lock = threading.Lock()
    _listeners: ClassVar[list[Backwards]] = []
    _engine: ClassVar[Any] = None

    @classmethod
    def enter(cls, listener: Backwards) -> None:
        with cls._lock:
            if not cls._listeners:
                cls._engine = torch.autograd._engine_run_backward
                torch.autograd._engine_run_backward = cls._run
            cls._listeners = [*cls._listeners, listener]

    @classmethod
    def leave(cls, listener: Backwards) -> None:
        with cls._lock:
            cls._listeners = [one for one in cls._listeners if one is not listener]
            if not cls._listeners:
                torch.autograd._engine_run_backward = cls._engine

    @classmethod
    def _run(cls, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """`args` are, as `torch.autograd.backward` and `grad` give them: the gradients to start from, `retain_graph`,
        `create_graph`, the inputs to stop at."""
        listeners = cls._listeners
        for listener in listeners:
            listener.backward_starts(outputs, *args[:1])
        found = cls._engine(outputs, *args, **kwargs)
        for listener in listeners:
            listener.backward_ended(args[3] if len(args) > 3 else (), found)
        return found


class ModuleStack:
    """The `nn.Module`s that are running, by global forward hooks."""

    def __init__(self, names: WeakMap[tuple[str, str]], shield: Shield) -> None:
        self.shield = shield
        self._stack: list[tuple[str, str]] = []
        self._paths: WeakMap[str] = WeakMap()
        self._names = names
        self._hooks = ExitStack()
        self.compiled: dict[str, None] = {}
        """What ran of what `torch.compile` had compiled: classes of modules, and functions that call modules."""

    def attach(self) -> None:
        self._thread = threading.get_ident()
        with ExitStack() as hooks:
            hooks.callback(register_module_forward_pre_hook(self._enter).remove)
            hooks.callback(register_module_forward_hook(self._leave, always_call=True).remove)
            self._hooks = hooks.pop_all()

    def detach(self) -> None:
        self._hooks.close()
        self._stack.clear()

    def current(self) -> tuple[str, str]:
        """(dotted path, class name) of the innermost running module; ("", "") outside."""
        return self._stack[-1] if self._stack else ("", "")

    def is_ours(self) -> bool:
        """Hooks are global: other threads' modules are not ours, those that autograd's threads run again are."""
        return threading.get_ident() == self._thread or is_in_engine()

    @shielded
    def _enter(self, module: nn.Module, args: Any) -> None:
        if not self.is_ours():
            return
        if module not in self._paths:
            self.add_root(module, self._path_within(module))
        compiled = _compiled_class(module) or (None if self._stack else _compiled_function())
        if compiled is not None:
            self.compiled[compiled] = None
        self._stack.append((self._paths.get(module) or "", type(module).__name__))

    @shielded
    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if self._stack and self.is_ours():
            self._stack.pop()

    def _path_within(self, module: nn.Module) -> str:
        """Where to show a module that no attribute of the running one leads to, such as a loss made in its forward: under the
        running one, by its class. One that nothing runs in is a root."""
        return ".".join(filter(None, (self._stack[-1][0], type(module).__name__))) if self._stack else ""

    def add_root(self, root: nn.Module, at: str = "") -> None:
        """Learn the dotted paths of `root`'s modules, which lies at `at`, and the names of its parameters and buffers."""
        for path, module in root.named_modules(prefix=at):
            if module not in self._paths:
                self._paths[module] = path
        for path, parameter in root.named_parameters():
            if parameter not in self._names:
                self._names[parameter] = ("parameter", path)
        for path, buffer in root.named_buffers():
            if buffer not in self._names:
                self._names[buffer] = ("buffer", path)


def _compiled_class(module: nn.Module) -> str | None:
    """The class of what `torch.compile` compiled, if `module` is it."""
    if module._compiled_call_impl is not None:
        return type(module).__name__
    return type(module._orig_mod).__name__ if "_orig_mod" in module._modules else None


def _compiled_function() -> str | None:
    """The function that `torch.compile` compiled, if one is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_code.co_filename.endswith(_DYNAMO):
            return getattr(frame.f_locals.get("fn"), "__name__", None)
        frame = frame.f_back
    return None
