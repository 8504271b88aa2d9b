"""Who waits for what is compiled, as a model in its first call, is told what for: lines on stderr, once it takes long."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

QUIET_S = 4.0
"""Seconds for which nothing is said."""


class Waiting:
    """A context in which `what` is made, by `doing` this first; `next` says what comes then. Only the first rank of a job
    speaks. A `progress` that the caller gave is told all of it at once, in place of stderr, with no part of the fraction
    done."""

    def __init__(self, what: str, doing: str, progress: Callable[[float, str], None] | None = None) -> None:
        self._what, self._doing, self._progress = what, doing, progress
        self._lock = threading.Lock()
        self._is_told = self._is_over = False
        self._start_s = time.perf_counter()
        self._timer = threading.Timer(QUIET_S, self._speak)
        self._timer.daemon = True

    def __enter__(self) -> Waiting:
        if self._progress is not None:
            self._progress(0.0, self._doing)
        elif os.environ.get("RANK", "0") == "0":
            self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._timer.cancel()
        with self._lock:
            self._is_over = True  # a timer that is late says nothing more
            if self._is_told and kind is None:
                _say(f"{self._what}: done in {time.perf_counter() - self._start_s:.1f} s")

    def next(self, doing: str) -> None:
        if self._progress is not None:
            self._progress(0.0, doing)
        with self._lock:
            self._doing = doing
            if self._is_told and not self._is_over:
                _say(f"{self._what}: {doing} …")

    def _speak(self) -> None:
        with self._lock:
            if not self._is_over:
                self._is_told = True
                _say(f"{self._what}: {self._doing} …")


def _say(text: str) -> None:
    with suppress(
        OSError, ValueError
    ):  # nobody listens any more: the reader of a pipe is gone, or the stream is closed
        print(f"tracefuse: {text}", file=sys.stderr, flush=True)
