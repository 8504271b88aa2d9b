"""The benchmark of a stranger's first minutes, in the environment that is there already."""

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
