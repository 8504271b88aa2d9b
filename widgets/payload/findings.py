"""The findings of a payload: what is found, what the passes mend of it, what a replay can test and has told.

Of one of them the first sentences say more: where matmuls are not aligned, as over a vocabulary, what share of the step these
take, how wide they are and what that means.

    46 % of kernels' time in lm_head (50,257 wide, not aligned for TF32, which is off; gpt.py:81)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from torch import fx

from tracefuse.diagnose.fixes import why_not
from tracefuse.findings.finding import MEDIUM, Finding, Fix
from tracefuse.findings.order import NOTHING
from tracefuse.optimizers.trace import origin
from tracefuse.tables.slowest import Slowest, place_of
from tracefuse.text import share_text
from tracefuse.timeline.measurements import Said, TrialKey
from tracefuse.variant import Variant

UNALIGNED = "unaligned-matmul"


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


# --- where matmuls are not aligned ------------------------------------------------------------------------------------


class Wide(NamedTuple):
    """`at` is the row of the tree, by the time of its kernels, `said` how wide it is and why that tells; it `is_slowest` where
    the sentence names it already."""

    at: Slowest
    said: str
    is_slowest: bool

    def told(self, of: str) -> str:
        """`46 % of the step is in lm_head (50,257 wide, not aligned: pad mends it; gpt.py:81)`, `of` which it is a share."""
        if self.is_slowest:
            return f"{self.at.label} is {self.said}"
        where = (
            f"in {self.at.label} ({self.said}; {self.at.place})"
            if self.at.paths
            else f"at {self.at.place} ({self.said})"
        )
        return f"{share_text(self.at.amount, self.at.of)} of {of} {where}"


def widest(
    variant: Variant, slow: Slowest | None, findings: Sequence[Mapping[str, Any]], us: Mapping[str, float]
) -> Wide | None:
    """The place that takes longest where matmuls are not aligned, by the `us` of the ops, if that is no trifle and not a part
    of what is `slow`."""
    ops = {node.name: node for node in variant.baseline.trace.ops}
    firsts = [(one, ops[one["values"][0]]) for one in findings if one["id"] == UNALIGNED and one["values"][0] in ops]
    found = []
    for finding, node in firsts:
        at = place_of(node, variant.whole, variant.baseline.whole, us)
        is_slowest = slow is not None and at.name == slow.name
        if at.amount >= MEDIUM * at.of > 0 and (is_slowest or not _is_inside(node, slow)):
            found.append(Wide(at, _said(finding), is_slowest))
    return max(found, key=lambda one: one.at.amount, default=None)


def _is_inside(node: fx.Node, slow: Slowest | None) -> bool:
    module = f"{origin(node).module}."
    return slow is not None and any(module.startswith(f"{path}.") for path in slow.paths)


def _said(finding: Mapping[str, Any]) -> str:
    by, why = finding["mended_by"], ""
    if finding["worth"].startswith(NOTHING):
        why = " for TF32, which is off"
    elif finding["is_mended"]:
        why = f": {' and '.join(by)} mend{'s' * (len(by) == 1)} it"
    return f"{dict(finding['evidence'])['dimension']} wide, not aligned{why}"
