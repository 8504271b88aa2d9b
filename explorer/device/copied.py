"""Texts of our own files that are copied into exported files, where those call what they define.

A runtime file has a mark, a comment of its own line: what stands below it needs nothing of tracefuse.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_MARK = re.compile(r"^# --- copied into exported files .*---\n", re.MULTILINE)


def below_mark(path: Path) -> str:
    """The text of a runtime file below its mark. Raises `ValueError` where there is no mark, or more than one."""
    _, copied = _MARK.split(path.read_text())
    return copied.strip("\n")


@dataclass(frozen=True)
class OperatorText:
    """The text that a file needs to call an operator of ours by `name`: `runtime`, besides torch and triton. It may have
    `others` too."""

    name: str
    runtime: str
    others: tuple[str, ...] = ()

    def is_called(self, text: str) -> bool:
        """Whether `text` calls such an operator, other than in a comment."""
        names = "|".join((self.name, *self.others))
        return re.search(rf"(?<![\w.])(?:{names})\(", re.sub(r"#.*", "", text)) is not None

    def support(self, text: str) -> str:
        """What stands above `text` in a file, if it calls such an operator; empty if it does not."""
        return self.runtime if self.is_called(text) else ""
