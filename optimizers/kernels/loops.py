"""Each statement of a kernel stands before its loop, in it, or after it; here it is decided where.

A kernel whose layout has a loop goes through it once for each *level*. What varies along the loop's lane is computed in the
loop, again in each that needs it; everything else stands between the loops.

    level(statement)   = the highest level among what it reads
    level(accumulator) = that of what it adds up; what reads its total is one level higher

A softmax of a long row is two levels: its maximum and sum are accumulated in the first loop, its result is stored in the
second. A sum down columns is one: the loop, then what is done with the total.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tracefuse.optimizers.lowering.indexing import Lanes
from tracefuse.optimizers.lowering.layouts import STEP, Loop
from tracefuse.optimizers.lowering.lowering import Accumulator, Statement
from tracefuse.optimizers.ops import reached

INDENT = "    "


@dataclass(frozen=True)
class Store:
    """A line that writes a block which varies along `lanes`."""

    text: str
    lanes: Lanes


Statements, Accumulators, Stores = Sequence[Statement], Sequence[Accumulator], Sequence[Store]


def body_lines(statements: Statements, accumulators: Accumulators, stores: Stores, loop: Loop | None) -> list[str]:
    """The lines of a program, those of its layout's prologue left out."""
    return _Body(statements, accumulators, stores, loop).lines()


class _Body:
    def __init__(self, statements: Statements, accumulators: Accumulators, stores: Stores, loop: Loop | None) -> None:
        self.loop, self.stores = loop, stores
        self.statements, self.accumulators = _live(statements, accumulators, stores)
        self.level: dict[str, int] = {}
        self.total: dict[str, Accumulator] = {name: a for a in self.accumulators for name in a.starts}
        self.by_name = {s.name: s for s in self.statements}
        for one in self.statements:
            self.level[one.name] = self._level_of(one.text)

    def lines(self) -> list[str]:
        if self.loop is None:
            return self._straight()
        stored = (self._level_of(s.text) for s in self.stores)
        levels = [*stored, *self.level.values(), *map(self._added, self.accumulators)]
        inside = [s for s in self.stores if not self._is_outside(s)]
        last = max((self._level_of(s.text) for s in inside), default=-1)
        lines: list[str] = []
        for level in range(max(levels) + 1):
            outside = [s for s in self.statements if self._is_outside(s) and self.level[s.name] == level]
            lines += _commented(outside)
            added = [a for a in self.accumulators if self._added(a) == level]
            lines += self._loop(added, inside if level == last else [])
        return [*lines, "", *(s.text for s in self.stores if s not in inside)]

    def _straight(self) -> list[str]:
        """Without a loop an accumulator's one step is its total; statements that read it come after it."""
        lines = _commented([s for s in self.statements if self.level[s.name] == 0])
        for one in self.accumulators:
            lines += ["", *(f"{name} = {text}" for name, text in one.starts.items()), *one.updates]
        after = [s for s in self.statements if self.level[s.name] > 0]
        return [*lines, *_commented(after), "", *(s.text for s in self.stores)]

    def _loop(self, added: Sequence[Accumulator], stores: Sequence[Store]) -> list[str]:
        if not added and not stores:
            return []
        assert self.loop is not None
        wanted = self._inside([*(u for a in added for u in a.updates), *(s.text for s in stores)])
        body = [*self.loop.lines, *_commented([s for s in self.statements if s.name in wanted]), ""]
        body += [update for a in added for update in a.updates]
        body += [s.text for s in stores]
        starts = [f"{name} = {text}" for a in added for name, text in a.starts.items()]
        return ["", *starts, self.loop.header, *(f"{INDENT}{line}".rstrip() for line in body), ""]

    def _inside(self, texts: Iterable[str]) -> set[str]:
        """The statements in the loop that `texts` read, directly or through others."""

        def read(text: str) -> list[str]:
            return [w for w in _words(text) if w in self.by_name and not self._is_outside(self.by_name[w])]

        names = (name for text in texts for name in read(text))
        return set(reached(names, lambda name: read(self.by_name[name].text)))

    def _is_outside(self, line: Statement | Store) -> bool:
        assert self.loop is not None
        return line.lanes.isdisjoint(STEP | {self.loop.lane})

    def _level_of(self, text: str) -> int:
        words = _words(text)
        totals = {id(self.total[w]): self.total[w] for w in words if w in self.total}
        known = [self.level[w] for w in words if w in self.level]
        return max([0, *known, *(1 + self._added(a) for a in totals.values())])

    def _added(self, accumulator: Accumulator) -> int:
        """The level of what an accumulator adds up."""
        words = {w for update in accumulator.updates for w in _words(update)} - set(accumulator.starts)
        return max((self.level[w] for w in words if w in self.level), default=0)


def _live(statements: Statements, accumulators: Accumulators, stores: Stores) -> tuple[Statements, Accumulators]:
    """What the stores read, directly or through others."""
    texts = {s.name: [s.text] for s in statements}
    texts |= {name: [*a.starts.values(), *a.updates] for a in accumulators for name in a.starts}
    words = {word for store in stores for word in _words(store.text)}
    used = reached(words, lambda name: [word for text in texts.get(name, ()) for word in _words(text)])
    return [s for s in statements if s.name in used], [a for a in accumulators if not used.keys().isdisjoint(a.starts)]


def _commented(statements: Sequence[Statement]) -> list[str]:
    """One line each; the op that they come from stands above them where it changes."""
    lines, comment = [], ""
    for one in statements:
        if one.comment != comment:
            lines += ["", f"# {one.comment}"] if one.comment else [""]
            comment = one.comment
        lines.append(f"{one.name} = {one.text}")
    return lines


@functools.lru_cache(maxsize=4096)
def _words(text: str) -> frozenset[str]:
    """The names that a line reads; not attributes, such as the `maximum` of `tl.maximum`."""
    return frozenset(re.findall(r"(?<![\w.])[A-Za-z_]\w*", text))
