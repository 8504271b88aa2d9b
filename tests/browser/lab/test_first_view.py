"""The benchmarks in a browser: a stranger's first minutes, in the environment that is there already, and clicks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser


def test_jupyterlab_shows_an_explorer_and_says_after_how_long(root: Path, tmp_path: Path) -> None:
    script = root / "tests" / "bench" / "overhead" / "first_view.py"
    command = [sys.executable, str(script), "--here", "--out", "out.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    seconds = json.loads((tmp_path / "out.json").read_text())["seconds"]
    assert list(seconds) == [
        "start JupyterLab", "open the notebook, kernel started", "run all, to the first explorer on the screen",
    ]  # fmt: skip
    assert min(seconds.values()) > 0


def test_a_click_is_timed_until_the_view_shows_its_numbers(root: Path, tmp_path: Path) -> None:
    script = root / "tests" / "bench" / "overhead" / "clicks.py"
    command = [sys.executable, str(script), "--small", "--out", "out.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert min(row["clicks"]["remat 0"][name] for name in ("first_ms", "second_ms")) > 0
    assert "GPT of 2 layers, 0.5 s behind its view" in done.stdout
