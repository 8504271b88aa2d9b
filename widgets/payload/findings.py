"""The findings of a payload: what is found, what the passes mend of it, what a replay can test and has told."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tracefuse.diagnose.fixes import why_not
from tracefuse.findings.finding import Finding, Fix
from tracefuse.measure.op_times import OpTimes
from tracefuse.optimizers.ops import does_work
from tracefuse.timeline.measurements import Said, TrialKey
from tracefuse.variant import Variant
from tracefuse.widgets.payload.kernels import Stood
from tracefuse.widgets.payload.sentence import share_left


def finding_records(
    variant: Variant, times: tuple[OpTimes, OpTimes], tried: Mapping[TrialKey, Said]
) -> list[dict[str, Any]]:
    """The findings of the program as it ran: first those that the passes leave, what is worth most before the others, then
    those that they mend."""
    found = variant.findings(times[1], times[0])
    trials = [[] if one.is_mended else _trials(one, variant, tried) for one in found]
    records = [finding_record(one) | {"trials": tried} for one, tried in zip(found, trials, strict=True)]
    by_worth = sorted(records, key=share_left, reverse=True)
    return sorted(by_worth, key=lambda one: one["is_mended"])


def finding_record(finding: Finding) -> dict[str, Any]:
    """A finding without what a session adds to it: its fields and its key."""
    record = asdict(finding) | {"key": finding.key}
    del record["fixes"]
    return record


def _trials(finding: Finding, variant: Variant, tried: Mapping[TrialKey, Said]) -> Sequence[dict[str, str]]:
    key = variant.config, finding.key
    return [_trial(fix, variant, tried.get((*key, at))) for at, fix in enumerate(finding.trials)]


def _trial(fix: Fix, variant: Variant, trial: Said | None) -> dict[str, str]:
    said = {"verdict": trial.verdict, "said": trial.said} if trial else {"verdict": "", "said": ""}
    return {"does": fix.does, "blocked": why_not(variant.program), **said}


def ops_now(variant: Variant, stood: Stood, captured: Collection[str]) -> int:
    """How many ops do the work of the captured ops of these names with the passes of `variant`: kernels, which stand for what
    `stood` says, and what is left."""
    names = set(captured)
    calls = {call for call, ops in stood.items() if not names.isdisjoint(op.name for op, _ in ops)}
    return sum(node.name in (calls if node.name in stood else names) for node in variant.whole.ops if does_work(node))
