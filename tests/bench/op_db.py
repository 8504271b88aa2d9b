"""torch's own operator database through capture, replay and every pass: what is exact, what is not, and why.

    python tests/bench/op_db.py --json op_db.json                 every sample of every operator, CPU, float32
    python tests/bench/op_db.py --max-samples 2 --ops "nn_*"      breadth first, some of them
    python tests/bench/op_db.py --device cuda --dtype bfloat16 float16 float32 --workers 4

Each operator has a time limit, and runs in a process of its own kind: one that dies is replaced, and the sample that it died
of counts as crashed. Which samples were left out (`--max-samples`, the time limit) is counted and printed.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from results import environment

sys.path.insert(0, str(Path(__file__).parents[1]))
from op_samples import CLOSE, CRASHED, EXACT, UNDEFINED, VERDICTS, Operator, Outcome, check, operators

START_SECONDS = 120.0  # a worker imports torch and its database; the first one on a GPU also loads kernels


@dataclass
class Tried:
    """One operator's outcomes, sample by sample, and how many samples were not run."""

    name: str
    dtype: str
    is_differentiable: bool
    outcomes: list[Outcome] = field(default_factory=list)
    left_out: int = 0
    seconds: float = 0.0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", default="cpu", help="cpu or cuda")
    made.add_argument("--dtype", nargs="+", default=["float32"], help="float32, bfloat16, … (default: float32)")
    made.add_argument("--ops", default="*", help='names that match this pattern ("nn_functional_*")')
    made.add_argument("--in-place", action="store_true", help="the in-place variants of the operators that have one")
    made.add_argument("--max-samples", type=int, help="at most so many samples of each operator (default: all)")
    made.add_argument("--shard", default="0/1", help="i/n: every n-th operator, from the i-th")
    made.add_argument("--workers", type=int, default=1, help="processes side by side (default: 1)")
    made.add_argument("--limit", type=float, default=600.0, help="seconds for one operator (default: 600)")
    made.add_argument("--json", type=Path, help="write every operator's outcomes here")
    return made


# --- one worker -------------------------------------------------------------------------------------------------------


def serve(pipe: Connection, options: argparse.Namespace) -> None:
    """Answers each (operator's position, first sample) with the number of samples, then with one outcome per sample."""
    known = chosen(options)
    pipe.send("ready")
    while (task := pipe.recv()) is not None:
        at, first = task
        try:
            samples = known[at].samples()
        except Exception as error:
            pipe.send(f"the database raises {type(error).__name__}: {error}")
            continue
        pipe.send(len(samples))
        for sample in samples[first : options.max_samples]:
            pipe.send(check(known[at], sample))


def chosen(options: argparse.Namespace) -> list[Operator]:
    """The operators of this shard, the same list in every process."""
    index, count = map(int, options.shard.split("/"))
    found = [o for d in options.dtype for o in operators(options.device, getattr(torch, d), options.in_place)]
    return [o for o in found if fnmatch.fnmatch(o.name, options.ops)][index::count]


