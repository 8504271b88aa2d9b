"""Findings that a comment on the user's line hides: `loss.item()  # tracefuse: ignore[host-sync]`.

Several ids stand in one pair of brackets, with commas. A comment hides only what it names, and is counted where findings are
shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tracefuse.findings.finding import Finding
from tracefuse.text import counted

_COMMENT = re.compile(r"#.*?\btracefuse:\s*ignore\[(?P<ids>[^\]]*)\]")


def ids_ignored_on(line: str) -> frozenset[str]:
    """The ids that a comment on a line of Python names."""
    found = (match["ids"].split(",") for match in _COMMENT.finditer(line))
    return frozenset(one.strip() for ids in found for one in ids)


def parted(findings: Iterable[Finding]) -> tuple[list[Finding], list[Finding]]:
    """Those that are shown, and those that a comment on their line hides."""
    shown: list[Finding] = []
    ignored: list[Finding] = []
    for one in findings:
        (ignored if one.id in ids_ignored_on(one.source) else shown).append(one)
    return shown, ignored


def ignored_text(ignored: Sequence[Finding]) -> str:
    """How many a comment hides, and which; "" for none."""
    if not ignored:
        return ""
    verb = "is" if len(ignored) == 1 else "are"
    ids = ", ".join(dict.fromkeys(one.id for one in ignored))
    return f"{counted(len(ignored), 'finding')} {verb} hidden by comments `# tracefuse: ignore[…]`: {ids}"
