"""A newcomer's first minutes, timed: README's first command, then JupyterLab and a notebook until its explorer is shown.

    python tests/bench/overhead/first_view.py --torch torch==2.13.0 --out first_view.json

The benchmark makes a fresh virtual environment in a scratch folder and installs this working tree into it. `--torch` names
what to install first, as `.ci/run` does where the newest torch would bring CUDA libraries that the machine has no use for.
It needs Chromium, and in the environment that runs this script what `pip install '.[test]'` brings. With `--here` it
installs nothing and times JupyterLab of that environment.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "tools"))
from lab import SHUT_DOWN, browsing, serving
from results import environment, write

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_MS = 180_000
EXPLORER = "[data-testid=tf-root][data-ready='1']"
RUN_ALL = "() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", help="install this first, such as torch==2.13.0")
    parser.add_argument(
        "--notebook", default="01_see_a_cell.ipynb", help="its name in notebooks/ (default: %(default)s)"
    )
    parser.add_argument("--here", action="store_true", help="leave out what installs, and the demo")
    parser.add_argument("--out", type=Path, help="write the JSON here")
    arguments = parser.parse_args()
    notebook, seconds = ROOT / "notebooks" / arguments.notebook, {}
    with tempfile.TemporaryDirectory() as folder:
        python = sys.executable if arguments.here else install(seconds, Path(folder), arguments.torch)
        walk(seconds, Path(folder) / "lab", python, notebook)
    print("\n", *(f"{took:7.1f} s  {name}\n" for name, took in seconds.items()), sep="")
    write(arguments.out, {"benchmark": "first_view", "environment": environment("cpu"), "seconds": seconds})


def install(seconds: dict[str, float], folder: Path, torch: str | None) -> str:
    """README's commands in a copy of this tree in `folder`: the interpreter of its virtual environment."""
    tree, python = folder / "tracefuse", folder / "tracefuse" / ".venv" / "bin" / "python"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "node_modules", "build", "*.egg-info"))
    with leg(seconds, "make the virtual environment"):
        run(tree, sys.executable, "-m", "venv", ".venv")
    if torch:
        with leg(seconds, f"install {torch}"):
            run(tree, python, "-m", "pip", "install", "-q", torch)
    with leg(seconds, "install tracefuse"):
        run(tree, python, "-m", "pip", "install", "-q", ".")
    with leg(seconds, "tracefuse demo"):
        run(tree, python.with_name("tracefuse"), "demo")
    with leg(seconds, "install JupyterLab"):
        run(tree, python, "-m", "pip", "install", "-q", ".[lab]")
    return str(python)


def walk(seconds: dict[str, float], home: Path, python: str, notebook: Path) -> None:
    """Start JupyterLab, open the notebook, run it, and wait for the first explorer."""
    start = time.perf_counter()
    with serving(home, python) as lab, browsing() as browser:
        seconds["start JupyterLab"] = time.perf_counter() - start
        (lab.root / notebook.name).write_bytes(notebook.read_bytes())
        page = browser.new_page(viewport={"width": 1300, "height": 1000})
        page.set_default_timeout(PATIENCE_MS)
        with leg(seconds, "open the notebook, kernel started"):
            lab.open(page, notebook.name)
        with leg(seconds, "run all, to the first explorer on the screen"):
            page.evaluate(RUN_ALL)
            page.wait_for_selector(EXPLORER)
        page.evaluate(SHUT_DOWN)


@contextmanager
def leg(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Time the block as `seconds[name]`, and say that it began."""
    print(name, flush=True)
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start


def run(folder: Path, *words: str | Path) -> None:
    """Run a command without its output; what it wrote is shown where it fails."""
    done = subprocess.run(list(map(str, words)), cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