class Worker:
    """A process that serves; `ask` starts it when there is none."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self._process: Any = None

    def ask(self, at: int, first: int) -> None:
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self._process = context.Process(target=serve, args=(theirs, self.options), daemon=True)
            self._process.start()
            theirs.close()
            self.answer(START_SECONDS)
        self.pipe.send((at, first))

    def answer(self, seconds: float) -> Any:
        """Raises `TimeoutError` or, where the process died, `EOFError`; there is no process then."""
        try:
            if not self.pipe.poll(max(0.0, seconds)):
                raise TimeoutError
            return self.pipe.recv()
        except (TimeoutError, EOFError, ConnectionResetError):
            self._process.kill()
            self._process.join()
            self._process = None
            raise

    def close(self) -> None:
        if self._process is not None:
            self.pipe.send(None)
            self._process.join()


def try_operator(worker: Worker, at: int, operator: Operator) -> Tried:
    tried = Tried(operator.name, str(operator.dtype).removeprefix("torch."), operator.is_differentiable)
    start, total = time.perf_counter(), None
    most = worker.options.max_samples
    while total is None or len(tried.outcomes) < total:
        try:
            worker.ask(at, len(tried.outcomes))
            for answer in _answers(worker, start + worker.options.limit):
                if isinstance(answer, str):
                    tried.outcomes.append(Outcome(UNDEFINED, UNDEFINED, answer))
                    total = 1
                elif isinstance(answer, int):
                    total = answer if most is None else min(answer, most)
                    tried.left_out = answer - total
                else:
                    tried.outcomes.append(answer)
                if total is not None and len(tried.outcomes) == total:
                    break
        except TimeoutError:
            tried.outcomes.append(Outcome(CRASHED, CRASHED, f"more than {worker.options.limit:.0f} s for the operator"))
            tried.left_out += (total or 1) - len(tried.outcomes)
            break
        except (EOFError, ConnectionResetError):
            tried.outcomes.append(Outcome(CRASHED, CRASHED, "the process died"))
            total = total or 1
    tried.seconds = time.perf_counter() - start
    return tried


def _answers(worker: Worker, until: float) -> Iterator[Any]:
    while True:
        yield worker.answer(until - time.perf_counter())


def try_all(options: argparse.Namespace) -> list[Tried]:
    """Every operator, in the database's order, by `options.workers` processes."""
    todo = chosen(options)
    found: list[Tried | None] = [None] * len(todo)
    waiting = iter(range(len(todo)))
    lock = threading.Lock()

    def work() -> None:
        worker = Worker(options)
        while True:
            with lock:
                at = next(waiting, None)
            if at is None:
                return worker.close()
            found[at] = try_operator(worker, at, todo[at])

    threads = [threading.Thread(target=work) for _ in range(options.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [tried for tried in found if tried is not None]


# --- the report -------------------------------------------------------------------------------------------------------


def counts(tried: list[Tried], what: str) -> dict[str, int]:
    """Samples by verdict; `what` is "replay" or "passes"."""
    found = Counter(getattr(outcome, what) for t in tried for outcome in t.outcomes)
    return {verdict: found[verdict] for verdict in VERDICTS if found[verdict]}


def summary(tried: list[Tried]) -> str:
    """A table of samples by dtype and verdict, then every operator that is not exact, with its first reason."""
    lines = [f"{len(tried)} operators, {sum(len(t.outcomes) for t in tried)} samples, "
             f"{sum(t.left_out for t in tried)} left out"]  # fmt: skip
    for dtype in dict.fromkeys(t.dtype for t in tried):
        for differentiable in (True, False):
            some = [t for t in tried if t.dtype == dtype and t.is_differentiable == differentiable]
            for what in ("replay", "passes"):
                lines.append(
                    _row(f"{dtype} {'' if differentiable else 'not '}differentiable, {what}", counts(some, what))
                )
    for t in tried:
        for what in ("replay", "passes"):
            lines += _exceptions(t, what)
    return "\n".join(lines)


def _row(title: str, found: dict[str, int]) -> str:
    defined = sum(n for verdict, n in found.items() if verdict != UNDEFINED)
    share = f"{found.get(EXACT, 0) / defined:.2%} exact" if defined else "nothing"
    return f"{title}: {share}; " + ", ".join(f"{n} {verdict}" for verdict, n in found.items())


def _exceptions(tried: Tried, what: str) -> list[str]:
    """One line per verdict of an operator that is not exact."""
    mild = {EXACT} if what == "replay" else {EXACT, CLOSE}
    first: dict[str, Outcome] = {}
    for outcome in tried.outcomes:
        verdict = getattr(outcome, what)
        if verdict not in mild and (what == "replay" or verdict != outcome.replay):
            first.setdefault(verdict, outcome)
    number = Counter(getattr(outcome, what) for outcome in tried.outcomes)
    return [
        f"  {tried.name} {tried.dtype}: {what} {number[verdict]} of {len(tried.outcomes)} {verdict}: {outcome.reason}"
        for verdict, outcome in first.items()
    ]


def record(options: argparse.Namespace, tried: list[Tried]) -> dict[str, Any]:
    return {
        "environment": environment(options.device),
        "in_place": options.in_place,
        "shard": options.shard,
        "replay": counts(tried, "replay"),
        "passes": counts(tried, "passes"),
        "operators": [asdict(t) for t in tried],
    }


def main() -> None:
    options = parser().parse_args()
    tried = try_all(options)
    print(summary(tried))
    if options.json is not None:
        options.json.write_text(json.dumps(record(options, tried), indent=1) + "\n")
        print(f"written: {options.json}")


if __name__ == "__main__":
    main()
