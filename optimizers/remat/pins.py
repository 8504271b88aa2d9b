"""Pins: which values a user wants saved or recomputed, given as globs over value names and module paths."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch import fx

from tracefuse.optimizers.errors import PinConflict, UnknownValue, did_you_mean
from tracefuse.optimizers.ops import behind_views, is_getitem, is_view
from tracefuse.optimizers.remat.forward import Forward, impossible, is_several
from tracefuse.optimizers.trace import origin

Action = Literal["save", "recompute"]


@dataclass(frozen=True)
class Pin:
    """`action` for one value, and the `glob` that asked for it. A pin that `names` its value beats one that matches it."""

    action: Action
    glob: str
    names: bool


def resolve_pins(forward: Forward, save: Sequence[str], recompute: Sequence[str]) -> dict[fx.Node, Pin]:
    """The pin of each pinned value. A view's pin holds for its base, a tuple's for its items.

    A module path stands for the values of that module and of those below it. Values that cannot be recomputed are left
    out of a glob, and refused where they are named.

    Raises `UnknownValue` for a glob that matches nothing, `PinConflict` where two pins contradict each other or none of a
    glob's values can be recomputed.
    """
    pins: dict[fx.Node, Pin] = {}
    for action, globs in (("save", save), ("recompute", recompute)):
        for glob in globs:
            for node, names in _matches(forward, glob, action):  # type: ignore[arg-type]
                _pin(pins, node, Pin(action, glob, names))  # type: ignore[arg-type]
    return pins


def _pin(pins: dict[fx.Node, Pin], node: fx.Node, pin: Pin) -> None:
    other = pins.get(node)
    if other is None or (pin.names and not other.names):
        pins[node] = pin
    elif other.action != pin.action and other.names == pin.names:
        raise PinConflict(
            f'{node.name} is pinned twice: {other.action}="{other.glob}" and {pin.action}="{pin.glob}". Drop one of them, '
            f'or decide for this value by its name: {pin.action}="{node.name}" beats a glob.'
        )


def _matches(forward: Forward, glob: str, action: Action) -> list[tuple[fx.Node, bool]]:
    matched = [n for n in forward.nodes if fnmatchcase(n.name, glob) or _in_module(n, glob)]
    if not matched:
        raise UnknownValue(_unknown(forward, glob), glob)
    names = any(n.name == glob for n in matched)
    values = dict.fromkeys(value for n in matched for value in _savable(forward, behind_views(n)))
    if action == "save":
        return [(v, names) for v in values if v.op != "placeholder"]
    possible = [v for v in values if impossible(forward, v) is None]
    if not possible or (names and len(possible) < len(values)):
        raise PinConflict(_impossible(forward, glob, next(v for v in values if v not in possible)))
    return [(v, names) for v in possible]


def _in_module(node: fx.Node, glob: str) -> bool:
    where = origin(node)
    return any(fnmatchcase(path, one) for path in where.called if path for one in (glob, f"{glob}.*"))


def _savable(forward: Forward, node: fx.Node) -> Iterable[fx.Node]:
    return [u for u in forward.readers(node) if is_getitem(u)] if is_several(node) else [node]


def _impossible(forward: Forward, glob: str, refused: fx.Node) -> str:
    """That `refused` cannot be recomputed, and what a pin may name in its place."""
    others = [n.name for n in _computed_from(forward, refused) if not fnmatchcase(n.name, glob)]
    remedy = f", or pin what is computed from it: {' or '.join(others[:3])}" if others else ""
    return f'recompute="{glob}": {refused.name} {impossible(forward, refused)}. Drop the pin{remedy}.'


def _computed_from(forward: Forward, node: fx.Node) -> Iterable[fx.Node]:
    """The nearest values behind `node`, seen through views and items, that the backward can compute again."""
    for reader in forward.readers(node):
        if is_view(reader) or is_getitem(reader):
            yield from _computed_from(forward, reader)
        elif impossible(forward, reader) is None:
            yield reader


def _unknown(forward: Forward, glob: str) -> str:
    names = [n.name for n in forward.nodes] + sorted({origin(n).module for n in forward.nodes} - {""})
    close = difflib.get_close_matches(glob, names, 3, 0.5) or names[-3:]
    return (
        f'"{glob}" matches no forward value and no module of the trace: {did_you_mean(glob, names)}backward values cannot '
        f"be pinned; pin a forward one, for example {', '.join(close)}."
    )
