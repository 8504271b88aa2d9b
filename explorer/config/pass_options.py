"""The options of a pass and of a configuration, read off a dataclass: every field has a name, a type, a default, a sentence.

    @dataclass(frozen=True)
    class Remat:
        distance_base: float = field(default=1.1, metadata={"help": "how much more the farther value counts"})

`options_of(Remat)` lists them, and `read` turns what somebody wrote, a Python value or the text of a flag or of a field in
the view, into what the field's type wants: this is the one place where the value of any option is read. Booleans, numbers,
texts, tuples of names, weights, sizes and their unions with None can be written as text; a value of any other type comes
from Python, as it is. Where a number of bytes or a weight is wanted, `metadata={"read_as": Size | None}` says so.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NewType

from tracefuse.config.names import DEFAULT_WEIGHT
from tracefuse.errors import OptionError
from tracefuse.optimizers.errors import did_you_mean
from tracefuse.text import read_size

NONE_WORDS = ("", "none", "off")
SWITCH_WORDS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}

Weight = NewType("Weight", float)
"""From 0 to 1."""
Bytes = NewType("Bytes", int)
"""A number of bytes; texts with a unit ("2GiB") too."""
Size = NewType("Size", float)
"""A fraction up to 1 as a float, more than that as bytes; texts with a unit ("2GiB", "2 GB", "40 %") too."""


@dataclass(frozen=True)
class PassOption:
    """One field of a pass: `types` are what it may hold, None among them where it can be left open."""

    name: str
    types: tuple[Any, ...]
    default: Any
    help: str

    @property
    def is_text(self) -> bool:
        """Whether it can be written as text, on a command line or in the view."""
        return all(one in _READERS for one in self.types)

    @property
    def kind(self) -> str:
        """How the view edits it: "switch", "number" or "text"."""
        left = {one for one in self.types if one is not type(None)}
        if left == {bool}:
            return "switch"
        return "number" if left <= {int, float} else "text"


@functools.lru_cache(maxsize=64)
def options_of(pass_class: type) -> dict[str, PassOption]:
    """Name -> option, in the order of the fields. Raises `OptionError` for a field without a default."""
    hints = typing.get_type_hints(pass_class)
    return {f.name: _option(f, hints[f.name]) for f in dataclasses.fields(pass_class)}


def _option(field: dataclasses.Field[Any], hint: Any) -> PassOption:
    hint = field.metadata.get("read_as", hint)
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if default is dataclasses.MISSING:
        raise OptionError(f"the option {field.name} has no default: give it one, such as `{field.name}: int = 1`")
    wanted = tuple(map(_plain, typing.get_args(hint) if is_union else (hint,)))
    return PassOption(field.name, wanted, default, field.metadata.get("help", ""))


def _plain(hint: Any) -> Any:
    """What is written as text for a `Literal` of texts: the pass itself checks which they are."""
    if typing.get_origin(hint) is tuple:
        return tuple[tuple(map(_plain, typing.get_args(hint)))]
    is_words = typing.get_origin(hint) is typing.Literal and all(isinstance(w, str) for w in typing.get_args(hint))
    return str if is_words else hint


def read_all(given: Any, options: Mapping[str, PassOption], of: str) -> tuple[tuple[str, Any], ...]:
    """`given`, a mapping or pairs, as `(name, value)` sorted by name, without what equals its default.

    `of` is what the message calls the options. Raises `OptionError` for an unknown name or a bad value.
    """
    try:
        pairs = dict(given)
    except (TypeError, ValueError):
        example = next(iter(options), "option")
        raise OptionError(
            f"{of}={given!r} is no mapping: pass names and values, such as {{{example!r}: ...}}"
        ) from None
    unknown = [name for name in pairs if name not in options]
    if unknown:
        raise OptionError(f"{of} has no {unknown[0]!r}: {_choices(str(unknown[0]), options)}")
    found = {name: read(options[name], value, of) for name, value in pairs.items()}
    return tuple((name, found[name]) for name in sorted(found) if not _same(found[name], options[name].default))


def _choices(name: str, options: Mapping[str, PassOption]) -> str:
    if not options:
        return "there is nothing to choose, leave it out"
    return f"{did_you_mean(name, options)}choose from {', '.join(options)}"


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other


def read(option: PassOption, value: Any, of: str = "", said: str = "") -> Any:
    """`value` as the field wants it. Raises `OptionError` for what it cannot be, which `of` and `said` name in the message:
    whose option it is, and how it was written (default: as in Python)."""
    said = f"{of and f'{of}: '}{said or f'{option.name}={value!r}'}"
    if type(None) in option.types and (value is None or _word(value) in NONE_WORDS):
        return None
    for one in option.types:
        try:
            found = _READERS[one].read(value) if one in _READERS else _instance(one, value)
        except ValueError as error:
            raise OptionError(f"{said} {error}") from None
        if found is not None:
            return _hashable(found, said)
    raise OptionError(f"{said} is no {_wanted(option)}: pass {_such_as(option, said)}")


def _wanted(option: PassOption) -> str:
    wanted = [one for one in option.types if one is not type(None)]
    return " or ".join(_READERS[t].noun if t in _READERS else getattr(t, "__name__", str(t)) for t in wanted)


def _such_as(option: PassOption, said: str) -> str:
    told = [example for one in option.types if one in _READERS and (example := _READERS[one].example)]
    found = " or ".join(told) or ("one" if option.default is None else f"one, such as {option.default!r}")
    none = "off" if said.startswith("--") else "None"
    return f"{found}, or {none}" if type(None) in option.types else found


def _hashable(value: Any, said: str) -> Any:
    try:
        hash(value)
    except TypeError:
        raise OptionError(f"{said} cannot be hashed: pass a tuple, or another frozen value") from None
    return value


# --- by type: the value, or None where it is none of that type --------------------------------------------------------


def _word(value: Any) -> str | None:
    return value.strip().lower() if isinstance(value, str) else None


def _switch(value: Any) -> bool | None:
    return value if isinstance(value, bool) else SWITCH_WORDS.get(_word(value) or "")


def _float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        found = float(value)
    except ValueError:
        return None
    return None if math.isnan(found) else found


def _int(value: Any) -> int | None:
    found = _float(value)
    return int(found) if found is not None and math.isfinite(found) and found == int(found) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _names(value: Any) -> tuple[str, ...] | None:
    if isinstance(value, str):
        return tuple(filter(None, (part.strip() for part in value.split(","))))
    if not isinstance(value, Iterable):
        return None
    found = tuple(value)
    return found if all(isinstance(part, str) and part.strip() for part in found) else None


def _weight(value: Any) -> float | None:
    found = DEFAULT_WEIGHT if _word(value) == "on" else _float(value)
    return found if found is not None and 0 <= found <= 1 else None


def _size(value: Any) -> int | float | None:
    found = _in_bytes(value)
    if found is None or not 0 <= found < math.inf:
        return None
    if 1 < found <= 100 and not str(value).strip().endswith(("b", "B")):
        raise ValueError(f"would be {found:g} bytes: write '{found:g}%', a fraction up to 1, or bytes as '{found:g}B'")
    return float(found) if found <= 1 else int(found)


def _bytes(value: Any) -> int | None:
    found = None if isinstance(value, str) and value.strip().endswith("%") else _in_bytes(value)
    return int(found) if found is not None and 2 <= found < math.inf else None


def _in_bytes(value: Any) -> float | None:
    """One byte is no size that anybody means, so that `1` is all of it."""
    if not isinstance(value, str):
        return _float(value)
    is_percent = value.strip().endswith("%")
    number, unit = read_size(value.strip().removesuffix("%")) or (math.nan, 0)
    if is_percent:
        return number / 100 if number <= 100 and not unit else math.nan
    return max(2, int(number * unit)) if unit else number


def _instance(wanted: Any, value: Any) -> Any:
    kind = typing.get_origin(wanted) or wanted
    return value if not isinstance(kind, type) or isinstance(value, kind) else None


@dataclass(frozen=True)
class _Reader:
    """How one type is read: the function, the word for it, and what to pass instead of a value that is none ("": such a
    value as the default)."""

    read: Callable[[Any], Any]
    noun: str
    example: str = ""


_READERS: dict[Any, _Reader] = {
    bool: _Reader(_switch, "switch", "True or False"),
    int: _Reader(_int, "whole number"),
    float: _Reader(_float, "number"),
    str: _Reader(_text, "text"),
    tuple[str, ...]: _Reader(_names, "list of names", "names or globs that are not empty, such as ['h.*.mlp.*']"),
    Weight: _Reader(_weight, "weight", "a number from 0 to 1"),
    Bytes: _Reader(_bytes, "number of bytes", "bytes such as '2GiB'"),
    Size: _Reader(_size, "budget", "a fraction such as 0.4, or bytes such as '2GiB'"),
    type(None): _Reader(lambda value: None, "None"),
}


def written(value: Any) -> Any:
    """`value` as JSON for the view, which shows and edits it: a boolean, else the text that `read` reads as that value."""
    if isinstance(value, bool):
        return value
    if value is None:
        return ""
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def assignment(text: str) -> tuple[str, str]:
    """`distance_base=1.0` as `("distance_base", "1.0")`. Raises `OptionError` for a text without `=`."""
    name, sign, value = text.partition("=")
    if not sign or not name.strip():
        raise OptionError(f"{text!r} names no option and value: write NAME=VALUE, such as distance_base=1.0")
    return name.strip(), value.strip()
