"""A program in a fork runs as in a fresh process: what it is given, what it writes, and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from forks import run_python, start
from ranks import needs_gloo, torchrun

SAYS = """
import os, sys
import beside
print(sys.argv, sys.path[0], __name__, __file__, beside.width, os.getcwd(), os.environ["SAID"], __spec__ is None, __doc__)
print(sys.modules["__main__"].SEEN if (SEEN := 3) else "", file=sys.stderr)
"""
ENDS = {
    "through": "print(1)",
    "a status": "import sys; sys.exit(3)",
    "a text": "import sys; sys.exit('bad')",
    "an error": "def f(x):\n    return 1 / x\n\ntry:\n    f(0)\nexcept ZeroDivisionError as e:\n    raise KeyError from e",
    "no program": "x = = 1",
    "a signal": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "in the end": "import atexit, threading as t\natexit.register(print, 'bye')\nt.Thread(target=print, args=[1]).start()",
}


def fresh(*arguments: str, cwd: Path, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def forked(*arguments: str, cwd: Path, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    done = run_python(arguments, cwd=cwd, env=env)
    return done.returncode, done.stdout, done.stderr


def test_it_sees_what_python_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAID", "so")
    (tmp_path / "beside.py").write_text("width = 8\n")
    (tmp_path / "says.py").write_text(SAYS)
    for words in (["says.py", "--x", "1"], ["-m", "says", "y"], ["-c", "import sys; print(sys.argv, __name__)", "z"]):
        assert forked(*words, cwd=tmp_path) == fresh(*words, cwd=tmp_path)


@pytest.mark.parametrize("end", ENDS)
def test_it_ends_as_python_ends_it(end: str, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(ENDS[end])
    assert forked("ends.py", cwd=tmp_path) == fresh("ends.py", cwd=tmp_path)


def test_it_ends_in_time(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_python(["-c", "import time; time.sleep(100)"], cwd=tmp_path, timeout=0.2)


@needs_gloo
def test_the_rank_that_fails_first_ends_the_others(tmp_path: Path) -> None:
    script = "import os, time\nassert os.environ['RANK'] == '0', 'I fail'\ntime.sleep(200)\n"
    start_s = time.monotonic()
    done = torchrun(script, 2, tmp_path)
    assert done.returncode == 1
    assert "I fail" in done.stderr
    assert time.monotonic() - start_s < 100


RUNS_OTHERS = """
import subprocess, sys
asked = "import sys; print('torch' in sys.modules)"
print(subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True).stdout.strip(), flush=True)
subprocess.run([sys.executable, "-c", "print('inherited')"], check=True)
print(subprocess.run([sys.executable, "-c", "raise SystemExit(3)"]).returncode)
print(subprocess.run(["echo", "another program"], capture_output=True).stdout)
subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.1)
"""


@pytest.mark.parametrize("with_its_own", [True, False])
def test_what_a_program_runs_is_a_fork_too_where_that_is_wanted(tmp_path: Path, with_its_own: bool) -> None:
    done = run_python(["-c", RUNS_OTHERS], cwd=tmp_path, with_its_own=with_its_own)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [str(with_its_own), "inherited", "3", "b'another program\\n'"]
    assert "TimeoutExpired" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="forks cannot use a CUDA GPU, and none are made")
def test_it_leads_a_group_of_its_own_as_soon_as_its_number_is_known() -> None:
    """Who signals to its group, as Jupyter does to a kernel's, signals to nobody else."""
    with open(os.devnull, "w") as nowhere:
        forks = [
            start(["-c", "import signal; signal.pause()"], None, os.environ, nowhere.fileno(), nowhere.fileno())
            for _ in range(4)
        ]
        groups = [os.getpgid(fork.pid) for fork in forks]
    for fork in forks:
        fork.end()
    assert groups == [fork.pid for fork in forks]
    assert all(fork.poll() is not None for fork in forks)
