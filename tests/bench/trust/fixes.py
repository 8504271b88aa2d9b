"""What findings say that their fixes are worth, beside what *Try fix* measures, of steps with mistakes that a replay can mend.

    python tests/bench/trust/fixes.py --check --out fixes.json
    python tests/bench/trust/fixes.py --small --only logits_upcast norm_in_float32

Each step of `mistaken_steps.py` is captured, and its ops are timed in profiled replays, so that findings speak of measured
times. Then the first fix that each finding offers is tried, as *Try fix* does, on the step as it ran, for as long as eight
rounds take. What is predicted is within the bound where it is at most 1.5 times as much as what is measured, and at least
that part of it. Where both are less than what the step as it is varies by, nothing can be told: such rows are counted apart.
Rows are written as they are made; one that fails says why, and counts as one that is not within. With `--check` the status
is 1 where fewer than 80 % of those that can be told are within, or a step has none of its findings.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))
from results import environment, parser, write
from trust.fix_rows import LEAST_ROUNDS, Row, judged, share_within, summary
from trust.mistaken_steps import MISTAKEN, Mistaken, Step

import tracefuse
from tracefuse.config.configuration import Config
from tracefuse.diagnose.fixes import Trial
from tracefuse.findings.finding import Finding, Fix
from tracefuse.measure.timing import Estimate
from tracefuse.text import aligned
from tracefuse.variant import Variant

LEAST_WITHIN = 0.8
STEPS = 3
"""Steps that are recorded of a training loop, of which one is captured."""
LONGER = 3
"""How many times as long a trial of too few rounds is made again."""


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(budget=1.5)
    options.add_argument("--only", nargs="+", choices=MISTAKEN, default=list(MISTAKEN), help="only these steps")
    options.add_argument("--seconds", type=float, default=300.0, help="begin no step after these (default: 300)")
    options.add_argument("--check", action="store_true", help="status 1 where predictions are too far off")
    arguments = options.parse_args()
    start_s, rows, left = time.monotonic(), list[Row](), list[str]()
    for name in arguments.only:
        if MISTAKEN[name].on_gpu and arguments.device == "cpu":
            continue
        if time.monotonic() - start_s > arguments.seconds:
            left.append(name)
            continue
        for row in tried(MISTAKEN[name], arguments.small, arguments.device, arguments.budget):
            rows.append({"program": name, **row})
            print(told(rows[-1]), flush=True)
            record = {"benchmark": "fixes", "environment": environment(arguments.device), "small": arguments.small}
            record |= {"budget_s": arguments.budget, "seconds": time.monotonic() - start_s, "left": left}
            write(arguments.out, record | {"share_within": share_within(rows), "rows": rows}, is_quiet=True)
        gc.collect()
        torch.cuda.empty_cache()
    print(f"\n{table(rows)}\n")
    print(summary(rows))
    print(f"not begun: {', '.join(left) or 'nothing'}")
    if arguments.check and not arguments.small and (left or share_within(rows) < LEAST_WITHIN):
        sys.exit(1)
    if arguments.check and any(row["error"] for row in rows):
        sys.exit(1)


def tried(one: Mistaken, small: bool, device: str, budget_s: float) -> Iterator[Row]:
    """A row for each finding of the program that offers a fix, or one that says why there is none."""
    try:
        variant = captured(one, small, device).variant(Config.off())
        variant.timeline()
        found = [f for f in variant.findings() if f.trials and (not one.ids or f.id in one.ids)]
        if missing := sorted(set(one.ids) - {f.id for f in found}):
            yield failed(f"no such finding: {', '.join(missing)}")
    except Exception as error:
        yield failed(f"{type(error).__name__}: {error}")
        return
    known = dict[str, Trial]()
    for finding in found:
        try:
            yield row(variant, finding, budget_s, known)
        except Exception as error:
            yield failed(f"{type(error).__name__}: {error}", finding)


def captured(one: Mistaken, small: bool, device: str) -> tracefuse.Capture:
    torch.manual_seed(0)
    with torch.device(device):
        step: Step = one.make(small)
        if not one.has_update:
            return tracefuse.capture(step)
        with tracefuse.capture_step() as c:
            for _ in range(STEPS):
                step()
    return c


def row(variant: Variant, finding: Finding, budget_s: float, known: dict[str, Trial]) -> Row:
    """What the finding's first fix is predicted to gain, and what it gains, in ms of a step; what findings have in common is
    tried once, and `known` then."""
    fix = finding.trials[0]
    us = finding.worth_us if fix.worth_us is None else fix.worth_us
    if us is None:
        raise ValueError(f"a fix can be tried, and its worth is no number: {finding.worth}")
    change = f"{fix.kind} {fix.of} {fix.changes}"
    if change not in known:
        known[change] = tried_long_enough(variant, fix, budget_s)
    trial = known[change]
    predicted, gained = us / 1e3, trial.gained_ms
    return about(finding) | {
        "predicted_ms": predicted,
        "predicted": finding.kind if fix.worth_us is None else "predicted",
        "measured_ms": interval(gained),
        "step_ms": {"as it is": interval(trial.before_ms), "fixed": interval(trial.after_ms)},
        "ratio": predicted / gained.median if gained.median else None,
        "rounds": trial.timing.rounds,
        "verdict": trial.verdict,
        "difference": {"results": str(trial.difference.results), "gradients": str(trial.difference.gradients)},
        "error": "",
    }


def tried_long_enough(variant: Variant, fix: Fix, budget_s: float) -> Trial:
    """The trial with enough rounds to say something: the budget is for comparing the numbers too, which may take longer."""
    while (trial := variant.try_fix(fix, budget_s=budget_s)).timing.rounds < LEAST_ROUNDS:
        budget_s *= LONGER
    return trial


def about(finding: Finding) -> Row:
    fix = finding.trials[0]
    facts = {"finding": finding.id, "severity": finding.severity, "source": finding.source}
    return facts | {"worth": finding.worth, "fix": fix.does, "fix_kind": fix.kind}


def failed(why: str, finding: Finding | None = None) -> Row:
    facts = about(finding) if finding else {"finding": "", "source": ""}
    return facts | {"predicted_ms": None, "measured_ms": None, "ratio": None, "error": why[:600]}


def interval(one: Estimate) -> list[float]:
    return [one.median, one.low, one.high]


def told(row: Row) -> str:
    return "  ".join(cells(row))


def cells(row: Row) -> tuple[str, ...]:
    if row["error"]:
        return row["program"], row["finding"], "", row["error"].splitlines()[0], "", ""
    median, low, high = row["measured_ms"]
    measured = f"{median:.3g} [{low:.3g}, {high:.3g}]"
    ratio = f"{row['ratio'] or 0:.2f}"
    return row["program"], row["finding"], f"{row['predicted_ms']:.3g}", measured, ratio, judged(row)


def table(rows: list[Row]) -> str:
    return aligned(
        [("program", "finding", "predicted ms", "measured ms", "predicted / measured", ""), *map(cells, rows)]
    )


if __name__ == "__main__":
    main()
