"""What makes the host wait for a GPU: values, shapes and copies that Python takes from tensors.

    operator                          read                       how it is said
    _local_scalar_dense               a number                   by the method: `.item()`, `bool(t)`, `float(t)`, …
    the same in torch.distributions   a check                  `validate_args`
    the same in a GradScaler          finite                   by the method
    equal, allclose                   a number                   `torch.equal(…)`
    nonzero, masked_select, unique …  a shape                    `nonzero`
    index, index_put with a mask      a shape                    `a boolean mask as an index`
    _to_copy, copy to the CPU         a copy                     `a copy to the CPU`
    the same in one_hot               a shape                    `one_hot` without `num_classes`
    lift_fresh                        a constant               `torch.tensor(…)`
    lift_fresh, read as an index      an index                 `a list or a NumPy array as an index`
    none: torch hides it from modes   print, list, copy          `print(t)`, `.tolist()`, `.cpu()`

One operator stands for many methods, and printing runs with dispatch modes off. So while a mode that is a `Listener` is
entered anywhere, the methods of `torch.Tensor` that read are wrapped; they do what they did. Who listens is asked of
torch's own stack of modes, which autograd's threads inherit.

Private names of torch that this file relies on, seen on 2.11, 2.13 and 2.15:
`torch.utils._python_dispatch._get_current_dispatch_mode_stack`, and the generator in `GradScaler._maybe_opt_step`.
"""

from __future__ import annotations

import ast
import functools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from tracefuse.optimizers.origins import Line, Source
from tracefuse.recording.frames import is_called_by, is_called_within, is_subscript, running_call
from tracefuse.recording.shield import Attached, Shield

aten = torch.ops.aten
Kind = Literal["number", "check", "finite", "shape", "copy", "print", "constant", "index"]

BRANCH = "`bool(t)`, `if t`"
PLACE = "a tensor as an index or a size"

# Methods of a tensor by what a user calls them. Those of the second table run no operator that a mode would see on the CPU.
_METHODS = {
    "item": "`.item()`",
    "__bool__": BRANCH,
    "__int__": "`int(t)`",
    "__float__": "`float(t)`",
    "__complex__": "`complex(t)`",
    "__index__": PLACE,
    "__contains__": "`in`",
    "__format__": "a formatted string",
}
_UNSEEN: dict[str, tuple[str, Kind]] = {
    "__repr__": ("`print(t)`", "print"),
    "tolist": ("`.tolist()`", "number"),
    "cpu": ("`.cpu()`", "copy"),
}
_NUMBERS = {aten.equal.default: "`torch.equal(…)`", aten.allclose.default: "`torch.allclose(…)`"}
_SHAPES = {
    "nonzero": "`nonzero`", "masked_select": "`masked_select`", "_unique2": "`unique`", "unique_dim": "`unique`",
    "unique_consecutive": "`unique_consecutive`", "unique_dim_consecutive": "`unique_consecutive`",
    "bincount": "`bincount`",
}  # fmt: skip
_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")
_READERS = {
    aten._local_scalar_dense.default, aten.repeat_interleave.Tensor, aten._to_copy.default, aten.copy_.default,
}  # fmt: skip
COPY = "a copy to the CPU"
CONSTANT = "`torch.tensor(…)`"
INDEX = "a list or a NumPy array as an index"
CHECK = "`validate_args` of `torch.distributions`"
_TORCH = os.path.dirname(torch.__file__)
_OPTIMIZER = os.path.join(_TORCH, "optim", "optimizer.py")
_DISTRIBUTIONS = os.path.join(_TORCH, "distributions", "")
_SCALER = os.path.join(_TORCH, "amp", "grad_scaler.py")


@dataclass(frozen=True)
class HostRead:
    """One read: `how` in the words of the table above, the `device` and the bytes that are read (0 where a shape is)."""

    kind: Kind
    how: str
    device: torch.device
    nbytes: int = 0


@dataclass(frozen=True)
class Stop:
    """A read that makes the host wait for a GPU, its line, whether autograd's engine was running, and the line `within` a
    library that owns the user's loop where that reads."""

    read: HostRead
    source: Source | None
    in_backward: bool = False
    within: Line | None = None


class Listener:
    """A dispatch mode that wants to know of reads. `heard` may raise: then the method that reads is not run."""

    def heard(self, read: HostRead) -> None:
        raise NotImplementedError


