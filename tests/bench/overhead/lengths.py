"""A loop over texts of many lengths: what compiling takes for all of them and for the first alone, and what a step takes.

    python tests/bench/overhead/lengths.py --check --out lengths.json      50 lengths from 64 to 256, in a random order

Each row is a process of its own, which trains a GPT of 4 layers through `torch.compile(backend="tracefuse", dynamic=True)` on
so many lengths: forward and backward. What compiling takes is the time of the first round over the lengths minus that of the
second, in which every length is known: processor time of this process, which other programs on the machine disturb less, and
the time that passed. Of a length that was not compiled as the first one was, it is told by others
(`tracefuse.dynamo.other_sizes`). On a GPU a row says too how many kernels became machine code for the first length, and how
many for all others. The last round holds losses and gradients of every length against eager's.

On a GPU one more process times rounds over all lengths, of eager, `torch.compile(dynamic=True)`, and ours, in turn.

With `--check` the benchmark ends with status 1 where all lengths take more than 3 times what one takes, numbers differ, or a
round of ours takes longer than `torch.compile(dynamic=True)`'s.
"""

from __future__ import annotations

import copy
import functools
import json
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tracefuse import backend
from tracefuse.build import kernels as kernels_module
from tracefuse.demo import GPT, batch
from tracefuse.device.clocks import clock_of
from tracefuse.text import aligned

sys.path.append(str(Path(__file__).parents[1]))
from fusions.columns import rounds
from results import environment, parser, write

SIZES = {
    "small": {"layers": 1, "width": 32, "heads": 2, "vocab": 64, "batch": 2},
    "cpu": {"layers": 4, "width": 64, "heads": 4, "vocab": 256, "batch": 2},
    "cuda": {"layers": 4, "width": 768, "heads": 12, "vocab": 50304, "batch": 4},
}
SHORTEST, LONGEST = 64, 256
LENGTHS = 50
MUST = 3.0
"""Times what one length takes; issue 19."""
COLUMNS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "eager": lambda model: model,
    "torch.compile": lambda model: torch.compile(model, dynamic=True),
    "ours": lambda model: torch.compile(model, backend="tracefuse", dynamic=True),
}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--count", type=int, help="train on so many lengths in this process, and write what it took")
    made.add_argument("--automatic", action="store_true", help="leave out dynamic=True: torch finds out what varies")
    made.add_argument("--times", action="store_true", help="time a round over so many lengths, beside others")
    made.add_argument("--check", action="store_true", help="end with status 1 where a limit is missed")
    arguments = made.parse_args()
    if arguments.count:
        write(arguments.out, times(arguments) if arguments.times else row(arguments), is_quiet=True)
        return
    most = 6 if arguments.small else LENGTHS
    rows = [process(count, sys.argv[1:]) for count in (1, most)]
    ratio = rows[1]["compile_cpu_s"] / rows[0]["compile_cpu_s"]
    titles = (
        "lengths",
        "compiled",
        "told by others",
        "compile, CPU s",
        "compile, s",
        "a length told, CPU ms",
        "kernels of the first",
        "of the others",
        "numbers",
    )
    print(aligned([titles, *map(_texts, rows)]))
    missed = [f"{ratio:.2f} times what one length takes, and {MUST} is the limit"] if ratio > MUST else []
    missed += [f"numbers of {one['lengths']} lengths differ" for one in rows if not one["is_equal"]]
    found = {"benchmark": "lengths", "rows": rows, "ratio": ratio, "step_ms": {}, "missed": missed}
    found["environment"] = environment(arguments.device)
    write(arguments.out, found, is_quiet=True)  # timing takes minutes, and may be cut off
    if arguments.device == "cuda":
        found["step_ms"] = step_ms = process(most, [*sys.argv[1:], "--times"])
        print("".join(f"{name}: {ms:.3f} ms a step\n" for name, ms in step_ms.items()), end="")
        if step_ms["ours"] > step_ms["torch.compile"]:
            missed.append(f"a step takes {step_ms['ours']:.3g} ms, and torch.compile's {step_ms['torch.compile']:.3g}")
    print(f"all lengths: {ratio:.2f} times what one takes; missed: {'; '.join(missed) or 'nothing'}")
    write(arguments.out, found)
    sys.exit(arguments.check and bool(missed))


