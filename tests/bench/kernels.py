"""Generated kernels beside eager, torch.compile and a copy of the bytes that must move, forward and backward.

    python tests/bench/kernels.py --out kernels.json
    python tests/bench/kernels.py --case softmax --case cross_entropy
    python tests/bench/kernels.py --tune

All programs of a case run interleaved, under autograd, torch.compile warmed and with static shapes. "limit" is the time of a
copy, in the same run, that moves as many bytes as the phase must (`cases/kernel_cases.py` says which). "must" and "aim" are
the bounds that each case was given. Differences are from the same program in float64.

Tunings are remembered: after a run with `--tune` a run without it uses tuned blocks too, unless TRACEFUSE_CACHE names another
folder. The JSON says of each kernel what it ran on.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from cases.kernel_cases import CASES, Case, Goal
from cases.timed import copies, differentiable, release
from results import environment, parser, write
from torch import Tensor

import tracefuse
from tracefuse.execution.program import Replays
from tracefuse.measure.rounds import measure
from tracefuse.measure.timing import ProgramTiming, Timing
from tracefuse.text import aligned
from tracefuse.variant import Variant

TITLES = ("case", "phase", "limit ms", "ours ms", "of limit", "of copy", "of compile", "of eager", "must", "aim")


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--case", action="append", choices=CASES, help="only this one (may be repeated)")
    made.add_argument("--tune", action="store_true", help="try block sizes of each kernel first (a GPU's)")
    arguments = made.parse_args()
    cases = {}
    for name in arguments.case or CASES:
        torch.manual_seed(0)
        cases[name] = run(CASES[name](arguments.small), arguments)
        release(arguments.device)
    rows = [row for case in cases.values() for row in case["rows"]]
    print(f"\n{aligned([TITLES, *map(_texts, rows)])}")
    failed = [f"{row['case']} {row['phase']}" for row in rows if row["must"] is False]
    print(f"\nbelow what must be: {', '.join(failed) or 'none'}")
    record = {"benchmark": "kernels", "environment": environment(arguments.device), "tune": arguments.tune}
    write(arguments.out, record | {"cases": cases})


def run(case: Case, arguments: Namespace) -> dict[str, Any]:
    """Measure one case and print its tables."""
    inputs = [typed.make(arguments.device) for typed in case.inputs]
    cotangent = None
    if "backward" in case.limit_nbytes:
        cotangent = torch.randn_like(case.function(*inputs))
    variant = captured(case, inputs, cotangent)
    variant.compile(tune=arguments.tune)
    programs = programs_of(case, variant, inputs, cotangent, arguments.device)
    exact = None if case.draws else in_float64(case, inputs, cotangent)
    timing = measure(programs, device=arguments.device, reference=exact, budget_s=arguments.budget)
    # Small tensors fit a cache, and a CPU runs no kernel of ours: the bounds are about neither.
    is_judged = arguments.device == "cuda" and not arguments.small
    rows = [row_of(case, timing, phase, is_judged) for phase in case.limit_nbytes]
    blocks = {k.name: blocks_of(variant, k.name) for k in variant.kernels}
    shown = "".join(f"\n  {name}: {how}" for name, how in blocks.items())
    print(f"\n{case.name}, max |Δ| against float64\n{timing}\nkernels: {shown or 'none'}", flush=True)
    return {
        "shapes": [list(t.shape) for t in inputs],
        "dtypes": [str(t.dtype).removeprefix("torch.") for t in inputs],
        "limit_nbytes": case.limit_nbytes,
        "rows": rows,
        "timing": timing.to_json(),
        "kernels": list(blocks),
        "blocks": blocks,
        "forward_ops": variant.forward.op_count,
        "backward_ops": variant.backward.op_count,
    }


def blocks_of(variant: Variant, name: str) -> str:
    """How a kernel's block sizes were found."""
    tuning = variant.tunings.get(name)
    if tuning is None:
        return "blocks guessed"
    return f"{tuning.note} (block {tuning.block:+d}, warps {tuning.warps:+d})"


# --- programs ---------------------------------------------------------------------------------------------------------


