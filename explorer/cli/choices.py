"""What parsed flags choose: the configuration of the passes.

It ends in the checks of `Config.changed`, so that a bad value has the same message everywhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

from tracefuse.cli.flags import OPTIONS
from tracefuse.config.configuration import Config, read_option
from tracefuse.config.names import FLAG_OF_REMAT, PASS_OF, PASSES
from tracefuse.config.pass_options import assignment
from tracefuse.errors import OptionError


def configuration(arguments: argparse.Namespace) -> Config:
    """What parsed flags of `PASS_OPTIONS` ask for; flags of other tables are left alone. Raises `OptionError`."""
    given = {o.name: getattr(arguments, o.name) for o in OPTIONS if getattr(arguments, o.name, None) is not None}
    off = {o.name: False for o in OPTIONS if getattr(arguments, f"no_{o.name}", False)}
    without = getattr(arguments, "without_pass", None) or ()
    own = _own_passes(getattr(arguments, "with_pass", None) or ())
    _check_are_passes({"--no-pass": without, "--pass": own})
    off |= dict.fromkeys(without, False)
    if both := sorted((given.keys() | own.keys()) & off.keys()):
        on_flag = f"--pass {both[0]}" if both[0] in own else _flag(both[0])
        off_flag = f"--no-pass {both[0]}" if both[0] in without else f"--no-{both[0]}"
        raise OptionError(f"{on_flag} and {off_flag} contradict each other: give one of them")
    if "remat_options" in given:
        given["remat_options"] = dict(map(assignment, given["remat_options"]))
    for name in {"remat", "memory_budget"} & given.keys():
        given[name] = read_option(name, given[name], said=f"{_flag(name)} {given[name]}")
    return Config.of(**{**own, **off, **given})


def _own_passes(texts: Iterable[str]) -> dict[str, Any]:
    """`["a", "b:level=3"]` as `{"a": True, "b": {"level": "3"}}`."""
    found: dict[str, Any] = {}
    for text in texts:
        name, _, option = text.partition(":")
        if option and name in PASSES:
            raise OptionError(f"--pass {text}: {_how_to_write(name, option)}")
        before = found.get(name, {}) or {}
        found[name] = {**before, **dict([assignment(option)])} if option else before
    return {name: options or True for name, options in found.items()}


def _how_to_write(name: str, option: str) -> str:
    """The flag for `option`, NAME=VALUE, of the built-in pass `name`."""
    field, _, value = option.partition("=")
    if name == "freeze":
        return f"what it freezes is written --freeze {value or 'GLOB'}"
    if name != "remat":
        return f"the pass {name} has no options, write --pass {name}"
    if field not in FLAG_OF_REMAT:
        return f"options of remat are written --remat-option {option}"
    return f"that option of remat is written {FLAG_OF_REMAT[field]} {value or 'VALUE'}"


def _check_are_passes(given: Mapping[str, Iterable[str]]) -> None:
    """Raise `OptionError` for names that are options of a pass."""
    for flag, names in given.items():
        for name in names:
            if name in PASS_OF:
                text, own = f"{name} is an option of the pass {PASS_OF[name]}", _flag(name)
                raise OptionError(f"{flag} {name}: {text}: write {own} to set it, and leave {own} out for none")


def _flag(name: str) -> str:
    return next(option.flags[0] for option in OPTIONS if option.name == name)
