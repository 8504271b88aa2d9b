"""Parsed flags become the configuration that they ask for, by the checks of `Config.changed`: a bad value has the same message
everywhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tracefuse.cli.flags import OPTIONS
from tracefuse.config.configuration import Config, read_option
from tracefuse.config.names import PASS_OF
from tracefuse.config.pass_options import assignment
from tracefuse.errors import OptionError


def check_folder(name: str, path: str | None) -> None:
    """Raise `OptionError` where a flag names a file that cannot be written for want of its folder."""
    if path and not Path(path).resolve().parent.is_dir():
        raise OptionError(f"--{name} {path}: there is no such directory: create it, or name another one")


def configuration(arguments: argparse.Namespace) -> Config:
    """What parsed flags of `PASS_OPTIONS` ask for; flags of other tables are left alone. Raises `OptionError`."""
    given = {o.name: getattr(arguments, o.name) for o in OPTIONS if getattr(arguments, o.name, None) is not None}
    off = {o.name: False for o in OPTIONS if getattr(arguments, f"no_{o.name}", False)}
    without = getattr(arguments, "without_pass", None) or ()
    on = _by_name(getattr(arguments, "with_pass", None) or ())
    _check_are_passes({"--no-pass": without, "--pass": on})
    off |= dict.fromkeys(without, False)
    if both := sorted((given.keys() | on.keys()) & off.keys()):
        on_flag = f"--pass {both[0]}" if both[0] in on else _flag(both[0])
        off_flag = f"--no-pass {both[0]}" if both[0] in without else f"--no-{both[0]}"
        raise OptionError(f"{on_flag} and {off_flag} contradict each other: give one of them")
    for name in {"remat_options", "overlap"} & given.keys():
        given[name] = dict(map(assignment, given[name]))
    for name in {"remat", "memory_budget", "peak_budget"} & given.keys():
        given[name] = read_option(name, given[name], said=f"{_flag(name)} {given[name]}")
    return Config.of(**on).changed(**off, **given)


def changes_of(text: str) -> dict[str, Any]:
    """What `--try remat=0,pad=off` changes of the shown configuration. Raises `OptionError` for what names no option."""
    given = dict(assignment(one) for one in text.split(","))
    found: dict[str, Any] = {}
    for name, value in given.items():
        if value in _SWITCH:
            found[name] = _SWITCH[value]
        elif name in ("remat", "memory_budget", "peak_budget"):
            found[name] = read_option(name, value, said=f"--try {name}={value}")
        else:
            found[name] = (value,) if name in _LISTS else value
    Config().changed(**found)
    return found


_SWITCH = {"on": True, "off": False}
_LISTS = {option.name for option in OPTIONS if option.kind == "list"}


def _by_name(texts: Iterable[str]) -> dict[str, Any]:
    """`["a", "b:level=3"]` as `{"a": True, "b": {"level": "3"}}`."""
    found: dict[str, Any] = {}
    for text in texts:
        name, _, option = text.partition(":")
        before = found.get(name, {}) or {}
        found[name] = {**before, **dict([assignment(option)])} if option else before
    return {name: options or True for name, options in found.items()}


def _check_are_passes(given: Mapping[str, Iterable[str]]) -> None:
    """Raise `OptionError` for names that are options of a pass."""
    for flag, names in given.items():
        for name in names:
            if name in PASS_OF:
                text, own = f"{name} is an option of the pass {PASS_OF[name]}", _flag(name)
                raise OptionError(f"{flag} {name}: {text}: write {own} to set it, and leave {own} out for none")


def _flag(name: str) -> str:
    return next(option.flags[0] for option in OPTIONS if option.name == name)
