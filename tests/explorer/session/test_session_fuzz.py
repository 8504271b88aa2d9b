"""Damaged session files: each raises `SessionError` or holds a program that passes take; none runs or writes anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COUNT = 800
"""Of them; 10,000 by `python tests/tools/session_fuzz.py FOLDER 10000 SEED`."""
TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    script = TOOLS / "session_fuzz.py"
    command = [sys.executable, str(script), str(tmp_path_factory.mktemp("fuzz")), str(COUNT), "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_damaged_files_raise_session_errors_and_run_nothing(found: dict) -> None:
    assert found["wrong"] == []
    assert found["refused"] + found["loaded"] == COUNT


def test_the_damages_reach_every_part_of_the_reader(found: dict) -> None:
    """Some change nothing that matters, such as a time; most are found."""
    assert found["loaded"] > COUNT / 100
    assert found["refused"] > COUNT / 2


def test_damaged_files_take_neither_time_nor_memory(found: dict) -> None:
    assert found["slowest_s"] < 5, "of this process alone"
    assert found["grown_mib"] < 500


WATCHED = """
import os, torch, session_fuzz
from torch._subclasses.fake_tensor import FakeTensorMode

@torch.library.custom_op("fuzz::noop", mutates_args=())
def noop(x: torch.Tensor) -> torch.Tensor:
    return x.clone()

@noop.register_fake
def _(x):
    exec("'in a fake kernel'")
    return torch.empty_like(x)

watch = session_fuzz.Watch()
watch.is_on = True
exec('1'); open('x', 'w').close(); os.system('true'); import colorsys
with FakeTensorMode():
    torch.fx.operator_schemas.normalize_function(torch.ops.aten.addmm.default, (torch.ones(2),) * 3)
    noop(torch.ones(2))
watch.is_on = False
import json
print(json.dumps(watch.seen))
"""


def test_the_watch_sees_what_it_must(tmp_path: Path) -> None:
    path = f"{TOOLS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, "-c", WATCHED]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path}
    )
    seen = json.loads(done.stdout)
    assert {"exec", "compile", "open", "os.system", "import"} <= {one.split()[0] for one in seen}
    assert any(one.startswith("compile") and "in a fake kernel" in one for one in seen)
    assert not any(one.startswith("compile (b'Tensor'") for one in seen), "torch's reading of the schema of addmm"
