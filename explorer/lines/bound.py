"""In which order code binds its variables, read off its instructions, and what it takes out of its parameters.

for clean, noisy in loader:               clean, noisy: in the order of the loop around a place, whatever is bound before it
def step(x, y): ...                       x, y: without a loop parameters come before what else the code binds
labels = inputs.pop("labels")             labels: taken out of `inputs`
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import linecache
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, MappingProxyType
from typing import NamedTuple

from tracefuse.lines.statements import root_of, statements_of

_TAKING = ("pop", "get")
_READING = ("numpy", "tolist")
_MAKING = ("from_numpy", "as_tensor", "tensor")


class Place(NamedTuple):
    """Where code binds a variable, as seen from a place in it: in the same round of a loop (0), in the round before (1) or
    elsewhere (2), and how many others are bound before it there."""

    kind: int
    at: int


def place_of(code: CodeType, at: int, name: str) -> Place | None:
    """Where `code` binds `name`, as seen from the instruction `at`; None where it does not."""
    found = [(place, offset) for place, (offset, stored) in enumerate(_stores(code)) if stored == name]
    for loop in sorted((one for one in _loops(code) if at in one), key=len) if found else ():
        if inside := [place for place, offset in found if offset in loop]:
            return Place(int(all(offset > at for _, offset in found if offset in loop)), inside[0])
    if name in (parameters := parameters_of(code)):
        return Place(2, parameters.index(name))
    return Place(2, len(parameters) + found[0][0]) if found else None


def parameters_of(code: CodeType) -> tuple[str, ...]:
    flags = code.co_flags
    stars = bool(flags & inspect.CO_VARARGS) + bool(flags & inspect.CO_VARKEYWORDS)
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + stars]


@functools.lru_cache(maxsize=256)
def _stores(code: CodeType) -> tuple[tuple[int, str], ...]:
    """The instruction and the name of all that the code binds, as it is written: of `x, y = a, b` Python binds
    `y` first. Since Python 3.13 one instruction may bind two."""
    found, unpacked = [], 0
    for at, one in enumerate(dis.get_instructions(code)):
        if one.opname == "UNPACK_SEQUENCE":
            unpacked = max(0, unpacked - 1) + (one.arg or 0)
        elif one.opname.startswith(("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF")):
            names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
            names = names[:1] if one.opname.startswith("STORE_FAST_LOAD") else names
            where = (one.positions.lineno, one.positions.col_offset) if one.positions else (None, None)
            written = where if None not in where else found[-1][0] if found else (code.co_firstlineno, 0)
            # Of two that are not unpacked, as in `x, y = a, b`, the one that is written second is bound first.
            found += [(written, at, one.offset, name) for name in (names if unpacked else names[::-1])]
            unpacked = max(0, unpacked - len(names))
    return tuple((offset, name) for *_, offset, name in sorted(found, key=lambda one: one[:2]))


@functools.lru_cache(maxsize=256)
def _loops(code: CodeType) -> tuple[range, ...]:
    """The instructions of each loop. What handles exceptions stands behind all else, and goes back from there without one."""
    found = []
    for one in dis.get_instructions(code):
        if one.opname == "PUSH_EXC_INFO":
            break
        if one.opcode in dis.hasjrel and one.argval < one.offset:
            found.append(range(one.argval, one.offset + 1))
    return tuple(found)


@functools.lru_cache(maxsize=256)
def taken(code: CodeType) -> frozenset[str]:
    """The variables that a function takes out of its parameters."""
    parameters = parameters_of(code)
    pairs = _assigned(code) if parameters else ()
    return frozenset(name for name, value in pairs if _holder(value) in parameters)


@functools.lru_cache(maxsize=256)
def through_numpy(code: CodeType) -> Mapping[str, int]:
    """The variables that code gives a tensor which it makes by NumPy of the one that they held, and the lines:
    `x = torch.from_numpy(x.numpy()[::-1].copy())`, or the same in several lines."""
    read_of: dict[str, set[str]] = {}
    found = {}
    for name, value in _assigned(code):
        parts = list(ast.walk(value))
        read = {root_of(one.func.value) for one in parts if _calls(one, _READING)}  # type: ignore[attr-defined]
        for one in parts:
            read |= read_of.get(one.id, set()) if isinstance(one, ast.Name) else set()
        if any(_calls(one, _MAKING) for one in parts):
            if name in read:
                found[name] = value.lineno
            read = set()
        read_of[name] = read
    return MappingProxyType(found)


def _calls(node: ast.AST, methods: Sequence[str]) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in methods


def _assigned(code: CodeType) -> tuple[tuple[str, ast.expr], ...]:
    """The names that statements of the code assign to, and what, in the order of the lines."""
    text = "".join(linecache.getlines(code.co_filename))
    lines = {line for _, _, line in code.co_lines() if line}
    assigned = [one for one in statements_of(text) if isinstance(one, ast.Assign) and one.lineno in lines]
    assigned.sort(key=lambda one: one.lineno)
    return tuple(pair for one in assigned for target in one.targets for pair in _pairs(target, one.value))


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for one, other in zip(target.elts, value.elts, strict=True):
            yield from _pairs(one, other)


def _holder(value: ast.expr) -> str:
    """The variable that an expression takes something out of; "" where it is none that does."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _TAKING:
        value = value.func.value
    elif isinstance(value, ast.Subscript):
        value = value.value
    else:
        return ""
    return value.id if isinstance(value, ast.Name) else ""
