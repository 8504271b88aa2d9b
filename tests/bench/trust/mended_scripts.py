"""Two training scripts of 200 lines with four mistakes each: which are named, and what a step takes once all are mended.

    python tests/bench/trust/mended_scripts.py --check --out mended_scripts.json       the whole sizes, on a GPU
    python tests/bench/trust/mended_scripts.py --small --check                         small ones, on a CPU
    python tests/bench/trust/mended_scripts.py --only texts --part times --out FILE    goes on in what the file has

`tests/bench/scripts` has each script as somebody wrote it, and in `mistakes.py` the lines that mend it as the findings say.
`tracefuse SCRIPT` runs first on all of them, side by side: a mistake is named where a finding of its kind stands at its line,
and mended where the mended script has none of that kind. Then each and its mended one train by themselves, in turn. A script
prints every few steps how much it trains on in a second; what is compared is the median without the first. With `--check` the
benchmark ends with status 1 where a mistake is not named or not mended, or, of the whole sizes, where mending does not pay.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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


PARTS = ("found", "times")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", choices=MISTAKES, default=list(MISTAKES), help="these scripts")
    options.add_argument("--part", choices=PARTS, action="append", help="only this (default: both)")
    options.add_argument("--check", action="store_true", help="status 1 where something does not hold")
    arguments = options.parse_args()
    rows = kept(arguments.out)
    shown, timed = [("--small",)] * 2 if arguments.small else [UNTIL_SHOWN, TIMED]

    def note(script: str, facts: dict[str, Any]) -> None:
        rows[script] = rows.get(script, {"script": script, "mistakes": len(MISTAKES[script])}) | facts
        record = {"environment": environment(arguments.device), "rows": list(rows.values())}
        write(arguments.out, record, is_quiet=True)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1 if arguments.small else None) as pool:
        paths = {script: written(script, Path(folder)) for script in arguments.only}
        if "found" in (arguments.part or PARTS):
            told = {script: [pool.submit(findings, path, shown) for path in both] for script, both in paths.items()}
            for script, (first, then) in told.items():
                note(script, {"missed": missed(script, first.result()), "left": left(script, then.result())})
        if "times" in (arguments.part or PARTS):
            for script, both in paths.items():
                for rates in turns(both, timed):
                    note(script, rates)
    print(
        aligned([("script", "named", "mended", "a second as written", "mended", "times"), *map(_cells, rows.values())])
    )
    for row in rows.values():
        for told_of in ("missed", "left"):
            print(f"{row['script']}: {told_of}: {', '.join(row.get(told_of, ['not asked'])) or 'nothing'}")
    if arguments.check and any(not _holds(row, arguments.small) for row in rows.values()):
        raise SystemExit(1)


def kept(out: Path | None) -> dict[str, dict[str, Any]]:
    """What the file has of each script already."""
    return {row["script"]: row for row in json.loads(out.read_text())["rows"]} if out and out.exists() else {}


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


def turns(paths: Sequence[Path], timed: Sequence[str]) -> Iterator[dict[str, Any]]:
    """After each turn, how much the script and the mended one trained on in a second until then."""
    rates: list[list[float]] = [[], []]
    for _ in range(TURNS):
        for path, told in zip(paths, rates, strict=True):
            told += _rates(path, timed)
        before, after = map(statistics.median, rates)
        yield {"rates": dict(zip(("as written", "mended"), rates, strict=True)), "gain": after / before}


def _rates(path: Path, words: Sequence[str]) -> list[float]:
    done = subprocess.run([sys.executable, str(path), *words], check=True, capture_output=True, text=True)
    return [float(rate) for rate in re.findall(r"(\d+) \w+/s", done.stdout)][1:]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    count = row["mistakes"]
    named, mended = (f"{count - len(row[told])} of {count}" if told in row else "" for told in ("missed", "left"))
    before, after = (f"{statistics.median(rates):,.0f}" for rates in row.get("rates", {"": [0], " ": [0]}).values())
    return row["script"], named, mended, before, after, f"{row.get('gain', 0):.2f}"


def _holds(row: dict[str, Any], small: bool) -> bool:
    return row.get("missed") == row.get("left") == [] and (small or row.get("gain", 0) > 1)


if __name__ == "__main__":
    main()
