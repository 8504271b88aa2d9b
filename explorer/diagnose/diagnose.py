"""Findings: what makes the step slow or large, in numbers, with the line of yours, what to do and what that is worth.

    print(variant.findings())

A detector is a function from what is known of a variant (`Case`) to findings; `DETECTORS` lists them, with those of
`tracefuse.lint`, and `tracefuse.findings.kinds` has a row for each kind that they find. Nothing runs here:
the trace, its times (measured where somebody measured, else a roofline's), what the capture knows besides and the
environment are enough, so that all of it works without a GPU. A finding's severity is the share of the step that it is
worth: "high" from a fifth, "medium" from a twentieth; below a hundredth it is only counted, but for those that stop the GPU
and, in a step that waits for launches, those that spare more than a hundredth of these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Self

from tracefuse.assembly.program import CapturedProgram
from tracefuse.config.configuration import Config
from tracefuse.device.target import chosen
from tracefuse.diagnose.attention import attention_in_float32, attention_in_single_ops
from tracefuse.diagnose.data_parallel import reduced_zeros, reductions_that_wait
from tracefuse.diagnose.gradients import (
    dropped_gradients,
    gradients_no_optimizer_takes,
    gradients_of_data,
    growing_graphs,
    never_used,
    unread_gradients,
)
from tracefuse.diagnose.host import constants_from_the_host, loops_of_small_kernels, waits_for_the_gpu
from tracefuse.diagnose.kept import kept_for_nothing
from tracefuse.diagnose.modes import matmuls_without_tf32, modes_that_slow
from tracefuse.diagnose.moves import casts_beside_moves, gradients_copied_to_the_host, inputs_moved_each_step
from tracefuse.diagnose.needless_work import casts_of_weights, concatenations, unaligned_matmuls, unfused_pointwise
from tracefuse.diagnose.update import counts_in_python, optimizers_op_by_op, share_of_the_update
from tracefuse.findings.finding import IN_LIBRARY, Case, Detector, Finding, Fix, in_brief
from tracefuse.findings.ignored import ignored_text, parted
from tracefuse.findings.kinds import KINDS
from tracefuse.findings.kinds import looked_for as looked_for_in_traces
from tracefuse.findings.order import below_text, in_order, told_by_launches, with_launches, with_launches_left
from tracefuse.lint import LINTS
from tracefuse.measure.launches import HOST_US, MEASURED, launches
from tracefuse.measure.op_times import OpTimes, how_to_measure
from tracefuse.measure.switched import Switched
from tracefuse.optimizers.ops import producer
from tracefuse.optimizers.passes import PassRecord
from tracefuse.optimizers.trace import Trace, origin
from tracefuse.text import counted, time_text

MOST_REASONS = 2  # of a pass that are told for one finding
MOST_LEFT = 2  # findings of the trace after the passes that are told for one of the captured trace


class Small(tuple[Finding, ...]):
    """Findings of which a count alone is told. Prints as paragraphs."""

    def __repr__(self) -> str:
        return "\n\n".join(map(str, self))


class Findings(tuple[Finding, ...]):
    """In the order of `tracefuse.findings.order`. Prints as paragraphs, with what measures modelled times; without any, as
    what was looked for. `below` are those whose share of the step is too small to be told, `ignored` those that a comment on
    their line hides: see `tracefuse.findings.ignored`. `launching` says that the step is bound by launches, where it is, and
    `launches` how many it has, where its times are modelled."""

    provenance: str
    looked_for: Iterable[str]
    ignored: tuple[Finding, ...]
    below: Small
    launching: str
    launches: float

    def __new__(
        cls,
        found: Iterable[Finding],
        provenance: str = "",
        looked_for: Iterable[str] | None = None,
        ignored: Iterable[Finding] = (),
        launching: str = "",
        launches: float = 0,
    ) -> Self:
        shown, hidden = parted(found)
        made = super().__new__(cls, in_order((one for one in shown if not one.is_below), launches if launching else 0))
        made.below = Small(one for one in shown if one.is_below)
        made.launching, made.launches = launching, launches
        made.provenance, made.looked_for = provenance, looked_for or looked_for_in_traces()
        made.ignored = (*ignored, *(one for one in hidden if not one.is_below))
        return made

    def __repr__(self) -> str:
        nothing = [] if self else [f"nothing found; looked for: {'; '.join(self.looked_for)}"]
        small = f"{below_text(self.below)}; `print(v.findings().below)` has them" if self.below else ""
        how = [self.launching, how_to_measure(self.provenance)] if self else []
        said = [*(in_brief(str(one), self.provenance) for one in self), *how, small, ignored_text(self.ignored)]
        return "\n\n".join(filter(None, [*nothing, *said]))


SAID_BY = {
    "loop-of-small-kernels": {"per-sample-loop", "stack-of-matmuls", "heads-apart", "cat-in-loop", "loss-in-loop"},
    "per-sample-loop": {"loss-in-loop"},
    "cat-in-forward": {"cat-in-loop"},
    "update-share": {"optimizer-not-fused"},
}
"""By the id of what is said in general those that say it in particular."""


_OF_ATTENTION = ("attention-math-backend",)


def findings(variant: Switched, times: OpTimes, captured: OpTimes) -> Findings:
    """See `Variant.findings`, whose arguments these are."""
    ran = _diagnosed(variant.baseline, captured, frozenset(KINDS))
    if variant.config == variant.baseline.config:
        return ran
    of_update = () if variant.update is None else variant.update.passes
    stays = bool(counts_in_python(variant.program))
    mended = frozenset(one.id for one in (*ran, *ran.below) if _mending(one, variant.config))
    left = _diagnosed(variant, times, mended)
    return _by_launches_left(beside(ran, left, variant.config, variant.passes, of_update, stays), left, variant)


def _by_launches_left(told: Findings, left: Findings, variant: Switched) -> Findings:
    """The findings by the launches of the program that passes made; as they are where its times were measured."""
    if not left.launches:
        return told
    update = None if variant.update is None else variant.update.trace
    traces = (variant.trace,) if update is None else (update, variant.trace)
    made_by = {node.name: producer(node).name for trace in traces for node in trace.ops}
    launched, count = _launched(variant.program, variant.trace, update)
    found = with_launches_left((*told, *told.below), launched, made_by, count)
    return Findings(found, told.provenance, None, told.ignored, left.launching, left.launches)


def _diagnosed(variant: Switched, times: OpTimes, ids: frozenset[str]) -> Findings:
    """The findings of this program alone, of these ids, kept with the trace, which they refer to: toggles ask for those of the
    captured one again."""
    update = None if variant.update is None else variant.update.trace
    asked = times, chosen(), variant.program, update
    known = variant.trace._cache.get((_diagnosed, ids))
    if known is None or known[0] != asked:
        known = variant.trace._cache[_diagnosed, ids] = asked, diagnose(_case(variant, times), ids)
    return known[1]


def _case(variant: Switched, times: OpTimes) -> Case:
    """The program for its detectors. `times` are those of `whole`, which has the ops of the update behind the others."""
    if variant.update is None:
        return Case(variant.program, variant.trace, times)
    # An op that was not timed has no time: that of a model would be of another clock.
    us, in_whole = times.us, variant.names_in_whole
    of_update = {name: us[there] for name, there in in_whole.items() if there in us}
    own = {name: us[name] for name in us.keys() - in_whole.values()}
    return Case(variant.program, variant.trace, replace(times, us=own), variant.update.trace, of_update)


def beside(
    ran: Findings,
    left: Findings,
    config: Config,
    steps: Sequence[PassRecord],
    of_update: Sequence[PassRecord] = (),
    stays: bool = False,
) -> Findings:
    """The findings of the program as it ran, each with what the passes of a configuration make of it: `left` are the findings
    of the trace that `steps` made, and of the step's update, which `of_update` made. An update `stays` of which no later step
    could be compiled."""
    updates = {node.name for node in of_update[0].before.ops} if of_update else set()

    def told_of(one: Finding) -> Finding:
        if updates.isdisjoint(one.values):
            return _beside(one, left, config, steps, "v.passes")
        return one if stays else _beside(one, left, config, of_update, "v.update.passes")

    told = [told_of(one) for one in (*ran, *ran.below)]
    return Findings(told, ran.provenance, None, ran.ignored, ran.launching, ran.launches)


def _beside(finding: Finding, left: Findings, config: Config, steps: Sequence[PassRecord], called: str) -> Finding:
    on = _mending(finding, config)
    if not on:
        return finding
    among = (*left, *left.below) if finding.is_below else left
    still = [one for one in among if one.id == finding.id and _is_same(one, finding)]
    about = set(finding.values)
    ran = [step for step in steps if step.name in on and not step.is_unchanged]
    acted = [step.name for step in ran if any(d.value in about for d in step.decisions)] or [s.name for s in ran] or on
    by, fixes = tuple(acted), _other_fixes(finding)
    passes = " and ".join(f"`{name}`" for name in acted)
    changes = finding.changes if finding.changes and config.changed(**finding.changes) != config else None
    if not still:
        said = f"mended by {passes} in this configuration"
        return replace(finding, mended=said, mended_by=by, is_mended=True, changes=None, fixes=fixes)
    if changes:  # an option of theirs that is not chosen
        return finding
    if not KINDS[finding.id].by_passes_alone and _is_all_of(still, finding):  # they are on, and mend nothing of it
        by = ()
    worth = "; ".join(one.worth for one in still[:MOST_LEFT])
    said = f"{passes} {'is' if len(acted) == 1 else 'are'} on; left: {worth}{_why_left(still, steps, called, on)}"
    # What is left has a remedy of its own: none is to switch on what is on.
    return replace(
        finding,
        fix=still[0].fix,
        code=still[0].code,
        mended=said,
        mended_by=by,
        changes=None,
        fixes=fixes,
        left_kind=still[0].kind,
        left=still[0].worth,
        left_share=still[0].worth_share,
        launches=sum(one.launches for one in still) if left.launches else finding.launches,
        launches_of=left.launches or finding.launches_of,
    )


def _is_all_of(still: Sequence[Finding], finding: Finding) -> bool:
    """Whether what passes left of a finding is all that it is about, and takes as long."""
    about = {value for one in still for value in one.values}
    return about.issuperset(finding.values) and sum(one.worth_us or 0 for one in still) >= (finding.worth_us or 0)


def _mending(finding: Finding, config: Config) -> list[str]:
    """The passes that are on and can mend it."""
    return [name for name in KINDS[finding.id].mended_by if config.state(name) == "on"]


def _other_fixes(finding: Finding) -> tuple[Fix, ...]:
    """What a replay can test of a finding beside the passes that are on."""
    return tuple(fix for fix in finding.fixes if fix.kind != "passes")


def _is_same(one: Finding, other: Finding) -> bool:
    return one.source == other.source or not set(one.values).isdisjoint(other.values)


def _why_left(still: Sequence[Finding], steps: Sequence[PassRecord], called: str, on: Sequence[str]) -> str:
    """Why the passes left it, in their own words, and where all their decisions are."""
    values = {value for one in still for value in one.values}
    told = (one for step in steps if step.name in on for one in step.decisions)
    reasons = Counter(one.reason for one in told if one.value in values).most_common()
    said = [f"{reason} ({counted(count, 'op')})" for reason, count in reasons[:MOST_REASONS]]
    more = [f"and {counted(len(reasons) - len(said), 'more reason')}"] * (len(reasons) > len(said))
    ran = [step.name for step in steps if step.name in on]
    where = " and ".join(f'`print({called}["{name}"])`' for name in ran)
    has = "has" if len(ran) == 1 else "have"
    return f"{', since ' * bool(said)}{'; '.join([*said, *more])}; {where} {has} all decisions"


def diagnose(case: Case, ids: Collection[str] = KINDS) -> Findings:
    """All findings of these ids, with others that the same detectors make."""
    lines = _lines_of_the_project(case)
    wanted = {*ids, *(particular for one in ids for particular in SAID_BY.get(one, ()))}
    asked = [detector for detector, makes in DETECTORS.items() if not wanted.isdisjoint(makes)]
    found = [_in_the_project(finding, lines) for detector in asked for finding in detector(case)]
    found = [finding for finding in found if not _is_inside(finding, case)]
    found = _told_once(found)
    if case.times.kind != "modelled":
        return Findings(found, case.times.provenance)
    launched, count = _launched(case.program, case.trace, case.update)
    found = with_launches(found, launched, count)
    launching = _launching(case, count)
    return Findings(told_by_launches(found) if launching else found, case.times.provenance, None, (), launching, count)


def _launched(program: CapturedProgram, trace: Trace, update: Trace | None) -> tuple[Mapping[str, float], float]:
    """How many launches each op is, and all of them; names of kernels may be those of both traces."""
    halves = launches(trace)
    late = {} if update is None else launches(update, () if program.update is None else program.update.stepped)
    return {**late, **halves}, sum(halves.values()) + sum(late.values())


def _launching(case: Case, launches: float) -> str:
    """That the host takes longer to launch the step's kernels than they are modelled to run; "" where it does not."""
    if HOST_US * launches <= case.step_us:
        return ""
    return (
        f"The step is bound by launches: its {launches:,.0f} kernels are modelled to run {time_text(case.step_us)}, and "
        f"launching them takes the host {time_text(HOST_US * launches)}: {MEASURED}. What counts is how many a fix spares."
    )


