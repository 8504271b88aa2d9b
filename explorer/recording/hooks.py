"""Hooks on torch: where backwards and optimizers' steps start and end, which `nn.Module`s are running, and what touches memory
behind the back of a dispatch mode: kernels that no operator wraps, launched by Triton or `torch.cuda.jiterator`, and storages
that are resized or copied into.

Private names of torch that this file relies on, seen on 2.11, 2.13 and 2.15: `torch.autograd._engine_run_backward`. Of global
hooks of modules: `_global_forward_hooks_with_kwargs`. Of what is compiled: `nn.Module._compiled_call_impl`, `_orig_mod`, and
the frame `compile_wrapper`, which calls `fn`. Of kernels: `torch.cuda.jiterator._JittedFunction`, and `kernel_name`.
Of layers what `__constants__` lists.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import FrameType
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tracefuse.distributed.sharded import local_of
from tracefuse.optimizers.origins import Origin, is_torchs
from tracefuse.recording.calls import Recording, Value, is_in_engine
from tracefuse.recording.memories import WeakMap
from tracefuse.recording.namespace import (
    Name,
    Path,
    Root,
    is_a,
    listed,
    modules_in,
    named,
    named_arguments,
    names_now,
    owners_of_methods,
)
from tracefuse.recording.shield import Attached, Shield, shielded

_DYNAMO = os.path.join("torch", "_dynamo", "eval_frame.py")


class Backwards(Protocol):
    """Who wants to know of backwards. It is asked on the thread that calls autograd, which need not be its own."""

    def backward_starts(self, outputs: Any, gradients: Any = ()) -> None: ...
    def backward_ended(self, inputs: Any, found: Any) -> None: ...


class BackwardHook(Attached[Backwards]):
    """Tells its listeners where a backward starts and ends."""

    _engine: ClassVar[Any] = None

    @classmethod
    def _put_on(cls) -> None:
        cls._engine = torch.autograd._engine_run_backward
        torch.autograd._engine_run_backward = cls._run

    @classmethod
    def _take_off(cls) -> None:
        if cls._engine is not None:
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


class Optimizers(Protocol):
    """Who wants to know of optimizers' steps."""

    def update_starts(self, optimizer: torch.optim.Optimizer) -> None: ...
    def update_ended(self, optimizer: torch.optim.Optimizer) -> None: ...


