"""Two training scripts of 200 lines with four mistakes each: which are named, and what a step takes once all are mended.

    python tests/bench/trust/mended_scripts.py --check --out mended_scripts.json       the whole sizes, on a GPU
    python tests/bench/trust/mended_scripts.py --small --check                         small ones, on a CPU

`tests/bench/scripts` has each script as somebody wrote it, and in `mistakes.py` the lines that mend it as the findings say.
`tracefuse SCRIPT` runs first on both: a mistake is named where a finding of its kind stands at its line, and mended where the
mended script has none of that kind. Then both train by themselves, in turn. A script prints every few steps how much it trains
on in a second; what is compared is the median without the first. With `--check` the benchmark ends with status 1 where a
mistake is not named or not mended, or, of the whole sizes, where mending does not pay.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tracefuse.text import aligned

sys.path.append(str(Path(__file__).parents[1]))
from results import environment, parser, write
from scripts.mistakes import MISTAKES, mended

BENCH = Path(__file__).parents[1]

TURNS = 2
UNTIL_SHOWN, TIMED = ("--steps", "6"), ("--steps", "40")
"""Steps of a run under `tracefuse`, which shows the third, and of one that is timed, at whole sizes."""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--check", action="store_true", help="status 1 where something does not hold")
    arguments = options.parse_args()
    rows: list[dict[str, Any]] = []
    for script in MISTAKES:
        rows.append(_row(script, arguments.small))
        write(arguments.out, {"environment": environment(arguments.device), "rows": rows})
    print(aligned([("script", "named", "mended", "a second as written", "mended", "times"), *map(_cells, rows)]))
    for row in rows:
        for told in ("missed", "left"):
            print(f"{row['script']}: {told}: {', '.join(row[told]) or 'nothing'}")
    if arguments.check and any(
        row["missed"] or row["left"] or not (arguments.small or row["gain"] > 1) for row in rows
    ):
        raise SystemExit(1)


def findings(script: Path, words: Sequence[str]) -> list[dict[str, Any]]:
    """What `tracefuse SCRIPT` finds, as its JSON has it. Raises `CalledProcessError` where the script or tracefuse fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        asked = [sys.executable, "-m", "tracefuse", script, "--no-measure", "--json", out]
        subprocess.run([*map(str, asked), "--", *words], check=True, stdout=subprocess.DEVNULL)
        return json.loads(out.read_text())["findings"]


def missed(script: str, found: Sequence[dict[str, Any]]) -> list[str]:
    """The mistakes of which no finding stands at the line."""
    said = {(one["id"], one["source"].partition("  ")[2]) for one in found}
    return [kind for kind, one in MISTAKES[script].items() if (kind, one.line) not in said]


def left(script: str, found: Sequence[dict[str, Any]]) -> list[str]:
    """The mistakes of which the mended script still has a finding."""
    said = {one["id"] for one in found}
    return [kind for kind in MISTAKES[script] if kind in said]


def written(script: str, folder: Path) -> tuple[Path, Path]:
    """The script, and the mended one, which is written to a folder."""
    after = folder / f"{script}_mended.py"
    after.write_text(mended(script))
    return BENCH / "scripts" / f"{script}.py", after


def _row(script: str, small: bool) -> dict[str, Any]:
    shown, timed = [("--small",)] * 2 if small else [UNTIL_SHOWN, TIMED]
    with tempfile.TemporaryDirectory() as folder:
        paths = written(script, Path(folder))
        found = [findings(path, shown) for path in paths]
        rates: list[list[float]] = [[], []]
        for _ in range(TURNS):
            for path, told in zip(paths, rates, strict=True):
                told += _rates(path, timed)
    before, after = map(statistics.median, rates)
    return {
        "script": script,
        "mistakes": len(MISTAKES[script]),
        "missed": missed(script, found[0]),
        "left": left(script, found[1]),
        "rates": dict(zip(("as written", "mended"), rates, strict=True)),
        "gain": after / before,
    }


def _rates(path: Path, words: Sequence[str]) -> list[float]:
    done = subprocess.run([sys.executable, str(path), *words], check=True, capture_output=True, text=True)
    return [float(rate) for rate in re.findall(r"(\d+) \w+/s", done.stdout)][1:]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    count = row["mistakes"]
    before, after = (f"{statistics.median(rates):,.0f}" for rates in row["rates"].values())
    named, mended = (f"{count - len(row[told])} of {count}" for told in ("missed", "left"))
    return row["script"], named, mended, before, after, f"{row['gain']:.2f}"


if __name__ == "__main__":
    main()
