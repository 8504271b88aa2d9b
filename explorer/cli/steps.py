"""A command says which of its steps it is at while it works."""

from __future__ import annotations

import sys
from typing import TextIO


class Steps:
    """`[2/5] optimising …` on `stream` (default: stderr, so that a pipe gets the tables only).

    On a terminal, progress within a step is one line that rewrites itself; elsewhere it is not shown.
    """

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self.total, self.count, self.stream = total, 0, stream or sys.stderr

    def next(self, text: str) -> None:
        self.count += 1
        print(f"[{self.count}/{self.total}] {text}", file=self.stream, flush=True)

    def progress(self, fraction: float, text: str) -> None:
        if self.stream.isatty():
            end = "\n" if fraction >= 1 else ""
            print(f"\r      {fraction:4.0%} {text:<40.40}", end=end, file=self.stream, flush=True)
