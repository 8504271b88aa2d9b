"""The findings of a payload: what is found before and after the passes, with what a replay can test and has told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tracefuse.diagnose.finding import Finding, Fix
from tracefuse.diagnose.fixes import why_not
from tracefuse.measure.op_times import OpTimes
from tracefuse.timeline.measurements import Said, TrialKey
from tracefuse.variant import Variant


def finding_records(
    before: Variant, after: Variant, times: tuple[OpTimes, OpTimes], tried: Mapping[TrialKey, Said]
) -> list[dict[str, Any]]:
    """The findings of the trace after the passes, then as `fixed` those that the passes have done away with."""
    left = after.findings(times[1])
    names = {one.name for one in left}
    gone = [one for one in before.findings(times[0]) if one.name not in names]
    records = [_record(one) | {"fixed": False, "trials": _trials(one, after, tried)} for one in left]
    return [*records, *(_record(one) | {"fixed": True, "trials": []} for one in gone)]


def _record(finding: Finding) -> dict[str, Any]:
    record = asdict(finding) | {"id": finding.id}
    del record["fixes"]
    return record


def _trials(finding: Finding, variant: Variant, tried: Mapping[TrialKey, Said]) -> Sequence[dict[str, str]]:
    key = variant.config, finding.id
    return [_trial(fix, variant, tried.get((*key, at))) for at, fix in enumerate(finding.trials)]


def _trial(fix: Fix, variant: Variant, trial: Said | None) -> dict[str, str]:
    said = {"verdict": trial.verdict, "said": trial.said} if trial else {"verdict": "", "said": ""}
    return {"does": fix.does, "blocked": why_not(variant.program), **said}
