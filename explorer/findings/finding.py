"""Findings, the cases that detectors look at, and the words that findings share.

`tracefuse.findings.kinds` lists the kinds, `tracefuse.diagnose.diagnose` the detectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2s
from typing import Any, Literal

from torch import fx

from tracefuse.assembly.program import CapturedProgram
from tracefuse.findings.kinds import KINDS
from tracefuse.findings.library_calls import inside_attention, inside_recurrent
from tracefuse.measure.op_times import OpTimes, modelled
from tracefuse.optimizers.ops import does_work
from tracefuse.optimizers.trace import Phase, Trace, is_on_gpu, line_of, origin, val
from tracefuse.tables.halves import halves
from tracefuse.text import share_text, time_text

Severity = Literal["high", "medium", "low"]
SEVERITIES: tuple[Severity, ...] = ("high", "medium", "low")
HIGH, MEDIUM, LOW = 0.2, 0.05, 0.01
IN_LIBRARY = "in the library"
"""The evidence that is a library's line, where the finding is told at the line of the project's that called it."""


@dataclass(frozen=True)
class Bar:
    """A part of the time that a finding is about; `provenance` begins with "measured on" or "modelled"."""

    label: str
    us: float
    provenance: str


FixKind = Literal["on device", "pinned input", "pinned gradient", "as cast", "left out", "computed once", "passes"]


@dataclass(frozen=True)
class Fix:
    """What a replay can test: `kind` names the change (`tracefuse.diagnose.fixes`), `does` says it, `of` are the names of the
    inputs or ops that it changes, `changes` the options of "passes". `gained_us` works out what it is predicted to gain, where
    that is another part of the step than its finding is about: passes work on all ops, and a value that moves comes back."""

    kind: FixKind
    does: str
    of: tuple[str, ...] = ()
    changes: dict[str, Any] | None = None
    gained_us: Callable[[], float] | None = field(default=None, compare=False, repr=False)

    @cached_property
    def worth_us(self) -> float | None:
        """The microseconds of `gained_us`, worked out when they are first asked for: regions of all ops take a while."""
        return None if self.gained_us is None else self.gained_us()


@dataclass(frozen=True)
class Finding:
    """One diagnosis. `id` is its kind, a key of `tracefuse.findings.kinds.KINDS`, `evidence` are pairs of label and figure,
    `values` the names of the ops that it is about, `source` the line of the user's program, `worth` what the fix gains and
    how that is known, `changes` the options that try it, if a pass can. `kind` is "measured", "predicted" or "modelled", as
    the time in `worth` is, and "" where it has none; `left_kind` is that of what passes leave.

    `worth_us` are the microseconds of a step that `worth` speaks of, and `worth_share` is their share of it: None where it
    speaks of none. `left` and `left_share` are the worth and the share of what passes leave, where any are on.

    `code` is the fix as it is pasted, one statement or several, where it is code and not words about it.

    `bars` are parts of the time of what it is about, one after another: they add up to that. `fixes` are what
    `Variant.try_fix` can measure, the best first. `mended` says which passes of a configuration mend it already and what is
    left, `mended_by` are their names, `is_mended` says that nothing is left. `is_below` marks one whose share of the step is
    too small to be told: it is counted. Of a step that waits for launches, `launches` are those that a GPU's host is spared at
    most: by mending what passes leave of it, where any are on; `launches_of` are all those of the program that they are in, as
    it ran or with the passes."""

    id: str
    severity: Severity
    title: str
    evidence: tuple[tuple[str, str], ...]
    values: tuple[str, ...]
    source: str
    fix: str
    worth: str
    changes: dict[str, Any] | None = None
    kind: str = ""
    bars: tuple[Bar, ...] = ()
    fixes: tuple[Fix, ...] = ()
    mended: str = ""
    is_mended: bool = False
    left_kind: str = ""
    mended_by: tuple[str, ...] = ()
    code: str = ""
    worth_us: float | None = None
    worth_share: float | None = None
    left: str = ""
    left_share: float | None = None
    is_below: bool = False
    launches: float = 0.0
    launches_of: float = 0.0

    def __post_init__(self) -> None:
        if self.id not in KINDS:
            raise ValueError(f"{self.id!r} is no kind of finding: add it to tracefuse.findings.kinds.KINDS")

    @property
    def key(self) -> str:
        """The same for what is found at the same place again, whatever its times are by then."""
        return blake2s("\n".join((self.id, self.title, self.source)).encode(), digest_size=6).hexdigest()

    @property
    def trials(self) -> tuple[Fix, ...]:
        """What `Variant.try_fix` can measure: `fixes`, or the passes of `changes`."""
        if self.fixes or not self.changes:
            return self.fixes
        return (Fix("passes", f"with {', '.join(self.changes)}", changes=self.changes),)

    def __str__(self) -> str:
        facts = "; ".join(f"{label}: {figure}" for label, figure in self.evidence)
        lines = [
            f"{self.severity}{how_mended(self.is_mended, self.mended_by)}: {self.title} [{self.id}]",
            f"  {facts}",
            f"  at {self.source}" if self.source else "",
        ]
        lines += [f"  time: {bars_text(self.bars)}" if self.bars else "", f"  fix: {self.fix}"]
        return "\n".join(filter(None, [*lines, f"  worth: {self.worth}", f"  {self.mended}" if self.mended else ""]))


@dataclass(frozen=True)
class Case:
    """What a detector may look at: a `trace` of `program`, as captured or as passes made it, and the times of its ops.

    `update` is the step's update likewise, if it has one. Passes may name an op of it as they name one of `trace`, so
    `update_us` has its ops' microseconds by their own names (default: modelled). `elsewhere_us` is what the step takes besides
    all of these.
    """

    program: CapturedProgram
    trace: Trace
    times: OpTimes
    update: Trace | None = None
    update_us: Mapping[str, float] | None = None
    elsewhere_us: float = 0.0

    @cached_property
    def half(self) -> Mapping[fx.Node, Phase]:
        """The half of its step that each op belongs to."""
        return halves(self.trace)

    @cached_property
    def own_ops(self) -> tuple[fx.Node, ...]:
        """The ops that the program's lines ran, in order, and none that autograd did, nor torch inside one call of its own."""
        own = [n for n in self.trace.ops if does_work(n) and not origin(n).autograd and self.half[n] == "forward"]
        torchs = inside_attention(self.trace) | inside_recurrent(own)
        return tuple(n for n in own if n not in torchs)

    @cached_property
    def not_on_a_gpu(self) -> frozenset[fx.Node]:
        """What a CPU ran inside one call of torch's, for which a GPU has one kernel."""
        return frozenset() if is_on_gpu(self.trace) else inside_attention(self.trace)

    @cached_property
    def step_us(self) -> float:
        return sum(self.times.us.values()) + sum(self._update_us.values()) + self.elsewhere_us

    @property
    def _update_us(self) -> Mapping[str, float]:
        if self.update is None:
            return {}
        return modelled(self.update).us if self.update_us is None else self.update_us

    @property
    def of_update(self) -> Case | None:
        """The update alone, within the same step; None where the step has none."""
        if self.update is None:
            return None
        times = replace(self.times, us=dict(self._update_us))
        elsewhere_us = self.step_us - sum(times.us.values())
        return replace(self, trace=self.update, times=times, update=None, update_us=None, elsewhere_us=elsewhere_us)

    def us(self, nodes: Collection[fx.Node]) -> float:
        """What they take together: the same to the last digit in whatever order a set has them."""
        return math.fsum(self.times.us.get(node.name, 0.0) for node in nodes)

    def finding(
        self,
        id: str,
        severity: Severity | None,
        title: str,
        evidence: Sequence[tuple[str, str]],
        ops: Sequence[fx.Node],
        at: fx.Node | str,
        fix: str,
        worth: float | str,
        changes: dict[str, Any] | None = None,
        said: str = "{}",
        kind: str = "",
        worth_us: float | None = None,
        worth_share: float | None = None,
        **more: Any,
    ) -> Iterator[Finding]:
        """The finding about `ops`; without a `severity` one that is only counted, if it is worth any time. `at` is its line,
        or the op whose line it is. `worth` is in microseconds of the step, told within `said`, or in words, of which `kind`,
        `worth_us` and `worth_share` are those of their time."""
        if not isinstance(worth, str):
            worth_us, worth, kind = worth, self.worth(worth), self.times.kind
            worth_share = worth_us / self.step_us if self.step_us else None
        source = at if isinstance(at, str) else line_of(at)
        if severity is None and max(worth_us or 0.0, worth_share or 0.0) <= 0:
            return
        values, worth = tuple(node.name for node in ops), said.format(worth)
        numbers = {"worth_us": worth_us, "worth_share": worth_share}
        more |= numbers | {"is_below": severity is None}
        yield Finding(id, severity or "low", title, tuple(evidence), values, source, fix, worth, changes, kind, **more)

    def severity(self, us: float, of_us: float | None = None) -> Severity | None:
        """By the share of the step, or of `of_us`; None for less than deserves a word."""
        return severity_of(us, self.step_us if of_us is None else of_us)

    def worth(self, us: float) -> str:
        """`us` of the step, with its share and how the times are known."""
        share = share_text(us, self.step_us)
        return f"{time_text(us)} of {time_text(self.step_us)} a step, {share} ({self.times.provenance})"

    def timed(self, nodes: Sequence[fx.Node]) -> str:
        """The time of some ops, with its kind: `61.2 µs (measured)`."""
        return f"{time_text(self.us(nodes))} ({self.times.kind})"

    def beside_step(self, how: str) -> str:
        """How a modelled number is known that stands beside the step, and how the step's own is, where that is another way."""
        return how if how in self.times.provenance else f"{how}; the step: {self.times.provenance}"


