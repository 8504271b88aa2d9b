"""The findings of a payload: what is found, what the passes mend of it, what a replay can test and has told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tracefuse.diagnose.fixes import why_not
from tracefuse.findings.finding import Finding, Fix
from tracefuse.timeline.measurements import Said, TrialKey
from tracefuse.variant import Variant


def finding_records(found: Iterable[Finding], variant: Variant, tried: Mapping[TrialKey, Said]) -> list[dict[str, Any]]:
    """The findings of the program as it ran, in their order."""
    trials = ([] if one.is_mended else _trials(one, variant, tried) for one in found)
    return [finding_record(one) | {"trials": tried} for one, tried in zip(found, trials, strict=True)]


def finding_record(finding: Finding) -> dict[str, Any]:
    """A finding without what a session adds to it: its fields and its key."""
    record = asdict(finding) | {"key": finding.key}
    del record["fixes"], record["is_below"]
    return record


def _trials(finding: Finding, variant: Variant, tried: Mapping[TrialKey, Said]) -> Sequence[dict[str, str]]:
    key = variant.config, finding.key
    return [_trial(fix, variant, tried.get((*key, at))) for at, fix in enumerate(finding.trials)]


def _trial(fix: Fix, variant: Variant, trial: Said | None) -> dict[str, str]:
    said = {"verdict": trial.verdict, "said": trial.said} if trial else {"verdict": "", "said": ""}
    return {"does": fix.does, "blocked": why_not(variant.program), **said}
