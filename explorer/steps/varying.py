"""What differs between two steps: operators, the shapes they read, and the Python values that they are given.

A Python value that is the same in two steps is taken to be a constant. One that is not is named by the operator's schema
(`lr` of `_fused_adamw_`), or varies: a trace of one step holds its value of that step, and no other step can be run by it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from tracefuse.optimizers.origins import Source
from tracefuse.steps.stream import MAKES, Shape, StepOp
from tracefuse.text import aligned, counted

_PLAIN = (bool, int, float, complex, str, Shape, torch.dtype, torch.device, torch.layout, torch.memory_format)

MADE = "torch.tensor"
"""What is called the operator of a tensor that Python makes of other numbers in each step; its argument is `data`."""

_ZEROING = {torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default}

MOST_ROWS = 10
"""Of the table of what varies."""
MOST_ALIGNED = 2_000
"""Operators that are aligned one by one, where the two steps differ; longer ones are compared by their ends alone."""


@dataclass(frozen=True)
class Varying:
    """A Python value that an operator was given in two steps: not the same. `position` counts the operators of the captured
    step, `argument` is its name in the schema (with an index where it is one of a list), `is_shape` tells sizes and offsets
    that follow from the shapes of what is read, `in_optimizer` an operator of an optimizer's `step`."""

    position: int
    op: str
    argument: str
    here: Any
    there: Any
    source: Source | None
    is_shape: bool = False
    in_optimizer: bool = False

    def __str__(self) -> str:
        line = f" ({self.source})" if self.source else ""
        return f"{self.argument} of {self.op}{line}: {_shown(self.here)}, then {_shown(self.there)}"


_SHORT = reprlib.Repr()
_SHORT.maxlist = 4


def _shown(value: Any) -> str:
    """A value as Python writes it; of a long list the first elements."""
    return _SHORT.repr(value) if isinstance(value, list) else repr(value)


class AllVarying(tuple[Varying, ...]):
    """All Python values that vary between two steps. Prints as a table, values of one line and one argument in a row."""

    def __repr__(self) -> str:
        if not self:
            return "()"
        groups: dict[tuple[str, str, str], list[Varying]] = {}
        for one in self:
            argument = one.argument.partition("[")[0]
            groups.setdefault((argument, one.op, str(one.source or "")), []).append(one)
        rows = [
            (argument, op, str(len(found)), *map(_shown, (found[0].here, found[0].there)), line)
            for (argument, op, line), found in groups.items()
        ]
        more = f"\nand {len(rows) - MOST_ROWS} more rows" if len(rows) > MOST_ROWS else ""
        return aligned([("argument", "operator", "values", "here", "next", "line"), *rows[:MOST_ROWS]]) + more


@dataclass(frozen=True)
class Difference:
    """How another step differs from the captured one: operators that only it has and that it lacks, by name, how many read
    other shapes, and what varies. `of_tensors` are those that only one of the two has and that compute with more than single
    numbers, `changes` those of them that write to such tensors outside of modules, each with its line: what the last step runs
    behind all that the captured one has is none, for the loop may be over. `lines` are those that only one of the two ran.
    `fed` are the operators that only one has and of whose results both compute the rest, each with the first one that reads
    it, and `by_data` is one that both have,
    and that yields another size though all that it is given has the same."""

    more: tuple[str, ...] = ()
    fewer: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    varying: tuple[Varying, ...] = ()
    of_tensors: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    fed: tuple[tuple[StepOp, StepOp], ...] = ()
    by_data: StepOp | None = None

    def __bool__(self) -> bool:
        return bool(self.more or self.fewer or self.shapes or self.varying)

    def __str__(self) -> str:
        values = [one for one in self.varying if not one.is_shape]
        parts = [
            f"{counted(len(self.more), 'op')} more ({_few(self.more)})" if self.more else "",
            f"{counted(len(self.fewer), 'op')} fewer ({_few(self.fewer)})" if self.fewer else "",
            f"other shapes in {counted(len(self.shapes), 'op')} ({self.shapes[0]})" if self.shapes else "",
            _few([f"{one.argument} of {one.op}" for one in values]) if values else "",
        ]
        return ", ".join(filter(None, parts))