Detector = Callable[[Case], Iterator[Finding]]


def severity_of(part: float, whole: float) -> Severity | None:
    """How grave a part of the time is, by its share; None for less than deserves a word."""
    share = part / whole if whole else 0.0
    return next((s for s, least in zip(SEVERITIES, (HIGH, MEDIUM, LOW), strict=True) if share >= least), None)


# --- words ---


def how_mended(is_mended: bool, mended_by: Sequence[str]) -> str:
    """What is said behind a severity, which is that of the program as it ran, where passes mend the finding."""
    return ", mended" if is_mended else ", mended in part" if mended_by else ""


def in_brief(said: str, provenance: str) -> str:
    """The text with "modelled" alone in place of what models, which is said once of all findings."""
    return said.replace(provenance, "modelled") if provenance.startswith("modelled: ") else said


def bars_text(bars: Sequence[Bar]) -> str:
    """`wait 3.4 ms | copy @ 1.3 GB/s 506 ms | host 20 ms = 529 ms (measured on …)`"""
    parts = " | ".join(f"{bar.label} {time_text(bar.us)}" for bar in bars)
    return f"{parts} = {time_text(sum(bar.us for bar in bars))} ({bars[0].provenance})"


def device(node: Any) -> str:
    return str(val(node).device)


def dtype(node: Any) -> str:
    return str(val(node).dtype).removeprefix("torch.")
