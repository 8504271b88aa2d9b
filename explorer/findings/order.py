"""In which order findings are told, in text, in the view and in reports, and what is said of those that are only counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tracefuse.findings.finding import HIGH, LOW, MEDIUM, SEVERITIES, Finding
from tracefuse.findings.kinds import KINDS

_LEAST = dict(zip(SEVERITIES, (HIGH, MEDIUM, LOW), strict=True))


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """First what there is something to do about, what is worth most first; then what passes mend, or leave of what they alone
    can mend. One without a share of the step counts for the least that its severity stands for."""
    return sorted(findings, key=lambda one: (_is_done(one), -_share_left(one), SEVERITIES.index(one.severity)))


def below_text(below: Sequence[Finding]) -> str:
    """How many are too small to be told, and which; "" for none."""
    if not below:
        return ""
    counts = Counter(one.id for one in below)
    ids = ", ".join(f"{id} \N{MULTIPLICATION SIGN}{count}" if count > 1 else id for id, count in counts.items())
    return f"{len(below)} more below {LOW:.0%}".replace("%", " %") + f" of the step: {ids}"


def _is_done(finding: Finding) -> bool:
    return finding.is_mended or bool(finding.mended_by and KINDS[finding.id].by_passes_alone)


def _share_left(finding: Finding) -> float:
    """The share of a step that is left of it. A remark that no switch mends counts for no more than remarks do."""
    share = finding.left_share if finding.left else finding.worth_share
    is_remark = finding.severity == "low" and not finding.changes
    return min(_LEAST[finding.severity] if share is None else share, MEDIUM if is_remark else 1.0)
