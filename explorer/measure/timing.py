"""What measuring yields: medians with intervals, as data, as JSON and as a table. Pure: no clock in here.

timing = device, programs (the first is the baseline), how many rounds, why it stopped
program timing = per phase an estimate in ms and its ratio to the baseline; cold run; added peak; difference
ratio = the program's time over the baseline's, everywhere: below 1 the program is faster; the median over rounds of the
        ratio in a round, so that what slows a whole round, and drift, cancel

A ratio has a 99 % interval, since a comparison asks about three phases at once, and `verdict` calls a difference only what
lies beyond `SMALLEST` of 1: two copies of one program differ by as much as where their memory lies, however long one looks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tracefuse.optimizers.trace import human_bytes
from tracefuse.text import aligned, counted, figure

CONFIDENCE = 0.95
RATIO_CONFIDENCE = 0.99
MIN_ROUNDS = 8  # Minimum to maximum of eight samples cover the median with 99.2 %: the first count that reaches 99 %.
FEWEST = 3
"""Samples below which an interval says nothing: the extremes of two cover the median with 50 %."""
SMALLEST = 0.01
"""The smallest difference, as a share, that is called one."""
VISIBLE = 0.05
"""A difference that should be seen: where the interval of a ratio is wider, the verdict says so."""
UNSEEN = "no difference seen"
MOST_STEPS = 9999
"""Of rounding, that are told apart."""
UNASKED_S = 30.0
"""The most seconds that times of a CPU take that nobody asked for: they are no verdict."""
DIFFERENCES = ("outputs", "max |Δ| results", "gradients", "new values")
RATIO_TITLE = "ratio [99 % interval], below 1 is faster"


@dataclass(frozen=True)
class Estimate:
    """A median with an interval that covers the true median with probability `coverage`.

    `coverage` is at least 0.95, of a ratio 0.99, from eight samples on; of fewer it is what their extremes cover,
    and of fewer than `FEWEST` it is not shown.
    """

    median: float
    low: float
    high: float
    coverage: float
    samples: int

    @property
    def relative_width(self) -> float:
        """Half the interval over the median."""
        return (self.high - self.low) / 2 / self.median if self.median else math.inf

    def text(self, digits: int = 4) -> str:
        """The median with its interval; of few samples what that covers, of one that it is one."""
        if self.samples < FEWEST:
            return f"{figure(self.median, digits)} ({'one sample' if self.samples == 1 else f'{self.samples} samples'})"
        text = f"{figure(self.median, digits)} [{figure(self.low, digits)}, {figure(self.high, digits)}]"
        return text if self.samples >= MIN_ROUNDS else f"{text} ({self.coverage:.0%}, {self.samples} samples)"

    def __str__(self) -> str:
        return self.text()


def estimate(samples: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Median and its distribution-free interval, that of the sign test. Raises `ValueError` for no samples.

    The number of samples below the true median is Binomial(n, 1/2); the interval runs from the k-th smallest to the
    k-th largest sample for the largest k that still covers `confidence`.
    """
    if not samples:
        raise ValueError("no samples: measure at least one round")
    ordered, n = sorted(samples), len(samples)
    tails = _tails(n)
    k = max((i for i, tail in enumerate(tails) if 1 - 2 * tail >= confidence), default=0)
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    return Estimate(middle, ordered[k], ordered[n - 1 - k], 1 - 2 * tails[k], n)


