"""README's measured figures, written from the committed results: no number by hand.

    python tests/bench/readme.py            write them
    python tests/bench/readme.py --check    status 1 where README says something else, or a figure that nothing renders

A block is what stands between `<!-- figures: NAME -->` and `<!-- end -->`; `readme_figures.py` says what each is. Outside
blocks README has no measured number: a number with a unit of time, of memory, of speed or in percent is one, unless `SETTINGS`
says what else it is.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill

from pages.figures import BLOCKS
from pages.rendering import Results

README = Path(__file__).parents[2] / "README.md"
BLOCK = re.compile(r"<!-- figures: (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)
UNIT = r"(?:ns|µs|us|ms|s|seconds?|minutes?|hours?|%|percent|×|x|times|[kKMGT]i?B|[GT]B/s|[TG]FLOP/s|bytes?)(?!\w)"
NUMBER = r"(?:\d[\d.,]*|(?:two|three|four|five|six|seven|eight|nine|ten)(?=[\s-]))"
FIGURE = re.compile(rf"(?<![\w.\[]){NUMBER}(?:[\s-]?{UNIT}(?:\s(?:faster|slower|less|more))?)")

WIDTH = 127

SETTINGS = {
    "40 % of what the forward would keep": "a comment on the option beside it",
    '"2GiB"': "how an option is written",
    "99 % interval": "the confidence of an interval",
    "95 % intervals": "the confidence of an interval",
    "within 0.5 %": "the bound that tests/test_recorded_timelines.py holds",
    "beyond 1 %": "the smallest difference that is called one: tracefuse.measure.timing.SMALLEST",
    "could hide 5 %": "the difference that should be seen: tracefuse.measure.timing.VISIBLE",
}
"""Numbers with a unit that are no measurements, and what they are."""

QUOTED = {
    "337 ms of backward under": "what the complaint that notebook 03 answers says",
    "531 ms in eager PyTorch": "the same",
    "544 ms in Flux": "the same",
}
"""Measurements of others in the text of notebooks, and whose they are. What ours says is what its cells print."""


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--check", action="store_true", help="write nothing; status 1 and what is wrong")
    arguments = made.parse_args()
    text, results = README.read_text(), Results()
    if not arguments.check:
        README.write_text(rendered(text, results))
        text = README.read_text()
    wrong = list(problems(text, results))
    print("\n".join(wrong) or f"{README.name}: {len(BLOCK.findall(text))} blocks, as the results say")
    sys.exit(bool(wrong))


def rendered(text: str, results: Results) -> str:
    """`text` with every block as the results say. Raises `KeyError` for the name of a block that is none."""
    return BLOCK.sub(lambda found: block(found[1], results), text)


def block(name: str, results: Results) -> str:
    lines = BLOCKS[name](results).splitlines()
    lines = [line if line.startswith("|") else fill(line, WIDTH, break_on_hyphens=False) for line in lines]
    return "\n".join([f"<!-- figures: {name} -->", *lines, "<!-- end -->"])


def problems(text: str, results: Results) -> Iterator[str]:
    """What `--check` holds against `text`, a sentence each."""
    found = [match[1] for match in BLOCK.finditer(text)]
    yield from (
        f"README has a block {name!r} that readme_figures.py does not know" for name in found if name not in BLOCKS
    )
    yield from (f"README has no block {name!r}" for name in BLOCKS if name not in found)
    for match in BLOCK.finditer(text):
        if match[1] in BLOCKS and match[0] != block(match[1], results):
            yield f"the block {match[1]!r} is not what the results say: run tests/bench/readme.py"
    outside = BLOCK.sub("", text)
    yield from (f"a figure that nothing renders: {figure}" for figure in figures(outside))
    yield from (
        f"not in README any more, take it out of SETTINGS: {text!r}" for text in SETTINGS if text not in outside
    )


def figures(text: str) -> Iterator[str]:
    """Measured numbers in `text`, each with what stands around it."""
    for known in (*SETTINGS, *QUOTED):
        text = text.replace(known, "")
    for match in FIGURE.finditer(text):
        around = text[max(0, match.start() - 40) : match.end() + 20].replace("\n", " ")
        yield f"{match[0]!r} in “{around.strip()}”"


if __name__ == "__main__":
    main()
