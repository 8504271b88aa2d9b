"""What reading, linking and diagnosing a trace file of 1,000,000 events takes: seconds, processor seconds, and peak memory.

    python tests/bench/overhead/timeline_file.py --out timeline_file_cpu.json

The files are made (tests/timelines/made_traces.py), since a recorded one would be 200 MB: a job whose GPU is ahead for most of
the time, with ten causes of idle time in turn, and one whose every launch is late, where each kernel is an idle stretch to
explain. Each is read by a process of its own, so that its peak memory is that of the reading, torch's import included; the
processor's seconds are of that process and do not count what else the machine does.
"""

from __future__ import annotations

import json
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
from made_traces import CAUSES, MadeJob, write_trace
from results import environment, parser, write

JOBS: dict[str, dict[str, Any]] = {
    "ten causes, gzipped": {"causes": list(CAUSES), "suffix": ".json.gz"},
    "ten causes": {"causes": list(CAUSES)},
    "without Python's frames": {"causes": list(CAUSES), "stacks": False},
    "every launch late": {"causes": ["small"]},
}
EVENTS = {"small": 5_000, "all": 1_000_000}
LAYERS = {"small": 8, "all": 96}
TRIES = {"small": 1, "all": 3}


def measured(path: str) -> dict[str, Any]:
    """The times of one reading in this process, and the most memory that it held."""
    marks: list[tuple[str, float, float]] = [("start", time.perf_counter(), time.process_time())]

    def mark(name: str) -> None:
        marks.append((name, time.perf_counter(), time.process_time()))

    from tracefuse.profiling.attribution import costs_of
    from tracefuse.profiling.timeline import load_timeline

    mark("import")
    run = load_timeline(path)
    mark("read")
    costs = costs_of(run)
    linked = {"records": len(costs.rows), "launched": int((costs.asked >= 0).sum())}
    linked |= {"operators": len(costs.by("operator")[0]), "modules": len(costs.by("module")[0])}
    linked |= {"of a forward": int((run.recording.forward_of >= 0).sum()), "lines": len(costs.by("line")[0])}
    mark("link")
    idle, findings, text = run.idle, run.findings(), str(run)
    mark("diagnose")
    pairs = list(pairwise(marks))
    unknown_ns = sum(one.by_cause.get("unknown", 0) for one in idle)
    return {
        "s": {name: round(b - a, 3) for (_, a, _), (name, b, _) in pairs},
        "cpu_s": {name: round(b - a, 3) for (_, _, a), (name, _, b) in pairs},
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "events": run.recording.account.read,
        "idle_stretches": sum(len(one.stretches) for one in idle),
        "idle_ns": {cause: ns for one in idle for cause, ns in one.by_cause.items()},
        "unknown_share": unknown_ns / max(sum(one.window_ns - one.busy_ns for one in idle), 1),
        "findings": [one.id for one in findings],
        "linked": linked,
        "said_lines": text.count("\n"),
    }


def made(size: str, causes: list[str], stacks: bool = True) -> MadeJob:
    """A job of about so many events."""
    few = MadeJob(len(causes) + 1, causes, LAYERS[size], 12_000, stacks=stacks)
    steps = max(len(causes) + 1, EVENTS[size] * (len(causes) + 1) // len(few.events))
    return MadeJob(steps, causes, LAYERS[size], 12_000, stacks=stacks)


def rows(size: str, folder: Path) -> Iterator[dict[str, Any]]:
    for name, options in JOBS.items():
        job = made(size, options["causes"], options.get("stacks", True))
        path = write_trace(job, folder / f"made{options.get('suffix', '.json')}")
        tries = [_read(path) for _ in range(TRIES[size])]
        best = min(tries, key=lambda one: sum(one["cpu_s"].values()))
        yield {"job": name, "file_mb": round(path.stat().st_size / 1e6, 1), **best, "tries": len(tries)}


def _read(path: Path) -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, "--read", str(path)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    made_parser = parser(__doc__)
    made_parser.add_argument(
        "--read", help="read this file in this process and print what it took: for this script itself"
    )
    options = made_parser.parse_args()
    if options.read:
        print(json.dumps(measured(options.read)))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = list(rows("small" if options.small else "all", Path(folder)))
    for one in found:
        took = [f"{name} {one['s'][name]:.2f} s ({one['cpu_s'][name]:.2f})" for name in one["s"]]
        print(
            f"{one['job']:<24} {one['events']:>9,} events, {one['file_mb']} MB; {', '.join(took)}; {one['peak_mib']} MiB"
        )
    write(options.out, {"environment": environment("cpu"), "of": "wall seconds (processor seconds)", "jobs": found})


if __name__ == "__main__":
    main()