class OptimizerHook(Attached[Optimizers]):
    """Tells its listeners where any optimizer's step starts and ends, on whatever thread. A listener may come and go while it
    is told: torch's own hooks, which may not meanwhile, are in place while there is one."""

    _hooks: ClassVar[list[Any]] = []

    @classmethod
    def _put_on(cls) -> None:
        cls._hooks.append(register_optimizer_step_pre_hook(cls._starts))
        cls._hooks.append(register_optimizer_step_post_hook(cls._ended))

    @classmethod
    def _take_off(cls) -> None:
        while cls._hooks:
            cls._hooks.pop().remove()

    @classmethod
    def _starts(cls, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for listener in cls._listeners:
            listener.update_starts(optimizer)

    @classmethod
    def _ended(cls, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for listener in cls._listeners:
            listener.update_ended(optimizer)


class Argument(NamedTuple):
    """What a tensor was to the outermost module that it was first given to: the parameter's name, empty where it has none, the
    number of the call and its place among the call's arguments."""

    name: str
    call: int
    place: int


class Running(NamedTuple):
    """A module that runs: its dotted path within its root, the name of its class, whether that is one of `torch.nn`, and the
    number of the root, as text."""

    path: str
    kind: str
    is_torchs: bool
    root: str


OUTSIDE = Running("", "", False, "")


class Held(Protocol):
    """What a module has of one kind, by name, as it is now."""

    def get(self, key: str, /) -> Any: ...
    def items(self) -> Iterable[tuple[str, Any]]: ...


class Scripted:
    """The same of a TorchScript module, which has no dicts but what `torch.jit` wraps: these have no `get`."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def get(self, key: str) -> Any:
        return dict(self._wrapped.items()).get(key)

    def items(self) -> Iterable[tuple[str, Any]]:
        return self._wrapped.items()  # type: ignore[no-any-return]


def held_by(module: nn.Module, kind: str) -> Held:
    """A module's own parameters or buffers; of one that was traced those of the module behind it."""
    behind = vars(module).get("_actual_script_module", module)
    found = vars(behind).get("_parameters" if kind == "parameter" else "_buffers", {})
    return found if isinstance(found, dict) else Scripted(found)


class Slot(NamedTuple):
    """Where a module, which is known weakly, keeps a tensor: its parameter or its buffer of that name, in no other module."""

    module: weakref.ref[nn.Module]
    kind: str
    key: str

    def held_in(self) -> Held | None:
        """What the module has of this kind; None where the module is gone."""
        module = self.module()
        return None if module is None else held_by(module, self.kind)

    def tensor(self) -> torch.Tensor | None:
        """What is there now."""
        held = self.held_in()
        found = None if held is None else held.get(self.key)
        return found if is_a(found, torch.Tensor) else None


NUMBERS = {
    *("alpha", "beta", "delta", "dropout", "eps", "label_smoothing", "lambd", "lower", "margin", "max_norm", "max_val"),
    *("min_val", "momentum", "negative_slope", "norm_type", "p", "threshold", "upper", "value"),
}
"""What layers of torch compute with, and a program may set anew."""


class Mode(NamedTuple):
    """How a module, which is known weakly, ran: by name whether it was `training`, if it asks, and numbers of `NUMBERS`."""

    module: weakref.ref[nn.Module]
    path: str
    options: Mapping[str, Any]


class ModuleStack:
    """The `nn.Module`s that are running, by global forward hooks, and the `arguments` of the outermost ones."""

    def __init__(self, shield: Shield) -> None:
        self.shield = shield
        self._stack: list[Running] = []
        self._roots: list[Root] = []
        self._paths: WeakMap[Path] = WeakMap()
        self.tensors: WeakMap[tuple[str, Path]] = WeakMap()
        """Parameters and buffers: which of both each is, and where."""
        self.roots: Mapping[int, Name] = {}
        """What the roots of the program are called, once it is over."""
        self.slots: WeakMap[Slot] = WeakMap()
        """By the tensor that was there when the module was met."""
        self._hooks = ExitStack()
        self._entered: WeakMap[dict[str, Any]] = WeakMap()
        """How each module ran last."""
        self._modes: WeakMap[dict[str, Any] | None] = WeakMap()
        """How those of the program ran, None of one that ran otherwise too."""
        self.arguments: WeakMap[Argument] = WeakMap()
        self.given: dict[Value, Argument] = {}
        """The same by value, of those that were known when the call ended, or there when a backward started."""
        self._value_of: Callable[[torch.Tensor], Value | None] = lambda _: None
        self._calls = 0
        self.called: Callable[[], None] = lambda: None
        """Called where a module with trained parameters is, and none runs."""
        self.compiled: dict[str, None] = {}
        """What ran of what `torch.compile` had compiled: classes of modules, and functions that call modules."""
        self.settings: dict[str, str] = {}
        """What the modules that ran were asked for, beside their work, in the words of `environment`."""

    def attach(self) -> None:
        self._thread = threading.get_ident()
        with ExitStack() as hooks:
            hooks.callback(register_module_forward_pre_hook(self._enter).remove)
            left = register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)
            # torch leaves it there
            hooks.callback(nn.modules.module._global_forward_hooks_with_kwargs.pop, left.id, None)
            hooks.callback(left.remove)
            self._hooks = hooks.pop_all()

    def detach(self) -> None:
        self._hooks.close()
        self._stack.clear()

    def current(self) -> Running:
        """The innermost running module; `OUTSIDE` outside of modules."""
        return self._stack[-1] if self._stack else OUTSIDE

    def is_ours(self) -> bool:
        """Hooks are global: other threads' modules are not ours, those that autograd's threads run again are."""
        return threading.get_ident() == self._thread or is_in_engine()

    @shielded
    def _enter(self, module: nn.Module, args: Any) -> None:
        if not self.is_ours():
            return
        if module not in self._paths:
            self._meet(module)
        if torch.is_grad_enabled():  # what a validation runs is none of the step's
            self._entered[module] = _options_of(module)
        compiled = _compiled_class(module) or (None if self._stack else _compiled_function())
        if compiled is not None:
            self.compiled[compiled] = None
        if isinstance(module, nn.parallel.DistributedDataParallel):
            self._note_data_parallel(module)
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            self.settings["DataParallel"] = f"{len(module.device_ids)} threads"
        if not self._stack and not is_in_engine() and _is_trained(module):
            self.called()
        root, path = self._paths.get(module) or ("", "")
        kind = type(module)
        self._stack.append(Running(path, kind.__name__, is_torchs(kind), str(root)))

    def _note_data_parallel(self, module: nn.parallel.DistributedDataParallel) -> None:
        if module.find_unused_parameters:
            self.settings["find_unused_parameters"] = "on"
        if module.require_backward_grad_sync:
            self.settings["DistributedDataParallel"] = "reduces gradients"

    @shielded
    def _leave(self, module: nn.Module, args: Any, kwargs: Any, *out: Any) -> None:
        """Of a forward that raised torch gives no `kwargs`, and the result in their place."""
        if self._stack and self.is_ours():
            self._stack.pop()
            if out and not self._stack and not is_in_engine():
                self._note_arguments(module, args, kwargs)

    def _note_arguments(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls += 1
        for place, (name, tensor) in enumerate(named_arguments(module.forward, args, kwargs)):
            if tensor in self.arguments:
                continue
            self.arguments[tensor] = argument = Argument(name, self._calls, place)
            if (value := self._value_of(tensor)) is not None:
                self.given.setdefault(value, argument)

    def forget_arguments(self, value_of: Callable[[torch.Tensor], Value | None]) -> None:
        """From now on they are those of another program, of whose tensors `value_of` tells the values."""
        self.arguments = WeakMap()
        self.given = {}
        self._modes = WeakMap()
        self._value_of = value_of

    def note_backward(self) -> None:
        """A backward starts, and the batches that modules were given are still there."""
        for tensor, argument in self.arguments.items():
            if (value := self._value_of(tensor)) is not None:
                self.given.setdefault(value, argument)
        for module, mode in self._entered.items():
            is_other = module in self._modes and self._modes.get(module) != mode
            self._modes[module] = None if is_other else mode
        self._entered = WeakMap()

    def modes(self) -> Iterator[Mode]:
        """How the modules ran of which a backward was computed, but for those that run the same in either mode and have no
        numbers."""
        for module, options in self._modes.items():
            asks = options is not None and _asks_for_mode(type(module))
            told = {name: one for name, one in (options or {}).items() if asks or name != "training"}
            if told and (at := self._paths.get(module)) is not None and at.root in self.roots:
                yield Mode(weakref.ref(module), self.in_full(at), told)

    def _meet(self, module: nn.Module) -> None:
        """A module that is none of a known one's. One that runs in no other may be of one of which a method runs, as
        Lightning calls a `training_step`."""
        owners = () if self._stack else owners_of_methods(sys._getframe(1))
        of_it = [one for one in owners if is_a(one, nn.Module) and one is not module and module in one.modules()]
        if of_it:
            self.add_root(of_it[-1])
        elif self._stack:  # no attribute leads there, as to a loss made in a forward: it is shown there, by its class
            running = self._stack[-1]
            at = ".".join(filter(None, (running.path, type(module).__name__)))
            self._learn(module, Path(int(running.root), at))
        else:
            self.add_root(module)

    def add_root(self, module: nn.Module, is_running: bool = True) -> None:
        """Learn where the modules of `module` are, which may be known itself, and the names of its parameters and buffers."""
        known = self._paths.get(module)
        if known is None:
            gone = (at for at, root in enumerate(self._roots) if root.is_gone_like(module))
            known = Path(next(gone, len(self._roots)), "")
        if known.root == len(self._roots):
            has_parameters = any(one not in self.tensors for _, one in listed(module.named_parameters))
            self._roots.append(Root.of(module, has_parameters, names_now(module) if is_running else ()))
        self._learn(module, known)

    def _learn(self, module: nn.Module, at: Path) -> None:
        for path, one in [(at.path, module), *listed(module.named_modules, prefix=at.path)]:
            if one not in self._paths:
                self._paths[one] = Path(at.root, path)
                self._note_slots(one)
        for kind, found in (("parameter", module.named_parameters), ("buffer", module.named_buffers)):
            for path, tensor in listed(found):
                for one in (tensor, local_of(tensor)):
                    if one not in self.tensors:
                        self.tensors[one] = kind, Path(at.root, path)

    def _note_slots(self, module: nn.Module) -> None:
        for kind in ("parameter", "buffer"):
            held = held_by(module, kind)
            is_parameters = kind == "parameter" and isinstance(held, dict)
            for key, tensor in held.items():
                # A plain tensor is a parameter for a moment alone, while `torch.func.functional_call` runs.
                if is_a(tensor, nn.Parameter if is_parameters else torch.Tensor) and tensor not in self.slots:
                    self.slots[tensor] = Slot(weakref.ref(module), kind, key)

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Dotted path and tensor of what the buffers of the modules that ran, or were read, hold now."""
        for module, path in self._paths.items():
            if path.root in self.roots:
                yield from listed(module.named_buffers, prefix=self.in_full(path), recurse=False)

    def name_of(self, tensor: torch.Tensor) -> tuple[str, str] | None:
        """Which of "parameter" and "buffer" a tensor is, and its dotted path; None of one that is of no module."""
        found = self.tensors.get(tensor)
        return found and (found[0], self.in_full(found[1]))

    def in_full(self, path: Path) -> str:
        return self.roots.get(path.root, Name()).of(path.path)

    def name_roots(self, recording: Recording, variables: Mapping[str, Any]) -> None:
        """The program is over, and sees these variables: say what its roots are called, and where its ops come from."""
        seen = [one for one in variables.values() if is_a(one, nn.Module)]
        if recording.updates:  # `trainer.ema` never runs, and a step writes to it
            seen += [held.module for held in modules_in(variables) if held.far]
        for module in sorted(seen, key=_size, reverse=True):
            self.add_root(module, is_running=False)
        ran = {int(call.origin.root) for call in recording.calls if call.origin.root}
        known = map(self.tensors.get, recording.externals.values())
        read = {one[1].root for one in known if one is not None}
        self.roots = named(self._roots, ran, read, self._paths.values(), variables)
        renamed: dict[int, tuple[Origin, Origin]] = {}
        for call in recording.calls:
            old = call.origin
            if old.root:
                if id(old) not in renamed:
                    name = self.roots[int(old.root)]
                    renamed[id(old)] = old, replace(old, module=name.of(old.module), root=name.name)
                call.origin = renamed[id(old)][1]


def _options_of(module: nn.Module) -> dict[str, Any]:
    names = {*getattr(type(module), "__constants__", ())} & NUMBERS
    if isinstance(module, nn.MultiheadAttention):
        names = {"dropout"}
    found = {name: getattr(module, name, None) for name in sorted(names)}
    return {"training": module.training} | {k: v for k, v in found.items() if isinstance(v, (int, float, type(None)))}


def _asks_for_mode(kind: type[nn.Module]) -> bool:
    """Whether code of a class, or of one that it derives from, asks `self.training`."""
    own = (one for base in kind.__mro__[: kind.__mro__.index(nn.Module)] for one in vars(base).values())
    return any("training" in code.co_names for one in own if (code := getattr(one, "__code__", None)) is not None)


def _size(module: nn.Module) -> int:
    return len(listed(module.named_modules))


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for _, parameter in listed(module.named_parameters))


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


# --- behind the back of a dispatch mode -------------------------------------------------------------------------------

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


class LaunchHook(Attached[Witness]):
    """Tells its witnesses of every such deed."""

    _wrapped: ClassVar[list[tuple[type, str, Any]]] = []

    @classmethod
    def _put_on(cls) -> None:
        has_kernels = "triton" in sys.modules or torch.cuda.is_available()
        for module, name, method, told in (*_STORAGES, *(_KERNELS if has_kernels else ())):
            cls._wrap(getattr(importlib.import_module(module), name), method, told)

    @classmethod
    def _take_off(cls) -> None:
        while cls._wrapped:
            kind, method, own = cls._wrapped.pop()
            delattr(kind, method) if own is None else setattr(kind, method, own)

    @classmethod
    def _wrap(cls, kind: type, method: str, told: str) -> None:
        run = getattr(kind, method)

        @functools.wraps(run)
        def tell_and_run(self: Any, *args: Any, **kwargs: Any) -> Any:
            witnesses = cls._listeners
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


# --- what runs otherwise in a dispatch mode ---------------------------------------------------------------------------


class LengthsHook(Attached[None]):
    """Lets `torch.ctc_loss` take lengths on the CPU beside a GPU's tensors, as it does where nothing is recorded.

    Eager reads lengths as numbers, wherever they lie. In a dispatch mode torch runs operators on them instead, and those want
    all on one device: the loss itself, and the mean, which divides by them. So lengths go to the device of the
    log-probabilities first. Seen on torch 2.11 to 2.15: `areAnyTensorSubclassLike`, in `LossCTC.cpp`.
    """

    _ctc_loss: ClassVar[Any] = None

    @classmethod
    def _put_on(cls) -> None:
        run = cls._ctc_loss = torch.ctc_loss

        @functools.wraps(run)
        def with_lengths_moved(log_probs: Any, targets: Any, *others: Any, **named: Any) -> Any:
            named = {name: _on_device_of(log_probs, one) for name, one in named.items()}
            return run(log_probs, targets, *(_on_device_of(log_probs, one) for one in others), **named)

        torch.ctc_loss = with_lengths_moved

    @classmethod
    def _take_off(cls) -> None:
        if cls._ctc_loss is not None:
            torch.ctc_loss = cls._ctc_loss


class CompiledHook(Attached[None]):
    """Lets what `torch.compile` has compiled run as it is written, and be compiled afterwards.

    In a dispatch mode dynamo compiles nothing, and for good: a function that is called for the first time there is never
    compiled later, and one with `fullgraph=True` raises, there and ever after. With this stance it is not asked. Who has
    not imported dynamo has compiled nothing. Seen on torch 2.11 to 2.15: `convert_frame.py`, `_set_stance`.
    """

    _own: ClassVar[Any] = None

    @classmethod
    def _put_on(cls) -> None:
        if "torch._dynamo.eval_frame" in sys.modules:
            cls._own = torch.compiler.set_stance("force_eager")

    @classmethod
    def _take_off(cls) -> None:
        if cls._own is not None:
            stance, cls._own = cls._own, None
            stance.__exit__(None, None, None)


def _on_device_of(tensor: torch.Tensor, argument: Any) -> Any:
    return argument.to(tensor.device) if isinstance(argument, torch.Tensor) else argument
