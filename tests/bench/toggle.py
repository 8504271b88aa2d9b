"""Seconds from a toggle to both regenerated traces as text, for a 12-layer GPT: pure Python, no kernel is compiled.

    python tests/bench/toggle.py

The first view, with every pass on, is not a toggle and is printed apart: it has nothing to build on. Ends with status 1 if
any toggle takes `--limit` seconds or more.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from results import environment, parser, write

import tracefuse
from tracefuse.capture import Capture
from tracefuse.demo import GPT, batch
from tracefuse.timing import aligned

TOGGLES: dict[str, dict[str, Any]] = {
    "simplify off": {"simplify": False},
    "freeze off": {"freeze": None},
    "freeze h.*.mlp.*": {"freeze": ["h.*.mlp.*"]},
    "cat off": {"cat": False},
    "decompose off": {"decompose": False},
    "remat off": {"remat": None},
    "remat 0": {"remat": 0.0},
    "remat 1": {"remat": 1.0},
    "fuse off": {"fuse": False},
    "every pass off": {
        "simplify": False,
        "freeze": None,
        "cat": False,
        "decompose": False,
        "remat": None,
        "fuse": False,
    },
}


def toggle_seconds(captured: Capture) -> dict[str, float]:
    """Seconds until both halves of each configuration are there as text, `captured` having been viewed with every pass on.

    In the order of a session: what earlier configurations computed is kept, as it is in the view. A second call on the
    same capture would find everything kept.
    """
    return {name: view_seconds(captured, options) for name, options in TOGGLES.items()}


def view_seconds(captured: Capture, options: dict[str, Any]) -> float:
    """Seconds until both halves of one configuration are there as text."""
    start = time.perf_counter()
    variant = captured.optimize(**options)
    text = variant.forward.code + variant.backward.code
    assert text
    return time.perf_counter() - start


def table(seconds: dict[str, float]) -> str:
    return aligned([("toggle", "seconds"), *((name, f"{s:.3f}") for name, s in seconds.items())])


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--layers", type=int, default=12)
    made.add_argument("--width", type=int, default=768)
    made.add_argument("--limit", type=float, default=1.0, help="seconds (default: 1)")
    arguments = made.parse_args()
    layers, width = (2, 64) if arguments.small else (arguments.layers, arguments.width)
    torch.manual_seed(0)
    model, data = GPT(layers=layers, width=width, heads=width // 64, length=32), batch(256, 1, 32)
    captured = tracefuse.capture(lambda: model(*data).backward())
    start = time.perf_counter()
    ops = captured.trace.op_count
    built = time.perf_counter() - start
    first = view_seconds(captured, {})
    seconds = toggle_seconds(captured)
    print(f"GPT, {layers} layers, {ops} ops; building the trace took {built:.2f} s, the first view {first:.2f} s")
    print(table(seconds))
    print(f"slowest toggle {max(seconds.values()):.3f} s, measured on {environment('cpu')['device']}")
    record = {
        "benchmark": "toggle",
        "layers": layers,
        "ops": ops,
        "trace_s": built,
        "first_view_s": first,
        "toggle_s": seconds,
    }
    write(arguments.out, {**record, "environment": environment("cpu")})
    sys.exit(max(seconds.values()) >= arguments.limit)


if __name__ == "__main__":
    main()