def difference(captured: Sequence[StepOp], other: Sequence[StepOp], is_last: bool = False) -> Difference:
    """What differs in `other` from the captured step, operator by operator. Where it `is_last`, the run may have ended before
    what ends a step, as the zeroing of gradients before the next one."""
    if is_last:
        captured = _as_far_as(captured, other)
    more, fewer, shapes, varying = [], [], [], []
    mine_alone, theirs_alone, unlike = set[int](), set[int](), set[int]()
    by_data: StepOp | None = None
    alone: list[StepOp] = []
    for mine, theirs in _aligned(captured, other):
        if len(mine) != len(theirs):
            fewer += [str(captured[at].func) for at in mine]
            more += [str(other[at].func) for at in theirs]
            alone += [*(captured[at] for at in mine), *(other[at] for at in theirs)]
            mine_alone.update(mine)
            theirs_alone.update(theirs)
            continue
        for at, there in zip(mine, theirs, strict=True):
            found = list(_differences(at, captured[at], other[there]))
            if found:
                unlike.add(at)
            is_shape = any(isinstance(one.here, Shape) or isinstance(one.there, Shape) for one in found)
            if is_shape and by_data is None and not shapes:
                by_data = _maker(captured, at, other[there], unlike | mine_alone)
            shapes += [f"{one.op}: {one.here}, then {one.there}" for one in found if isinstance(one.here, Shape)][:1]
            varying += [_as_shape(one, is_shape) for one in found if not isinstance(one.here, Shape)]
    of_tensors = tuple(str(one.func) for one in alone if one.reads_tensors())
    is_over = is_last and _same_length(captured, other) == len(captured)
    changes = () if is_over else tuple(f"{one.func} ({one.source})" for one in alone if one.is_change)
    in_both = {one.source for one in captured} & {one.source for one in other}
    lines = tuple(dict.fromkeys(str(one.source) for one in alone if one.source and one.source not in in_both))
    fed = (*_feeding(captured, mine_alone), *_feeding(other, theirs_alone))
    return Difference(
        tuple(more), tuple(fewer), tuple(shapes), tuple(varying), of_tensors, changes, lines, fed, by_data
    )


def _feeding(step: Sequence[StepOp], alone: Set[int]) -> tuple[tuple[StepOp, StepOp], ...]:
    """Those of the operators `alone` that compute with more than single numbers, such as a rate, and of whose results another
    one reads, if through others of them: each with the first that does. Views tell nothing."""
    came_of: dict[int | None, dict[int, None]] = {}
    found: dict[int, StepOp] = {}
    for at, op in enumerate(step) if alone else ():
        behind = {one: None for memory in op.read for one in came_of.get(memory, ())}
        if at in alone:
            came_of |= {memory: {**behind, at: None} for memory in op.made - {None}}
        else:
            found = dict.fromkeys(behind, op) | found
    return tuple((step[at], found[at]) for at in sorted(found) if step[at].reads_tensors())


def _maker(captured: Sequence[StepOp], at: int, other: StepOp, unlike: Set[int]) -> StepOp | None:
    """What made the first tensor that the operator `at` reads in another shape than the `other` does; None where that is from
    outside, or is made or cut by one that was given other values or shapes itself."""
    mine, theirs = (tree_leaves((one.args, one.kwargs)) for one in (captured[at], other))
    pairs = zip(_shapes(mine), _shapes(theirs), captured[at].read, strict=False)
    memory = next((memory for here, there, memory in pairs if here != there), None)
    there = () if memory is None else range(at)
    made = [one for one in there if memory in captured[one].made]
    is_cut = any(memory in captured[one].read for one in there if one in unlike)
    return None if not made or is_cut or made[0] in unlike else captured[made[0]]


def _shapes(leaves: Sequence[Any]) -> list[Shape]:
    return [one for one in leaves if isinstance(one, Shape)]


def before_last(
    captured: Sequence[StepOp], before: Sequence[StepOp], updated: int | None, updated_before: int | None
) -> Difference:
    """What differs in the step before the captured one, which is the last: up to where each had `updated`, and to its last
    change behind that, for what else stands there may belong to the next step, or be behind the loop. Nobody knows what the
    step before these two has computed, so that what ends it may stand first."""
    begin = next((there for at, there in paired(captured, before) if at == 0), 0)
    return difference(captured[: _last_change(captured, updated)], before[begin : _last_change(before, updated_before)])


def _last_change(step: Sequence[StepOp], updated: int | None) -> int:
    """How many of the operators there are up to the last change behind the update."""
    start = len(step) if updated is None else updated
    changes = [at + 1 for at in range(start, len(step)) if _is_lasting(step[at])]
    return changes[-1] if changes else start


