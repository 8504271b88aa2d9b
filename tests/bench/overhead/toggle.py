"""A toggle takes seconds until both regenerated traces are there as text: how many, for GPTs of 12 and 48 layers.

    python tests/bench/overhead/toggle.py --check

The benchmark is pure Python; no kernel is compiled. A session views every pass on, then makes one toggle after the other;
what earlier configurations computed is kept, as it is in the view. Of several sessions the median counts; the least is
printed beside it, since other programs on the machine only add. The first view has nothing to build on, so it is no toggle
and is printed apart; so is the view's payload, which comes on top of its first toggle. With `--check` it ends with status 1
if a toggle takes its limit or more: half a second at 12 layers, 3 s at 48.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import tracefuse
from tracefuse.captures import Capture
from tracefuse.demo import GPT, batch
from tracefuse.optimizers.fuse import carving
from tracefuse.widgets.payload.program import payload

sys.path.append(str(Path(__file__).parents[1]))
from cases.toggles import TOGGLES, table, toggle_seconds, view_seconds
from results import environment, parser, write

LIMITS_S = {12: 0.5, 48: 3.0}


def session_seconds(captured: Capture) -> dict[str, float]:
    """The first view of a capture that keeps nothing yet, then the toggles."""
    captured.known_records.clear()
    captured._variants.clear()
    carving._known.clear()
    return {"first view": view_seconds(captured, {}), **toggle_seconds(captured)}


def measured(layers: int, width: int, sessions: int) -> dict[str, Any]:
    """One model's record: the median of `sessions` for each toggle, and the least."""
    torch.manual_seed(0)
    model, data = GPT(layers=layers, width=width, heads=max(1, width // 64), length=32), batch(256, 1, 32)
    captured = tracefuse.capture(lambda: model(*data).backward())
    start = time.process_time()
    ops = captured.trace.op_count
    built = time.process_time() - start
    rounds = [session_seconds(captured) for _ in range(sessions)]
    seconds = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    least = {name: min(one[name] for one in rounds) for name in TOGGLES}
    counts = {name: captured.optimize(**options).trace.op_count for name, options in TOGGLES.items()}
    start = time.process_time()
    payload(captured.optimize())
    shown = time.process_time() - start
    first = seconds.pop("first view")
    return {
        "layers": layers,
        "ops": ops,
        "trace_s": built,
        "first_view_s": first,
        "payload_s": shown,
        "toggle_s": seconds,
        "least_s": least,
        "toggle_ops": counts,
    }


def report(found: dict[str, Any], limit: float) -> bool:
    """Print one model's table; whether every toggle keeps the limit."""
    facts = ("trace_s", "built in"), ("first_view_s", "first viewed in"), ("payload_s", "the view's payload in")
    print(
        f"GPT, {found['layers']} layers, {found['ops']} ops; {', '.join(f'{text} {found[k]:.2f} s' for k, text in facts)}"
    )
    seconds = found["toggle_s"]
    print(table(seconds, least=found["least_s"], ops=found["toggle_ops"]))
    slowest = max(seconds, key=seconds.__getitem__)
    print(f"slowest: {slowest}, {seconds[slowest]:.3f} s (limit: {limit:g} s)")
    print(f"CPU time measured on {environment('cpu')['device']}\n")
    return seconds[slowest] < limit


def main() -> None:
    made = parser(__doc__)
    made.add_argument(
        "--layers", type=int, nargs="+", default=list(LIMITS_S), help="transformer blocks (default: 12 48)"
    )
    made.add_argument("--width", type=int, default=256)
    made.add_argument("--sessions", type=int, default=3, help="of which the median counts (default: 3)")
    made.add_argument("--check", action="store_true", help="end with status 1 if a toggle takes its limit or more")
    made.add_argument("--limit", type=float, help="seconds for all (default: 0.5 at 12 layers, 3 at 48, else 1)")
    arguments = made.parse_args()
    layers, width = ([2], 64) if arguments.small else (arguments.layers, arguments.width)
    records, kept = [], []
    for count in layers:
        records.append(measured(count, width, arguments.sessions))
        kept.append(report(records[-1], arguments.limit or LIMITS_S.get(count, 1.0)))
    write(arguments.out, {"benchmark": "toggle", "models": records, "environment": environment("cpu")})
    sys.exit(arguments.check and not all(kept))


if __name__ == "__main__":
    main()
