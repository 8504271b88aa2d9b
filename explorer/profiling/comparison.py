"""Two runs beside each other: what got slower, by operator, kernel, module, line and range. Pure.

    print(tracefuse.compare_timelines(before, after))

Times are of a step where both files name steps (`ProfilerStep#…`), else of the whole window. With three steps or more in each,
a difference has an interval of 95 % (Welch's), and what it does not tell from nothing is not shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import stats

from tracefuse.profiling.attribution import BY, Costs, costs_of
from tracefuse.profiling.timeline import RunTimeline
from tracefuse.text import aligned, time_text

_FEWEST_STEPS = 3
_LEAST = 0.002
"""Of the longer step: a difference below that is not shown."""
_TOP = 8
_BY_STACK = ("module", "line")
"""What a run names that was recorded with stacks alone."""


@dataclass(frozen=True)
class Change:
    """What one operator, module, … took in each run (ns of a step, or of the window), in how many records; `interval_ns` is
    the 95 % interval of the difference, None where the steps are too few."""

    name: str
    before_ns: float
    after_ns: float
    before_count: float
    after_count: float
    interval_ns: tuple[float, float] | None

    @property
    def ns(self) -> float:
        return self.after_ns - self.before_ns

    @property
    def is_told(self) -> bool:
        """Whether the difference is told from none."""
        return self.interval_ns is None or not self.interval_ns[0] <= 0 <= self.interval_ns[1]


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two runs. `changes(by)` are differences of one kind, the largest loss first; printing shows all kinds."""

    before: RunTimeline
    after: RunTimeline

    @cached_property
    def costs(self) -> tuple[Costs, Costs]:
        return costs_of(self.before), costs_of(self.after)

    @cached_property
    def steps(self) -> tuple[int, int]:
        """How many steps each run has; ones where either names none, and the whole window is compared."""
        first, second = (len(one.steps) for one in self.costs)
        return (first, second) if first and second else (1, 1)

    @property
    def is_by_step(self) -> bool:
        return all(len(one.steps) for one in self.costs)

    def changes(self, by: str) -> list[Change]:
        """The differences by "operator", "kernel", "module", "line" or "range", what got slower by most first. None by what
        one of the runs has no names of at all, since it was recorded without stacks."""
        if by in self.uncompared:
            return []
        sides = [self._totals(costs, steps, by) for costs, steps in zip(self.costs, self.steps, strict=True)]
        names = dict.fromkeys([*sides[0], *sides[1]])
        found = [self._change(name, *(side.get(name) for side in sides)) for name in names if name]
        return sorted(found, key=lambda one: -one.ns)

    @cached_property
    def uncompared(self) -> dict[str, str]:
        """By what is not compared, and why: the one run names it, and the other was recorded without."""
        named = {by: [any(costs.by(by)[0]) for costs in self.costs] for by in _BY_STACK}
        return {
            by: f"{by}s are not compared: the run {'before' if after else 'after'} was recorded without `with_stack=True`"
            for by, (before, after) in named.items()
            if before != after
        }

    def idle_changes(self) -> list[Change]:
        """The same of idle time, by cause, all GPUs together."""
        sides = []
        for run, steps in zip((self.before, self.after), self.steps, strict=True):
            totals: dict[str, float] = {}
            for idle in run.idle:
                for cause, ns in idle.by_cause.items():
                    totals[cause] = totals.get(cause, 0.0) + ns / steps
            sides.append(totals)
        names = dict.fromkeys([*sides[0], *sides[1]])
        found = [Change(name, sides[0].get(name, 0.0), sides[1].get(name, 0.0), 0, 0, None) for name in names]
        return sorted(found, key=lambda one: -one.ns)

    def _totals(self, costs: Costs, steps: int, by: str) -> dict[str, np.ndarray]:
        """By name, rows of (ns, records) of each step."""
        names, which = costs.by(by)
        step = costs.step if self.is_by_step else np.zeros(len(which), np.int64)
        kept = step >= 0
        at = which[kept] * steps + step[kept]
        size = len(names) * steps
        ns = np.bincount(at, costs.ns[kept], size).reshape(-1, steps)
        count = np.bincount(at, minlength=size).reshape(-1, steps)
        return {name: np.stack([ns[row], count[row]]) for row, name in enumerate(names)}

    def _change(self, name: str, before: np.ndarray | None, after: np.ndarray | None) -> Change:
        sides = [
            np.zeros((2, steps)) if side is None else side
            for side, steps in zip((before, after), self.steps, strict=True)
        ]
        means = [side.mean(axis=1) for side in sides]
        interval = None
        if min(self.steps) >= _FEWEST_STEPS:
            interval = _interval(sides[0][0], sides[1][0])
        return Change(name, means[0][0], means[1][0], means[0][1], means[1][1], interval)

    # --- as text ------------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        unit = "a step" if self.is_by_step else "the window"
        runs = zip((self.before, self.after), self.steps, strict=True)
        lengths = [(run.window[1] - run.window[0]) / steps for run, steps in runs]
        counts = f" (the window by its {self.steps[0]} and {self.steps[1]} steps)" if self.is_by_step else ""
        head = [
            f"before: {self.before.provenance}",
            f"after:  {self.after.provenance}",
            f"{unit}{counts}: {time_text(lengths[0] / 1e3)} before, {time_text(lengths[1] / 1e3)} after, "
            f"{_signed(lengths[1] - lengths[0])}",
        ]
        least = _LEAST * max(lengths)
        parts = ["\n".join(head), *(_table(by, self.changes(by), least) for by in BY)]
        parts.append("\n".join(self.uncompared.values()))
        parts.append(_table("idle by cause", self.idle_changes(), least))
        return "\n\n".join(filter(None, parts))

    __repr__ = __str__


