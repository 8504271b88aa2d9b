"""What recording costs: a GPT's training step under `tracefuse.capture` beside the same step without, in time and in memory.

    python tests/bench/recorder.py --out recorder.json     48 layers; then seconds until a 128-layer capture can be shown

Steps are run in turn, plain and recorded, and each ratio is of two that followed one another: of the time that passed and,
on a CPU, of the processor time that the process took, which other programs on the machine disturb less. Memory is what a step
adds to what was allocated, at its highest, by torch's own count; gradients are None before each. The second part captures a
model of 128 layers, runs all passes and makes the payload that the view shows, without measuring anything.
"""

from __future__ import annotations

import time
from argparse import Namespace
from statistics import median
from typing import Any

import torch
from results import environment, parser, write
from torch import Tensor

import tracefuse
from tracefuse.allocator import added_peak
from tracefuse.demo import GPT, batch
from tracefuse.timing import estimate
from tracefuse.widgets.payload import payload

CPU = {"width": 256, "heads": 4, "vocab": 512, "length": 128, "batch": 4}
GPU = {"width": 768, "heads": 12, "vocab": 50304, "length": 1024, "batch": 4}
SMALL = {"width": 32, "heads": 2, "vocab": 64, "length": 16, "batch": 2}
LAYERS, DEEP = 48, 128
FEWEST, MOST = 5, 40


class Step:
    """A training step of a GPT with dropout, called plainly or recorded."""

    def __init__(self, layers: int, sizes: dict[str, int], device: str) -> None:
        torch.manual_seed(0)
        shape = {k: sizes[k] for k in ("width", "heads", "vocab", "length")}
        self.model = GPT(layers=layers, **shape).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
        self.batch = batch(sizes["vocab"], sizes["batch"], sizes["length"], device)
        self.device = device

    def plain(self) -> Tensor:
        self.model.zero_grad(set_to_none=True)
        loss = self.model(*self.batch)
        loss.backward()
        return loss

    def recorded(self) -> tracefuse.Capture:
        with tracefuse.capture() as c:
            loss = self.plain()
        del loss
        return c

    def peak(self, run: Any) -> int:
        self.model.zero_grad(set_to_none=True)
        return added_peak(run, self.device)

    def seconds(self, run: Any) -> tuple[float, float]:
        """Of the clock and of the processor."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        began, began_cpu = time.perf_counter(), time.process_time()
        run()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began, time.process_time() - began_cpu


def cost(step: Step, budget_s: float) -> dict[str, Any]:
    step.plain(), step.recorded()  # the first recording imports what recording takes
    pairs: list[tuple[tuple[float, float], tuple[float, float]]] = []
    began = time.perf_counter()
    while len(pairs) < FEWEST or (len(pairs) < MOST and time.perf_counter() - began < budget_s):
        plain, recorded = step.seconds(step.plain), step.seconds(step.recorded)
        pairs.append((plain, recorded))
    ratio, processor = (estimate([recorded[i] / plain[i] for plain, recorded in pairs]) for i in (0, 1))
    peaks = step.peak(step.plain), step.peak(step.recorded)
    ops = sum(half.op_count for half in step.recorded().trace.split())
    return {
        "ops": ops,
        "plain_s": median(plain for (plain, _), _ in pairs),
        "recorded_s": median(recorded for _, (recorded, _) in pairs),
        "ratio": [ratio.median, ratio.low, ratio.high],
        "processor_ratio": [processor.median, processor.low, processor.high] if step.device == "cpu" else None,
        "pairs": len(pairs),
        "peak_nbytes": peaks,
        "peak_ratio": peaks[1] / peaks[0],
    }


def until_the_view(step: Step) -> dict[str, float]:
    found, began = {}, time.perf_counter()

    def note(name: str) -> None:
        nonlocal began
        found[name], began = time.perf_counter() - began, time.perf_counter()

    capture = step.recorded()
    note("run and record")
    _ = capture.trace
    note("trace")
    variant = capture.optimize()
    note("passes")
    payload(variant)
    note("payload")
    return found | {"in all": sum(found.values())}


def main() -> None:
    options: Namespace = parser(__doc__).parse_args()
    sizes = SMALL if options.small else GPU if options.device == "cuda" else CPU
    layers, deep = (2, 3) if options.small else (LAYERS, DEEP)
    first = cost(Step(layers, sizes, options.device), options.budget)
    low, high = first["ratio"][1:]
    print(f"{layers} layers, {first['ops']} ops, {sizes}, measured on {environment(options.device)['device']}")
    times = f"plain {1e3 * first['plain_s']:.1f} ms, recorded {1e3 * first['recorded_s']:.1f} ms"
    print(f"{times}, ratio {first['ratio'][0]:.3f} [{low:.3f}, {high:.3f}] of {first['pairs']} pairs")
    if first["processor_ratio"] is not None:
        print("processor time, ratio {:.3f} [{:.3f}, {:.3f}]".format(*first["processor_ratio"]))
    plain, recorded = (nbytes / 1e6 for nbytes in first["peak_nbytes"])
    print(f"peak memory {plain:.1f} MB, recorded {recorded:.1f} MB, ratio {first['peak_ratio']:.3f}", flush=True)
    view = until_the_view(Step(deep, SMALL, options.device))
    print(f"{deep} layers until the view: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in view.items()))
    write(
        options.out,
        {"environment": environment(options.device), "layers": layers, "cost": first, "deep": deep, "view_s": view},
    )


if __name__ == "__main__":
    main()