def process(count: int, flags: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        subprocess.run([sys.executable, __file__, *flags, "--count", str(count), "--out", str(out)], check=True)
        return json.loads(out.read_text())


def lengths(count: int) -> list[int]:
    return random.Random(0).sample(range(SHORTEST, LONGEST + 1), count)


def row(arguments: Any) -> dict[str, Any]:
    """One process: what it takes to compile for so many lengths, and whether each gives eager's numbers."""
    model, batches = made_of(arguments)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="tracefuse", dynamic=None if arguments.automatic else True)
    traces = Traces()
    kernels = Kernels()
    traced, first = watched_round(compiled, batches[:1], traces)
    of_first = kernels.count
    more = watched_round(compiled, batches[1:], traces)
    traced, first = [*traced, *more[0]], [*first, *more[1]]
    _, second = watched_round(compiled, batches, traces)
    told = [a[0] - b[0] for a, b, is_traced in zip(first, second, traced, strict=True) if not is_traced]
    return {
        "lengths": arguments.count,
        "compiled": sum(traced),
        "compile_cpu_s": sum(one[0] for one in first) - sum(one[0] for one in second),
        "compile_s": sum(one[1] for one in first) - sum(one[1] for one in second),
        "told_cpu_s": median(told) if told else None,
        "kernels_of_first": of_first,
        "kernels_of_others": kernels.count - of_first,
        "is_equal": all(differences_are_rounding(compiled, model, eager, given) for given in batches),
    }


def made_of(arguments: Any) -> tuple[GPT, list[Any]]:
    """The model, and a batch of each length."""
    chosen = "small" if arguments.small else arguments.device
    shape = dict(SIZES[chosen])
    size, vocab = shape.pop("batch"), shape["vocab"]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT(**shape, length=LONGEST, dropout=0.0).to(arguments.device)
    return model, [batch(vocab, size, length, arguments.device) for length in lengths(arguments.count)]


def times(arguments: Any) -> dict[str, float]:
    """The median ms of a step by column, of rounds over all lengths that are taken in turn, none of whose steps waits."""
    model, batches = made_of(arguments)
    steps = {name: functools.partial(a_round, made(copy.deepcopy(model)), batches) for name, made in COLUMNS.items()}
    for step in steps.values():
        step()
    found = rounds(steps, clock_of(arguments.device), arguments.budget)
    return {name: median(ms) / len(batches) for name, ms in found.items()}


def a_round(model: Any, batches: list[Any]) -> None:
    for given in batches:
        model.zero_grad()
        model(*given).backward()


def watched_round(compiled: Any, batches: list[Any], traces: Traces) -> tuple[list[bool], list[tuple[float, float]]]:
    """For each batch whether a graph was traced for it, and the seconds of its step: of the processor, and that passed."""
    traced, seconds = [], []
    for given in batches:
        known = traces.count
        cpu, wall = time.process_time(), time.perf_counter()
        compiled(*given).backward()
        if given[0].is_cuda:
            torch.cuda.synchronize()
        seconds.append((time.process_time() - cpu, time.perf_counter() - wall))
        traced.append(traces.count > known)
    return traced, seconds


class Kernels:
    """How many launches of kernels have become machine code; those of trials are among them."""

    def __init__(self) -> None:
        self.count = 0
        compile_them = kernels_module._compile

        def counted(missing: Any, *rest: Any) -> Any:
            self.count += len(missing)
            return compile_them(missing, *rest)

        kernels_module._compile = counted


class Traces:
    """How many programs AOTAutograd has handed to our partitioner."""

    def __init__(self) -> None:
        self.count = 0
        partition = backend._Compiling.partition

        def counted(compiling: Any, *given: Any, **named: Any) -> Any:
            self.count += 1
            return partition(compiling, *given, **named)

        backend._Compiling.partition = counted  # type: ignore[method-assign]


def differences_are_rounding(compiled: Any, model: torch.nn.Module, eager: torch.nn.Module, given: Any) -> bool:
    found = []
    for run, of in ((compiled, model), (eager, eager)):
        of.zero_grad()
        loss = run(*given)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in of.parameters())])
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(*found, strict=True))


def _texts(one: dict[str, Any]) -> tuple[str, ...]:
    told = "" if one["told_cpu_s"] is None else f"{1e3 * one['told_cpu_s']:.0f}"
    counts = one["lengths"], one["compiled"], one["lengths"] - one["compiled"]
    seconds = f"{one['compile_cpu_s']:.2f}", f"{one['compile_s']:.2f}"
    kernels = str(one["kernels_of_first"]), str(one["kernels_of_others"])
    return *map(str, counts), *seconds, told, *kernels, "as eager's" if one["is_equal"] else "differ"


if __name__ == "__main__":
    warnings.simplefilter("ignore", UserWarning)
    main()
