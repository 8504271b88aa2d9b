"""The lines of a half trace, and what changed in them against another version of the same half. Pure functions.

A line is named after the value that it defines. Passes keep the names of values that they do not replace, so that two versions
are aligned by name: the longest common subsequence of names, which for unique names is a longest increasing one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal
from weakref import WeakKeyDictionary

from tracefuse.optimizers.render import body_lines, head_lines
from tracefuse.optimizers.trace import Trace

Kind = Literal["signature", "input", "group", "op", "free", "return", "blank"]
Mark = Literal[" ", "+", "-", "~"]

# The signature repeats the inputs, and where a value dies follows from the ops around it: these lines are never marked.
_ALIGNED = {"input", "op", "return"}


@dataclass(frozen=True)
class Line:
    """One line: its `code` and `comment`, the `value` that it defines (or ""), and how it differs (`mark`)."""

    code: str
    comment: str
    value: str
    kind: Kind
    mark: Mark = " "

    @property
    def key(self) -> str:
        return self.value or self.kind


# A trace is never edited once it is shown, and the captured one is compared with every variant of it.
_known: WeakKeyDictionary[Trace, tuple[Line, ...]] = WeakKeyDictionary()


def lines_of(trace: Trace) -> tuple[Line, ...]:
    """The printed trace, line by line; its text is that of `trace.code`."""
    if trace not in _known:
        signature, *comments = head_lines(trace)
        inputs = [Line("", text.strip(), i.name, "input") for text, i in zip(comments, trace.inputs, strict=True)]
        body = (_line(text, value) for text, value in body_lines(trace))
        _known[trace] = (Line(signature, "", "", "signature"), *inputs, *body)
    return _known[trace]


def _line(text: str, value: str | None) -> Line:
    stripped = text.strip()
    if not stripped:
        return Line("", "", "", "blank")
    if stripped.startswith("#"):
        return Line("", stripped, "", "group")
    if value is None:
        return Line(text, "", "", "free" if stripped.startswith("del ") else "return")
    code, mark, comment = text.rpartition("  # ")
    return Line(code.rstrip(), f"# {comment}", value, "op") if mark else Line(text, "", value, "op")


def diff(before: Sequence[Line], after: Sequence[Line]) -> list[Line]:
    """`after` with "+" at what is new and "~" at what changed, and the lines of `before` that are gone, marked "-".

    A removed line follows the line that it followed before, under its own group's header where that went too.
    """
    old = [line for line in before if line.kind in _ALIGNED]
    new = [line for line in after if line.kind in _ALIGNED]
    pairs = _common([line.key for line in old], [line.key for line in new])
    headers = _headers(before)
    kept_headers = {line.comment for line in after if line.kind == "group"}
    merged: list[Line] = []
    at = position = 0

    def remove(until: int) -> Iterator[Line]:
        above = ""
        for line in old[at:until]:
            header = headers[line.key]
            if header != above and header and header not in kept_headers:
                yield Line("", header, "", "group", "-")
            above = header
            yield replace(line, mark="-")

    for line in after:
        if line.kind not in _ALIGNED:
            merged.append(line)
            continue
        match = pairs.get(position)
        if match is None:
            merged.append(replace(line, mark="+"))
        else:
            _insert(merged, remove(match))
            at = match + 1
            merged += _matched(old[match], line)
        position += 1
    _insert(merged, remove(len(old)))
    return merged


def _matched(old: Line, new: Line) -> list[Line]:
    """What is shown of a line that both versions have. An old return says nothing that the inputs do not."""
    if old.code == new.code:
        return [new]
    return [replace(new, mark="~")] if new.kind == "return" else [replace(old, mark="-"), replace(new, mark="~")]


def _insert(merged: list[Line], removed: Iterator[Line]) -> None:
    """Put removed lines behind the last op, before the header that belongs to what comes next."""
    end = len(merged)
    while end and merged[end - 1].kind in ("group", "blank"):
        end -= 1
    merged[end:end] = removed


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
