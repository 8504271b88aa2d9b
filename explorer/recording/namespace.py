"""Whose names a captured program can see: a block's frame, a function's globals, closure and arguments."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, repeat
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import MappingKey, tree_flatten_with_path

_OWN_REFERENCES = 3
"""To a frame's dict of variables while only this module looks at it: the frame's, ours, and the argument that counts them."""


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
            if isinstance(one, torch.Tensor):
                keys = [str(key.key) for key in path if isinstance(key, MappingKey)]
                yield (keys[-1] if keys else name), one


def _cell_contents(name: str, cell: Any) -> dict[str, Any]:
    try:
        return {name: cell.cell_contents}
    except ValueError:  # not assigned yet
        return {}
