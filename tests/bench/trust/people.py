"""Programs that people run: each captured, replayed, optimised, exported and trained through the backend, beside eager.

    python tests/bench/trust/people.py --out people.json                          all of `people_programs/`, in float64
    python tests/bench/trust/people.py --only "gemma*" gan --again                some, also those that the file has
    python tests/bench/trust/people.py --device cuda --jobs 12 --out people_h200.json
    python tests/bench/pages/people_table.py people_cpu.json people_h200.json     what was found, as one page

Each runs in a process of its own, forked from one that has imported torch: one that dies, or takes more than
`--limit-seconds`, counts as crashed. Rows are written as they are done; what the file has is not run again.
`people_trial.py` says what is done with each.
"""

from __future__ import annotations

import argparse
import faulthandler
import fnmatch
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from cases.people_trial import CRASHED, WRONG, Row, asdict, try_program
from pages.people_table import refused_share, summary, table
from people_programs import PROGRAMS
from results import environment, parser, write

PRELOADED = ["cases.people_trial", "torch._dynamo", "torch._functorch.aot_autograd"]
PACKAGES = ["transformers.modeling_utils", "peft", "timm"]
"""What programs import that need more than torch, as those of `SMALL` do not."""
SMALL = ("focal", "clipping by value")
MOST_REFUSED = 0.05
TAIL = 3
"""Lines of what a process said last."""

BENCH = Path(__file__).parents[1]

JSONRow = dict[str, Any]


class Trial:
    """A program in a process of its own. `row()` is its row once it is done, None before."""

    def __init__(self, context: Any, name: str, device: str, limit_s: float, processors: int) -> None:
        self.name, self._limit_s = name, limit_s
        self._until = time.monotonic() + limit_s
        self._last: JSONRow = asdict(Row(name, PROGRAMS[name].kind, device))
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115 - closed by `_end`
        self.pipe, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_serve, args=(name, device, theirs, self._log.name, processors))
        self._process.start()
        theirs.close()

    def row(self) -> JSONRow | None:
        try:
            while self.pipe.poll():
                self._last = self.pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            status = self._process.exitcode
            return self._end("" if status == 0 else f"the process died with status {status}")
        return self._end(f"more than {self._limit_s:g} s") if time.monotonic() > self._until else None

    def _end(self, died: str) -> JSONRow:
        if died:
            said = Path(self._log.name).read_text(errors="replace").strip().splitlines()[-TAIL:]
            of = "backend" if self._last["at"] == "backend" else ""
            verdict, reason = ("backend", "backend_reason") if of else ("verdict", "reason")
            self._last |= {verdict: CRASHED, reason: f"{died}, at {self._last['at']}: {'; '.join(said)}"[:900]}
        if self._process.is_alive():
            self.kill()
        self._log.close()
        self.pipe.close()
        return self._last

    def kill(self) -> None:
        """It and what it started."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()


def _serve(name: str, device: str, pipe: Connection, log: str, processors: int) -> None:
    os.cpu_count = lambda: processors  # kernels are compiled by so many processes, and others compile beside it
    os.setpgid(0, 0)
    said = os.open(log, os.O_WRONLY)
    os.dup2(said, 1)
    os.dup2(said, 2)
    faulthandler.enable()
    try_program(name, device, pipe.send)


def try_all(todo: list[str], options: argparse.Namespace) -> Iterator[JSONRow]:
    """Rows as they are done, `options.jobs` programs at a time."""
    # For the process that others are forked from: a GPU that was asked for before the fork is lost after it.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(BENCH), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that what it started ends too
    context = multiprocessing.get_context(options.start)
    if options.start == "forkserver":
        context.set_forkserver_preload(PRELOADED if options.small else [*PRELOADED, *PACKAGES])
    waiting, running = list(reversed(todo)), []
    processors = max(1, (os.cpu_count() or 1) // options.jobs)
    try:
        while waiting or running:
            while waiting and len(running) < options.jobs:
                running.append(Trial(context, waiting.pop(), options.device, options.limit_seconds, processors))
            wait([one.pipe for one in running], timeout=0.5)
            for one in list(running):
                if (row := one.row()) is not None:
                    running.remove(one)
                    yield row
    finally:
        for one in running:
            one.kill()


# --- all of them ------------------------------------------------------------------------------------------------------


def chosen(options: argparse.Namespace) -> list[str]:
    names = list(SMALL) if options.small else list(PROGRAMS)
    return [n for n in names if any(fnmatch.fnmatch(n, only) or PROGRAMS[n].kind == only for only in options.only)]


def kept(options: argparse.Namespace) -> dict[str, JSONRow]:
    """The rows that the file has, by program."""
    if options.out is None or not options.out.exists():
        return {}
    return {row["program"]: row for row in json.loads(options.out.read_text())["programs"]}


def main() -> None:
    given = parser(__doc__)
    given.formatter_class = argparse.RawDescriptionHelpFormatter
    given.add_argument("--only", nargs="+", default=["*"], help='names that match, or kinds ("gemma*", step)')
    given.add_argument("--again", action="store_true", help="also programs that the file has")
    given.add_argument("--limit-seconds", type=float, default=120.0, help="for each (default: 120)")
    given.add_argument("--jobs", type=int, default=1, help="programs side by side (default: 1)")
    given.add_argument("--start", choices=("forkserver", "spawn"), default="forkserver", help="how processes start")
    given.add_argument(
        "--check", action="store_true", help="fail where one is wrong or crashed, or too many are refused"
    )
    options = given.parse_args()
    rows = kept(options)
    todo = [name for name in chosen(options) if options.again or name not in rows]
    began = time.monotonic()
    for count, row in enumerate(try_all(todo, options), 1):
        rows[row["program"]] = row
        save(options, rows)
        said = [row["verdict"], row["reason"], f"backend {row['backend']}", row["backend_reason"]]
        print(
            f"{count}/{len(todo)} {time.monotonic() - began:.0f} s  {row['program']}: {', '.join(filter(None, said))}"
        )
        sys.stdout.flush()
    ordered = in_order(rows)
    print(f"\n{table(ordered)}\n\n{summary(ordered)}")
    wrong = [row["program"] for row in ordered if {row["verdict"], row["backend"]} & {WRONG, CRASHED, "raised"}]
    if options.check and (wrong or refused_share(ordered) > MOST_REFUSED):
        raise SystemExit(f"not right: {', '.join(wrong)}; refused {refused_share(ordered):.1%}")


def in_order(rows: dict[str, JSONRow]) -> list[JSONRow]:
    return [rows[name] for name in PROGRAMS if name in rows]


def save(options: argparse.Namespace, rows: dict[str, JSONRow]) -> None:
    """Atomically: a run that is killed leaves what it had."""
    if options.out is None:
        return
    beside = options.out.with_suffix(".part")
    write(beside, {"environment": environment(options.device), "programs": in_order(rows)}, is_quiet=True)
    beside.replace(options.out)


if __name__ == "__main__":
    main()
