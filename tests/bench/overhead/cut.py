"""The choice of rematerialisation takes seconds for a deep GPT: how many, and what memory costs in time. It needs no GPU.

    python tests/bench/overhead/cut.py                 128 layers of a small width
    python tests/bench/overhead/cut.py --layers 12

The benchmark ends with status 1 if the choice without a budget, or the one for half of the bytes with its 24 cuts or fewer,
takes `--limit` seconds or more. The time of the whole pass is printed beside it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.optimizers.remat import Remat
from tracefuse.optimizers.remat.budget import Budgeting
from tracefuse.optimizers.remat.forward import Forward
from tracefuse.optimizers.remat.tradeoffs import Point, pareto
from tracefuse.optimizers.simplify import Simplify
from tracefuse.optimizers.trace import Trace, human_bytes
from tracefuse.text import aligned

sys.path.append(str(Path(__file__).parents[1]))
from results import environment, parser, write

OPTIONS = {
    "no budget": Remat(),
    "half": Remat(memory_budget=0.5, stop_at_lowest_peak=False),
    "half, peak watched": Remat(memory_budget=0.5),
    "a tenth, peak watched": Remat(memory_budget=0.1),
}


def process_seconds(work: Callable[[], Any]) -> float:
    """Of this process alone, best of two: other programs share the machine."""
    return min(_process_seconds(work) for _ in range(2))


def _process_seconds(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def rows(trace: Trace) -> list[dict[str, Any]]:
    """Seconds of the choice, from the trace on, and of the pass, for each of the options."""
    return [
        {
            "options": name,
            "choice_s": process_seconds(lambda o=options: Budgeting(trace, Forward(trace), o).meet(o.memory_budget)),
            "pass_s": process_seconds(lambda o=options: o.run(trace, lambda _: None)),
        }
        for name, options in OPTIONS.items()
    ]


def table(points: list[Point]) -> str:
    head = ("weight", "budget", "saved", "static peak", "recompute, modelled", "ops again")
    lines = [
        (
            f"{p.weight:g}",
            f"{p.budget:.0%}",
            human_bytes(p.saved_bytes),
            human_bytes(p.peak_bytes),
            _us(p),
            str(p.recomputed_ops),
        )
        for p in points
    ]
    return aligned([head, *lines])


def _us(point: Point) -> str:
    return f"{point.recompute_seconds * 1e6:.2f} us"


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--layers", type=int, default=128)
    made.add_argument("--limit", type=float, default=2.0, help="seconds (default: 2)")
    arguments = made.parse_args()
    layers = 2 if arguments.small else arguments.layers
    torch.manual_seed(0)
    model, data = GPT(layers=layers, width=16, heads=2, vocab=31, length=32), batch(31, 4, 32)
    trace = Simplify().run(tracefuse.capture(lambda: model(*data).backward()).trace, lambda _: None)
    found = rows(trace)
    print(f"GPT, {layers} layers, {trace.op_count} ops")
    lines = [(r["options"], f"{r['choice_s']:.3f}", f"{r['pass_s']:.3f}") for r in found]
    print(aligned([("rematerialisation", "choice, s", "whole pass, s"), *lines]))
    points = pareto(trace)
    print(table(points))
    record = {
        "benchmark": "cut",
        "layers": layers,
        "ops": trace.op_count,
        "rows": found,
        "points": [asdict(p) for p in points],
    }
    write(arguments.out, {**record, "environment": environment("cpu")})
    sys.exit(max(r["choice_s"] for r in found[:2]) >= arguments.limit)


if __name__ == "__main__":
    main()
