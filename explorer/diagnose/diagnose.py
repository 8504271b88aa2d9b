"""Findings: what makes the step slow or large, in numbers, with the line of yours, what to do and what that is worth.

    print(variant.findings())

A detector is a function from what is known of a variant (`Case`) to findings; `DETECTORS` lists them. Nothing runs here:
the trace, its times (measured where somebody measured, else a roofline's), what the capture knows besides and the
environment are enough, so that all of it works without a GPU. A finding's severity is the share of the step that it is
worth: "high" from a fifth, "medium" from a twentieth, and below a hundredth it is none, but for those that stop the GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Self
from weakref import WeakKeyDictionary

from tracefuse.config.configuration import Config
from tracefuse.device.target import chosen
from tracefuse.diagnose.attention import attention_in_single_ops
from tracefuse.diagnose.data_parallel import reduced_zeros, reductions_that_wait
from tracefuse.diagnose.gradients import (
    dropped_gradients,
    gradients_no_optimizer_takes,
    gradients_of_data,
    never_used,
    unread_gradients,
)
from tracefuse.diagnose.host import constants_from_the_host, loops_of_small_kernels, waits_for_the_gpu
from tracefuse.diagnose.kept import kept_for_nothing
from tracefuse.diagnose.modes import matmuls_without_tf32, modes_that_slow
from tracefuse.diagnose.moves import casts_beside_moves, gradients_copied_to_the_host, inputs_moved_each_step
from tracefuse.diagnose.needless_work import casts_of_weights, concatenations, unaligned_matmuls, unfused_pointwise
from tracefuse.diagnose.update import optimizers_op_by_op, share_of_the_update
from tracefuse.findings.finding import SEVERITIES, Case, Detector, Finding, Fix
from tracefuse.findings.ignored import ignored_text, parted
from tracefuse.findings.kinds import KINDS
from tracefuse.findings.kinds import looked_for as looked_for_in_traces
from tracefuse.lint import LINTS
from tracefuse.measure.op_times import OpTimes, how_to_measure
from tracefuse.measure.switched import Switched
from tracefuse.optimizers.costs.datasheets import DataSheet
from tracefuse.optimizers.passes import PassRecord
from tracefuse.optimizers.trace import origin
from tracefuse.text import counted

MOST_REASONS = 2  # of a pass that are told for one finding
MOST_LEFT = 2  # findings of the trace after the passes that are told for one of the captured trace


class Findings(tuple[Finding, ...]):
    """The gravest first. Prints as paragraphs, with what measures modelled times; without any, as what was looked for.
    `ignored` are those that a comment on their line hides: see `tracefuse.findings.ignored`."""

    provenance: str
    looked_for: Iterable[str]
    ignored: tuple[Finding, ...]

    def __new__(
        cls,
        found: Iterable[Finding],
        provenance: str = "",
        looked_for: Iterable[str] | None = None,
        ignored: Iterable[Finding] = (),
    ) -> Self:
        shown, hidden = parted(found)
        made = super().__new__(cls, shown)
        made.provenance, made.looked_for = provenance, looked_for or looked_for_in_traces()
        made.ignored = (*ignored, *hidden)
        return made

    def __repr__(self) -> str:
        nothing = [] if self else [f"nothing found; looked for: {'; '.join(self.looked_for)}"]
        said = [*map(str, self), how_to_measure(self.provenance) if self else "", ignored_text(self.ignored)]
        return "\n\n".join(filter(None, [*nothing, *said]))


SAID_BY = {
    "loop-of-small-kernels": {"per-sample-loop", "stack-of-matmuls", "heads-apart", "cat-in-loop"},
    "cat-in-forward": {"cat-in-loop"},
}
"""By the id of what is said in general those that say it in particular."""


_known: WeakKeyDictionary[Switched, tuple[tuple[OpTimes, DataSheet | None], Findings]] = WeakKeyDictionary()
"""The last findings of each program: toggles ask for those of the captured one again."""


def findings(variant: Switched, times: OpTimes, captured: OpTimes) -> Findings:
    """See `Variant.findings`, whose arguments these are."""
    ran = _diagnosed(variant.baseline, captured)
    if variant.config == variant.baseline.config:
        return ran
    of_update = () if variant.update is None else variant.update.passes
    return beside(ran, _diagnosed(variant, times), variant.config, variant.passes, of_update)


def _diagnosed(variant: Switched, times: OpTimes) -> Findings:
    """The findings of this program alone."""
    asked = times, chosen()
    if variant not in _known or _known[variant][0] != asked:
        _known[variant] = asked, diagnose(_case(variant, times))
    return _known[variant][1]


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
    ran: Findings, left: Findings, config: Config, steps: Sequence[PassRecord], of_update: Sequence[PassRecord] = ()
) -> Findings:
    """The findings of the program as it ran, each with what the passes of a configuration make of it: `left` are the findings
    of the trace that `steps` made, and of the step's update, which `of_update` made."""
    updates = {node.name for node in of_update[0].before.ops} if of_update else set()
    told = [
        _beside(
            one,
            left,
            config,
            *((steps, "v.passes") if updates.isdisjoint(one.values) else (of_update, "v.update.passes")),
        )
        for one in ran
    ]
    return Findings(told, ran.provenance, ignored=ran.ignored)


