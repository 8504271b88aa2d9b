"""What the front door costs: `import tracefuse` beside `import torch`, the first public name, and `tracefuse --help`.

    python tests/bench/overhead/front_door.py --out front_door.json

Each command runs in a fresh interpreter, all of them once a round, in turns, so that a busy machine slows all alike. Times are
seconds of the wall clock from the start of the process to its end; the figures are medians, and of the differences the median
of those within one round. The first round, which reads from a cold disk, does not count.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from results import environment, write

COMMANDS = {
    "python": ("-c", "pass"),
    "import torch": ("-c", "import torch"),
    "import torch, tracefuse": ("-c", "import torch, tracefuse"),
    "import torch, tracefuse; tracefuse.capture": ("-c", "import torch, tracefuse; tracefuse.capture"),
    "tracefuse --help": ("-m", "tracefuse", "--help"),
}
OVER = {
    "import tracefuse over import torch": ("import torch, tracefuse", "import torch"),
    "first use of tracefuse.capture over import torch": ("import torch, tracefuse; tracefuse.capture", "import torch"),
    "tracefuse --help over python": ("tracefuse --help", "python"),
}
BOUNDS_S = {"import tracefuse over import torch": 0.3, "tracefuse --help over python": 1.0}


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--rounds", type=int, default=15, help="how often each command runs (default: 15)")
    made.add_argument("--out", type=Path, help="write the JSON here")
    arguments = made.parse_args()
    rounds = [{name: seconds(words) for name, words in COMMANDS.items()} for _ in range(arguments.rounds + 1)][1:]
    medians = {name: statistics.median(one[name] for one in rounds) for name in COMMANDS}
    over = {name: statistics.median(one[a] - one[b] for one in rounds) for name, (a, b) in OVER.items()}
    for name, value in (medians | over).items():
        bound = f"   (at most {BOUNDS_S[name]} s)" if name in BOUNDS_S else ""
        print(f"{value:7.3f} s   {name}{bound}")
    record = {"benchmark": "front_door", "rounds": len(rounds), "environment": environment("cpu")}
    write(arguments.out, record | {"seconds": medians, "over_s": over, "bounds_s": BOUNDS_S})


def seconds(words: tuple[str, ...]) -> float:
    """How long a fresh interpreter takes for `words`."""
    start_s = time.perf_counter()
    subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start_s


if __name__ == "__main__":
    main()
