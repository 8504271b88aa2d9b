"""In which order findings are told, in text, in the view and in reports, and what is said of those that are only counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from tracefuse.findings.finding import HIGH, LOW, MEDIUM, SEVERITIES, Finding
from tracefuse.findings.kinds import KINDS

NOTHING = "nothing without", "nothing on a GPU"
"""What the worth begins with of a finding that is no lever as the program is."""
_LEAST = dict(zip(SEVERITIES, (HIGH, MEDIUM, LOW), strict=True))


def in_order(findings: Iterable[Finding], launches: float = 0) -> list[Finding]:
    """First what there is something to do about, what is worth most in the step first; then what passes mend, or leave of what
    they alone can mend. `launches` are those of a step that waits for them: there the time of kernels is worth nothing."""
    return sorted(findings, key=lambda one: (_is_done(one), -_worth(one, launches), SEVERITIES.index(one.severity)))


def with_launches(findings: Sequence[Finding], launches: Mapping[str, float], count: float) -> list[Finding]:
    """Each with how many launches mending it spares at most, by those that each op is, of the `count` of its program."""
    return [replace(one, launches=_spared(one, findings, launches), launches_of=count) for one in findings]


def with_launches_left(
    findings: Sequence[Finding], launches: Mapping[str, float], made_by: Mapping[str, str], count: float
) -> list[Finding]:
    """Those that passes mend nothing of, each with how many launches mending it spares at most of the `count` that passes
    leave: `made_by` is by value the op that computes it now, be it a kernel, and what no op computes is no launch."""

    def left(one: Finding) -> Finding:
        if one.is_mended or one.left:
            return one
        ops = {made_by[name] for name in _own(one, findings) if name in made_by}
        return replace(one, launches=sum(launches.get(name, 0.0) for name in ops), launches_of=count)

    return [left(one) for one in findings]


def told_by_launches(findings: Sequence[Finding]) -> list[Finding]:
    """The findings of a step that waits for launches: none is too small to be told that spares more than a hundredth
    of them, and more than one."""
    return [replace(one, is_below=one.is_below and one.launches <= max(1, LOW * one.launches_of)) for one in findings]


def _spared(finding: Finding, found: Iterable[Finding], launches: Mapping[str, float]) -> float:
    return sum(launches.get(name, 1.0) for name in _own(finding, found))


def _own(finding: Finding, found: Iterable[Finding]) -> set[str]:
    """The values whose launches mending it spares. What is said in general of ops that are mostly those of another finding, as
    of a loop, counts for the others: a line stands before what is true of all lines."""
    kind, own = KINDS[finding.id], set(finding.values)
    if not kind.spares_launches or finding.worth.startswith(NOTHING):
        return set()
    told = [own.intersection(one.values) for one in found if kind.by_passes_alone and not KINDS[one.id].by_passes_alone]
    most = max(told, key=len, default=set())
    return own - most if 2 * len(most) > len(own) else own


def below_text(below: Sequence[Finding]) -> str:
    """How many are too small to be told, and which; "" for none."""
    if not below:
        return ""
    counts = Counter(one.id for one in below)
    ids = ", ".join(f"{id} \N{MULTIPLICATION SIGN}{count}" if count > 1 else id for id, count in counts.items())
    return f"{len(below)} more below {LOW:.0%}".replace("%", " %") + f" of the step: {ids}"


def _is_done(finding: Finding) -> bool:
    return finding.is_mended or bool(finding.mended_by and KINDS[finding.id].by_passes_alone)


def _worth(finding: Finding, launches: float) -> float:
    """What mending is worth that is left of it, as a share of the step, or of its launches. One
    without a share counts for the least that its severity stands for. A remark that no switch mends counts for no more than
    remarks do, and for nothing where it says of no part that it can be spared."""
    kind, is_low = KINDS[finding.id], finding.severity == "low"
    share = finding.left_share if finding.left else finding.worth_share
    if is_low and not finding.changes and (kind.in_part or share is None):
        return 0.0
    if share is None:
        return _LEAST[finding.severity]
    if launches:
        return finding.launches / launches
    return min(share, MEDIUM if is_low and not finding.changes else 1.0)