def _interval(before: np.ndarray, after: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of the difference of the means."""
    if before.std() == 0 == after.std():
        difference = float(after.mean() - before.mean())
        return difference, difference
    found = stats.ttest_ind(after, before, equal_var=False).confidence_interval(0.95)
    return float(found.low), float(found.high)


def _table(by: str, changes: list[Change], least: float) -> str:
    shown = [one for one in changes if abs(one.ns) >= least and one.is_told]
    slower, faster = [one for one in shown if one.ns > 0], [one for one in reversed(shown) if one.ns < 0]
    rows = [*_rows(slower[:_TOP]), *_rows(faster[:_TOP])]
    left = len(slower) + len(faster) - len(rows)
    more = f"\nand {left} more" if left else ""
    return f"{aligned([(by, 'before', 'after', 'change', 'records'), *rows])}{more}" if rows else ""


def _rows(changes: list[Change]) -> Iterator[tuple[str, ...]]:
    for one in changes:
        low_high = one.interval_ns
        said = f" ({_signed(low_high[0])} to {_signed(low_high[1])})" if low_high else ""
        same = abs(one.before_count - one.after_count) < 0.05
        counts = _count(one.before_count) if same else f"{_count(one.before_count)} → {_count(one.after_count)}"
        times = time_text(one.before_ns / 1e3), time_text(one.after_ns / 1e3)
        yield one.name[:80], *times, f"{_signed(one.ns)}{said}", counts if one.before_count or one.after_count else ""


def _count(records: float) -> str:
    """Of a step: a mean, of which few have a fraction that says something."""
    return f"{records:.3g}" if records < 100 else f"{records:,.0f}"


def _signed(ns: float) -> str:
    return f"{'-' if ns < 0 else '+'}{time_text(abs(ns) / 1e3)}"


def compare_timelines(before: RunTimeline, after: RunTimeline) -> Comparison:
    """Two runs of the same program, as `load_timeline` and `profile_run` give them, beside each other."""
    return Comparison(before, after)
