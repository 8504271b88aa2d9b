"""The pages README and RESULTS.md get their measured figures from the committed results: no number is written by hand.

    python tests/bench/readme.py            writes them
    python tests/bench/readme.py --check    status 1 where a page says something else, or a figure that nothing renders

A block is what stands between `<!-- figures: NAME -->` and `<!-- end -->`; `pages/` has a function for each. Outside blocks no
page has a measured number: a number with a unit of time, of memory, of speed or in percent is one, unless `SETTINGS` says what
else it is.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

from pages import answers, figures
from pages.rendering import Results

ROOT = Path(__file__).parents[2]
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
    "within 0.5 %": "the bound that tests/explorer/timeline/test_recorded_timelines.py holds",
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


@dataclass(frozen=True)
class Page:
    """A file of this repository, and what renders each of its blocks."""

    name: str
    blocks: Mapping[str, Callable[[Results], str]]

    @property
    def path(self) -> Path:
        return ROOT / self.name

    def rendered(self, text: str, results: Results) -> str:
        """`text` with every block as the results say. Raises `KeyError` for the name of a block that is none."""
        return BLOCK.sub(lambda found: self.block(found[1], results), text)

    def block(self, name: str, results: Results) -> str:
        lines = self.blocks[name](results).splitlines()
        lines = [line if line.startswith("|") else fill(line, WIDTH, break_on_hyphens=False) for line in lines]
        return "\n".join([f"<!-- figures: {name} -->", *lines, "<!-- end -->"])

    def problems(self, text: str, results: Results) -> Iterator[str]:
        """What `--check` holds against `text`, a sentence each."""
        found = [match[1] for match in BLOCK.finditer(text)]
        yield from (
            f"{self.name} has a block {name!r} that nothing renders" for name in found if name not in self.blocks
        )
        yield from (f"{self.name} has no block {name!r}" for name in self.blocks if name not in found)
        for match in BLOCK.finditer(text):
            if match[1] in self.blocks and match[0] != self.block(match[1], results):
                yield f"the block {match[1]!r} is not what the results say: run tests/bench/readme.py"
        yield from (f"a figure that nothing renders: {figure}" for figure in measured(BLOCK.sub("", text)))


README = Page("README.md", answers.BLOCKS)
RESULTS = Page("tests/bench/RESULTS.md", figures.BLOCKS)
PAGES = (README, RESULTS, Page("notebooks/README.md", {}))


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--check", action="store_true", help="write nothing; status 1 and what is wrong")
    arguments, results, wrong = made.parse_args(), Results(), []
    for page in PAGES:
        if not arguments.check:
            page.path.write_text(page.rendered(page.path.read_text(), results))
        wrong += page.problems(page.path.read_text(), results)
    wrong += unused_settings()
    print("\n".join(wrong) or f"{', '.join(page.name for page in PAGES)}: as the results say")
    sys.exit(bool(wrong))


def unused_settings() -> list[str]:
    text = " ".join(word for page in PAGES for word in page.path.read_text().split())
    return [f"on no page any more, take it out of SETTINGS: {known!r}" for known in SETTINGS if known not in text]


def measured(text: str) -> Iterator[str]:
    """Measured numbers in `text`, each with what stands around it."""
    text = " ".join(text.split())
    for known in (*SETTINGS, *QUOTED):
        text = text.replace(known, "")
    for match in FIGURE.finditer(text):
        around = text[max(0, match.start() - 40) : match.end() + 20]
        yield f"{match[0]!r} in “{around.strip()}”"


if __name__ == "__main__":
    main()
