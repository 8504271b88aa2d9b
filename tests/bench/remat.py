"""Rematerialisation on a 12-layer GPT: what each memory budget and weight saves and costs, beside torch.compile's own budget.

    python tests/bench/remat.py --out remat.json

Each row is one budget or weight. `saved` and `static peak` are read off the trace, in bytes; `peak` is what one step was
measured to allocate at most; both peaks leave out what is there before the step. `step` is one forward and backward under
autograd, all programs interleaved in one run. `compile s` is the time of passes and kernels, those of earlier rows being
there. `worst ‖Δ‖/‖g‖` compares the gradients with those of the captured program, with the same dropout masks.
torch.compile's budget is `torch._functorch.config.activation_memory_budget`; below 1 it draws other masks in the backward
(pytorch issue 190758).

The vocabulary is padded to a multiple of 64, as whoever trains such a model does: else the head's matmuls hide the rest.
"""

from __future__ import annotations

import time
import types
from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import Any

import torch
from cases.gpt import SIZES, SMALL
from cases.timed import training_step, worst
from results import environment, parser, write
from torch import Tensor, nn

import tracefuse
from tracefuse.captures import Capture
from tracefuse.demo import GPT, batch
from tracefuse.execution.program import Replays
from tracefuse.measure.rounds import measure
from tracefuse.measure.timing import Timing
from tracefuse.optimizers.liveness import peak_bytes, saved_bytes
from tracefuse.optimizers.trace import nbytes
from tracefuse.text import aligned
from tracefuse.variant import Variant

BUDGETS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
WEIGHTS = (1.0, 0.5, 0.0)
TORCH_BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.1)
PADDED_VOCAB = 50304
AGREE = 0.05
"""The static and the measured peak are called equal within this."""

Point = dict[str, Any]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--dropout", type=float, default=0.1)
    made.add_argument("--torch-compile", action="store_true", help="time torch.compile too; it compiles first")
    made.add_argument("--plain", action="store_true", help="only the weights, without a budget")
    arguments = made.parse_args()
    torch.manual_seed(0)
    model, inputs = model_and_batch(arguments)
    captured = capture(model, inputs)
    parameters = list(model.parameters())
    points, programs = [], {"eager": training_step(lambda: model(*inputs), parameters)}
    for point, variant in variants(captured, arguments.plain):
        points.append(point)
        programs[point["name"]] = training_step(variant.compile(), parameters)
        print(f"{point['name']}: {point['compile_s']:.2f} s", flush=True)
    if arguments.torch_compile:
        programs |= torch_programs(model, inputs, parameters)
    timing = measure(programs, device=arguments.device, budget_s=arguments.budget)
    rows = [*(point | measured(timing, point["name"]) for point in points)]
    others = [
        {"name": p.name, **measured(timing, p.name)} for p in timing.programs if p.name not in {r["name"] for r in rows}
    ]
    print(f"\n{timing.device}: {timing.rounds} rounds\n{table([*others, *rows])}\n")
    found = verdicts(rows, [o for o in others if o["name"].startswith("torch")])
    print("\n".join(f"{name}: {text}" for name, text in found.items()))
    sizes = {**(SMALL if arguments.small else SIZES | {"vocab": PADDED_VOCAB}), "dropout": arguments.dropout}
    machine = environment(arguments.device)
    write(
        arguments.out,
        {"benchmark": "remat", "sizes": sizes, "environment": machine, "rows": [*others, *rows], "verdicts": found},
    )


def model_and_batch(arguments: Namespace) -> tuple[GPT, tuple[Tensor, Tensor]]:
    sizes = SMALL if arguments.small else SIZES | {"vocab": PADDED_VOCAB}
    shape = {k: sizes[k] for k in ("layers", "width", "heads", "vocab", "length")}
    model = GPT(**shape, dropout=arguments.dropout).to(arguments.device, torch.bfloat16)
    return model, batch(sizes["vocab"], sizes["batch"], sizes["length"], arguments.device)


def capture(model: GPT, inputs: tuple[Tensor, Tensor]) -> Capture:
    def step() -> Tensor:
        loss = model(*inputs)
        loss.backward()
        return loss

    captured = tracefuse.capture(step)
    model.zero_grad()
    return captured


# --- ours -------------------------------------------------------------------------------------------------------------


def variants(captured: Capture, plain: bool) -> Iterable[tuple[Point, Variant]]:
    """Every point, with what is known without a clock. The first is no remat at all."""
    exact = gradients(
        captured.optimize(
            simplify=False,
            freeze=False,
            cat=False,
            decompose=False,
            channels_last=False,
            pad=False,
            remat=False,
            fuse=False,
        )
    )
    yield _point("no remat", captured, exact, remat=False)
    for weight in WEIGHTS:
        yield _point(f"weight {weight:g}", captured, exact, remat=weight)
        for budget in () if plain else BUDGETS:
            yield _point(f"weight {weight:g}, {budget:.0%}", captured, exact, remat=weight, memory_budget=budget)


