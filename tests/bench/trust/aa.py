"""A program is timed beside itself: how often `measure` sees a difference that is none, and whether it sees a planted 5 %.

    python tests/bench/trust/aa.py --check --out aa.json
    python tests/bench/trust/aa.py --device cpu --runs 100 --planted 20 --budget 5

The program is the captured training step of a GPT, replayed as `Variant.measure` replays it. "A/A" compares two replays of
it under two names. "planted" compares it with itself followed by more work, as much as takes 5 % of its step. Timing finds
how many elements that work needs, and the JSON says which share was hit. A comparison fails where any phase of an A/A is
called faster or slower, or where the step of a planted one is neither called slower nor hidden by noise that the verdict
speaks of. With `--check` the status is 1 if more than 5 % of the A/A fail, or any of the planted.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.execution.program import Replays
from tracefuse.measure.rounds import measure
from tracefuse.measure.timing import Timing
from tracefuse.text import aligned
from tracefuse.variant import Variant

sys.path.append(str(Path(__file__).parents[1]))
from results import environment, parser, write

SIZES = {"layers": 12, "width": 768, "heads": 12, "vocab": 50304, "length": 1024, "batch": 8}
SMALL = {"layers": 2, "width": 128, "heads": 4, "vocab": 256, "length": 64, "batch": 4}
UNITS = 4
"""Launches that the planted work takes: few beside the step's."""
ROUNDS_OF_CALIBRATION = 4


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--runs", type=int, default=100, help="comparisons of the program with itself (default: 100)")
    made.add_argument("--planted", type=int, default=20, help="comparisons with a planted slowdown (default: 20)")
    made.add_argument("--more", type=float, default=0.05, help="the slowdown, as a share of the step (default: 0.05)")
    made.add_argument("--check", action="store_true", help="end with status 1 if too many fail")
    arguments = made.parse_args()
    program = step_program(SMALL if arguments.small else SIZES, arguments.device)

    def compare(other: Replays) -> Timing:
        return measure({"captured": program, "again": other}, device=arguments.device, budget_s=arguments.budget)

    slowed, share = planted(program, arguments.more, arguments.device, arguments.budget)
    print(f"planted: {share:.2%} of the step, by timing it alone", flush=True)
    equal = [told(compare(replace(program)), f"A/A {n + 1}") for n in range(arguments.runs)]
    slower = [told(compare(slowed), f"planted {n + 1}") for n in range(arguments.planted)]
    alarms = sum(not says_none(one) for one in equal)
    seen = sum(one["step"]["verdict"] == "slower" for one in slower)
    print(f"\n{table(equal, slower)}\n")
    few = sum("too few" in one["step"]["verdict"] for one in equal)
    hidden = sum("the noise hides" in one["step"]["verdict"] for one in slower)
    print(
        f"A/A: a difference seen in {alarms} of {len(equal)}, none in {len(equal) - alarms - few}, too few rounds in {few}"
    )
    print(f"planted: seen in {seen} of {len(slower)}; in {hidden} the verdict says that noise hides as much")
    write(
        arguments.out,
        {"benchmark": "aa", "environment": environment(arguments.device), "small": arguments.small}
        | {
            "budget_s": arguments.budget,
            "planted_share": share,
            "no_difference": len(equal) - alarms - few,
            "too_few": few,
            "seen": seen,
        }
        | {"hidden_by_noise": hidden}
        | {"equal": equal, "planted": slower},
    )
    if arguments.check:
        sys.exit(int(alarms + few > 0.05 * len(equal) or seen + hidden < len(slower)))


# --- programs ---------------------------------------------------------------------------------------------------------


def step_program(sizes: dict[str, int], device: str) -> Replays:
    """A captured training step, as `Variant.measure` replays it; in bfloat16 on a GPU."""
    torch.manual_seed(0)
    shape = {k: sizes[k] for k in ("layers", "width", "heads", "vocab", "length")}
    model = GPT(**shape).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    tokens, targets = batch(sizes["vocab"], sizes["batch"], sizes["length"], device)
    captured = tracefuse.capture(lambda: model(tokens, targets).backward())
    variant: Variant = captured.optimize().baseline
    return variant.compile().replays(captured.example_inputs, captured.rng_states)


def planted(program: Replays, more: float, device: str, budget_s: float) -> tuple[Replays, float]:
    """`program` with `more` of its step's time in work after its backward, and the share that this work was timed to take."""
    step_ms = step_time(program, device, budget_s)
    elements = 1 << 16
    for _ in range(ROUNDS_OF_CALIBRATION):
        work = work_on(elements, device)
        share = step_time(Replays(functools.partial(alone, work), compared=False), device, budget_s / 2) / step_ms
        if abs(share / more - 1) < 0.02:
            break
        elements = max(1, round(elements * more / share))

    def backward(state: Any) -> Any:
        gradients = program.backward(state)
        work()
        return gradients

    return replace(program, backward=backward), share


def work_on(elements: int, device: str) -> Callable[[], torch.Tensor]:
    source = torch.ones(elements, device=device)
    target = torch.empty_like(source)

    def work() -> torch.Tensor:
        for _ in range(UNITS):
            torch.sin(source, out=target)
        return target

    return work


def alone(work: Callable[[], torch.Tensor]) -> tuple[tuple[torch.Tensor]]:
    """The work as a program's forward."""
    return ((work(),),)


def step_time(program: Replays, device: str, budget_s: float) -> float:
    return measure({"alone": program}, device=device, budget_s=budget_s).baseline.times_ms["step"].median


# --- what was found ---------------------------------------------------------------------------------------------------


def told(timing: Timing, name: str) -> dict[str, Any]:
    """The rows of one comparison by phase, printed when one of them says something."""
    rows = {row.label: {"ratio": vars(row.ratio), "verdict": row.verdict} for row in timing.rows}
    said = "; ".join(f"{label} {row['ratio']['median']:.4f} {row['verdict']}" for label, row in rows.items())
    print(f"{name}: {timing.rounds} rounds of {timing.inner}: {said}", flush=True)
    return rows | {"rounds": timing.rounds, "stopped": timing.stopped}


def says_none(found: dict[str, Any]) -> bool:
    return {"faster", "slower"}.isdisjoint(found[phase]["verdict"] for phase in ("forward", "backward", "step"))


def table(equal: list[dict[str, Any]], slower: list[dict[str, Any]]) -> str:
    """How often each verdict was given on the step, and the spread of its ratio."""
    rows = []
    for name, found in (("A/A", equal), ("planted", slower)):
        if found:
            ratios = sorted(one["step"]["ratio"]["median"] for one in found)
            said = Counter(one["step"]["verdict"].split(":")[0] for one in found)
            spread = f"{ratios[0]:.4f} to {ratios[-1]:.4f}"
            rows.append((name, f"{median(ratios):.4f}", spread, ", ".join(f"{k} {v}" for k, v in said.items())))
    return aligned([("comparison", "ratio of the step", "from, to", "verdicts on the step"), *rows])


if __name__ == "__main__":
    main()
