"""The options of a pass, read off its dataclass: every field has a name, a type, a default and a sentence.

    @dataclass(frozen=True)
    class Remat:
        distance_base: float = field(default=1.1, metadata={"help": "how much more the farther value counts"})

`options_of(Remat)` lists them, and `read` turns what somebody wrote, a Python value or the text of a flag or of a field in
the view, into what the field's type wants. Booleans, numbers, texts, tuples of texts and their unions with None can be
written as text; a value of any other type comes from Python, as it is.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tracefuse.errors import OptionError

NONE_WORDS = ("", "none", "off")
SWITCH_WORDS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}


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
        return all(one in _READERS for one in self.types if one is not type(None))

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
    close = difflib.get_close_matches(name, options, n=1)
    return f"{f'did you mean {close[0]}? ' if close else ''}choose from {', '.join(options)}"


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other


def read(option: PassOption, value: Any, of: str) -> Any:
    """`value` as the field wants it. Raises `OptionError` for what it cannot be."""
    if type(None) in option.types and (value is None or _word(value) in NONE_WORDS):
        return None
    for one in option.types:
        found = _READERS[one](value) if one in _READERS else _instance(one, value)
        if found is not None:
            return _hashable(option.name, found, of)
    raise OptionError(f"{of}: {option.name}={value!r} is no {_wanted(option)}: pass one, such as {option.default!r}")


def _wanted(option: PassOption) -> str:
    names = {bool: "switch", int: "whole number", float: "number", str: "text", tuple[str, ...]: "list of names"}
    return " or ".join(
        "None" if t is type(None) else names.get(t, getattr(t, "__name__", str(t))) for t in option.types
    )


def _hashable(name: str, value: Any, of: str) -> Any:
    try:
        hash(value)
    except TypeError:
        kind = type(value).__name__
        raise OptionError(
            f"{of}: {name} is a {kind}, which cannot be hashed: pass a tuple, or another frozen value"
        ) from None
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


def _texts(value: Any) -> tuple[str, ...] | None:
    if isinstance(value, str):
        return tuple(filter(None, (part.strip() for part in value.split(","))))
    if not isinstance(value, Iterable):
        return None
    found = tuple(value)
    return found if all(isinstance(part, str) for part in found) else None


def _instance(wanted: Any, value: Any) -> Any:
    kind = typing.get_origin(wanted) or wanted
    return value if not isinstance(kind, type) or isinstance(value, kind) else None


_READERS: dict[Any, Callable[[Any], Any]] = {
    bool: _switch,
    int: _int,
    float: _float,
    str: _text,
    tuple[str, ...]: _texts,
}


# --- as text ----------------------------------------------------------------------------------------------------------


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


def table(pass_class: type, without: Iterable[str] = ()) -> str:
    """`name=default: what it is; ...` of the options that can be written as text, for a flag's help."""
    shown = (o for o in options_of(pass_class).values() if o.is_text and o.name not in without)
    return "; ".join(
        f"{o.name}={'False' if o.default is False else written(o.default) or 'none'}{': ' if o.help else ''}{o.help}"
        for o in shown
    )
