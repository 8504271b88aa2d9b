"""What opening the traces of a job of many ranks takes: seconds, processor seconds and peak memory.

    python tests/bench/overhead/many_ranks.py --out many_ranks_cpu.json

The files are made (tests/timelines/made_ranks.py), as Kineto writes them, with Python's frames: 8 ranks of 1,000,000 events,
all read in full, and 64 ranks of 125,000, of which 16 are read in full and of the others the collectives. One rank is late by
a copy in each step. Opening is reading, matching, finding causes, the findings, the text and the page. It is done in one
process, whose peak memory is that of all of it, torch's import included. The processor's seconds are of that process and do
not count what else the machine does, though they grow where its cores are shared; `load` is how many processes wanted them.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "timelines")]
from made_ranks import MadeRanks
from results import environment, parser, write

JOBS: dict[str, dict[str, int]] = {
    "8 ranks of 1,000,000 events": {"ranks": 8, "events": 1_000_000, "most": 16},
    "64 ranks of 125,000 events, 16 of them in full": {"ranks": 64, "events": 125_000, "most": 16},
}
SMALL: dict[str, dict[str, int]] = {
    "6 ranks of 4,000 events, 4 of them in full": {"ranks": 6, "events": 4_000, "most": 4}
}
LATE_RANK, LATE_NS = 1, 9_000_000
TRIES = 2
MOST_S, MOST_MIB = 60.0, 4096


def measured(folder: str, most: int) -> dict[str, Any]:
    """What opening takes in this process, step by step, and what was found."""
    marks = [("start", time.perf_counter(), time.process_time())]

    def mark(name: str) -> None:
        marks.append((name, time.perf_counter(), time.process_time()))

    from tracefuse.ranks.loading import load_ranks

    mark("import")
    ranks = load_ranks(folder, most=most)
    mark("read and match")
    waits = ranks.waits
    mark("causes")
    findings = ranks.findings()
    mark("findings")
    said, page = str(ranks), ranks.explore().to_html()
    mark("text and page")
    pairs = list(pairwise(marks))
    return {
        "wall_s": {name: round(b - a, 2) for (_, a, _), (name, b, _) in pairs},
        "cpu_s": {name: round(b - a, 2) for (_, _, a), (name, _, b) in pairs},
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "events_read_in_full": sum(rank.run.recording.account.read for rank in ranks.ranks.values()),
        "read_in_full": list(ranks.ranks),
        "collectives": len(ranks.splits),
        "late": [waits[0].rank, str(waits[0].doing)],
        "findings": [f"{one.severity}: {one.id}" for one in findings],
        "text": said.split("\n\n")[0],
        "page_kb": len(page) // 1000,
    }


def made(folder: Path, ranks: int, events: int) -> int:
    """Files of about so many events a rank; returns how many steps."""
    few = MadeRanks(ranks=2, steps=20)
    steps = max(4, 20 * events // min(len(one.events) for one in few.ranks) + 1)
    MadeRanks(ranks=ranks, steps=steps, cause="copy", late_rank=LATE_RANK, late_ns=LATE_NS, spill=folder)
    return steps


def rows(jobs: dict[str, dict[str, int]], tries: int) -> Iterator[dict[str, Any]]:
    for name, job in jobs.items():
        with tempfile.TemporaryDirectory() as folder:
            steps = made(Path(folder), job["ranks"], job["events"])
            files_mb = sum(path.stat().st_size for path in Path(folder).iterdir()) // 10**6
            found = [_opened(folder, job["most"]) for _ in range(tries)]
        best = min(found, key=lambda one: sum(one["cpu_s"].values()))
        yield {"job": name, **job, "steps": steps, "files_mb": files_mb, "tries": tries, **best}


def _opened(folder: str, most: int) -> dict[str, Any]:
    before = os.getloadavg()[0]
    command = [sys.executable, __file__, "--read", folder, "--most", str(most)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {**json.loads(done.stdout), "load": [round(before, 1), round(os.getloadavg()[0], 1)]}


def main() -> None:
    made_parser = parser(__doc__)
    made_parser.add_argument("--read", help="open this folder in this process: for this script itself")
    made_parser.add_argument("--most", type=int, default=16, help="how many ranks are read in full (default: 16)")
    made_parser.add_argument(
        "--check", action="store_true", help="end with status 1 above 60 s of a processor or 4 GiB"
    )
    options = made_parser.parse_args()
    if options.read:
        print(json.dumps(measured(options.read, options.most)))
        return
    found = list(rows(SMALL, 1) if options.small else rows(JOBS, TRIES))
    for one in found:
        took = ", ".join(f"{name} {one['cpu_s'][name]:.1f} s" for name in one["cpu_s"])
        print(f"{one['job']}: {sum(one['cpu_s'].values()):.1f} s of a processor ({took}), {one['peak_mib']} MiB")
        print(f"  {sum(one['wall_s'].values()):.1f} s by the wall clock at a load of {one['load']}; {one['late']}")
    write(options.out, {"environment": environment("cpu"), "jobs": found})
    over = [one for one in found if sum(one["cpu_s"].values()) > MOST_S or one["peak_mib"] > MOST_MIB]
    if options.check and over:
        sys.exit(1)


if __name__ == "__main__":
    main()