def captured(case: Case, inputs: list[Tensor], cotangent: Tensor | None) -> Variant:
    def step(*tensors: Tensor) -> Any:
        result = case.function(*tensors)
        if cotangent is not None:
            result.backward(cotangent)
        return result

    return tracefuse.capture(step, *inputs).optimize()


def programs_of(
    case: Case, variant: Variant, inputs: list[Tensor], cotangent: Tensor | None, device: str
) -> dict[str, Replays]:
    """On a CPU without torch.compile, which needs a C++ compiler there and would time other kernels."""
    compared = not case.draws
    made = {
        "eager": differentiable(lambda: case.function(*inputs), inputs, cotangent, compared),
        "tracefuse": differentiable(variant.compile(), inputs, cotangent, compared),
    }
    if device == "cuda":
        # Cases share no code: what was compiled for one must not count against the next one's limit of recompilations.
        torch.compiler.reset()
        compiled = torch.compile(case.function, dynamic=False)
        made["torch.compile"] = differentiable(lambda: compiled(*inputs), inputs, cotangent, compared)
    return made | {"copy": copies(case.limit_nbytes, device)}


def in_float64(case: Case, inputs: list[Tensor], cotangent: Tensor | None) -> Replays:
    """The same program on the same numbers in float64. Its tensors live only while it runs: they are large."""

    def forward() -> tuple[tuple[Tensor, ...], list[Tensor]]:
        wide = [t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in inputs]
        result = case.function(*wide)
        return result if isinstance(result, tuple) else (result,), [t for t in wide if t.requires_grad]

    def backward(state: tuple[tuple[Tensor, ...], list[Tensor]]) -> tuple[Tensor, ...]:
        (result,), leaves = state
        assert cotangent is not None
        return torch.autograd.grad(result, leaves, cotangent.to(result.dtype))

    return Replays(forward, None if cotangent is None else backward)


# --- the table --------------------------------------------------------------------------------------------------------


def row_of(case: Case, timing: Timing, phase: str, is_judged: bool) -> dict[str, Any]:
    """One line of the table; times in ms, ratios of medians. None for what was not measured, not judged or not asked for."""
    times = {p.name: p.times_ms[phase].median for p in timing.programs}
    ours = times["tracefuse"]
    over = {name: ours / time for name, time in times.items()}
    of_limit, of_peer = over["copy"], over.get("torch.compile")
    goal = case.goal if is_judged else Goal()
    return {
        "case": case.name,
        "phase": phase,
        "limit_ms": times["copy"],
        "ours_ms": ours,
        "of_limit": of_limit,
        "percent_of_copy": 100 / of_limit,
        "of_compile": of_peer,
        "of_eager": over["eager"],
        "must": judged((of_limit, goal.must_of_limit), (of_peer, goal.must_of_peer)),
        "aim": judged((of_limit, goal.aim_of_limit)),
        "max_abs_difference": {p.name: difference(p, phase) for p in timing.programs if p.difference},
    }


def judged(*pairs: tuple[float | None, float | None]) -> bool | None:
    """Whether every ratio is within its bound; None where no pair has both."""
    both = [ratio <= bound for ratio, bound in pairs if ratio is not None and bound is not None]
    return all(both) if both else None


def difference(program: ProgramTiming, phase: str) -> float | str:
    assert program.difference is not None
    found = program.difference.results if phase == "forward" else program.difference.gradients
    return found if found == found else "nan"


def _texts(row: dict[str, Any]) -> tuple[str, ...]:
    words = {True: "pass", False: "FAIL", None: ""}
    of_compile = "" if row["of_compile"] is None else f"{row['of_compile']:.3f}"
    return (
        row["case"], row["phase"], f"{row['limit_ms']:.4f}", f"{row['ours_ms']:.4f}", f"{row['of_limit']:.3f}",
        f"{row['percent_of_copy']:.0f} %", of_compile, f"{row['of_eager']:.3f}", words[row["must"]], words[row["aim"]],
    )  # fmt: skip


if __name__ == "__main__":
    main()