def _is_inside(finding: Finding, case: Case) -> bool:
    """Whether it is about what a CPU runs inside one call of torch's: no line of the user's can change that, and a GPU runs
    one kernel."""
    inside = {node.name for node in case.not_on_a_gpu}
    return 2 * len(inside.intersection(finding.values)) > len(finding.values) and finding.id not in _OF_ATTENTION


def _told_once(found: Sequence[Finding]) -> list[Finding]:
    """The findings without those that say in general what another one says in particular of most of the ops of either."""
    told = [one for one in found if not one.is_below]
    known = {general: [set(one.values) for one in told if one.id in SAID_BY[general]] for general in SAID_BY}

    def is_told(one: Finding, of: set[str]) -> bool:
        return 2 * len(of.intersection(one.values)) > min(len(of), len(one.values))

    return [one for one in found if not any(is_told(one, of) for of in known.get(one.id, ()))]


def _lines_of_the_project(case: Case) -> dict[str, str]:
    """By each line of an installed library the line of the user's project that called it."""
    traces = [case.trace] if case.update is None else [case.trace, case.update]
    sources = [origin(node).source for trace in traces for node in trace.ops]
    sources += [one.origin.source for one in case.program.dropped] + [one.source for one in case.program.stops]
    return {str(one): str(one.called) for one in sources if one is not None and one.called is not None}


