"""What `tracefuse.capture_step` costs the steps that it leaves alone: nothing that can be measured.

    python tests/bench/overhead/capture_step.py --out capture_step.json

Runs of the same loop follow one another in turn, without us, without us once more, and inside `capture_step(n=2)`; what is
compared are the steps behind those that are followed, which run by themselves again, and the followed ones beside them. The
second run without us says what the machine's own noise is. The two hooks that stay count updates: `hook_us` is what they take
by themselves, `share` of a step that is.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.measure.timing import estimate
from tracefuse.recording.shield import Shield
from tracefuse.steps.watch import FOLLOWED, Plan, StepWatch

sys.path.append(str(Path(__file__).parents[1]))
from results import environment, parser, write

SIZES = {
    "small": {"layers": 1, "width": 32, "heads": 2, "vocab": 64, "length": 16, "batch": 2},
    "cpu": {"layers": 2, "width": 64, "heads": 2, "vocab": 128, "length": 32, "batch": 2},
    "cuda": {"layers": 12, "width": 768, "heads": 12, "vocab": 50304, "length": 256, "batch": 4},
}
CAPTURED = 2
LEFT_ALONE_FROM = CAPTURED + FOLLOWED + 1
FEWEST, MOST = 8, 60


class Loop:
    """A training loop that notes when each step ended."""

    def __init__(self, sizes: dict[str, int], device: str) -> None:
        torch.manual_seed(0)
        shape = {k: sizes[k] for k in ("layers", "width", "heads", "vocab", "length")}
        self.model = GPT(**shape).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device == "cuda")
        self.batch = batch(sizes["vocab"], sizes["batch"], sizes["length"], device)
        self.device = device

    def seconds(self, steps: int) -> tuple[float, float]:
        """Of the median step of those that are left alone, and of those behind the captured one that are followed."""
        found = []
        for _ in range(steps):
            began = time.perf_counter()
            self.model(*self.batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.device == "cuda":
                torch.cuda.synchronize()
            found.append(time.perf_counter() - began)
        return median(found[LEFT_ALONE_FROM:]), median(found[CAPTURED : CAPTURED + FOLLOWED])

    def inside(self, steps: int) -> tuple[float, float]:
        with tracefuse.capture_step(n=CAPTURED):
            return self.seconds(steps)


def hook_us(calls: int = 2000) -> float:
    """Processor time of the hooks of a watch that records nothing, for an optimizer's step that does nothing."""

    class Idle(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            pass

    def run(optimizer: Idle) -> float:
        began = time.process_time()
        for _ in range(calls):
            optimizer.step()
        return time.process_time() - began

    optimizer = Idle([nn.Parameter(torch.ones(1))], lr=0.1)
    watch = StepWatch(Plan(n=calls * 100, first=calls * 100), dict, Shield("the benchmark"))
    alone = min(run(optimizer) for _ in range(5))
    watch.start()
    watched = min(run(optimizer) for _ in range(5))
    watch.stop()
    return 1e6 * (watched - alone) / calls


def main() -> None:
    options = parser(__doc__).parse_args()
    sizes = SIZES["small" if options.small else options.device]
    loop, steps = Loop(sizes, options.device), LEFT_ALONE_FROM + (3 if options.small else 12)
    loop.inside(steps)
    rounds, began = [], time.perf_counter()
    while len(rounds) < (2 if options.small else FEWEST) or (
        len(rounds) < MOST and time.perf_counter() - began < options.budget
    ):
        rounds.append([loop.seconds(steps), loop.inside(steps), loop.seconds(steps)])
    step_s, hooks = median(plain for (plain, _), *_ in rounds), hook_us()
    found = {
        "environment": environment(options.device),
        "sizes": sizes,
        "step_s": step_s,
        "ratio": _interval([inside / plain for (plain, _), (inside, _), _ in rounds]),
        "noise": _interval([again / plain for (plain, _), _, (again, _) in rounds]),
        "followed": _interval([followed / plain for (plain, _), (_, followed), _ in rounds]),
        "rounds": len(rounds),
        "hook_us": hooks,
        "share": hooks / (1e6 * step_s),
    }
    print(
        f"a step {1e3 * step_s:.2f} ms; inside capture_step, left alone, {_text(found['ratio'])} of it; a run without us "
        f"{_text(found['noise'])}; a step that is followed {_text(found['followed'])}; "
        f"the hooks {hooks:.2f} us, {100 * found['share']:.4f} % of a step"
    )
    write(options.out, found)


def _interval(ratios: list[float]) -> list[float]:
    found = estimate(ratios)
    return [found.median, found.low, found.high]


def _text(interval: list[float]) -> str:
    return "{:.3f} [{:.3f}, {:.3f}]".format(*interval)


if __name__ == "__main__":
    main()
