"""The suite's own conftest: a run of many files uses all cores, one file does not, and tests marked `alone` are alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

WHERE = """\
import os, pathlib, pytest
HERE = pathlib.Path(__file__).parent
def note(name):
    (HERE / "notes").open("a").write(name + "\\n")
"""
ALONE = f"{WHERE}@pytest.mark.alone\ndef test_alone():\n    note('alone begins')\n    note('alone ends')\n"
BESIDE = f"{WHERE}@pytest.mark.parametrize('n', range(40))\ndef test_beside(n):\n    note('begins')\n    note('ends')\n"
PLACE = f"{WHERE}def test_place():\n    note(os.environ.get('PYTEST_XDIST_WORKER', 'no worker'))\n"


@pytest.fixture
def suite(root: Path, tmp_path: Path) -> Path:
    shutil.copy(root / "tests" / "conftest.py", tmp_path)
    shutil.copy(root / "tests" / "tools" / "lab.py", tmp_path)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\naddopts = --strict-markers\nmarkers =\n    alone\n    gpu\n    browser\n"
    )
    return tmp_path


def notes(suite: Path, *words: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", *words]
    done = subprocess.run(command, cwd=suite, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    file = suite / "notes"
    found = file.read_text().split("\n")[:-1] if file.exists() else []
    file.unlink(missing_ok=True)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "workers"),
    [
        (("-x",), True),
        (("test_a.py::test_place",), False),
        (("-n", "0"), False),
        (("-p", "no:xdist"), False),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else None,
)
def test_many_files_are_spread_over_workers(words: tuple[str, ...], workers: bool, suite: Path) -> None:
    for name in "ab":
        (suite / f"test_{name}.py").write_text(PLACE)
    found = notes(suite, *words)
    assert found
    assert all(one.startswith("gw") for one in found) if workers else set(found) == {"no worker"}


def test_collecting_runs_nothing(suite: Path) -> None:
    (suite / "test_a.py").write_text(PLACE)
    assert notes(suite, "--collect-only") == []


@pytest.mark.slow
def test_a_test_that_is_alone_is_beside_no_other(suite: Path) -> None:
    for name in "abc":
        (suite / f"test_{name}.py").write_text(BESIDE if name != "b" else ALONE)
    found = notes(suite, "-n", "3")
    assert found.count("begins") == found.count("ends") == 80
    at = found.index("alone begins")
    assert found[at + 1] == "alone ends"
    assert found[:at].count("begins") == found[:at].count("ends")
