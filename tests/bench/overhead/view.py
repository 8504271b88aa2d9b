"""The explorer on a GPT, as a notebook opens it: seconds to open, measure, toggle and save; each pass's share of the step.

    python tests/bench/overhead/view.py --out view.json --html view.html

The GPT has 12 layers, 768 wide, 12 heads, a vocabulary of 50257, a batch of 8 x 1024 and bfloat16 with dropout 0.1. README's
pictures are drawn from the saved page. The benchmark also says how far the static peak is from the allocator's, and how much
of the step's time the profiled ops add up to.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tracefuse
from tracefuse.text import aligned
from tracefuse.widgets.view.explorer import Explorer

sys.path.append(str(Path(__file__).parents[1]))
from cases.gpt import SIZES, SMALL, model_and_batch
from results import environment, parser, write

SWITCHES = ("simplify", "cat", "decompose", "pad", "remat", "fuse")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--html", type=Path, help="save the page here")
    arguments = options.parse_args()
    seconds: dict[str, float] = {}
    explorer = opened(arguments, seconds)
    timed(seconds, "measure", explorer.measure)
    timed(seconds, "measure each pass", explorer.ablate)
    check(explorer)
    for name in SWITCHES:
        timed(seconds, f"{name} off", lambda name=name: explorer.configure(off(explorer, name)))
        timed(seconds, f"{name} on", lambda name=name: explorer.configure(back(name)))
    page = arguments.html or Path("view.html")
    timed(seconds, "save the page", lambda: explorer.save_html(page))
    record = report(explorer, seconds, page)
    if arguments.html is None:
        page.unlink()
    sizes = SMALL if arguments.small else SIZES
    write(arguments.out, {"benchmark": "view", "sizes": sizes, "environment": environment(arguments.device), **record})


def opened(arguments: Namespace, seconds: dict[str, float]) -> Explorer:
    """An explorer on one captured step, after a step that warmed the libraries up."""
    arguments.dropout = 0.1
    model, tokens, targets = model_and_batch(arguments)
    model(tokens, targets).backward()
    model.zero_grad()
    with tracefuse.capture() as c:
        loss = model(tokens, targets)
        loss.backward()
    explorer: list[Explorer] = []
    timed(seconds, "open", lambda: explorer.append(Explorer(c.optimize(), "c", arguments.budget)))
    return explorer[0]


def timed(seconds: dict[str, float], name: str, run: Callable[[], Any]) -> None:
    start = time.perf_counter()
    run()
    seconds[name] = time.perf_counter() - start


def check(explorer: Explorer) -> None:
    if explorer.status["error"]:
        raise SystemExit(f"the view shows an error: {explorer.status['error']['message']}")


def off(explorer: Explorer, name: str) -> dict[str, Any]:
    return {name: None if name == "remat" else False}


def back(name: str) -> dict[str, Any]:
    return {name: 0.5 if name == "remat" else True}


def report(explorer: Explorer, seconds: dict[str, float], page: Path) -> dict[str, Any]:
    """Print the tables; the same as data."""
    shown = explorer.payload
    times, summary = shown["timing"], shown["summary"]
    step = next(row for row in times["rows"] if row["label"] == "step")
    ops_ms = [sum(value["time_us"][at] or 0 for value in shown["values"].values()) / 1e3 for at in (0, 1)]
    shares = {one["name"]: one["delta_ms"] for one in shown["passes"] if one["delta_ms"]}
    before, after = step["baseline_ms"]["median"], step["variant_ms"]["median"]
    print(aligned([("", "s"), *((name, f"{s:.2f}") for name, s in seconds.items())]), end="\n\n")
    print(aligned([("pass", "adds ms", "95 %"), *(share_row(name, share) for name, share in shares.items())]))
    print(f"\nstep: {before:.3f} -> {after:.3f} ms, {times['provenance']}")
    print(f"profiled ops add up to {ops_ms[0]:.3f} -> {ops_ms[1]:.3f} ms")
    print(f"peaks in bytes: static {summary['peak_bytes']}, measured {summary['measured_peak_bytes']}")
    for finding in shown["findings"]:
        print(f"{finding['severity']}: {finding['title']}; {finding['worth']}{' (mended)' * finding['is_mended']}")
    print(f"saved page: {page.stat().st_size:,} bytes")
    found = explorer.measured.last
    return {
        "seconds": seconds,
        "step": step,
        "ops_ms": ops_ms,
        "passes": shares,
        "summary": summary,
        "findings": [[one[key] for key in ("severity", "title", "worth", "is_mended")] for one in shown["findings"]],
        "page_nbytes": page.stat().st_size,
        "timeline": found.provenance if found else "",
    }


def share_row(name: str, share: dict[str, float]) -> tuple[str, str, str]:
    return name, f"{share['median']:+.3f}", f"{share['low']:+.3f} … {share['high']:+.3f}"


if __name__ == "__main__":
    main()
