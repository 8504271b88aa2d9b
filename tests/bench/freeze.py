"""Freezing: one all-trainable capture, pruned; beside eager and torch.compile of the model with `requires_grad=False`.

    python tests/bench/freeze.py --out freeze.json

    lora     a GPT, 12 layers, 768 wide, batch 8 x 1024, bfloat16, LoRA of rank 8 on the attention's projections
    stack    five sizes of linear layers without biases, every second one frozen, bfloat16

Each model is frozen as a user freezes it and captured once with `train_all`. Programs: that capture replayed (all trained),
the same after `freeze` alone (pruned), after all passes (tracefuse), eager, torch.compile. Static: bytes that the forward
saves. Measured, interleaved: backward, step, peak memory. Numbers are compared with eager in float32.
"""

from __future__ import annotations

import copy
import itertools
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from results import environment, parser, write
from torch import Tensor, nn

import tracefuse
from tracefuse.capture import Capture
from tracefuse.demo import GPT, batch
from tracefuse.measure import Program, measure
from tracefuse.optimizers.liveness import saved_bytes
from tracefuse.optimizers.trace import human_bytes
from tracefuse.options import Config
from tracefuse.timing import Timing, aligned
from tracefuse.variant import Variant

sys.path.insert(0, str(Path(__file__).parents[1]))
from freeze_programs import LoRA, is_frozen

GPT_SIZES = {"layers": 12, "width": 768, "heads": 12, "vocab": 50257, "length": 1024, "batch": 8}
SMALL_GPT = {"layers": 2, "width": 64, "heads": 4, "vocab": 211, "length": 32, "batch": 2}
STACK = {"rows": 8192, "sizes": (1024, 4096, 6144, 4096, 1024)}
SMALL_STACK = {"rows": 16, "sizes": (24, 40, 56, 40, 24)}
DTYPE, WIDER = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Case:
    """`loss(model)` is the training cell's forward; what `patterns` match is frozen in `model`."""

    model: nn.Module
    loss: Callable[[nn.Module], Tensor]
    patterns: tuple[str, ...]

    @property
    def trained(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}


def lora(options: Namespace) -> Case:
    torch.manual_seed(0)
    sizes = SMALL_GPT if options.small else GPT_SIZES
    model = GPT(**{k: sizes[k] for k in ("layers", "width", "heads", "vocab", "length")}, dropout=0.0)
    for block in model.h:
        block.attn.qkv, block.attn.proj = LoRA(block.attn.qkv, 8), LoRA(block.attn.proj, 8)
    tokens, targets = batch(sizes["vocab"], sizes["batch"], sizes["length"], options.device)
    return frozen(model, lambda model: model(tokens, targets), ("*", "!*.lora_*"), options)


def stack(options: Namespace) -> Case:
    torch.manual_seed(0)
    sizes = SMALL_STACK if options.small else STACK
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes["sizes"])))
    x = torch.randn(sizes["rows"], sizes["sizes"][0], device=options.device)
    of_dtype = {dtype: x.to(DTYPE).to(dtype) for dtype in (DTYPE, WIDER)}

    def loss(model: nn.Module) -> Tensor:
        return model(of_dtype[next(model.parameters()).dtype]).square().mean()

    return frozen(model, loss, ("[02].*",), options)


def frozen(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], patterns: tuple[str, ...], options: Namespace
) -> Case:
    model.to(options.device, DTYPE)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_frozen(name, patterns))
    return Case(model, loss, patterns)


CASES = {"lora": lora, "stack": stack}


# --- one case ---------------------------------------------------------------------------------------------------------


