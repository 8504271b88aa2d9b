"""The page of `models.py`'s results, `results/models.md`, has a table for each machine.

cd tests/bench/results && python ../pages/models_table.py models_*.json --out models.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

NOT_CHECKED = "not checked"
"""How an exported file begins whose sizes depend on the data: random inputs give others."""

COLUMNS = (
    "model",
    "dtype",
    "parameters",
    "ops, forward + backward",
    "with all passes",
    "kernels",
    "capture, passes, compile",
    "replay",
    "max \\|Δ\\| / max",
    "inputs rounded",
    "exported file",
)


def is_right(row: dict[str, Any]) -> bool:
    """Whether the replay is exact, the numbers are near and the exported file checked itself."""
    is_exported = row["exported"] == "runs" or row["exported"].startswith(NOT_CHECKED)
    return not row["problem"] and row["replay"] == "bit for bit" and is_exported


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Markdown; where there is a problem, it stands in the last cell."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *map(_cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: dict[str, Any]) -> list[str]:
    if not row["replay"]:
        return [row["model"], row["dtype"], *[""] * (len(COLUMNS) - 3), in_a_cell(row["problem"])]
    seconds = ", ".join(f"{row[name]:.2f}" for name in ("capture_s", "optimise_s", "compile_s"))
    last = "; ".join(filter(None, [row["exported"], row["problem"]]))
    return [
        row["model"],
        row["dtype"],
        f"{row['parameters']:,}",
        f"{row['forward_ops']} + {row['backward_ops']}",
        str(row["ops_after"]),
        str(row["kernels"]),
        f"{seconds} s",
        row["replay"],
        *("" if row[name] is None else f"{row[name]:.1e}" for name in ("difference", "moved")),
        in_a_cell(last),
    ]


def in_a_cell(text: str) -> str:
    """Without what ends a cell."""
    return text.replace("|", "\\|").replace("\n", " ")


def page(found: Sequence[dict[str, Any]]) -> str:
    """A table for each machine. `found` is what `models.py` wrote there, all models at once or some at a time."""
    lines = [
        "# Models",
        "",
        "`tests/bench/models.py` ran training steps of small models; `tests/bench/pages/models_table.py` wrote this page.",
        "*Replay* is the captured program beside eager, *max |Δ| / max* the compiled one with all passes: of all results and",
        "gradients the largest difference, over that output's largest element. *Inputs rounded* is the same for the captured",
        "program itself, whose inputs move by one rounding each: no program in this dtype can be asked for less.",
    ]
    machines: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in found:
        machines.setdefault((one["environment"]["device"], one["environment"]["torch"]), []).append(one)
    for (device, version), some in machines.items():
        rows = [row for one in some for row in one["models"]]
        lines += ["", f"## {device}", "", f"torch {version}, {some[0]['environment']['date']}", "", table(rows)]
    return "\n".join([*lines, ""])


def written(about: str | None, page: Callable[[Sequence[dict[str, Any]]], str]) -> None:
    """The command: files in, the page out."""
    given = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("found", nargs="+", type=Path, help="what the benchmark wrote")
    given.add_argument("--out", type=Path, help="write the page here")
    options = given.parse_args()
    text = page([json.loads(path.read_text()) for path in options.found])
    print(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    written(__doc__, page)
