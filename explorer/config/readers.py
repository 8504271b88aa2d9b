"""What people write as an option's value, read as what `Config` holds; every refusal ends with the remedy.

A reader takes the option's name, for its message, and the value. It raises `OptionError` for what it cannot read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tracefuse.config.pass_options import options_of, read_all
from tracefuse.errors import OptionError
from tracefuse.optimizers.remat.cut import Remat
from tracefuse.text import read_size

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
        value,
        f"{name}={value!r} is no weight: pass a number from 0 to 1, or {name}=False to switch it off{_elsewhere(value)}",
    )


def _elsewhere(value: Any) -> str:
    return "; its other options go into remat_options={...}" if isinstance(value, Mapping) else ""


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


def memory_budget(name: str, value: Any) -> int | float | None:
    """A fraction up to 1 as a float, more than that as bytes; texts with a unit ("2GiB", "2 GB", "40 %") too."""
    if value is None or value is False or value == "off":
        return None
    found = _sized(value)
    if 1 < found <= 100 and not str(value).strip().endswith(("b", "B")):
        raise OptionError(
            f"{name}={value!r} would be {found:g} bytes: write '{found:g}%', a fraction up to 1, or bytes as '{found:g}B'"
        )
    if not 0 <= found < math.inf:
        raise OptionError(
            f"{name}={value!r} is no budget: pass a fraction such as 0.4, or bytes such as '2GiB'; {name}=None sets none"
        )
    return float(found) if found <= 1 else int(found)


def _sized(value: Any) -> float:
    """NaN for what is no size. One byte is no budget that anybody means, so that `1` is all of it."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    if not isinstance(value, str):
        return math.nan
    is_percent = value.strip().endswith("%")
    number, unit = read_size(value.strip().removesuffix("%")) or (math.nan, 0)
    if is_percent:
        return number / 100 if number <= 100 and not unit else math.nan
    return max(2, int(number * unit)) if unit else number


def remat_options(name: str, value: Any) -> tuple[tuple[str, Any], ...]:
    """The rest of the pass's fields, sorted, without those that have their default."""
    return () if value is None or value is False else read_all(value, REMAT_OPTIONS, name)


OWN_FLAGS = ("producer_input_weight", "memory_budget", "save", "recompute")
REMAT_OPTIONS = {name: option for name, option in options_of(Remat).items() if name not in OWN_FLAGS}
"""The fields of `Remat` that have no option of their own."""


READERS: dict[str, Callable[[str, Any], Any]] = {
    "simplify": switch,
    "freeze": freeze,
    "cat": switch,
    "decompose": switch,
    "pad": switch,
    "remat": weight,
    "memory_budget": memory_budget,
    "save": pins,
    "recompute": pins,
    "remat_options": remat_options,
    "fuse": switch,
}
