"""Where a step's time goes, in one row of the tree of its modules: the answer to "what is slow".

    h.*.attn ×12    28 % of the step, gpt.py:18 alone 9 %

It is the row that a reader of the tree comes to who opens the largest one again and again. Rows are modules, those that are
alike as one (`tracefuse.tables.folding`), and lines of what has modules inside, each with all that is in it: forward, backward
and update. The way ends at a module of which no single part takes most, and before one that something beside it exceeds, since
that would be slower still; the update is told apart, and exceeds none. What has nearly all of the step says nothing: there the
largest part is told in any case.

The quantity is the caller's: microseconds, or launches where a step waits for these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import fx

from tracefuse.optimizers.ops import does_work
from tracefuse.optimizers.trace import Trace, line_of, origin, phase
from tracefuse.tables.folding import folded_paths

NEARLY_ALL = 0.9
"""The share of the step from where on a module is not what is slow in it."""
MOST = 0.5
"""The share of a module from where on a part is told in its place."""
AT_A_LINE = 0.995
"""The share of a module from where on all of it is said to be at one line."""


@dataclass(frozen=True)
class Slowest:
    """A row of the tree: `name` is a module's folded path, the class of the outermost one without a path, or a line's text;
    `paths` are the modules that it stands for, none for a line. `amount` is what it takes `of` the whole. `line` is the line
    of the program that takes most in it, with its place, and `line_amount` what that takes there. `kind` is the class of a
    module whose path is numbers alone."""

    name: str
    paths: tuple[str, ...]
    amount: float
    of: float
    line: str
    line_amount: float
    kind: str = ""

    @property
    def label(self) -> str:
        """`h.*.attn ×12`; of a line its place, `gpt.py:18`; `5 (Bottleneck)` of an `nn.Sequential`'s."""
        if not self.paths:
            return self.place
        name = f"{self.name} ({self.kind})" if self.kind else self.name
        return f"{name} \N{MULTIPLICATION SIGN}{len(self.paths)}" if len(self.paths) > 1 else name

    @property
    def place(self) -> str:
        """`gpt.py:18`, whatever folder that is in; "" where no line is known."""
        return self.line.partition("  ")[0].rpartition("/")[2]

    @property
    def is_one_line(self) -> bool:
        """Whether nearly all of it is at that line."""
        return self.line_amount >= AT_A_LINE * self.amount


@dataclass
class _Row:
    """A module by its folded path, or a line of the program by its text, with all that is inside."""

    name: str
    is_line: bool = False
    amount: float = 0.0
    of_update: float = 0.0
    lines: Counter[str] = field(default_factory=Counter)
    inside: dict[str, _Row] = field(default_factory=dict)

    @property
    def beside_update(self) -> float:
        return self.amount - self.of_update

    def part(self, name: str, is_line: bool = False) -> _Row:
        if name not in self.inside:
            self.inside[name] = _Row(name, is_line)
        return self.inside[name]

    def add(self, line: str, amount: float, is_late: bool) -> None:
        """Count an op of this `line`; one of the update `is_late`."""
        self.amount += amount
        self.of_update += amount if is_late else 0.0
        self.lines[line] += amount


def slowest(trace: Trace, captured: Trace, amounts: Mapping[str, float]) -> Slowest | None:
    """The row that has most of `amounts`, which are by the names of the ops of `trace`; None where nothing has any. Modules
    are alike that are so as `captured`. It is kept for the last amounts that were asked for."""
    known = trace._cache.get(slowest)
    if known is None or known[0] is not captured or known[1] is not amounts:
        known = trace._cache[slowest] = captured, amounts, _slowest(trace, captured, amounts)
    return known[2]


def _slowest(trace: Trace, captured: Trace, amounts: Mapping[str, float]) -> Slowest | None:
    folds = folded_paths(captured)
    step = _rows(trace, folds, amounts)
    if step.amount <= 0:
        return None
    row = _opened(step)
    paths = () if row.is_line else tuple(path for path, name in folds.items() if name == row.name)
    ((line, amount),) = row.lines.most_common(1)
    name = row.name or next(origin(node).module_type for node in trace.ops if origin(node).module_type)
    kind = "" if any(map(str.isalpha, name)) else _kind(trace, paths)
    return Slowest(name, paths, row.amount, step.amount, line, amount, kind)


def place_of(node: fx.Node, trace: Trace, captured: Trace, amounts: Mapping[str, float]) -> Slowest:
    """The row of the tree that an op of `captured` is in, with what `trace` takes there in its forward and backward: its
    module and those alike, or, where it is in none that has no other inside, its line."""
    folds, where = folded_paths(captured), origin(node)
    name = folds.get(where.module, where.module)
    is_leaf = bool(name) and not any(path.startswith(f"{where.module}.") for path in folds)
    paths = tuple(path for path, fold in folds.items() if is_leaf and fold == name)
    line, lines, step = line_of(node), Counter[str](), 0.0
    for one in filter(does_work, trace.ops):
        amount = amounts.get(one.name, 0.0)
        step += amount
        if phase(one) != "update" and (origin(one).module in paths if is_leaf else line_of(one) == line):
            lines[line_of(one)] += amount
    return Slowest(name if is_leaf else line, paths, lines.total(), step, line, lines[line])


def _kind(trace: Trace, paths: Collection[str]) -> str:
    """The class of the modules, as far as ops are known to be theirs."""
    return next((where.module_type for where in map(origin, trace.ops) if where.module in paths), "")


def _opened(step: _Row) -> _Row:
    """The row at which the way ends that opens the largest one again and again."""
    row, beside = step, 0.0
    while row.inside:
        *others, part = sorted(row.inside.values(), key=lambda one: (one.amount, one.name))
        beside = max([beside, *(one.beside_update for one in others)])
        has_all = row.beside_update >= NEARLY_ALL * step.beside_update
        is_most = part.amount > MOST * row.amount or has_all
        if row is not step and (part.is_line or part.amount < beside or not is_most):
            break
        row = part
    return row


def _rows(trace: Trace, folds: Mapping[str, str], amounts: Mapping[str, float]) -> _Row:
    """The step, and what is in it: what the outermost module has inside beside what is in none."""
    step = _Row("")
    ops = [node for node in trace.ops if does_work(node)]
    around_of = {module: _around(folds.get(module, module)) for module in {origin(node).module for node in ops}}
    # Lines are rows among modules alone: a model without any inside is one itself.
    inner = {path for around in around_of.values() for path in around[:-1]}
    is_leaf = not any(around_of)
    for node in ops:
        where = origin(node)
        op = line_of(node), amounts.get(node.name, 0.0), phase(node) == "update"
        around = around_of[where.module]
        step.add(*op)
        row = step
        for path in around:
            row = row.part(path)
            row.add(*op)
        if is_leaf and where.module_type:
            row.part("").add(*op)
        elif not around or around[-1] in inner:
            text = str(where.source) if where.source else "no line of the program"
            row.part(text, is_line=True).add(*op)
    return step


def _around(path: str) -> list[str]:
    """`h`, `h.*` and `h.*.mlp` of the last of them."""
    parts = path.split(".") if path else []
    return [".".join(parts[: at + 1]) for at in range(len(parts))]
