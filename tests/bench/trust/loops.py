"""Loops that frameworks own: one line captures step 3, the run is left alone, the step replays.

    python tests/bench/trust/loops.py --out loops.json                 on a GPU where there is one
    python tests/bench/trust/loops.py --device cpu --only GAN PPO --check

Each loop of `tests/loops/training_loops.py` is run four times, made anew: twice by itself, which says whether eager repeats
itself, and then inside `capture_step(n=3)` to its fifth step, which must be the same run. A run of three steps, of which the
last is captured, is still there as the step left it: a replay is held against that. A row says how far the update could be
told from the rest, what varies between steps 3 and 4, and the times of the captured and of the optimised step. With `--check`
it ends with status 1 where a run was disturbed, a replay differs where eager repeats itself, or a loop that is there failed.
"""

from __future__ import annotations

import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import tracefuse
from tracefuse.measure.timing import Timing
from tracefuse.optimizers.errors import TracefuseError
from tracefuse.text import aligned

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "loops")]
from results import environment, parser, write
from training_loops import LOOPS, Trained

SHOWN, STEPS = 3, 5


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", nargs="*", choices=sorted(LOOPS), help="loops (default: all)")
    options.add_argument("--check", action="store_true", help="status 1 where something does not hold")
    arguments = options.parse_args()
    warnings.simplefilter("ignore")
    rows = [_row(name, arguments.device, arguments.budget) for name in arguments.only or LOOPS]
    titles = (
        "loop",
        "eager repeats",
        "run unharmed",
        "step",
        "ops",
        "update ops",
        "replay",
        "varies",
        "step ms, ours ms",
    )
    print(aligned([titles, *map(_cells, rows)]))
    for row in rows:
        for text in filter(None, (row.get("skipped"), row.get("error"), row.get("uncut"), row.get("not_measured"))):
            print(f"{row['loop']}: {text}")
    write(arguments.out, {"environment": environment(arguments.device), "rows": rows})
    wrong = [row["loop"] for row in rows if not _holds(row)]
    print(f"does not hold: {', '.join(wrong) or 'nothing'}")
    if arguments.check and wrong:
        raise SystemExit(1)


def _row(name: str, device: str, budget_s: float) -> dict[str, Any]:
    try:
        LOOPS[name](device)
    except ImportError as error:
        return {"loop": name, "skipped": str(error)}
    try:
        return {"loop": name, **_run_unharmed(name, device), **_replayed(name, device, budget_s)}
    except Exception as error:
        traceback.print_exc()
        return {"loop": name, "error": f"{type(error).__name__}: {error}"}


def _run_unharmed(name: str, device: str) -> dict[str, Any]:
    plain, again = (LOOPS[name](device)(STEPS) for _ in range(2))
    run = LOOPS[name](device)
    began = time.perf_counter()
    with tracefuse.capture_step(n=SHOWN) as c:
        watched = run(STEPS)
    assert c.steps is not None
    return {
        "repeats": plain.is_same(again),
        "unharmed": watched.is_same(plain),
        "apart": _apart(plain, watched),
        "eager_apart": _apart(plain, again),
        "run_s": time.perf_counter() - began,
        "steps": len(c.steps),
        "captured": c.steps.captured,
        "optimizers": list(c.steps.optimizers),
        "said": str(c.steps),
        "varying": sorted({f"{one.argument.partition('[')[0]} of {one.op}" for one in c.varying if not one.is_shape}),
    }


def _apart(one: Trained, other: Trained) -> float:
    """The largest difference of weights, relative to the largest weight."""
    pairs = [(a.double(), b.double()) for a, b in zip(one.weights, other.weights, strict=True)]
    return max(float((a - b).abs().max() / a.abs().max().clamp_min(1e-30)) for a, b in pairs)


def _replayed(name: str, device: str, budget_s: float) -> dict[str, Any]:
    run = LOOPS[name](device)
    with tracefuse.capture_step(n=SHOWN) as c:
        run(SHOWN)
    agreement = c.check()
    assert agreement is not None
    update = c.program.update
    found = {
        "ops": c.trace.op_count,
        "update_ops": 0 if update is None else update.trace.op_count,
        "uncut": c.program.uncut,
        "compared": agreement.compared,
        "differing": agreement.differing,
        "is_rounding": agreement.is_rounding,
        "agreement": str(agreement),
    }
    return found | _measured(c, budget_s)


def _measured(c: tracefuse.Capture, budget_s: float) -> dict[str, Any]:
    variant = c.optimize()
    try:
        timing = variant.measure(budget_s=budget_s)
    except TracefuseError as error:
        return {"not_measured": str(error)}
    return {"timing": str(timing), "step_ms": _step_ms(timing), "failed": dict(timing.failed)}


def _step_ms(timing: Timing) -> dict[str, float]:
    return {one.name: one.times_ms["step"].median for one in timing.programs if "step" in one.times_ms}


def _holds(row: dict[str, Any]) -> bool:
    if "skipped" in row:
        return True
    return (
        "error" not in row
        and (not row["repeats"] or (row["unharmed"] and row["differing"] == 0))
        and row["is_rounding"]
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if "skipped" in row or "error" in row:
        return (row["loop"], "not there" if "skipped" in row else "failed", *[""] * 7)
    replay = (
        f"{row['compared']} bit for bit" if row["differing"] == 0 else f"{row['differing']} of {row['compared']} differ"
    )
    return (
        row["loop"], _yes(row["repeats"]), _yes(row["unharmed"]), f"{row['captured']} of {row['steps']}", str(row["ops"]),
        str(row["update_ops"]), replay, ", ".join(row["varying"]) or "nothing",
        " -> ".join(f"{name} {ms:.3g}" for name, ms in row.get("step_ms", {}).items()) or "not measured",
    )  # fmt: skip


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


if __name__ == "__main__":
    main()
