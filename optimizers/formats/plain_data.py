"""Our data classes as JSON and back, by the types that our code declares.

    int, str, bool, None        themselves           dataclass, mapping          an object
    float                       itself, or {"float": "nan"} where JSON has no number for it
    list, tuple, frozenset      a list               of a `special` type         what its functions say

A file never says which class to make: `read(kind, data)` makes what the caller asks for, field by field, and raises
`SessionError` for anything else. Texts are single lines of printable characters, since they end in comments of generated
code; numbers are what 64 bits hold.
"""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from tracefuse.optimizers.errors import SessionError

Special = Mapping[type, tuple[Callable[[Any], Any], Callable[[Any, str], Any]]]
"""Type -> how it is written, and how it is read: `(data, where) -> value`."""

LONGEST_TEXT = 20_000
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def damaged(problem: str) -> SessionError:
    """The error for a file that holds what no session does."""
    reason = f"{problem}: the file is damaged, or no session of this tracefuse"
    return SessionError(f"{reason}. Save it again with `c.save(path)`")


# --- writing ----------------------------------------------------------------------------------------------------------


def written(value: Any, special: Special = types.MappingProxyType({})) -> Any:
    """`value` as what `json.dumps(allow_nan=False)` takes. Raises `SessionError` for what no session holds."""
    if isinstance(value, str):
        return _one_line(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if type(value) in special:
        return special[type(value)][0](value)
    if is_dataclass(value):
        return {f.name: written(getattr(value, f.name), special) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: written(item, special) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [written(item, special) for item in value]
    if isinstance(value, frozenset):
        return sorted(written(item, special) for item in value)
    raise SessionError(f"an object of type {type(value).__name__} cannot be saved: leave out what holds it")


def _one_line(value: str) -> str:
    """As `text` takes it: a line of the user's may have a no-break space, an ideographic one, or no end."""
    plain = "".join(one if one.isprintable() or one == "\t" else " " for one in value)
    return plain[:LONGEST_TEXT]


# --- reading ----------------------------------------------------------------------------------------------------------


def read(kind: Any, data: Any, where: str, special: Special = types.MappingProxyType({})) -> Any:
    """`data` as a `kind`: a type, a dataclass, or what annotations say of them. `where` is its place, for the error."""
    if kind in special:
        return special[kind][1](data, where)
    if kind in _PLAIN:
        return _PLAIN[kind](data, where)
    if is_dataclass(kind):
        return _dataclass(kind, data, where, special)
    return _generic(kind, data, where, special)


def record(data: Any, names: Sequence[str], where: str) -> tuple[Any, ...]:
    """The values of an object that has exactly the keys `names`, in that order."""
    found = _mapping(data, where)
    if found.keys() != set(names):
        raise damaged(f"{where} has {_some(found)}, not {', '.join(names)}")
    return tuple(found[name] for name in names)


def _checked(is_right: bool, data: Any, where: str, what: str) -> Any:
    if not is_right:
        raise damaged(f"{where} is {shown(data)}, {what}")
    return data


def items(data: Any, where: str) -> list[Any]:
    return _checked(isinstance(data, list), data, where, "not a list")


def whole(data: Any, where: str) -> int:
    is_whole = isinstance(data, int) and not isinstance(data, bool) and -(1 << 63) <= data < 1 << 64
    return _checked(is_whole, data, where, "not a whole number of 64 bits")


def place(data: Any, table: Sequence[Any], where: str) -> Any:
    """What stands in `table` at the place that `data` names."""
    if not 0 <= whole(data, where) < len(table):
        raise damaged(f"{where} is {data}, and there are {len(table)}")
    return table[data]


def text(data: Any, where: str) -> str:
    _checked(isinstance(data, str), data, where, "not a text")
    if len(data) > LONGEST_TEXT or not data.replace("\t", "").isprintable():
        raise damaged(f"{where} is no single printable line of at most {LONGEST_TEXT} characters")
    return data


def number(data: Any, where: str) -> float:
    if isinstance(data, dict):
        (name,) = record(data, ("float",), where)
        _checked(isinstance(name, str) and name in NOT_FINITE, data, where, "not a number")
        return NOT_FINITE[name]
    _checked(isinstance(data, (int, float)) and not isinstance(data, bool), data, where, "not a number")
    return float(data) if isinstance(data, float) else float(whole(data, where))


def _truth(data: Any, where: str) -> bool:
    return _checked(isinstance(data, bool), data, where, "neither true nor false")


def _nothing(data: Any, where: str) -> None:
    return _checked(data is None, data, where, "not null")


_PLAIN: dict[Any, Callable[[Any, str], Any]] = {
    int: whole, float: number, str: text, bool: _truth, type(None): _nothing,
}  # fmt: skip


def _mapping(data: Any, where: str) -> dict[str, Any]:
    return _checked(isinstance(data, dict), data, where, "not an object")


@functools.cache
def _annotations(kind: type) -> dict[str, tuple[Any, bool]]:
    """Each field's type, and whether it must be given."""
    hints = typing.get_type_hints(kind)
    return {f.name: (hints[f.name], f.default is MISSING and f.default_factory is MISSING) for f in fields(kind)}


def prepare(kind: Any) -> None:
    """Look up what `kind` and everything in it are made of, as `read` would: Python evaluates annotations to tell."""
    if is_dataclass(kind):
        for hint, _ in _annotations(kind).values():
            prepare(hint)
    for inner in typing.get_args(kind):
        prepare(inner)


def _dataclass(kind: Any, data: Any, where: str, special: Special) -> Any:
    found, known = _mapping(data, where), _annotations(kind)
    if unknown := found.keys() - known.keys():
        raise damaged(f"{where} has {_some(unknown)}, which no {kind.__name__} has")
    if missing := {name for name, (_, needed) in known.items() if needed} - found.keys():
        raise damaged(f"{where} has no {_some(missing)}")
    return kind(**{name: read(known[name][0], item, f"{where}.{name}", special) for name, item in found.items()})


def _generic(kind: Any, data: Any, where: str, special: Special) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _union(inner, data, where, special)
    if origin is typing.Literal:
        is_known = isinstance(data, str) and data in inner
        return _checked(is_known, data, where, f"not one of {', '.join(map(str, inner))}")
    if isinstance(origin, type) and issubclass(origin, Mapping):
        pairs = _mapping(data, where).items()
        return {text(key, where): read(inner[1], item, f"{where}.{key[:40]}", special) for key, item in pairs}
    if isinstance(origin, type) and issubclass(origin, (tuple, frozenset, Sequence)):
        return _several(origin, inner, items(data, where), where, special)
    raise TypeError(f"{where}: fields of type {kind} cannot be saved")


def _union(kinds: tuple[Any, ...], data: Any, where: str, special: Special) -> Any:
    if data is None and type(None) in kinds:
        return None
    rest = [kind for kind in kinds if kind is not type(None)]
    for kind in rest[:-1]:
        try:
            return read(kind, data, where, special)
        except SessionError:
            continue  # the next one may fit; the last one's error leaves
    return read(rest[-1], data, where, special)


def _several(origin: type, inner: tuple[Any, ...], data: list[Any], where: str, special: Special) -> Any:
    is_fixed = origin is tuple and inner[-1] is not Ellipsis
    if is_fixed and len(data) != len(inner):
        raise damaged(f"{where} has {len(data)} items, not {len(inner)}")
    kinds = inner if is_fixed else [inner[0]] * len(data)
    pairs = enumerate(zip(kinds, data, strict=True))
    found = (read(kind, item, f"{where}[{at}]", special) for at, (kind, item) in pairs)
    return (origin if origin in (tuple, frozenset) else list)(found)


def _some(names: Any) -> str:
    return ", ".join(shown(name) for name in sorted(map(str, names))[:3]) or "nothing"


def shown(data: Any) -> str:
    """A short text for an error: what a file holds may be as long as it likes."""
    if isinstance(data, (list, dict)):
        return f"{'a list' if isinstance(data, list) else 'an object'} of {len(data)}"
    if isinstance(data, int) and data.bit_length() > 128:
        return f"a number of {data.bit_length()} bits"
    return repr(data if not isinstance(data, str) else data[:40])