def paired_ratio(mine: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """The median over rounds of `mine / baseline`, with a 99 % interval. Raises `ValueError` for no rounds."""
    return estimate([time / base for time, base in zip(mine, baseline, strict=True)], RATIO_CONFIDENCE)


def inverse(ratio: Estimate) -> Estimate:
    """The ratio of the two programs the other way round."""
    return replace(ratio, median=1 / ratio.median, low=1 / ratio.high, high=1 / ratio.low)


def negated(excess: Estimate) -> Estimate:
    """The difference of the two programs the other way round."""
    return Estimate(-excess.median, -excess.high, -excess.low, excess.coverage, excess.samples)


def over(ratio: Estimate, other: Estimate) -> Estimate:
    """One ratio over another of the same baseline, in rounds of its own: as far apart as both intervals allow."""
    samples, coverage = min(ratio.samples, other.samples), ratio.coverage * other.coverage
    return Estimate(ratio.median / other.median, ratio.low / other.high, ratio.high / other.low, coverage, samples)


def verdict(ratio: Estimate) -> str:
    """What a ratio of program to baseline lets one say: "faster", "slower", or that it lets one say neither, and whether the
    noise would have hidden a difference of `VISIBLE`."""
    if ratio.samples < MIN_ROUNDS:
        return f"too few rounds to say ({ratio.samples} of {MIN_ROUNDS})"
    if ratio.high < 1 - SMALLEST:
        return "faster"
    if ratio.low > 1 + SMALLEST:
        return "slower"
    hidden = max(1 - ratio.low, ratio.high - 1)
    if hidden > 1:  # a program that took twice as long would not be seen either
        return f"{UNSEEN}: too noisy to say"
    return UNSEEN if hidden <= VISIBLE else f"{UNSEEN}: the noise hides up to {hidden:.0%}"


def shown(ratio: Estimate, digits: int = 4) -> str:
    """What is printed of a ratio beside its `verdict`: without a median where no difference was seen, since a median claims
    one."""
    if verdict(ratio).startswith(UNSEEN):
        return f"[{figure(ratio.low, digits)}, {figure(ratio.high, digits)}]"
    return ratio.text(digits)


@functools.cache
def _tails(n: int) -> tuple[float, ...]:
    """`P(Binomial(n, 1/2) <= i)` for each i that leaves an interval."""
    total, tails = 0, []
    for i in range((n + 1) // 2):
        total += math.comb(n, i)
        tails.append(total / 2**n)
    return tuple(tails)


@dataclass(frozen=True)
class Rounding:
    """The output that is furthest from the reference: its greatest difference, `delta`, is so many rounding steps of `dtype`,
    the distance of two neighbours there where its largest number lies; `dtype` is its own, or a coarser one that rounds on the
    way. `steps` is None of integers, and where what differs would be zero but for rounding. `is_near`: all results and
    gradients are within the tolerance of the exported file's check, which is `allowed` of this one's norm."""

    of: str
    delta: float
    steps: float | None
    dtype: str
    allowed: float
    is_near: bool

    @property
    def brief(self) -> str:
        """`1 bf16 rounding`, `300 fp32 roundings`, `noise of rounding`, `other integers`"""
        if self.steps is None:
            return "noise of rounding" if self.is_near else "other integers"
        unit = f"{self.dtype.replace('bfloat', 'bf').replace('float', 'fp')} rounding"
        return counted(math.ceil(self.steps), unit) if self.steps <= MOST_STEPS else f"> {MOST_STEPS} {unit}s"


@dataclass(frozen=True)
class Difference:
    """Largest absolute difference from the reference, over results, over gradients and, where there is an update, over its new
    values; NaN where only one has a NaN. `rounding` is None where no result or gradient differs, where one has no number, and
    in files of before it was told; `updated_near` says whether the new values, as one vector, are within the tolerance."""

    results: float
    gradients: float
    updated: float | None = None
    rounding: Rounding | None = None
    updated_near: bool | None = None

    @property
    def is_same(self) -> bool | None:
        """Whether all that differs is within the tolerance; None where nobody knows."""
        if self.rounding is None and not self.results == self.gradients == 0:
            return None
        if self.updated and self.updated_near is None:
            return None
        return self.updated_near is not False and (self.rounding is None or self.rounding.is_near)

    @property
    def said(self) -> str:
        """`the same to 1 bf16 rounding (0.0625)`, `the same in every number`, `apart by 9 bf16 roundings (4)`,
        `the same in every number; new values apart by up to 3`"""
        found = [self.results, self.gradients]
        largest = math.nan if any(map(math.isnan, found)) else max(found)
        if self.rounding is not None:
            verdict = (
                "the same to " if self.rounding.is_near else "apart by " if self.rounding.steps is not None else ""
            )
            said = f"{verdict}{self.rounding.brief} ({self.rounding.delta:.3g})"
        else:
            said = "the same in every number" if largest == 0 else f"apart by up to {largest:.3g}"
        return said if self.updated_near is not False else f"{said}; new values apart by up to {self.updated:.3g}"


@dataclass(frozen=True)
class ProgramTiming:
    """One program's times by phase ("forward", "backward", "update", "step").

    `times_ms` are medians over rounds, `ratios` those of its time over the baseline's. `cold_ms` is the first run
    with all its compiling. `peak_nbytes` is the added peak (`tracefuse.tables.memory`) of a replay on a GPU; None on the
    CPU. `difference` is None for what was compared with nothing: the reference itself, a yardstick. `excess_ms` is what the
    program takes more than the baseline, by phase: the median over rounds of the difference in a round. `host_ms` is what the
    host took to queue a replay, the median over rounds; None where nothing is queued, as on a CPU.
    """

    name: str
    times_ms: Mapping[str, Estimate]
    ratios: Mapping[str, Estimate]
    cold_ms: float
    peak_nbytes: int | None = None
    difference: Difference | None = None
    excess_ms: Mapping[str, Estimate] = field(default_factory=dict)
    host_ms: float | None = None

    @property
    def step_ms(self) -> Estimate:
        """The whole step; of a program of one phase, that one."""
        return self.times_ms.get("step") or [*self.times_ms.values()][-1]


@dataclass(frozen=True)
class Row:
    """One phase of one program beside the same phase of the baseline; `ratio` is variant / baseline, below 1 is faster."""

    label: str
    program: str
    baseline_ms: Estimate
    variant_ms: Estimate
    ratio: Estimate

    @property
    def verdict(self) -> str:
        """`faster`, `slower`, `no difference seen`, or that there were too few rounds to say."""
        return verdict(self.ratio)


@dataclass(frozen=True)
class Timing:
    """What one call of `measure` found. `programs[0]` is the baseline; `device` begins with "measured on".

    A sample is the mean of `inner` replays back to back; `stopped` says why the rounds ended. `failed` are programs that were
    asked for and could not run, with the reason; `notes` say what to know of those that did.
    """

    device: str
    programs: tuple[ProgramTiming, ...]
    rounds: int
    inner: int
    stopped: str
    failed: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def baseline(self) -> ProgramTiming:
        return self.programs[0]

    def program(self, name: str) -> ProgramTiming:
        """The timing of the program called `name`; raises `KeyError` if there is none."""
        return {p.name: p for p in self.programs}[name]

    @property
    def rows(self) -> tuple[Row, ...]:
        """Every phase of every program but the baseline, beside the baseline's."""
        return tuple(
            Row(phase, p.name, self.baseline.times_ms[phase], p.times_ms[phase], p.ratios[phase])
            for p in self.programs[1:]
            for phase in p.times_ms
            if phase in self.baseline.times_ms
        )

    def to_json(self) -> dict[str, Any]:
        """The same as dictionaries, lists, strings and numbers; NaN and infinity, which JSON lacks, become strings."""
        return plain(asdict(self))

    def __str__(self) -> str:
        """Two tables with aligned columns: times in ms and ratios; cold run, memory and differences."""
        by_phase = [
            (p.name, phase, str(time_ms), *_ratio(p.ratios.get(phase), p is self.baseline))
            for p in self.programs
            for phase, time_ms in p.times_ms.items()
        ]
        new = ["new values"] * any("update" in p.times_ms for p in self.programs)
        rest = [(p.name, figure(p.cold_ms, 4), _memory(p), *_difference(p)[: 3 + len(new)]) for p in self.programs]
        rounds = f"{self.rounds} round{'s' * (self.rounds > 1)}"
        replays = f"{self.inner} replay{'s' * (self.inner > 1)}"
        return "\n".join([
            f"{self.device}: {rounds} of {replays}, interleaved; stopped: {self.stopped}",
            aligned([("program", "phase", "median ms [95 % interval]", RATIO_TITLE, ""), *by_phase]),
            "",
            aligned([("program", "first run ms", "added peak (without inputs)", *DIFFERENCES[: 3 + len(new)]), *rest]),
            *(f"{name} did not run: {reason}" for name, reason in self.failed.items()),
            *self.notes,
        ])  # fmt: skip


def _ratio(ratio: Estimate | None, is_baseline: bool) -> tuple[str, str]:
    if is_baseline or ratio is None:
        return "baseline" if is_baseline else "", ""
    return shown(ratio), verdict(ratio)


def _memory(program: ProgramTiming) -> str:
    return "not measured" if program.peak_nbytes is None else human_bytes(program.peak_nbytes)


def _difference(program: ProgramTiming) -> tuple[str, str, str, str]:
    found = program.difference
    if found is None:
        return "", "", "", ""
    updated = "" if found.updated is None else f"{found.updated:.3g}"
    return found.said, f"{found.results:.3g}", f"{found.gradients:.3g}", updated


def plain(value: Any) -> Any:
    """`value` as dictionaries, lists, strings and numbers; NaN and infinity, which JSON lacks, become strings."""
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
