"""torch's own operator database goes through capture, replay and every pass: what is exact, what is not, and why.

    python tests/bench/trust/op_db.py --out run.json                    every sample of every operator, CPU, float32
    python tests/bench/trust/op_db.py --max-samples 2 --ops "nn_*"      breadth first, some of them
    python tests/bench/trust/op_db.py --device cuda --dtype bfloat16 float16 float32 --workers 12
    python tests/bench/pages/op_db_table.py run.json --out op_db.json   runs and their shards as one table

After the passes the regenerated program is compiled; on a GPU its Triton kernels run. A sample runs in one of `--workers`
processes: one that dies, or whose CUDA context does, is replaced, and the sample counts as crashed. What was left out
(`--max-samples`, `--limit`, `--seconds`) is counted.
"""

from __future__ import annotations

import argparse
import fnmatch
import multiprocessing
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "samples"))
from op_samples import CRASHED, UNDEFINED, Operator, Outcome, check, operators
from pages.op_db_table import record, table
from results import environment, write

START_SECONDS = 120.0  # a worker imports torch and its database; the first one on a GPU also loads kernels


@dataclass
class Tried:
    """One operator's outcomes, sample by sample, none if its turn did not come, and how many samples were not run."""

    name: str
    dtype: str
    is_differentiable: bool
    outcomes: list[Outcome] = field(default_factory=list)
    left_out: int = 0


class Answer(NamedTuple):
    """Of a worker: how many samples the operator has, what became of one, and whether the worker can go on."""

    samples: int
    outcome: Outcome
    is_alive: bool


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
    made.add_argument("--seconds", type=float, default=float("inf"), help="begin no operator after so many seconds")
    made.add_argument("--out", type=Path, help="write the counts, and what is not exact, here as JSON")
    return made


# --- one worker -------------------------------------------------------------------------------------------------------


def serve(pipe: Connection, options: argparse.Namespace) -> None:
    """Answers each (operator's position, sample's position)."""
    torch.set_num_threads(1)
    known = chosen(options)
    pipe.send("ready")
    at, samples = -1, []
    while (task := pipe.recv()) is not None:
        if task[0] != at:
            at = task[0]
            try:
                samples = known[at].samples()
            except Exception as error:
                pipe.send(_undefined(f"the database raises {type(error).__name__}: {error}"))
                at = -1
                continue
        if not samples:
            pipe.send(_undefined("the database has no sample"))
            continue
        outcome = check(known[at], samples[task[1]])
        dead = _why_dead(options.device)
        pipe.send(Answer(len(samples), outcome if dead is None else Outcome(CRASHED, CRASHED, dead), dead is None))


def _undefined(reason: str) -> Answer:
    return Answer(1, Outcome(UNDEFINED, UNDEFINED, reason), True)


def _why_dead(device: str) -> str | None:
    """What the GPU says where an operator has asserted on it: nothing runs there any more in this process."""
    if device == "cpu":
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"the CUDA context is lost: {str(error).splitlines()[0]}"
    return None


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

    def ask(self, at: int, sample: int, until: float) -> Answer:
        """Raises `TimeoutError` or, where the process died, `EOFError`; there is no process then."""
        try:
            if self._process is None:
                self._start()
            self.pipe.send((at, sample))
            answer: Answer = self._next(until - time.monotonic())
        except (TimeoutError, EOFError, ConnectionError) as error:
            self._end()
            raise error if isinstance(error, TimeoutError) else EOFError from error
        if not answer.is_alive:
            self._end()
        return answer

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, self.options), daemon=True)
        self._process.start()
        theirs.close()
        self._next(START_SECONDS)

    def _next(self, seconds: float) -> Any:
        if not self.pipe.poll(max(0.0, seconds)):
            raise TimeoutError
        return self.pipe.recv()

    def _end(self) -> None:
        self._process.kill()
        self._process.join()
        self._process = None

    def close(self) -> None:
        if self._process is not None:
            self.pipe.send(None)
            self._process.join()


def try_operator(worker: Worker, at: int, operator: Operator) -> Tried:
    tried = _not_begun(operator)
    until = time.monotonic() + worker.options.limit
    most = worker.options.max_samples or sys.maxsize
    samples = 1  # until a worker says how many
    while len(tried.outcomes) < min(samples, most):
        try:
            samples, outcome, _ = worker.ask(at, len(tried.outcomes), until)
        except TimeoutError:
            if not tried.outcomes:
                tried.outcomes.append(Outcome(CRASHED, CRASHED, f"more than {worker.options.limit:.0f} s for a sample"))
            break
        except EOFError:
            outcome = Outcome(CRASHED, CRASHED, "the process died")
        tried.outcomes.append(outcome)
    tried.left_out = samples - len(tried.outcomes)
    return tried


def try_all(options: argparse.Namespace) -> list[Tried]:
    """Every operator, in the database's order, by `options.workers` processes."""
    todo = chosen(options)
    found = [_not_begun(operator) for operator in todo]
    waiting = _in_time(len(todo), time.monotonic() + options.seconds)
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
    return found


def _not_begun(operator: Operator) -> Tried:
    return Tried(operator.name, str(operator.dtype).removeprefix("torch."), operator.is_differentiable)


def _in_time(count: int, until: float) -> Iterator[int]:
    for at in range(count):
        if time.monotonic() > until:
            return
        yield at


def main() -> None:
    options = parser().parse_args()
    tried = try_all(options)
    where = environment(options.device)
    runs = [record(where, options, dtype, [t for t in tried if t.dtype == dtype]) for dtype in options.dtype]
    print(table(runs))
    write(options.out, {"runs": runs})


if __name__ == "__main__":
    main()