def _in_the_project(finding: Finding, lines: Mapping[str, str]) -> Finding:
    """The finding at the line of the user's project; that of the library is evidence, and no error of the user's where only
    another line there would mend it."""
    if finding.source not in lines:
        return finding
    severity = "low" if KINDS[finding.id].in_the_line else finding.severity
    evidence = (*finding.evidence, (IN_LIBRARY, finding.source))
    return replace(finding, severity=severity, source=lines[finding.source], evidence=evidence)


DETECTORS: dict[Detector, tuple[str, ...]] = {
    **LINTS,
    gradients_copied_to_the_host: ("cpu-leaf",),
    inputs_moved_each_step: ("moved-each-step", "pageable-copy"),
    casts_beside_moves: ("one-name-two-copies",),
    waits_for_the_gpu: ("host-sync",),
    constants_from_the_host: ("constant-from-host",),
    casts_of_weights: ("weights-cast-each-step",),
    attention_in_single_ops: ("attention-by-hand", "attention-math-backend"),
    attention_in_float32: ("attention-in-float32",),
    concatenations: ("cat-of-nothing", "cat-in-forward", "cat-in-backward"),
    unfused_pointwise: ("unfused-pointwise",),
    unaligned_matmuls: ("unaligned-matmul",),
    gradients_no_optimizer_takes: ("gradient-without-optimizer",),
    gradients_of_data: ("gradient-of-data",),
    dropped_gradients: ("gradient-dropped",),
    never_used: ("never-used",),
    unread_gradients: ("gradient-unread", "frozen-weight-gradient"),
    growing_graphs: ("growing-graph",),
    kept_for_nothing: ("saved-not-recomputed",),
    loops_of_small_kernels: ("loop-of-small-kernels",),
    matmuls_without_tf32: ("tf32-off",),
    modes_that_slow: (
        "anomaly-mode",
        "launch-blocking",
        "deterministic-mode",
        "profiler-on",
        "cudnn-off",
        "cudnn-benchmark-off",
    ),
    optimizers_op_by_op: ("optimizer-not-fused",),
    share_of_the_update: ("update-share",),
    reduced_zeros: ("unused-parameters", "frozen-parameters-reduced"),
    reductions_that_wait: ("unused-parameters",),
}
"""All detectors, and the ids of what each may find, by which those are asked that can find it."""
