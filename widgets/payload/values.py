"""The part of the wire format that says what each value is, and the lines of code that define them, with what changed. Pure.

A half trace is set against another version of the same half line by line. A line is named after the value that it defines.
Passes keep the names of values that they do not replace, so that two versions are aligned by name: the longest common
subsequence of names, which for unique names is a longest increasing one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch import fx

from tracefuse.measure.op_times import OpTimes
from tracefuse.optimizers.facts import once_per_spelling, once_per_trace
from tracefuse.optimizers.render import INDENT, body, head_lines, render_op, value_comment
from tracefuse.optimizers.trace import Half, Trace
from tracefuse.widgets.payload import facts as trace_facts

Kind = Literal["signature", "input", "group", "op", "free", "return", "blank"]
Mark = Literal[" ", "+", "-", "~"]

# The signature repeats the inputs, and where a value dies follows from the ops around it: these lines are never marked.
_ALIGNED = {"input", "op", "return"}


class Line(NamedTuple):
    """One line: its `code` and `comment`, the `value` that it defines (or ""), and how it differs (`mark`)."""

    code: str
    comment: str
    value: str
    kind: Kind
    mark: Mark = " "

    @property
    def key(self) -> str:
        return self.value or self.kind


@once_per_trace
def lines_of(trace: Trace | Half) -> tuple[Line, ...]:
    """The printed trace, line by line; its text is that of `trace.code`."""
    signature, *comments = head_lines(trace)
    inputs = [Line("", text.strip(), i.name, "input") for text, i in zip(comments, trace.inputs, strict=True)]
    lines = [_line(one) if isinstance(one, str) else _op_line(one) for one in body(trace)]
    return (Line(signature, "", "", "signature"), *inputs, *lines)


@once_per_spelling
def _op_line(node: fx.Node) -> Line:
    return Line(f"{INDENT}{render_op(node)}", f"# {value_comment(node)}", node.name, "op")


_BLANK = Line("", "", "", "blank")


def _line(text: str) -> Line:
    if text.startswith(f"{INDENT}del "):
        return Line(text, "", "", "free")
    if text.startswith(f"{INDENT}#"):
        return Line("", text.strip(), "", "group")
    return Line(text, "", "", "return") if text else _BLANK


def diff(before: Sequence[Line], after: Sequence[Line]) -> list[Line]:
    """`after` with "+" at what is new and "~" at what changed, and the lines of `before` that are gone, marked "-".

    A removed line stands near the line that it followed before, always under its own group's header: inside that group
    where it is still there, else between two groups under a header of its own.
    """
    old = [line for line in before if line.kind in _ALIGNED]
    new = [line for line in after if line.kind in _ALIGNED]
    pairs = _common([line.key for line in old], [line.key for line in new])
    above, headers = _headers(before), _headers(after)
    merged = _Merged(above)
    at = position = 0
    for line in after:
        if line.kind in ("group", "blank"):
            merged.open(line)
            continue
        if line.kind not in _ALIGNED:
            merged.add([], [line])
            continue
        match = pairs.get(position)
        if match is None:
            merged.add([], [line._replace(mark="+")])
        elif line.kind == "op" and old[match].code != line.code and above[line.key] != headers[line.key]:
            merged.add(old[at : match + 1], [line._replace(mark="~")])  # what it was stands under another header
            at = match + 1
        else:
            merged.add(old[at:match], _matched(old[match], line))
            at = match + 1
        position += 1
    merged.add(old[at:], [])
    return merged.lines


class _Merged:
    """The lines of a diff so far. `opening` is the header of the next group; `held` are removed lines of other groups, which
    wait for the end of this one, whose lines they would take under their header."""

    def __init__(self, headers: dict[str, str]) -> None:
        self.headers = headers
        self.lines: list[Line] = []
        self.opening: list[Line] = []
        self.held: list[Line] = []
        self.header = ""

    def open(self, line: Line) -> None:
        self.opening.append(line)

    def add(self, removed: Sequence[Line], shown: Sequence[Line]) -> None:
        """Append what was removed before `shown`, and `shown`."""
        if (
            not removed and not self.opening and shown and shown[-1].kind != "return"
        ):  # most lines of a half are as they were
            self.lines += shown
            return
        is_end = bool(self.opening) or not shown or shown[-1].kind == "return"
        self.held += [line for line in removed if self.headers[line.key] != self.header]
        self._remove(line for line in removed if self.headers[line.key] == self.header)
        if is_end:
            self._end_group()
        self.lines += shown

    def _end_group(self) -> None:
        following = next((line.comment for line in reversed(self.opening) if line.kind == "group"), self.header)
        self._remove_under_headers([line for line in self.held if self.headers[line.key] != following])
        self.lines += self.opening
        self._remove(line for line in self.held if self.headers[line.key] == following)
        self.opening, self.held, self.header = [], [], following

    def _remove_under_headers(self, removed: Sequence[Line]) -> None:
        above = self.header
        for line in removed:
            header = self.headers[line.key]
            if header and header != above:
                self.lines.append(Line("", header, "", "group", "-"))
            above = header
            self._remove([line])

    def _remove(self, removed: Iterable[Line]) -> None:
        self.lines += [line._replace(mark="-") for line in removed]


def _matched(old: Line, new: Line) -> list[Line]:
    """What is shown of a line that both versions have. An old return says nothing that the inputs do not."""
    if old.code == new.code:
        return [new]
    return [new._replace(mark="~")] if new.kind == "return" else [old._replace(mark="-"), new._replace(mark="~")]


def _headers(lines: Sequence[Line]) -> dict[str, str]:
    """The group header above each aligned line."""
    above, found = "", {}
    for line in lines:
        if line.kind == "group":
            above = line.comment
        found[line.key] = above
    return found


def _common(old: Sequence[str], new: Sequence[str]) -> dict[int, int]:
    """`{index in new: index in old}` of a longest common subsequence of two sequences of unique names."""
    where = {key: index for index, key in enumerate(old)}
    shared = [(index, where[key]) for index, key in enumerate(new) if key in where]
    ends: list[int] = []
    ranks: list[int] = []
    for _, place in shared:
        rank = bisect_left(ends, place)
        ends[rank : rank + 1] = [place]
        ranks.append(rank)
    chain: dict[int, int] = {}
    wanted, bound = len(ends) - 1, len(old)
    for (index, place), rank in zip(reversed(shared), reversed(ranks), strict=True):
        if rank == wanted and place < bound:
            chain[index], bound = place, place
            wanted -= 1
    return chain


# --- as JSON ----------------------------------------------------------------------------------------------------------


@once_per_trace
def half(before: Trace | Half, after: Trace | Half) -> dict[str, Any]:
    """One column of code: the half `after` the passes, marked against the same half `before` them."""
    lines = diff(lines_of(before), lines_of(after))
    marks = Counter(line.mark for line in lines)
    return {
        "lines": [_line_record(line) for line in lines],
        "ops": [trace_facts.op_count(before), trace_facts.op_count(after)],
        "added": marks["+"] + marks["~"],
        "removed": marks["-"],
    }


def sides(before: Trace | Half, after: Trace | Half) -> dict[str, Any]:
    """`half`, and beside it the whole text before, with "-" at the lines that are gone or have changed."""
    found = half(before, after)
    gone = {line["value"] or line["kind"] for line in found["lines"] if line["diff"] == "-" and line["kind"] != "group"}
    lines = (
        line._replace(mark="-") if line.kind in _ALIGNED and line.key in gone else line for line in lines_of(before)
    )
    return found | {"before": [_line_record(line) for line in lines]}


def _line_record(line: Line) -> dict[str, str]:
    return {"code": line.code, "comment": line.comment, "value": line.value, "kind": line.kind, "diff": line.mark}


def values(
    before: Trace, after: Trace, times: tuple[OpTimes, OpTimes], lines: Mapping[str, Sequence[Any]] | None = None
) -> dict[str, dict[str, Any]]:
    """Every value by name, those included that the passes removed; `times` are of the ops before and after, `lines` those of
    kernels that do the work of several, with the share of each. A removed one whose name another op has taken is called
    `NAME as captured`, and keeps its time where it ran."""
    old, new = trace_facts.values(before), trace_facts.values(after)
    taken = {name for name, one in new.items() if name in old and _place(one) != _place(old[name])}
    removed = {node.name: old[node.name] for node in before.ops if node.name not in new or node.name in taken}
    before_us, after_us = (one.us.get for one in times)
    lines_of = (lines or {}).get
    gone = {
        f"{name} as captured" if name in taken else name: record
        | {"removed": True, "time_us": [before_us(name), None], "lines": []}
        for name, record in removed.items()
    }
    left = {
        name: record
        | {
            "removed": False,
            "time_us": [None if name in taken else before_us(name), after_us(name)],
            "lines": lines_of(name, []),
        }
        for name, record in new.items()
    }
    return gone | left


def _place(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Where a value stands in the program."""
    return tuple(record[part] for part in ("phase", "module", "module_type", "source"))
