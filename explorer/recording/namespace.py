"""Whose names a captured program can see: a block's frame, a function's globals, closure and arguments."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from types import CodeType, FrameType
from typing import Any, Generic, TypeGuard, TypeVar

import torch
from torch import nn
from torch.utils._pytree import MappingKey, tree_flatten_with_path

from tracefuse.recording.frames import is_torchs_or_ours
from tracefuse.recording.memories import WeakMap

T = TypeVar("T")
V = TypeVar("V")
"""What a recorder knows a tensor as."""

_OWN_REFERENCES = 3
"""To a frame's dict of variables while only this module looks at it: the frame's, ours, and the argument that counts them."""

_FEW = 100
"""Entries of a container that is looked into, at most: longer ones are data."""


def visible_from(frame: FrameType) -> dict[str, Any]:
    """The globals and locals of a running frame, in a dict that keeps nothing alive once it is dropped."""
    return {**frame.f_globals, **locals_of(frame)}


def locals_of(frame: FrameType) -> dict[str, Any]:
    """A function's frame keeps the dict that it makes of its variables until it ends, and with it what they held, on CPython
    before 3.13. So that dict is emptied, unless somebody holds it too, by `locals()`; it is made anew when next asked for."""
    made = frame.f_locals
    found = dict(made)
    is_snapshot = sys.version_info < (3, 13) and bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
    if is_snapshot and sys.getrefcount(made) <= _OWN_REFERENCES:
        made.clear()
    return found


def owners_of_methods(start: FrameType) -> Iterator[Any]:
    """What the methods that are running are of, from the innermost one on."""
    frame: FrameType | None = start
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":
            yield locals_of(frame).get("self")
        frame = frame.f_back


def name_of(thing: Any, names: Mapping[str, Any]) -> str | None:
    """The first of `names` that is `thing`, those with a leading underscore aside; None if there is none."""
    return next((name for name, value in names.items() if value is thing and not name.startswith("_")), None)


def namespace_of(fn: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """The names that `fn` can see: globals it mentions, its closure, its arguments."""
    function = inspect.unwrap(getattr(fn, "__func__", fn))
    code = getattr(function, "__code__", None)
    names: dict[str, Any] = {}
    if code is not None:
        names |= {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            names |= _cell_contents(name, cell)
    try:
        names |= inspect.signature(fn).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # builtins have no signature: their arguments stay nameless
        names |= kwargs
    return names


def named_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a call in its order, also those in lists and dicts, each with the name of its parameter, or its key.
    What goes to `*args`, or to a function without a signature, has no name."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    has_name = (one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters)
    names = (one.name if named else "" for one, named in zip(parameters, has_name, strict=True))
    for name, given in (*zip(chain(names, repeat("")), args, strict=False), *kwargs.items()):
        for path, one in tree_flatten_with_path(given)[0]:
            if is_a(one, torch.Tensor):
                keys = [str(key.key) for key in path if isinstance(key, MappingKey)]
                yield (keys[-1] if keys else name), one


def is_a(thing: object, kinds: type[T] | tuple[type[T], ...]) -> TypeGuard[T]:
    """Whether a thing of the user's is of one of these classes. `isinstance` asks the thing itself too, whose `__class__` may
    be computed, and raise."""
    return issubclass(type(thing), kinds)


def _cell_contents(name: str, cell: Any) -> dict[str, Any]:
    try:
        return {name: cell.cell_contents}
    except ValueError:  # not assigned yet
        return {}


def contents_of(container: Any) -> list[tuple[Any, Any]]:
    """What a dict holds by key, and a list or tuple by place; nothing of a long one. None of the user's code runs: a subclass
    may do anything where it is asked for its length or its items."""
    kind: Any = next(one for one in (dict, list, tuple) if issubclass(type(container), one))
    if kind.__len__(container) > _FEW:
        return []
    return list(dict.items(container)) if kind is dict else list(enumerate(kind.__iter__(container)))


class Bindings(Generic[V]):
    """The variables of the running functions that held a program's tensors, where a block's own frame does not show them: a
    loop in a method, a batch that a line has replaced. Tensors are known weakly, or as values, and no frame is kept."""

    def __init__(self) -> None:
        self._read: WeakMap[tuple[tuple[CodeType, str, bool], ...]] = WeakMap()
        self._running: set[CodeType] = set()
        self._calling: set[CodeType] = set()
        self.held: dict[V, str] = {}
        """The first variable that held each value where a backward started."""

    def note_read(self, tensors: Sequence[torch.Tensor]) -> None:
        """These tensors come from outside, and an operator is about to read them for the first time. Once a backward has
        run nothing is noted: what is read then belongs to the update, or a variable holds it when the next backward starts."""
        if self._running:
            return
        found: dict[int, list[tuple[CodeType, str, bool]]] = {id(tensor): [] for tensor in tensors}
        for frame in _user_frames() if found else ():
            given = _given(frame)
            for name, thing in _variables(frame):
                if id(thing) in found:
                    found[id(thing)].append((frame.f_code, name, id(thing) in given))
        for tensor in tensors:
            self._read[tensor] = tuple(found[id(tensor)])

    def note_call(self) -> None:
        """A model is called: the functions that run now own the step, too, though they may return before its backward, as one
        does that returns the loss."""
        if self._running:
            return
        outside: list[CodeType] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is nn.Module._call_impl.__code__:
                outside.clear()  # what ran so far ran inside of the model
            elif not is_torchs_or_ours(frame.f_code.co_filename):
                outside.append(frame.f_code)
            frame = frame.f_back
        self._calling.update(outside)

    def note_backward(self, value_of: Callable[[torch.Tensor], V | None]) -> None:
        """A backward starts: the functions that run now own the step, and those that made its batch have returned."""
        for frame in _user_frames():
            self._running.add(frame.f_code)
            for name, thing in _variables(frame):
                value = value_of(thing) if is_a(thing, torch.Tensor) else None
                if value is not None:
                    self.held.setdefault(value, name)

    def name_of(self, value: V, tensor: torch.Tensor) -> str:
        """The variable that holds the tensor where a backward starts, or held it when it was first read, in a function that
        was still running then, or that was given it and called the model; "" where there is none."""
        read = self._read.get(tensor) or ()
        owned = [name for code, name, _ in read if code in self._running]
        given = (name for code, name, is_given in read if is_given and code in self._calling)
        return self.held.get(value) or next(chain(owned, given), "")


def _user_frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if not is_torchs_or_ours(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _given(frame: FrameType) -> set[int]:
    """The `id` of each thing that the frame's function was given, by itself or in a list, a tuple or a dict."""
    code, variables = frame.f_code, locals_of(frame)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    things = [variables[name] for name in names if name in variables]
    held = [one for thing in things if is_a(thing, (dict, list, tuple)) for _, one in contents_of(thing)]
    return set(map(id, things + held))


def _variables(frame: FrameType) -> list[tuple[str, Any]]:
    """The variables of a frame, and what its dicts hold by name, as a batch does."""
    found = [(name, thing) for name, thing in locals_of(frame).items() if name.isidentifier() and name[:1] != "_"]
    held = (contents_of(thing) for _, thing in found if is_a(thing, dict))
    return found + [(key, one) for pairs in held for key, one in pairs if isinstance(key, str) and key.isidentifier()]
