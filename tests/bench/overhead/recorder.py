"""Recording has a cost: a GPT's training step under `tracefuse.capture` beside the same step without, in time and in memory.

    python tests/bench/overhead/recorder.py --out recorder.json     48 layers; then a 128-layer capture until it can be shown

Steps are run in turn, and each ratio is of two that followed one another: of the time that passed and, on a CPU, of the
processor time that the process took, which other programs on the machine disturb less. The floor is a dispatch mode that does
nothing but hand each operator on: whatever records operators in Python pays that. A GPU gets two sizes: GPT-2 XL, and a
narrow model whose kernels end sooner than the host can queue them. Memory is what a step adds to what was allocated, at its
highest, by torch's own count; gradients are None before each. The last part captures a model of 128 layers, runs all passes
and makes the payload that the view shows, without measuring anything.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.measure.timing import estimate
from tracefuse.tables.allocator import added_peak
from tracefuse.widgets.payload.program import payload

sys.path.append(str(Path(__file__).parents[1]))
from results import environment, parser, write

SIZES: dict[str, dict[str, dict[str, int]]] = {
    "cpu": {"256 wide": {"width": 256, "heads": 4, "vocab": 512, "length": 128, "batch": 4}},
    "cuda": {
        "GPT-2 XL, 1600 wide": {"width": 1600, "heads": 25, "vocab": 50304, "length": 1024, "batch": 8},
        "768 wide": {"width": 768, "heads": 12, "vocab": 50304, "length": 1024, "batch": 4},
    },
}
SMALL = {"width": 32, "heads": 2, "vocab": 64, "length": 16, "batch": 2}
LAYERS, DEEP = 48, 128
FEWEST, MOST = 5, 40


class HandOn(TorchDispatchMode):
    """The least that a dispatch mode does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


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

    def handed_on(self) -> None:
        with HandOn():
            self.plain()

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
    step.plain(), step.handed_on(), step.recorded()  # the first recording imports what recording takes
    rounds: list[list[tuple[float, float]]] = []
    began = time.perf_counter()
    while len(rounds) < FEWEST or (len(rounds) < MOST and time.perf_counter() - began < budget_s):
        rounds.append([step.seconds(run) for run in (step.plain, step.handed_on, step.recorded)])

    def ratio(of: int, clock: int) -> list[float]:
        found = estimate([one[of][clock] / one[0][clock] for one in rounds])
        return [found.median, found.low, found.high]

    peaks = step.peak(step.plain), step.peak(step.recorded)
    capture = step.recorded()
    return {
        "ops": sum(half.op_count for half in capture.trace.split()),
        "recorded_ops": len(capture.run.recorder.recording.calls),
        **{f"{name}_s": median(one[at][0] for one in rounds) for at, name in enumerate(("plain", "floor", "recorded"))},
        "ratio": ratio(2, 0),
        "floor_ratio": ratio(1, 0),
        "processor_ratio": ratio(2, 1) if step.device == "cpu" else None,
        "rounds": len(rounds),
        "peak_nbytes": peaks,
        "peak_ratio": peaks[1] / peaks[0],
    }


def text(found: dict[str, Any]) -> str:
    times = ", ".join(f"{name} {1e3 * found[f'{name}_s']:.1f} ms" for name in ("plain", "floor", "recorded"))
    ratios = "; ".join(
        "{} {:.3f} [{:.3f}, {:.3f}]".format(title, *found[key])
        for title, key in (("ratio", "ratio"), ("of the floor", "floor_ratio"), ("processor time", "processor_ratio"))
        if found[key] is not None
    )
    plain, recorded = (nbytes / 1e6 for nbytes in found["peak_nbytes"])
    memory = f"peak memory {plain:.1f} MB, recorded {recorded:.1f} MB, ratio {found['peak_ratio']:.3f}"
    return f"{found['recorded_ops']} operators recorded: {times}\n{ratios}; {found['rounds']} rounds\n{memory}"


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
    sizes = {"small": SMALL} if options.small else SIZES[options.device]
    layers, deep = (2, 3) if options.small else (LAYERS, DEEP)
    record: dict[str, Any] = {"environment": environment(options.device), "layers": layers, "costs": {}, "deep": deep}
    for title, size in sizes.items():
        found = cost(Step(layers, size, options.device), options.budget)
        record["costs"][title] = {"sizes": size, **found}
        print(f"{layers} layers, {title}, measured on {record['environment']['device']}: {text(found)}", flush=True)
    view = until_the_view(Step(deep, SMALL, options.device))
    print(f"{deep} layers until the view: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in view.items()))
    write(options.out, record | {"view_s": view})


if __name__ == "__main__":
    main()
