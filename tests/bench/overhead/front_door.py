"""What the front door costs: `import tracefuse` after `import torch`, the first public name, and `tracefuse --help`.

    python tests/bench/overhead/front_door.py --out front_door.json

Each round starts three fresh interpreters in turns, so that a busy machine slows all alike: one that does nothing, one that
says how long each of its statements took, and one that prints the help. Times are seconds of the wall clock; the figures are
medians of the rounds, and of a difference the median of those within one round. The first round, which reads from a cold disk,
does not count.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from results import environment, write

STATEMENTS = ("import torch", "import tracefuse", "tracefuse.capture")
HELP = "tracefuse --help over python"
BOUNDS_S = {"import tracefuse": 0.3, HELP: 1.0}


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--rounds", type=int, default=15, help="how often each interpreter starts (default: 15)")
    made.add_argument("--out", type=Path, help="write the JSON here")
    arguments = made.parse_args()
    rounds = [one_round() for _ in range(arguments.rounds + 1)][1:]
    found = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    for name, value in found.items():
        bound = f"   (at most {BOUNDS_S[name]} s)" if name in BOUNDS_S else ""
        print(f"{value:7.3f} s   {name}{bound}")
    record = {"benchmark": "front_door", "rounds": len(rounds), "environment": environment("cpu")}
    write(arguments.out, record | {"seconds": found, "bounds_s": BOUNDS_S})


def one_round() -> dict[str, float]:
    """Seconds of each statement after those before it, in one interpreter, and of the help beyond an interpreter's start."""
    start_s = time.perf_counter()
    run("-c", "pass")
    python_s = time.perf_counter() - start_s
    timed = "".join(f"{statement}\nnow_s.append(time.perf_counter())\n" for statement in STATEMENTS)
    said = run("-c", f"import time\nnow_s = [time.perf_counter()]\n{timed}print(*now_s)")
    now_s = [float(word) for word in said.split()]
    start_s = time.perf_counter()
    run("-m", "tracefuse", "--help")
    help_s = time.perf_counter() - start_s
    steps = {name: end - begin for name, (begin, end) in zip(STATEMENTS, itertools.pairwise(now_s), strict=True)}
    return {"python": python_s, **steps, HELP: help_s - python_s}


def run(*words: str) -> str:
    """What a fresh interpreter prints."""
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
