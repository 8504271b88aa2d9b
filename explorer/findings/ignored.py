"""Findings that a comment on the user's line hides: `loss.item()  # tracefuse: ignore[host-sync]`.

Several ids stand in one pair of brackets, with commas. A comment hides only what it names, and is counted where findings are
shown. A profile knows functions and not lines: there the comment stands where the function begins, and a finding of several
functions is hidden where all of them have it.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Sequence

from tracefuse.findings.finding import Finding
from tracefuse.text import counted

_COMMENT = re.compile(r"#.*?\btracefuse:\s*ignore\[(?P<ids>[^\]]*)\]")


def ids_ignored_on(line: str) -> frozenset[str]:
    """The ids that a comment on a line of Python names."""
    found = (match["ids"].split(",") for match in _COMMENT.finditer(line))
    return frozenset(one.strip() for ids in found for one in ids)


_FUNCTION = re.compile(r".+, at (?P<file>.+):(?P<line>\d+)")


def _ids_ignored_at(source: str) -> frozenset[str]:
    """The ids that comments name for what was found there: in a line's own text, or where each of its functions begins."""
    functions = [_FUNCTION.fullmatch(one) for one in source.split("; ")]
    named = [ids_ignored_on(_beginning(one["file"], int(one["line"]))) for one in functions if one is not None]
    return frozenset.intersection(*named) if len(named) == len(functions) else ids_ignored_on(source)


def _beginning(file: str, line: int) -> str:
    """The first line of a function, behind its decorators; "" where the file is not here."""
    lines = linecache.getlines(file)[line - 1 :]
    return next((one for one in lines if not one.lstrip().startswith("@")), "")


def parted(findings: Iterable[Finding]) -> tuple[list[Finding], list[Finding]]:
    """Those that are shown, and those that a comment on their line hides."""
    shown: list[Finding] = []
    ignored: list[Finding] = []
    for one in findings:
        (ignored if one.id in _ids_ignored_at(one.source) else shown).append(one)
    return shown, ignored


def ignored_text(ignored: Sequence[Finding]) -> str:
    """How many a comment hides, and which; "" for none."""
    if not ignored:
        return ""
    verb = "is" if len(ignored) == 1 else "are"
    ids = ", ".join(dict.fromkeys(one.id for one in ignored))
    return f"{counted(len(ignored), 'finding')} {verb} hidden by comments `# tracefuse: ignore[…]`: {ids}"
