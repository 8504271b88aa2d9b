"""A process that `steps.py` starts warms up, times and compares every column of one program, and writes JSON.

    python tests/bench/cases/step_once.py --case gpt_bf16 --out case.json

The caches are wherever the environment says; `steps.py` gives each process empty ones.
"""

from __future__ import annotations

import copy
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import tracefuse
from tracefuse.captures import Capture
from tracefuse.execution.program import Replays
from tracefuse.measure.op_times import modelled
from tracefuse.measure.peaks import peaks_of
from tracefuse.measure.peer_names import MODES
from tracefuse.measure.rounds import measure
from tracefuse.measure.timing import Timing
from tracefuse.optimizers.liveness import saved_bytes
from tracefuse.variant import Variant

sys.path.append(str(Path(__file__).parents[1]))
from results import environment, parser, write

from cases.step_programs import STEPS, TrainingStep
from cases.timed import copies

COMPILE = {"torch.compile": None, **{f"torch.compile {mode}": mode for mode in MODES[:2]}}
WARM_UPS = 3  # CUDA graphs of torch.compile: one run to warm up, one to record, one that replays.


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--case", choices=STEPS, required=True)
    made.add_argument("--peer-limit", type=float, default=240.0, help="seconds for a column to compile (default: 240)")
    made.add_argument(
        "--leave-out", choices=COMPILE, action="append", default=[], help="not this peer (may be repeated)"
    )
    arguments = made.parse_args()
    write(arguments.out, measured(arguments.case, arguments))


@dataclass
class Columns:
    """Programs by their column, why others have none, and seconds of each first run."""

    programs: dict[str, Replays] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    first_s: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, make: Callable[[], Replays], limit_s: float) -> None:
        """Make and warm up one; it has a reason instead where it raises, or takes longer than `limit_s`."""
        start_s = time.perf_counter()
        try:
            with limited(limit_s):
                program = make()
                run(program)
                self.first_s[name] = time.perf_counter() - start_s
                for _ in range(WARM_UPS - 1):
                    run(program)
        except NotFinished:
            self.failed[name] = f"not finished in {limit_s:g} s"
        except Exception as error:  # whatever a compiler raises is that column's affair, and stands in its row
            first = next((line for line in str(error).splitlines() if line.strip()), "no message")
            self.failed[name] = f"{type(error).__name__}: {first}"
        else:
            self.programs[name] = program
        print(f"{name}: {self.failed.get(name) or f'{self.first_s[name]:.2f} s'}", flush=True)


class NotFinished(BaseException):
    """Time is up. No `Exception`: compilers catch those of single kernels, and go on."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises `NotFinished` in here after `seconds`, and again each second: Python drops what is raised in a destructor.

    Signals reach the main thread only, and compilers compile a backward when it first runs: so that runs in it too.
    """

    def ring(number: int, frame: FrameType | None) -> None:
        raise NotFinished

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(program: Replays) -> None:
    state = program.forward()
    if program.backward is not None:
        program.backward(state)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def measured(name: str, arguments: Namespace) -> dict[str, Any]:
    """All columns of one program, timed, as JSON; the tables are printed."""
    device, on_gpu = arguments.device, arguments.device == "cuda"
    torch.manual_seed(0)
    step = STEPS[name](arguments.small, device)
    torch.backends.cuda.matmul.allow_tf32 = step.tf32
    print(f"\n{name}: {step.title}", flush=True)
    columns, variants, limit_s = Columns(), dict[str, Variant](), arguments.peer_limit
    import_compilers(device)
    columns.add("eager", lambda: differentiable_step(step, step.function), limit_s)
    capture: Capture | None = None

    def optimised(label: str) -> Replays:
        nonlocal capture
        capture = capture or captured(step)
        variants[label] = capture.optimize(**step.variants[label])
        return differentiable_step(step, lambda *_: variants[label].compile()())

    for label in step.variants:
        columns.add(label, lambda label=label: optimised(label), limit_s)  # type: ignore[misc]
    if on_gpu:
        columns.add("tracefuse CUDA graph", lambda: graphed(step, variants["tracefuse"]), limit_s)
        columns.failed |= dict.fromkeys(arguments.leave_out, "left out")
        for column, mode in ((c, m) for c, m in COMPILE.items() if c not in arguments.leave_out):
            columns.add(column, lambda mode=mode: compiled(step, mode), limit_s)  # type: ignore[misc]
    for problem in ("eager", "tracefuse"):
        if problem in columns.failed:
            raise SystemExit(f"{problem}: {columns.failed[problem]}")
    if step.limit_nbytes:
        columns.programs["copy"] = copies(dict(step.limit_nbytes), device)
    return timed(step, columns, variants, arguments)


