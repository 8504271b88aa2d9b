"""Rotary embedding, forward and backward: eager, tracefuse and torch.compile beside a copy of as many bytes, in one run.

    python tests/bench/rope.py --out rope.json

All run as differentiable functions under autograd. The copy reads and writes as many bytes as the rotated tensor has, once
per phase: the time below which no kernel that writes the result can be (the table of angles has 1/320 of its elements).
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from results import environment, parser, write
from torch import Tensor

import tracefuse
from tracefuse.measure import Program, measure
from tracefuse.timing import Timing, aligned

sys.path.insert(0, str(Path(__file__).parents[1]))
from programs import apply_rope

SHAPE, SMALL = (4096, 10, 32, 128), (64, 2, 4, 32)


def main() -> None:
    arguments = parser(__doc__).parse_args()
    torch.manual_seed(0)
    shape = SMALL if arguments.small else SHAPE
    cases = {}
    for dtype in (torch.float32, torch.bfloat16):
        cases[str(dtype).removeprefix("torch.")] = case(shape, dtype, arguments)
    machine = environment(arguments.device)
    write(arguments.out, {"benchmark": "rope", "shape": shape, "environment": machine, "cases": cases})


def case(shape: tuple[int, ...], dtype: torch.dtype, arguments: Namespace) -> dict[str, Any]:
    """Measure and print one dtype."""
    device = arguments.device
    t = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
    freqs = torch.randn(shape[0], 1, 1, shape[-1], device=device)
    cotangent = torch.randn_like(t)

    def step() -> Tensor:
        out = apply_rope(t, freqs)
        out.backward(cotangent)
        return out

    captured = tracefuse.capture(step)
    variant = captured.optimize()
    optimised = variant.compile()
    programs = {
        "eager": differentiable(lambda: apply_rope(t, freqs), t, cotangent),
        "tracefuse": differentiable(optimised, t, cotangent),
    }
    # On a CPU torch.compile needs a C++ compiler, and its times would be those of other kernels.
    if device == "cuda":
        compiled = torch.compile(apply_rope)
        programs["torch.compile"] = differentiable(lambda: compiled(t, freqs), t, cotangent)
    programs["copy"] = copies(t.detach())
    exact = differentiable(lambda: apply_rope(t.double(), freqs.double()), t, cotangent.double())
    timing = measure(programs, device=device, reference=exact, budget_s=arguments.budget)
    nbytes = 2 * t.numel() * t.element_size()
    print(f"\nrope {list(shape)} {dtype}, max |Δ| against float64\n{timing}\n{percentages(timing, nbytes)}")
    return {
        "timing": timing.to_json(),
        "nbytes_per_phase": nbytes,
        "copy_bytes_per_s": nbytes / (timing.program("copy").times_ms["forward"].median * 1e-3),
        "percent_of_copy": {p.name: of_copy(timing, p.name) for p in timing.programs},
        "kernels": [k.name for k in variant.kernels],
        "forward_ops": variant.forward.op_count,
        "backward_ops": variant.backward.op_count,
    }


def differentiable(run: Callable[[], Tensor], leaf: Tensor, cotangent: Tensor) -> Program:
    """`run()` under autograd, and the gradient of `leaf`."""

    def forward() -> tuple[tuple[Tensor]]:
        return ((run(),),)

    def backward(state: tuple[tuple[Tensor]]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(state[0][0], leaf, cotangent)

    return Program(forward, backward)


def copies(source: Tensor) -> Program:
    """One copy in each phase."""
    target = torch.empty_like(source)
    return Program(lambda: ((target.copy_(source),),), lambda state: (target.copy_(source),), compared=False)


def of_copy(timing: Timing, name: str) -> dict[str, float]:
    """Percent of the measured copy bandwidth that `name` reaches on the bytes that have to move, by phase."""
    mine, copy = timing.program(name).times_ms, timing.program("copy").times_ms
    return {phase: 100 * copy[phase].median / mine[phase].median for phase in mine}


def percentages(timing: Timing, nbytes: int) -> str:
    rows = [(p.name, *(f"{v:.1f} %" for v in of_copy(timing, p.name).values())) for p in timing.programs]
    speed = nbytes / (timing.program("copy").times_ms["forward"].median * 1e-3)
    title = f"% of the copy bandwidth, {speed / 1e12:.3g} TB/s {timing.device}"
    return f"\n{title}\n{aligned([('', 'forward', 'backward', 'step'), *rows])}"


if __name__ == "__main__":
    main()
