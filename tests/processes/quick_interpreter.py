"""Triton's interpreter without the work that it does again for each launch and each operator, and that nobody sees: what it
computes and what it refuses are the same.

It lists all of `triton.language` for each launch, and for each call of a function within one, to put functions of its own in
the place of Triton's. It computes each sum of integers once more, in 64 bits, to assert that it does not overflow, and asserts
nothing outside of Triton's debug mode. And it makes a table of all types for each array.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from triton.language import core
from triton.runtime import interpreter

_patch_lang, _get_np_dtype = interpreter._patch_lang, interpreter._get_np_dtype
_patches: dict[tuple[int, ...], list[tuple[Any, str, Any]]] = {}
"""By the modules that a kernel sees: what is put in whose place."""
_functions: set[tuple[int, ...]] = set()
"""By the modules that a function within a kernel sees: what it needs is in place, since nothing of it is taken away."""
_types: dict[str, Any] = {}


class Scope(interpreter._LangPatchScope):  # type: ignore[misc, name-defined]
    depth = 0

    def restore(self) -> None:
        super().restore()
        Scope.depth -= 1


def patch_lang(fn: Any) -> Any:
    seen = tuple(id(one) for one in fn.__globals__.values() if one is interpreter.tl or one is core)
    if Scope.depth:
        if seen not in _functions:
            _functions.add(seen)
            _patch_lang(fn)
        return None
    scope = Scope()
    if seen in _patches:
        for patch in _patches[seen]:
            scope.set_attr(*patch)
    else:
        scope._changes = _patch_lang(fn)._changes
        places = {(id(owner), name): (owner, name) for owner, name, _ in scope._changes}
        _patches[seen] = [(owner, name, vars(owner)[name]) for owner, name in places.values()]
    Scope.depth += 1
    return scope


def np_dtype(type_: Any) -> Any:
    found = _types.get(type_.name)
    if found is None:
        found = _types[type_.name] = _get_np_dtype(type_)
    return found


def use() -> None:
    interpreter._patch_lang, interpreter._get_np_dtype = patch_lang, np_dtype
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