def import_compilers(device: str) -> None:
    """What compilers import for the first program of a process is no part of any other's first run."""
    step = TrainingStep("tiny", tiny, (torch.ones(3, device=device, requires_grad=True),))
    ours = captured(step).optimize().compile()
    run(differentiable_step(step, lambda *_: ours()))
    if device == "cuda":
        run(compiled(step, None))


def tiny(x: Tensor) -> Tensor:
    return (x * 2).sum()


def timed(step: TrainingStep, columns: Columns, variants: dict[str, Variant], arguments: Namespace) -> dict[str, Any]:
    programs = {"tracefuse": columns.programs.pop("tracefuse"), **columns.programs}
    timing = measure(programs, device=arguments.device, reference=in_float64(step), budget_s=arguments.budget)
    timing = replace(timing, failed=columns.failed)
    print(timing, flush=True)
    return {
        "title": step.title,
        "shapes": [list(t.shape) for t in step.inputs],
        "small": arguments.small,
        "environment": environment(arguments.device),
        "first_run_s": columns.first_s,
        "limit": limit(step, timing, variants["tracefuse"], arguments.device),
        "static": {name: statics(variant) for name, variant in variants.items()},
        "timing": timing.to_json(),
    }


def statics(variant: Variant) -> dict[str, int]:
    calls = [n for n in variant.trace.ops if n.target in variant.kernels]
    return {
        "saved_nbytes": saved_bytes(variant.trace),
        "ops": variant.trace.op_count,
        "kernels": len(variant.kernels),
        "kernel_calls": len(calls),
    }


def limit(step: TrainingStep, timing: Timing, variant: Variant, device: str) -> dict[str, Any]:
    """ms below which the step cannot be, and what that is."""
    if step.limit_nbytes:
        return {"ms": timing.program("copy").times_ms["step"].median, "what": "copy", "nbytes": dict(step.limit_nbytes)}
    torch.cuda.empty_cache()
    peaks = peaks_of(device).roofline(step.tf32)
    return {"ms": sum(modelled(variant.trace, peaks).us.values()) / 1e3, "what": "roofline", "peaks": peaks.source}


# --- columns ----------------------------------------------------------------------------------------------------------


def captured(step: TrainingStep) -> Capture:
    def training_step(*inputs: Tensor) -> Any:
        result = step.function(*inputs)
        if step.leaves:
            result.backward(step.cotangent)
        return result

    found = tracefuse.capture(training_step, *step.inputs, train_all=step.train_all)
    for leaf in step.leaves:
        leaf.grad = None
    return found


def differentiable_step(step: TrainingStep, function: Callable[..., Any]) -> Replays:
    """`function` on the step's inputs under autograd, and the gradients of the step's leaves."""

    def forward() -> tuple[tuple[Any, ...]]:
        result = function(*step.inputs)
        return (tuple(result) if isinstance(result, (tuple, list)) else (result,),)

    def backward(state: tuple[tuple[Any, ...]]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(state[0][0], step.leaves, step.cotangent)

    return Replays(forward, backward if step.leaves else None)


def graphed(step: TrainingStep, variant: Variant) -> Replays:
    program = variant.compile(cuda_graph=True)
    return differentiable_step(step, lambda *_: program())


def compiled(step: TrainingStep, mode: str | None) -> Replays:
    function = torch.compile(step.function, mode=mode, dynamic=False)

    def call(*inputs: Tensor) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return function(*inputs)

    return differentiable_step(step, call)


def in_float64(step: TrainingStep) -> Replays:
    """The same step on the same numbers in float64, whose copies live only while it runs: they are large."""

    def forward() -> tuple[tuple[Any, ...], TrainingStep]:
        function = copy.deepcopy(step.function).double() if isinstance(step.function, nn.Module) else step.function
        inputs = tuple(
            t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in step.inputs
        )
        cotangent = None if step.cotangent is None else step.cotangent.double()
        wide = replace(step, function=function, inputs=inputs, cotangent=cotangent)
        return differentiable_step(wide, function).forward()[0], wide

    def backward(state: tuple[tuple[Any, ...], TrainingStep]) -> tuple[Tensor, ...]:
        (result, *_), wide = state
        return torch.autograd.grad(result, wide.leaves, wide.cotangent)

    return Replays(forward, backward if step.leaves else None)


if __name__ == "__main__":
    main()