class Methods(Attached[None]):
    """The wrapped methods of `torch.Tensor`, in place while any listener is entered."""

    _inherited: ClassVar[dict[str, Any]] = {}
    _current = threading.local()

    @classmethod
    def _put_on(cls) -> None:
        for name in (*_METHODS, *_UNSEEN):
            own, wrapped = vars(torch.Tensor).get(name), cls._wrapped(name, getattr(torch.Tensor, name))
            setattr(torch.Tensor, name, wrapped)
            cls._inherited[name] = own

    @classmethod
    def _take_off(cls) -> None:
        while cls._inherited:
            name, own = cls._inherited.popitem()
            delattr(torch.Tensor, name) if own is None else setattr(torch.Tensor, name, own)

    @classmethod
    def word(cls) -> str:
        """How the outermost method is said that this thread is in; "" outside."""
        return getattr(cls._current, "word", "")

    @classmethod
    def is_told(cls) -> bool:
        """Whether listeners were told of the method that this thread is in, before it ran."""
        return getattr(cls._current, "is_told", False)

    @classmethod
    def _wrapped(cls, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        own_word, kind = _UNSEEN.get(name) or (_METHODS[name], None)

        @functools.wraps(method)
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            before = vars(cls._current).copy()
            try:
                Shield.survive_all(cls._tell, tensor, own_word, kind)
                return method(tensor, *args, **kwargs)
            finally:
                vars(cls._current).clear()
                vars(cls._current).update(before)

        return read

    @classmethod
    def _tell(cls, tensor: torch.Tensor, own_word: str, kind: Kind | None) -> None:
        """Tell those who listen that a method of `tensor` is about to read."""
        listeners = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Listener)]
        if not listeners:
            return
        word, is_told = cls.word() or own_word, cls.is_told()
        cls._current.word, cls._current.is_told = word, is_told or kind is not None
        if kind is not None and not is_told:
            for listener in listeners:
                listener.heard(HostRead(kind, word, tensor.device, tensor.nbytes))


def may_read(func: OpOverload) -> bool:
    """Whether `read_by` can be anything but None for calls of this operator."""
    return func in _READERS or func in _NUMBERS or func.overloadpacket.__name__ in {*_SHAPES, *_INDEXED}


def read_by(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> HostRead | None:
    """What the host reads when the operator runs, and so waits for; None if it need not, or if listeners were told."""
    if Methods.is_told():
        return None
    if func is aten._local_scalar_dense.default:
        device, size = args[0].device, args[0].element_size()
        # torch's optimizers count their steps on the CPU on purpose.
        is_counter = device.type == "cpu" and is_called_by("_get_value", _OPTIMIZER)
        if is_counter:
            return None
        if is_called_within(_DISTRIBUTIONS):
            return HostRead("check", CHECK, device, size)
        if is_called_by("<genexpr>", _SCALER):
            return HostRead("finite", Methods.word(), device, size)
        if not Methods.word() and (call := running_call()) is not None and _called(call) == "one_hot":
            # On a CPU it checks its classes; on a GPU it finds out how many they are, where it is not told.
            return None if _has_classes(call) else HostRead("shape", "`one_hot` without `num_classes`", device)
        return HostRead("number", Methods.word() or PLACE, device, size)
    if func in _NUMBERS:
        return HostRead("number", _NUMBERS[func], args[0].device, 1)
    name = func.overloadpacket.__name__
    if name in _SHAPES:
        return HostRead("shape", _SHAPES[name], args[0].device)
    if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
        return HostRead("shape", "`repeat_interleave` without `output_size`", args[0].device)
    if name in _INDEXED and _is_masked(name, args):
        return HostRead("shape", "a boolean mask as an index", args[0].device)
    return _copy_to_the_cpu(func, args, kwargs)


def made_by_python(made: torch.Tensor) -> HostRead | None:
    """What Python made a tensor of: an index, or numbers. None for numbers that lie in memory of NumPy's, which nothing was
    copied from, and for one that is written by an index, which is copied to no GPU."""
    if is_subscript():
        return HostRead("index", INDEX, made.device, _nbytes(made)) if made.dim() else None
    return None if _is_wrapped(made) else HostRead("constant", CONSTANT, made.device, _nbytes(made))


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _has_classes(call: ast.Call) -> bool:
    """Whether a call of `one_hot` gives a number of classes: -1, which it has by itself, is none."""
    given = [*call.args[1:2], *(one.value for one in call.keywords if one.arg == "num_classes")]
    return bool(given) and ast.unparse(given[0]) != "-1"


def _is_wrapped(made: torch.Tensor) -> bool:
    return not made.untyped_storage().resizable()


def _nbytes(made: torch.Tensor) -> int:
    return made.numel() * made.element_size()


def _is_masked(name: str, args: tuple[Any, ...]) -> bool:
    """An index by a mask finds out first how many elements it takes; writing one number by one mask does not."""
    masks = [t for t in tree_leaves(args[1]) if isinstance(t, torch.Tensor) and t.dtype in (torch.bool, torch.uint8)]
    fills = name != "index" and len(args[1]) == 1 and args[2].numel() == 1 and args[2].device.type == "cpu"
    return bool(masks) and not fills


def _copy_to_the_cpu(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> HostRead | None:
    if func is aten._to_copy.default:
        source, target, waits = args[0], kwargs.get("device"), not kwargs.get("non_blocking")
    elif func is aten.copy_.default:
        source, target, waits = args[1], args[0].device, not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    else:
        return None
    to_cpu = target is not None and torch.device(target).type == "cpu" and source.device.type == "cuda"
    return HostRead("copy", COPY, source.device, source.nbytes) if to_cpu and waits else None
