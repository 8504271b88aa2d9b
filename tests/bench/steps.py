"""Whole training steps: eager, torch.compile in three modes, tracefuse, the same as CUDA graphs, and a limit, side by side.

    python tests/bench/steps.py --out steps.json
    python tests/bench/steps.py --case gpt_bf16 --case chain --peer-limit 60 --out steps.json

Each program (`cases/step_programs.py`) runs in a process of its own with empty caches, since CUDA graphs keep their memory.
There all columns are differentiable functions of the same tensors, timed in the same rounds. A ratio is a column's step over
that of tracefuse, so tracefuse is faster where it is above 1. `first run s` has all compiling in it, and of tracefuse the
capture and the passes too; a column may find what columns before it compiled in the process. What has not compiled within
`--peer-limit` seconds is given up, and its row says so. For programs that only move bytes the limit is a copy of the bytes
that must move, in the same rounds; for others it is the sum of the rooflines of the ops that tracefuse runs, with measured
peaks. Results and gradients are compared with the same step in float64.

With `--out` of a file that is there, programs that are measured again replace their own entries. `--check` ends with status 1
where a program failed, or where its gradients (its results, where it has none) are further from float64's than 1.5 times
eager's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cases.step_programs import STEPS
from results import environment, parser, write

from tracefuse.text import aligned

MORE_THAN_EAGER = 1.5  # Both round, in different places.


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--case", choices=STEPS, action="append", help="only this one (may be repeated)")
    made.add_argument("--peer-limit", type=float, default=240.0, help="seconds for a peer to compile (default: 240)")
    made.add_argument("--limit", type=float, default=900.0, help="seconds for a program's process (default: 900)")
    made.add_argument(
        "--leave-out", action="append", default=[], help="not this peer: its row says so (may be repeated)"
    )
    made.add_argument("--check", action="store_true", help="status 1 where a program fails or is wrong")
    arguments = made.parse_args()
    before = json.loads(arguments.out.read_text())["cases"] if arguments.out and arguments.out.exists() else {}
    found: dict[str, dict[str, Any]] = {}
    for name in arguments.case or STEPS:
        found[name] = in_own_process(name, arguments)
        cases = before | found
        write(arguments.out, {"benchmark": "steps", "cases": {name: cases[name] for name in STEPS if name in cases}})
    print(f"\nstep, ms; ratio over tracefuse's, 99 % interval\n{aligned([TITLES, *rows(found)])}")
    wrong = [f"{name}: {reason}" for name, case in found.items() for reason in problems(case)]
    print(f"\nfailed: {'; '.join(wrong) or 'nothing'}")
    if arguments.check and wrong:
        sys.exit(1)


def in_own_process(name: str, arguments: Namespace) -> dict[str, Any]:
    """What a fresh process with empty caches finds; what it said last, where it failed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "case.json")
        places = ("TRACEFUSE_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
        surroundings = os.environ | {place: str(Path(folder, place)) for place in places}
        surroundings["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
        command = [sys.executable, str(Path(__file__).parent / "cases" / "step_once.py")]
        flags = {"case": name, "out": out, **{f: getattr(arguments, f) for f in ("device", "budget", "peer_limit")}}
        command += [text for flag, value in flags.items() for text in (f"--{flag.replace('_', '-')}", str(value))]
        command += ["--small"] * arguments.small + [text for c in arguments.leave_out for text in ("--leave-out", c)]
        try:
            status = subprocess.run(command, env=surroundings, check=False, timeout=arguments.limit).returncode
        except subprocess.TimeoutExpired:
            return {"error": f"not finished in {arguments.limit:g} s", "environment": environment(arguments.device)}
        if status or not out.exists():
            return {"error": f"ended with status {status}", "environment": environment(arguments.device)}
        return json.loads(out.read_text())


# --- the table --------------------------------------------------------------------------------------------------------

TITLES = ("program", "column", "step", "ratio", "first run s", "of the limit")


def rows(cases: dict[str, dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for name, case in cases.items():
        if "error" in case:
            yield name, case["error"], "", "", "", ""
            continue
        for program in case["timing"]["programs"]:
            median = program["times_ms"]["step"]["median"]
            ratio = program["ratios"]["step"]
            shown = f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
            first = case["first_run_s"].get(program["name"])
            of_limit = f"{case['limit']['ms'] / median:.0%} ({case['limit']['what']})"
            yield name, program["name"], f"{median:.4g}", shown, "" if first is None else f"{first:.1f}", of_limit
        for column, reason in case["timing"]["failed"].items():
            yield name, column, reason, "", "", ""


def problems(case: dict[str, Any]) -> Iterator[str]:
    """What `--check` holds against a program."""
    if "error" in case:
        yield case["error"]
        return
    timings = {p["name"]: p for p in case["timing"]["programs"]}
    # A loss is one number, whose rounding is luck; gradients are many.
    what = "gradients" if "backward" in timings["eager"]["times_ms"] else "results"
    for name in case["static"]:
        mine, eager = (float(timings[n]["difference"][what]) for n in (name, "eager"))
        if not mine <= MORE_THAN_EAGER * eager + 1e-6:
            yield f"{what} of {name} differ from float64's by {mine:.3g}, eager's by {eager:.3g}"


if __name__ == "__main__":
    main()