def measured(name: str, options: Namespace) -> dict[str, Any]:
    case = CASES[name](options)
    captured = tracefuse.capture(lambda: backward(case.loss(case.model)), train_all=True)
    case.model.zero_grad()
    variants = {
        "all trained": captured.variant(Config.off()),
        "pruned": captured.variant(Config.off().changed(freeze=case.patterns)),
        "tracefuse": captured.optimize(freeze=case.patterns),
    }
    static = {n: {"saved_nbytes": saved_bytes(v.trace), "ops": v.trace.op_count} for n, v in variants.items()}
    programs = replays(captured, variants) | eager(case, captured, options)
    timing = measure(programs, device=options.device, reference=exact(case, captured), budget_s=options.budget)
    costs = captured.frozen_costs(case.patterns)
    together = costs.together
    print(f"\n{name}: frozen {', '.join(case.patterns)}", table(timing, static), timing, sep="\n\n")
    print(f"\nfreezing spares {len(together.ops)} ops, modelled {together.modelled_us:.4g} µs of {costs.peaks.source}")
    return {
        "patterns": case.patterns,
        "static": static,
        "timing": timing.to_json(),
        "ratios": ratios(timing),
        "frozen_together": {"saved_nbytes": together.saved_nbytes, "modelled_us": together.modelled_us},
    }


def backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss


def replays(captured: Capture, variants: dict[str, Variant]) -> dict[str, Program]:
    return {
        name: variant.compile().replays(captured.example_inputs, captured.rng_states)
        for name, variant in variants.items()
    }


def eager(case: Case, captured: Capture, options: Namespace) -> dict[str, Program]:
    """The frozen model under autograd; on a CPU torch.compile needs a C++ compiler and runs other kernels."""
    programs = {"eager": differentiable(lambda: case.loss(case.model), case.trained, captured)}
    if options.device == "cuda":
        compiled = torch.compile(case.model)
        programs["torch.compile"] = differentiable(lambda: case.loss(compiled), case.trained, captured)
    return programs


def exact(case: Case, captured: Capture) -> Program:
    """Eager, everything trained: what every program's gradients are compared with."""
    model = copy.deepcopy(case.model).to(WIDER).requires_grad_(True)
    return differentiable(lambda: case.loss(model), dict(model.named_parameters()), captured)


def differentiable(run: Callable[[], Tensor], leaves: dict[str, Tensor], captured: Capture) -> Program:
    """`run()` under autograd and the gradients of `leaves`, called as the trace calls them."""
    name_of = {i.source: i.name for i in captured.trace.inputs}
    return Program(
        lambda: ((run(),),),
        lambda state: torch.autograd.grad(state[0][0], list(leaves.values())),
        tuple(name_of[source] for source in leaves),
    )


# --- tables -----------------------------------------------------------------------------------------------------------


def table(timing: Timing, static: dict[str, dict[str, int]]) -> str:
    rows = []
    for p in timing.programs:
        saved = human_bytes(static[p.name]["saved_nbytes"]) if p.name in static else ""
        peak = "not measured" if p.peak_nbytes is None else human_bytes(p.peak_nbytes)
        rows.append((p.name, saved, peak, *(f"{p.times_ms[phase].median:.4g}" for phase in ("backward", "step"))))
    found = (f"{name}: {', '.join(f'{k} {v:.3f}' for k, v in r.items())}" for name, r in ratios(timing).items())
    return "\n".join([aligned([("program", "saved", "peak", "backward ms", "step ms"), *rows]), "", *found])


def ratios(timing: Timing) -> dict[str, dict[str, float]]:
    """Of medians and of peaks, by pair of programs: below 1 the first is faster, or needs less."""
    pairs = [("pruned", "all trained"), ("pruned", "eager"), ("tracefuse", "eager"), ("tracefuse", "torch.compile")]
    known = {p.name: p for p in timing.programs}
    found: dict[str, dict[str, float]] = {}
    for mine, other in (pair for pair in pairs if known.keys() >= set(pair)):
        a, b = known[mine], known[other]
        row = {phase: a.times_ms[phase].median / b.times_ms[phase].median for phase in ("backward", "step")}
        if a.peak_nbytes is not None and b.peak_nbytes is not None:
            row["peak"] = a.peak_nbytes / b.peak_nbytes
        found[f"{mine} / {other}"] = row
    return found


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--case", choices=CASES, action="append", help="only this one (may be repeated)")
    options = made.parse_args()
    cases = {name: measured(name, options) for name in options.case or CASES}
    sizes = {"lora": SMALL_GPT, "stack": SMALL_STACK} if options.small else {"lora": GPT_SIZES, "stack": STACK}
    write(options.out, {"benchmark": "freeze", "dtype": "bfloat16", "sizes": sizes, "cases": cases,
                        "environment": environment(options.device)})  # fmt: skip


if __name__ == "__main__":
    main()
