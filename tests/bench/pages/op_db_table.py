"""The page of `op_db.py`'s results joins its runs and their shards: a table of verdicts, and a list of what is not exact.

python tests/bench/pages/op_db_table.py run0.json run1.json --out tests/bench/results/op_db.json    writes op_db.md beside it
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "samples"))
from op_samples import CLOSE, CRASHED, EXACT, LAYOUT, NO_PROGRAM, REFUSED, UNDEFINED, WRONG
from results import write

Run = dict[str, Any]
"""One dtype on one device; `rest` are the operators' samples that are not exact, by verdict, with the first one's reason."""

COLUMNS = (EXACT, CLOSE, UNDEFINED, NO_PROGRAM, REFUSED, LAYOUT, WRONG, CRASHED)
NOTHING_TO_HOLD = (UNDEFINED, NO_PROGRAM)
"""Verdicts on samples of which a trace cannot be right or wrong."""

_OWN_LINE = re.compile(r" \(op_samples\.py:\d+:? .*?\)(?= |,|$)")
"""Every operator is called by the same line, which tells nothing."""


# --- one run ----------------------------------------------------------------------------------------------------------


def record(environment: dict[str, Any], options: argparse.Namespace, dtype: str, tried: Sequence[Any]) -> Run:
    """What is kept of the operators that were `tried` in one dtype: counts, and a reason for each that is not exact."""
    begun = [t for t in tried if t.outcomes]
    return {
        "environment": environment,
        "device": options.device,
        "dtype": dtype,
        "in_place": options.in_place,
        "shards": [options.shard],
        "operators": len(begun),
        "not_begun": [t.name for t in tried if not t.outcomes],
        "left_out": sum(t.left_out for t in begun),
        "counts": {name: _counts(t for t in begun if t.is_differentiable == is_so) for name, is_so in _KINDS.items()},
        "rest": [row for t in begun for row in _rest(t)],
    }


_KINDS = {"differentiable": True, "not differentiable": False}


def _counts(tried: Iterable[Any]) -> dict[str, dict[str, int]]:
    outcomes = [outcome for t in tried for outcome in t.outcomes]
    return {what: dict(Counter(getattr(outcome, what) for outcome in outcomes)) for what in ("replay", "passes")}


def _rest(tried: Any) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], list[Any]] = {}
    for outcome in tried.outcomes:
        if outcome.replay != EXACT or outcome.passes not in (EXACT, CLOSE):
            found.setdefault((outcome.replay, outcome.passes), []).append(outcome)
    return [
        {
            "operator": tried.name,
            "replay": replay,
            "passes": passes,
            "samples": len(outcomes),
            "of": len(tried.outcomes),
            "reason": _OWN_LINE.sub("", outcomes[0].reason),
        }
        for (replay, passes), outcomes in found.items()
    ]


# --- several ----------------------------------------------------------------------------------------------------------


def merged(runs: Iterable[Run]) -> list[Run]:
    """The runs, those that differ only in their shards as one. Raises `ValueError` for a shard that is there twice."""
    found: dict[str, Run] = {}
    for run in runs:
        known = found.setdefault(_label(run), {})
        if not known:
            known |= run
            continue
        if set(known["shards"]) & set(run["shards"]):
            raise ValueError(f"{_label(run)}: shard {run['shards']} is there twice")
        for name in ("shards", "operators", "not_begun", "left_out", "rest"):
            known[name] = known[name] + run[name]
        known["counts"] = {
            kind: {what: dict(Counter(counts) + Counter(run["counts"][kind][what])) for what, counts in both.items()}
            for kind, both in known["counts"].items()
        }
    return list(found.values())


def _label(run: Run) -> str:
    device = "CPU" if run["device"] == "cpu" else run["environment"]["device"].removeprefix("NVIDIA ")
    torch = ".".join(run["environment"]["torch"].split(".")[:2])
    return f"{device} {run['dtype']}{' in place' if run['in_place'] else ''} (torch {torch})"


def table(runs: Sequence[Run]) -> str:
    """Markdown: a row for what was captured and one for what the passes made of it, then what is not exact."""
    title = ["", "operators", "samples", "left out", *COLUMNS, "exact, of differentiable operators' defined"]
    lines = [_row(title), _row(["---"] * len(title))]
    for run in runs:
        lines += [_row(_numbers(run, "replay", "captured")), _row(_numbers(run, "passes", "all passes"))]
    lines += ["", "| operator | captured | all passes | samples | reason |", "|---|---|---|---|---|"]
    rest: dict[tuple[str, ...], list[str]] = {}
    for run in runs:
        for row in run["rest"]:
            key = (f"`{row['operator']}`", row["replay"], row["passes"], _in_a_cell(row["reason"]))
            rest.setdefault(key, []).append(f"{_label(run)}: {row['samples']} of {row['of']}")
    for (operator, replay, passes, reason), where in sorted(rest.items(), key=lambda item: (item[0][1:3], item[0][0])):
        lines.append(_row([operator, replay, passes, "; ".join(where), reason]))
    return "\n".join(lines)


def _numbers(run: Run, what: str, title: str) -> list[str]:
    counts = Counter(run["counts"]["differentiable"][what]) + Counter(run["counts"]["not differentiable"][what])
    differentiable = run["counts"]["differentiable"][what]
    defined = sum(n for verdict, n in differentiable.items() if verdict not in NOTHING_TO_HOLD)
    share = f"{differentiable.get(EXACT, 0) / defined:.2%}" if defined else ""
    operators = f"{run['operators']:,}" + (f" ({len(run['not_begun'])} not begun)" if run["not_begun"] else "")
    sizes = [operators, f"{counts.total():,}", f"{run['left_out']:,}"]
    return [f"{_label(run)}, {title}", *sizes, *(f"{counts[verdict]:,}" for verdict in COLUMNS), share]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _in_a_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def page(runs: Sequence[Run]) -> str:
    """The table with what it is of."""
    environments = {_label(run): run["environment"] for run in runs}
    lines = [f"- {label}: {e['device']}, torch {e['torch']}, {e['date']}" for label, e in environments.items()]
    return "\n".join(
        [
            "# torch's operator database",
            "",
            "`tests/bench/trust/op_db.py` ran the samples of `torch.testing._internal`'s `op_db`, forward and backward, and",
            "`tests/bench/pages/op_db_table.py` wrote this page. `op_samples.py` says what the verdicts mean. *Captured* is",
            "the replay of the captured trace beside eager, *all passes* the compiled program beside that replay.",
            "",
            *lines,
            "",
            table(runs),
            "",
        ]
    )


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("runs", nargs="+", type=Path, help="what op_db.py wrote")
    given.add_argument("--out", type=Path, help="write them as one here, and the table beside it as .md")
    options = given.parse_args()
    runs = merged(run for path in options.runs for run in json.loads(path.read_text())["runs"])
    print(table(runs))
    if options.out is not None:
        write(options.out, {"runs": runs})
        options.out.with_suffix(".md").write_text(page(runs))


if __name__ == "__main__":
    main()