def _beside(finding: Finding, left: Findings, config: Config, steps: Sequence[PassRecord], called: str) -> Finding:
    on = [name for name in KINDS[finding.id].mended_by if config.state(name) == "on"]
    if not on:
        return finding
    still = [one for one in left if one.id == finding.id and _is_same(one, finding)]
    about = set(finding.values)
    acted = [step.name for step in steps if step.name in on and any(d.value in about for d in step.decisions)] or on
    passes = " and ".join(f"`{name}`" for name in acted)
    changes = finding.changes if finding.changes and config.changed(**finding.changes) != config else None
    if not still:
        said = f"mended by {passes} in this configuration"
        return replace(finding, mended=said, is_mended=True, changes=None, fixes=_other_fixes(finding))
    if changes:  # an option of theirs that is not chosen
        return finding
    worth = "; ".join(one.worth for one in still[:MOST_LEFT])
    said = f"{passes} {'is' if len(acted) == 1 else 'are'} on; left: {worth}{_why_left(still, steps, called, on)}"
    return replace(finding, mended=said, changes=None, fixes=_other_fixes(finding), left_kind=still[0].kind)


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
    places = [at - len(steps) for at, step in enumerate(steps) if step.name in on]
    where = " and ".join(f"`print({called}[{at}])`" for at in places)
    has = "has" if len(places) == 1 else "have"
    return f"{', since ' * bool(said)}{'; '.join([*said, *more])}; {where} {has} all decisions"


def diagnose(case: Case) -> Findings:
    """All findings, the gravest first."""
    lines = _lines_of_the_project(case)
    found = [_in_the_project(finding, lines) for detector in DETECTORS for finding in detector(case)]
    return Findings(sorted(_told_once(found), key=lambda one: SEVERITIES.index(one.severity)), case.times.provenance)


def _told_once(found: Sequence[Finding]) -> list[Finding]:
    """The findings without those that say in general what another one says in particular of most of their ops."""
    known = {general: [set(one.values) for one in found if one.id in SAID_BY[general]] for general in SAID_BY}
    return [one for one in found if not any(2 * len(of & set(one.values)) > len(of) for of in known.get(one.id, ()))]


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
    evidence = (*finding.evidence, ("in the library", finding.source))
    return replace(finding, severity=severity, source=lines[finding.source], evidence=evidence)


DETECTORS: tuple[Detector, ...] = (
    *LINTS,
    gradients_copied_to_the_host,
    inputs_moved_each_step,
    casts_beside_moves,
    waits_for_the_gpu,
    constants_from_the_host,
    casts_of_weights,
    attention_in_single_ops,
    concatenations,
    unfused_pointwise,
    unaligned_matmuls,
    gradients_no_optimizer_takes,
    gradients_of_data,
    dropped_gradients,
    never_used,
    unread_gradients,
    kept_for_nothing,
    loops_of_small_kernels,
    matmuls_without_tf32,
    modes_that_slow,
    optimizers_op_by_op,
    share_of_the_update,
    reduced_zeros,
    reductions_that_wait,
)
