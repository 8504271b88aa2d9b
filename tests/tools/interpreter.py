"""Triton decides when it is imported whether it interprets, so numbers are checked in a process of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by the tests that start the interpreter")

if INTERPRETED:
    import quick_interpreter

    quick_interpreter.use()

ROOT = Path(__file__).resolve().parents[2]


def passed_under_the_interpreter(files: Iterable[str | Path], *options: str, timeout: float | None = 280) -> int:
    """How many tests of `files` pass in a process in which Triton interprets; an `AssertionError` with its output where one
    fails. `timeout` in seconds."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        *map(str, files),
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        *options,
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout[-6000:]
    return int(passed[1])