def _is_lasting(op: StepOp) -> bool:
    return op.is_change and op.func not in _ZEROING


def _as_far_as(step: Sequence[StepOp], last: Sequence[StepOp]) -> Sequence[StepOp]:
    """`step` up to where the last one ended, if it has run all until there, and what it lacks is no more than what may run at
    the next step's begin, as the zeroing of gradients."""
    is_shorter = _same_length(step, last) == len(last)
    lacks = any(map(_is_lasting, step[len(last) :]))
    return step[: len(last)] if is_shorter and not lacks else step


def paired(captured: Sequence[StepOp], other: Sequence[StepOp]) -> Iterator[tuple[int, int]]:
    """The positions of the operators that both steps run."""
    for mine, theirs in _aligned(captured, other):
        if len(mine) == len(theirs):
            yield from zip(mine, theirs, strict=True)


def _aligned(captured: Sequence[StepOp], other: Sequence[StepOp]) -> Iterator[tuple[range, range]]:
    """Pairs of ranges: of equal lengths where the steps run the same operators, of others where they do not."""
    same = _same_length(captured, other)
    rest = _same_length(captured[same:][::-1], other[same:][::-1])
    yield range(same), range(same)
    mine, theirs = range(same, len(captured) - rest), range(same, len(other) - rest)
    if mine and theirs and len(mine) + len(theirs) <= MOST_ALIGNED:
        yield from _matched(captured, other, mine, theirs)
    else:
        yield mine, range(0)
        yield range(0), theirs
    yield range(len(captured) - rest, len(captured)), range(len(other) - rest, len(other))


def _same_length(one: Sequence[StepOp], other: Sequence[StepOp]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if not a.is_like(b)), min(len(one), len(other)))


def _matched(
    captured: Sequence[StepOp], other: Sequence[StepOp], mine: range, theirs: range
) -> Iterator[tuple[range, range]]:
    keys = [str(captured[at].func) for at in mine], [str(other[at].func) for at in theirs]
    for tag, a, b, c, d in SequenceMatcher(None, *keys, autojunk=False).get_opcodes():
        if tag == "replace":
            yield mine[a:b], range(0)
            yield range(0), theirs[c:d]
        else:
            yield mine[a:b], theirs[c:d]


def _differences(at: int, one: StepOp, other: StepOp) -> Iterator[Varying]:
    if one.func is MAKES and None not in (one.numbers, other.numbers) and repr(one.numbers) != repr(other.numbers):
        yield Varying(at, MADE, "data", one.numbers, other.numbers, one.source, in_optimizer=one.in_optimizer)
    names = [a.name for a in one.func._schema.arguments] if isinstance(one.func, OpOverload) else []
    pairs = [
        (names[i] if i < len(names) else str(i), mine, theirs)
        for i, (mine, theirs) in enumerate(zip(one.args, other.args, strict=False))
    ]
    pairs += [(name, one.kwargs.get(name), other.kwargs.get(name)) for name in {**one.kwargs, **other.kwargs}]
    for name, mine, theirs in pairs:
        for path, here, there in _leaves(name, mine, theirs):
            yield Varying(at, str(one.func), path, here, there, one.source, in_optimizer=one.in_optimizer)


def _leaves(path: str, mine: Any, theirs: Any) -> Iterator[tuple[str, Any, Any]]:
    """The Python values and shapes that differ."""
    if isinstance(mine, (list, tuple)) and isinstance(theirs, (list, tuple)) and len(mine) == len(theirs):
        for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            yield from _leaves(f"{path}[{index}]", one, other)
    elif type(mine) is not type(theirs) or (isinstance(mine, _PLAIN) and _is_other(mine, theirs)):
        yield path, mine, theirs


def _is_other(mine: Any, theirs: Any) -> bool:
    """Not-a-numbers are alike. Only plain values are asked: the `!=` of a process group raises, that of an array is one."""
    return mine != theirs and not (mine != mine and theirs != theirs)


def _as_shape(one: Varying, is_shape: bool) -> Varying:
    follows = is_shape and not isinstance(one.here, float)
    return replace(one, is_shape=True) if follows else one


def _few(names: Sequence[str]) -> str:
    found = list(dict.fromkeys(names))
    return ", ".join(found[:2]) + (f" and {len(found) - 2} others" if len(found) > 2 else "")