def _point(name: str, captured: Capture, exact: dict[str, Tensor], **options: Any) -> tuple[Point, Variant]:
    start_s = time.perf_counter()
    variant = captured.optimize(**options)
    variant.compile()
    compile_s = time.perf_counter() - start_s
    held = sum(nbytes(p) for p in variant.trace.placeholders)
    return {
        "name": name,
        "options": options,
        "saved_nbytes": saved_bytes(variant.trace),
        "static_peak_nbytes": peak_bytes(variant.trace) - held,
        "kernels": len(variant.kernels),
        "compile_s": compile_s,
        "worst_gradient": worst(gradients(variant), exact)["max_relative_norm"],
    }, variant


def gradients(variant: Variant) -> dict[str, Tensor]:
    """Of the program on the captured inputs and generator states, by parameter."""
    captured = variant.capture
    program = variant.compile().replays(captured.example_inputs, captured.rng_states)
    assert program.backward is not None
    found = program.backward(program.forward())
    return dict(zip([variant.trace.input_of(n).source for n in program.gradients or ()], found, strict=True))


# --- torch's ----------------------------------------------------------------------------------------------------------


def torch_programs(model: GPT, inputs: tuple[Tensor, ...], parameters: list[nn.Parameter]) -> dict[str, Replays]:
    """torch.compile under each budget, compiled. Dynamo keeps what it compiled by code object, so each has its own."""
    from torch._functorch import config

    def step(model: GPT, tokens: Tensor, targets: Tensor) -> Tensor:
        return model(tokens, targets)

    programs = {}
    for budget in TORCH_BUDGETS:
        name = f"torch.compile, {budget:.0%}"
        own = types.FunctionType(step.__code__.replace(co_name=f"step_{budget:g}"), step.__globals__)
        compiled = torch.compile(own, dynamic=False)
        programs[name] = training_step(_bound(compiled, model, *inputs), parameters)
        start_s = time.perf_counter()
        with config.patch(activation_memory_budget=budget):
            program = programs[name]
            assert program.backward is not None
            program.backward(program.forward())
        print(f"{name}: {time.perf_counter() - start_s:.1f} s", flush=True)
    return programs


def _bound(function: Callable[..., Tensor], *arguments: Any) -> Callable[[], Tensor]:
    return lambda: function(*arguments)


# --- what was found ---------------------------------------------------------------------------------------------------


def measured(timing: Timing, name: str) -> Point:
    program = timing.program(name)
    return {
        "peak_nbytes": program.peak_nbytes,
        "step_ms": vars(program.times_ms["step"]),
        "forward_ms": program.times_ms["forward"].median,
        "backward_ms": program.times_ms["backward"].median,
        "shown_step": str(program.times_ms["step"]),
    }


def table(rows: list[Point]) -> str:
    head = (
        "point",
        "saved MB",
        "static peak MB",
        "peak MB",
        "static / peak",
        "step ms",
        "kernels",
        "compile s",
        "worst ‖Δ‖/‖g‖",
    )
    return aligned([head, *map(_cells, rows)])


def _cells(row: Point) -> tuple[str, ...]:
    def mb(key: str) -> str:
        return "" if row.get(key) is None else f"{row[key] / 1e6:.1f}"

    if "options" not in row:
        return row["name"], "", "", mb("peak_nbytes"), "", row["shown_step"], "", "", ""
    agreement = _agreement(row)
    return (
        row["name"], mb("saved_nbytes"), mb("static_peak_nbytes"), mb("peak_nbytes"),
        "" if agreement is None else f"{agreement:.3f}", row["shown_step"], str(row["kernels"]),
        f"{row['compile_s']:.2f}", f"{row['worst_gradient']:.2g}",
    )  # fmt: skip


def _agreement(row: Point) -> float | None:
    return row["static_peak_nbytes"] / row["peak_nbytes"] if row["peak_nbytes"] else None


def verdicts(rows: list[Point], others: list[Point]) -> dict[str, str]:
    """What the rows show: agreement of the peaks, monotony, and beside each of torch's points the fastest as small."""
    found = {}
    agreements = [a for a in map(_agreement, rows) if a is not None]
    if agreements:
        low, high = min(agreements), max(agreements)
        fits = "pass" if low >= 1 - AGREE and high <= 1 + AGREE else "FAIL"
        found["static over measured peak"] = f"{low:.3f} to {high:.3f} (within {AGREE:.0%}: {fits})"
    for key in ("static_peak_nbytes", "peak_nbytes"):
        series = {
            w: [r[key] for r in rows if r["options"].get("remat") == w and "memory_budget" in r["options"]]
            for w in WEIGHTS
        }
        rising = [w for w, peaks in series.items() if None not in peaks and peaks != sorted(peaks, reverse=True)]
        if any(series.values()) and None not in series[WEIGHTS[0]]:
            found[f"{key} falls with the budget"] = (
                "FAIL at weight " + ", ".join(map(str, rising)) if rising else "pass"
            )
    for other in others:
        found[f"beside {other['name']}"] = _beside(rows, other)
    return found


def _beside(rows: list[Point], other: Point) -> str:
    as_small = [r for r in rows if r["peak_nbytes"] is not None and r["peak_nbytes"] <= other["peak_nbytes"]]
    if not as_small:
        return "no point of ours has so small a peak"
    best = min(as_small, key=lambda r: r["step_ms"]["median"])
    ratio = best["step_ms"]["median"] / other["step_ms"]["median"]
    return f"{best['name']}: {ratio:.3f} of its time, {best['peak_nbytes'] / other['peak_nbytes']:.3f} of its peak"


if __name__ == "__main__":
    main()
