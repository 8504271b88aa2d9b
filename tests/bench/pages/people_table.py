"""What `people.py` wrote, on one machine or several, as one page.

cd tests/bench/results && python ../pages/people_table.py people_*.json --out people.md
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from pages.models_table import in_a_cell, written

COLUMNS = ("program", "kind", "verdict", "ops", "with all passes", "kernels", "eager", "replay", "max \\|Δ\\| / max",
    "exported file", "backend", "reason")  # fmt: skip
UNCOUNTED = ("not run",)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown, a row a program."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *map(_cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: dict[str, Any]) -> list[str]:
    ops = f"{row['forward_ops']} + {row['backward_ops']}" if row["forward_ops"] else ""
    reasons = [
        row["reason"] and f"{row['at']}: {row['reason']}",
        row["backend_reason"] and f"backend: {row['backend_reason']}",
    ]
    return [
        row["program"],
        row["kind"],
        row["verdict"],
        ops,
        str(row["ops_after"] or ""),
        str(row["kernels"] or ""),
        row["eager"],
        row["replay"],
        "" if row["difference"] is None else f"{row['difference']:.1e}",
        row["exported"],
        row["backend"],
        in_a_cell("; ".join(filter(None, reasons))),
    ]


def counted(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that ran in eager."""
    return [row for row in rows if row["verdict"] not in UNCOUNTED]


def refused_share(rows: Sequence[dict[str, Any]]) -> float:
    those = counted(rows)
    return sum(row["verdict"] == "refused" for row in those) / (len(those) or 1)


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """One line: how many of each verdict, and of the backend's."""
    verdicts = Counter(row["verdict"] for row in rows)
    backend = Counter(row["backend"] for row in counted(rows))
    parts = [
        ", ".join(f"{name or 'none'} {count}" for name, count in some.most_common()) for some in (verdicts, backend)
    ]
    return f"{len(rows)} programs: {parts[0]}; refused {refused_share(rows):.1%}. Under the backend: {parts[1]}."


def page(found: Sequence[dict[str, Any]]) -> str:
    """A table for each machine, of what `people.py` wrote there."""
    lines = [
        "# Programs that people run",
        "",
        "Programs of `tests/bench/people_programs/` by `tests/bench/trust/people.py`, in float64; this page is written by",
        "`tests/bench/pages/people_table.py`. *Replay* is the captured program beside eager; *max |Δ| / max* the compiled one",
        "with all passes; the exported file runs in a fresh process, on the captured inputs and on its own; *backend* is the",
        'same program under `torch.compile(backend="tracefuse")`.',
    ]
    for one in found:
        machine, rows = one["environment"], one["programs"]
        lines += ["", f"## {machine['device']}", "", f"torch {machine['torch']}, {machine['date']}. {summary(rows)}"]
        lines += ["", table(rows)]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    written(__doc__, page)
