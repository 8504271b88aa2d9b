"""What people write as an option's value, read as what `Config` holds; every refusal ends with the remedy.

A reader takes the option's name, for its message, and the value. It raises `OptionError` for what it cannot read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from tracefuse.errors import OptionError

DEFAULT_WEIGHT = 0.5


def switch(name: str, value: Any) -> bool:
    if value is None:
        return False
    if isinstance(value, bool):
        return value
    raise OptionError(f"{name}={value!r} is neither on nor off: pass {name}=True or {name}=False")


def patterns(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Iterable):
        raise OptionError(
            f"{name}={value!r} is not a list of patterns: pass names or globs, such as {name}=['h.*.mlp.*']"
        )
    found = tuple(value)
    wrong = [p for p in found if not isinstance(p, str) or not p.strip()]
    if wrong:
        raise OptionError(f"{name} has the pattern {wrong[0]!r}: pass non-empty names or globs, such as 'h.*.mlp.*'")
    return found


def pins(name: str, value: Any) -> tuple[str, ...]:
    return () if value is None or value is False else patterns(name, value)


def freeze(name: str, value: Any) -> tuple[str, ...] | None:
    if value is None or value is False:
        return None
    return () if value is True else patterns(name, value)


def weight(name: str, value: Any) -> float | None:
    return _weight_or(
        value, f"{name}={value!r} is no weight: pass a number from 0 to 1, or {name}=False to switch it off"
    )


def weight_of_flag(text: str) -> float | None:
    """As `weight`, with the remedy in flags."""
    return _weight_or(text, f"--remat {text} is no weight: pass a number from 0 to 1, or --no-remat to switch it off")


def _weight_or(value: Any, message: str) -> float | None:
    if value is None or value is False or value == "off":
        return None
    if value is True or value == "on":
        return DEFAULT_WEIGHT
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not 0 <= found <= 1:
        raise OptionError(message)
    return found


READERS: dict[str, Callable[[str, Any], Any]] = {
    "simplify": switch,
    "freeze": freeze,
    "cat": switch,
    "decompose": switch,
    "remat": weight,
    "save": pins,
    "recompute": pins,
    "fuse": switch,
}
