"""What measuring yields: medians with intervals, as data, as JSON and as a table. Pure: no clock in here.

timing = device, programs (the first is the baseline), how many rounds, why it stopped
program timing = per phase an estimate in ms and its ratio to the baseline; cold run; peak memory; difference
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tracefuse.optimizers.trace import human_bytes

CONFIDENCE = 0.95
MIN_ROUNDS = 6  # Minimum to maximum of six samples cover the median with 96.9 %: the first count that reaches 95 %.


@dataclass(frozen=True)
class Estimate:
    """A median with an interval that covers the true median with probability `coverage`.

    `coverage` is at least 0.95 from six samples on; of fewer it is what their minimum and maximum cover.
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

    def __str__(self) -> str:
        if self.samples == 1:
            return f"{self.median:.4g} (1 sample)"
        text = f"{self.median:.4g} [{self.low:.4g}, {self.high:.4g}]"
        return text if self.samples >= MIN_ROUNDS else f"{text} ({self.coverage:.0%}, {self.samples} samples)"


def estimate(samples: Sequence[float]) -> Estimate:
    """Median and its distribution-free interval, that of the sign test. Raises `ValueError` for no samples.

    The number of samples below the true median is Binomial(n, 1/2); the interval runs from the k-th smallest to the
    k-th largest sample for the largest k that still covers 95 %.
    """
    if not samples:
        raise ValueError("no samples: measure at least one round")
    ordered, n = sorted(samples), len(samples)
    tails = _tails(n)
    k = max((i for i, tail in enumerate(tails) if 1 - 2 * tail >= CONFIDENCE), default=0)
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    return Estimate(middle, ordered[k], ordered[n - 1 - k], 1 - 2 * tails[k], n)


def _tails(n: int) -> list[float]:
    """`P(Binomial(n, 1/2) <= i)` for each i that leaves an interval."""
    total, tails = 0.0, []
    for i in range((n + 1) // 2):
        total += math.comb(n, i) / 2**n
        tails.append(total)
    return tails


@dataclass(frozen=True)
class Difference:
    """Largest absolute difference from the reference, over results and over gradients; NaN where only one has a NaN."""

    results: float
    gradients: float


@dataclass(frozen=True)
class ProgramTiming:
    """One program's times by phase ("forward", "backward", "step").

    `times_ms` are medians over rounds, `ratios` those of program / baseline, paired by round. `cold_ms` is the first
    run with all its compiling. `peak_nbytes` is what a replay adds to the allocated GPU memory at its peak; None on the
    CPU. `difference` is None for what was compared with nothing: the reference itself, a yardstick.
    """

    name: str
    times_ms: Mapping[str, Estimate]
    ratios: Mapping[str, Estimate]
    cold_ms: float
    peak_nbytes: int | None = None
    difference: Difference | None = None


@dataclass(frozen=True)
class Row:
    """One phase of one program beside the same phase of the baseline."""

    label: str
    program: str
    baseline_ms: Estimate
    variant_ms: Estimate
    ratio: Estimate


@dataclass(frozen=True)
class Timing:
    """What one call of `measure` found. `programs[0]` is the baseline; `device` begins with "measured on".

    A sample is the mean of `inner` replays back to back; `stopped` says why the rounds ended.
    """

    device: str
    programs: tuple[ProgramTiming, ...]
    rounds: int
    inner: int
    stopped: str

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
        return _plain(asdict(self))

    def __str__(self) -> str:
        """Two tables with aligned columns: times in ms and ratios; cold run, memory and differences."""
        by_phase = [
            (p.name, phase, str(p.times_ms[phase]), "baseline" if p is self.baseline else str(p.ratios.get(phase, "")))
            for p in self.programs
            for phase in p.times_ms
        ]
        rest = [(p.name, f"{p.cold_ms:.4g}", _memory(p), *_difference(p)) for p in self.programs]
        replays = f"{self.inner} replay{'s' * (self.inner > 1)}"
        return "\n".join([
            f"{self.device}: {self.rounds} rounds of {replays}, interleaved; stopped: {self.stopped}",
            aligned([("program", "phase", "median ms [95 % interval]", "ratio"), *by_phase]),
            "",
            aligned([("program", "first run ms", "peak memory", "max |Δ| results", "gradients"), *rest]),
        ])  # fmt: skip


def _memory(program: ProgramTiming) -> str:
    return "not measured" if program.peak_nbytes is None else human_bytes(program.peak_nbytes)


def _difference(program: ProgramTiming) -> tuple[str, str]:
    if program.difference is None:
        return "", ""
    return f"{program.difference.results:.3g}", f"{program.difference.gradients:.3g}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Lines of columns, each as wide as its widest cell, two spaces between."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
