"""The text of a program at another size: texts at three sizes that differ in numbers and names alone, as one text that is
compiled once, in which names stand for the numbers that vary."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, MappingProxyType
from typing import Any

from tracefuse.optimizers.sizes.numbers import NotAlike, Sizes

_NAME = "number_{}_of_size"


@dataclass(frozen=True)
class Text:
    """`code` is what defines the functions of a program, of the numbers `at` three sizes, by their names."""

    code: CodeType
    at: dict[str, tuple[Any, ...]]

    def functions(self, sizes: Sizes, given: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """What the text defines, by name, at the size `sizes.new`, where it reads what is `given`. Raises `NotAlike` where a
        number does not follow the size."""
        made: dict[str, Any] = {name: sizes.number(at) for name, at in self.at.items()} | dict(given)
        exec(self.code, made)
        return made


def merged(texts: Sequence[str]) -> Text:
    """The text that all `texts` are, of as many sizes; what it defines is called as in the first.

    Comments are left out. Raises `NotAlike` where they differ in more than numbers and names.
    """
    merging = _Merging()
    tree = merging.node(tuple(map(ast.parse, texts)))
    at = {name: numbers for numbers, name in merging.names.items()}
    return Text(compile(ast.fix_missing_locations(tree), "<a program of any size>", "exec"), at)


class _Merging:
    """Trees of the same text at several sizes on their way to one: `names` are those of numbers that vary."""

    def __init__(self) -> None:
        self.names: dict[tuple[Any, ...], str] = {}
        self._renamed: dict[str, tuple[str, ...]] = {}
        self._taken: set[tuple[int, str]] = set()

    def node(self, alike: tuple[Any, ...]) -> Any:
        first = alike[0]
        if len({type(one) for one in alike}) > 1:
            raise NotAlike("the text is another one at another size")
        if isinstance(first, ast.Constant):
            return self._constant(alike)
        if isinstance(first, ast.AST):
            for field in first._fields:
                setattr(first, field, self.node(tuple(getattr(one, field, None) for one in alike)))
            return first
        if isinstance(first, list):
            if len({len(one) for one in alike}) > 1:
                raise NotAlike("the text is longer at one size than at another")
            return [self.node(some) for some in zip(*alike, strict=True)]
        return self._name(alike) if isinstance(first, str) else _same(alike)

    def _constant(self, alike: tuple[ast.Constant, ...]) -> ast.expr:
        at = tuple(one.value for one in alike)
        if len(set(map(repr, at))) == 1:
            return alike[0]
        if {*map(type, at)} not in ({int}, {float}):
            raise NotAlike(f"the text has {at[0]!r} at one size and {at[-1]!r} at another")
        name = self.names.setdefault(at, _NAME.format(len(self.names)))
        return ast.Name(name, ast.Load())

    def _name(self, alike: tuple[str, ...]) -> str:
        """The first name; it stands for the others wherever it comes, and no other name does."""
        others = alike[1:]
        if alike[0] not in self._renamed:
            if any((at, one) in self._taken for at, one in enumerate(others)):
                raise NotAlike(f"{alike[0]} has the name of another one at another size")
            self._renamed[alike[0]] = others
            self._taken |= set(enumerate(others))
        if self._renamed[alike[0]] != others:
            raise NotAlike(f"{alike[0]} is {others} at other sizes")
        return alike[0]


def _same(alike: tuple[Any, ...]) -> Any:
    if any(one != alike[0] for one in alike):
        raise NotAlike(f"the text has {alike[0]!r} at one size and not at another")
    return alike[0]
