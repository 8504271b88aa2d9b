"""Two programs told apart by module: what each of its parts takes in one and in the other, and which of its lines changed.

They may be one capture under two choices of passes, or two captures: before and after an edit of the code, or of two sizes of
a batch. Modules are aligned by their paths, ops within a module by the text of their line, since an edit moves the lines below
it. Numbered modules that are alike share a row (`tracefuse.tables.folding`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tracefuse.measure.op_times import OpTimes
from tracefuse.optimizers.liveness import known_saved_values
from tracefuse.optimizers.ops import does_work, grouped
from tracefuse.optimizers.origins import Source
from tracefuse.optimizers.trace import Trace, origin

Pair = tuple[float, float]
LinesOfCalls = Mapping[str, Mapping[str, tuple[Source | None, float]]]
"""By the name of a kernel's call the lines that it does the work of, with the share of each: `lines_of` of `replaced.py`."""
SMALLEST = 1e-3
"""The least share of the larger step that counts as a difference of time."""


@dataclass(frozen=True)
class LineDifference:
    """What the ops of one line in one module take in either program: how many, in µs, its part of kernels included that do the
    work of other lines too, and are counted as ops of another one. `place` is where it stands, in the
    second program if it is there."""

    place: str
    text: str
    ops: tuple[int, int]
    us: Pair


@dataclass(frozen=True)
class ModuleDifference:
    """What a module takes in either program: ops, µs, bytes saved for the backward. `count` modules alike share the row;
    `lines` are those that differ, the largest difference of time first."""

    path: str
    module_type: str
    count: int
    ops: tuple[int, int]
    us: Pair
    saved_bytes: tuple[int, int]
    lines: tuple[LineDifference, ...] = ()

    @property
    def delta_us(self) -> float:
        """How much more the second program takes."""
        return self.us[1] - self.us[0]


@dataclass
class _Line:
    place: str = ""
    ops: list[int] = field(default_factory=lambda: [0, 0])
    us: list[float] = field(default_factory=lambda: [0.0, 0.0])


@dataclass
class _Part:
    """One module in both programs."""

    module_type: str = ""
    saved: list[int] = field(default_factory=lambda: [0, 0])
    lines: dict[str, _Line] = field(default_factory=lambda: defaultdict(_Line))

    def line(self, source: Source | None) -> _Line:
        found = self.lines[source.text.strip() if source else ""]
        found.place = source.place if source else found.place
        return found


def compared(
    one: Trace,
    other: Trace,
    times: tuple[OpTimes, OpTimes],
    folds: Mapping[str, str],
    lines: tuple[LinesOfCalls, LinesOfCalls] = ({}, {}),
) -> list[ModuleDifference]:
    """The modules that differ, the largest difference of time first; `times` are those of the ops of `one` and of `other`,
    `folds` the folded path of each module, as the captured programs have it. `lines` are by call of a kernel those that it
    does the work of: its time is shared over them, within the module that it is booked on."""
    parts: dict[str, _Part] = defaultdict(_Part)
    for side, (trace, known, shares) in enumerate(zip((one, other), times, lines, strict=True)):
        _book(parts, trace, known, side, shares)
    groups = grouped(parts, lambda path: folds.get(path, path))
    least_us = SMALLEST * max(known.step_us for known in times)
    rows = [_row(name, [parts[path] for path in paths], least_us) for name, paths in groups.items()]
    return sorted((row for row in rows if _differs(row, least_us)), key=lambda row: -abs(row.delta_us))


def _book(parts: dict[str, _Part], trace: Trace, times: OpTimes, side: int, shares: LinesOfCalls) -> None:
    for node in filter(does_work, trace.ops):
        where = origin(node)
        part = parts[where.module]
        part.module_type = part.module_type or where.module_type
        part.line(where.source).ops[side] += 1
        own = {"": (where.source, 1.0)}
        for source, share in shares.get(node.name, own).values():
            part.line(source).us[side] += share * times.us.get(node.name, 0.0)
    nodes = {node.name: node for node in trace.graph.nodes}
    for saved in known_saved_values(trace):
        parts[origin(nodes[saved.name]).module].saved[side] += saved.nbytes


def _row(path: str, alike: list[_Part], least_us: float) -> ModuleDifference:
    lines: dict[str, _Line] = defaultdict(_Line)
    for part in alike:
        for text, line in part.lines.items():
            found = lines[text]
            found.place = line.place
            for side in (0, 1):
                found.ops[side] += line.ops[side]
                found.us[side] += line.us[side]
    told = [LineDifference(one.place, text, _ints(one.ops), _pair(one.us)) for text, one in lines.items()]
    differ = [one for one in told if one.ops[0] != one.ops[1] or abs(one.us[1] - one.us[0]) > least_us]
    return ModuleDifference(
        path,
        next((part.module_type for part in alike if part.module_type), ""),
        len(alike),
        _ints([sum(one.ops[side] for one in told) for side in (0, 1)]),
        _pair([sum(one.us[side] for one in told) for side in (0, 1)]),
        _ints([sum(part.saved[side] for part in alike) for side in (0, 1)]),
        tuple(sorted(differ, key=lambda one: -abs(one.us[1] - one.us[0]))),
    )


def _differs(row: ModuleDifference, least_us: float) -> bool:
    is_same_work = row.ops[0] == row.ops[1] and not row.lines
    return not is_same_work or abs(row.delta_us) > least_us or row.saved_bytes[0] != row.saved_bytes[1]


def _ints(both: Iterable[int]) -> tuple[int, int]:
    one, other = both
    return one, other


def _pair(both: Iterable[float]) -> Pair:
    one, other = both
    return one, other
