"""The view as one HTML file that needs no kernel and no network: the same JavaScript, with the payloads of several
configurations inside. Switches move between those; what the file does not hold, it says. What is open and selected stands in
the address behind `#`, which is so a link to it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from tracefuse.config.configuration import Config
from tracefuse.variant import Variant
from tracefuse.widgets.payload.board import Stand, board_record, entry_of
from tracefuse.widgets.payload.measured import Measured
from tracefuse.widgets.payload.pack import encode
from tracefuse.widgets.payload.without import reweighed
from tracefuse.widgets.text import to_text

STATIC = Path(__file__).parent / "static"

MOST_BYTES = 2_000_000
"""Of a page, as far as configurations beyond the shown one are concerned."""
MOST_COMBINATIONS = 32
MOST_OPS = 6_000
"""Of all programs that a page holds, the neighbours of the shown one aside: making a payload takes time by the op."""

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>$title</title>
<style>
:root { color-scheme: light dark; background: light-dark(#f4f5f7, #0f1114); }
body { margin: 0 auto; padding: 24px clamp(8px, 2vw, 32px); max-width: 2000px; }
noscript pre { color: light-dark(#1b1f26, #e4e7ec); overflow: auto; }
</style>
</head>
<body>
<div id="view"></div>
<noscript><pre>$text</pre></noscript>
<script id="held" type="text/plain">$held</script>
<script id="module" type="text/plain">$module</script>
<script type="module">
const text = (id) => document.getElementById(id).textContent;
const place = document.getElementById("view");
if (!("DecompressionStream" in globalThis)) {
  place.append("This browser cannot unpack the page: open it in a current Chrome, Edge, Firefox or Safari.");
}
const url = URL.createObjectURL(new Blob([text("module")], { type: "text/javascript" }));
const view = await import(url);
URL.revokeObjectURL(url);
await view.mountPage(view.default.render, text("held"), place);
</script>
</body>
</html>
""")


def to_html(
    variant: Variant,
    name: str | None = "c",
    payload_of: Callable[[Variant], dict[str, Any]] | None = None,
    timeline: dict[str, Any] | None = None,
    board: dict[str, Any] | None = None,
) -> str:
    """One self-contained page: `variant`, no pass at all, all passes, each pass switched alone, what is on the `board`, and as
    many combinations of passes as `MOST_OPS` and `MOST_BYTES` allow.

    `name` is the variable that holds the capture, if there is one. `payload_of` says what is shown of a variant (default:
    what `payload` says, with the times that were measured of it beside the captured program), `timeline` is a
    `timeline_record` with its events as text (default: that of the session file, if the capture came from one). `board` is
    what was tried, as the view has it (default: what the page holds, and what was tried before).
    """
    variants = [variant, *map(variant.capture.variant, held_configurations(variant, tried_on(board)))]
    measured = Measured.of(variant)
    for one in reversed(variants):  # those of the shown one last: where there are no others, they are what is stale
        measured.adopt(one)
    for one in variants:
        _ = one.passes  # what the switches of one change is told by the others
    payloads = [payload_of(one) if payload_of else measured.payload(one, None, name) for one in variants]
    board = board or stored_board(variants, measured, name)
    return page(payloads, f"tracefuse: {variant.config.as_code()}", timeline or measured.timeline, board)


def stored_board(variants: Sequence[Variant], measured: Measured, name: str | None) -> dict[str, Any]:
    """The board of a page that no view wrote: the captured program and `variants`, the first of them shown, beside what was
    tried of the capture before."""
    shown = variants[0]
    stand = Stand(name or "this capture", shown.capture, measured)
    clock = measured.clocks.clock(shown, None)
    for one in (shown.baseline, *variants):
        if one.config not in stand.tried:
            stand.tried[one.config] = entry_of(one, clock, time.time())
    return board_record([stand], 0, shown, clock) | {"comparison": None}


def write_html(variant: Variant, path: str | Path, *shown: Any, **more: Any) -> Path:
    """Write `to_html(variant, *shown, **more)` to `path`, and return that."""
    return written(to_html(variant, *shown, **more), path)


def written(page: str, path: str | Path) -> Path:
    """Write the text of a page to `path`, and return that."""
    path = Path(path)
    path.write_text(page, encoding="utf-8")
    return path


class Page:
    """What is looked at as a page of its own: a notebook shows it below the cell, `save_html` writes it."""

    height_px = 640

    def __init__(self, shown: Any) -> None:
        self.shown = shown

    def to_html(self) -> str:
        """The page. Every string of it is data, never markup."""
        raise NotImplementedError

    def save_html(self, path: str | Path) -> Path:
        """Write the page to `path`, and return that."""
        return written(self.to_html(), path)

    def _repr_html_(self) -> str:
        style = f"width:100%;height:{self.height_px}px;border:0"
        return f'<iframe srcdoc="{escape(self.to_html())}" style="{style}"></iframe>'

    def __str__(self) -> str:
        return str(self.shown)

    __repr__ = __str__


def configurations(shown: Config) -> list[Config]:
    """What a page holds beside `shown`: the neighbours one switch away, everything on, everything off; each once."""
    full, bare = Config(), Config.off()
    around = [one.switched(name) for one in (shown, full) for name in one.names]
    return [c for c in dict.fromkeys([*around, full, bare]) if c != shown]


def held_configurations(shown: Variant, tried: Iterable[Config] = ()) -> list[Config]:
    """What a page holds beside `shown`: its neighbours, then what was tried, the other input weights of `remat`, and
    combinations of the passes that change something, two switches away from `shown` and more."""
    near = configurations(shown.config)
    most = min(MOST_COMBINATIONS, MOST_OPS // max(1, shown.program.whole.op_count))
    wanted = (*tried, *reweighed(shown.config), *_combinations(shown))
    further = (one for one in wanted if one != shown.config and one not in near)
    return [*near, *itertools.islice(dict.fromkeys(further), max(0, most - len(near)))]


def _combinations(shown: Variant) -> Iterator[Config]:
    passes = [one.name for one in shown.passes if not one.is_unchanged]
    for count in range(2, len(passes) + 1):
        for some in itertools.combinations(passes, count):
            yield shown.config.changed(**dict.fromkeys(some, False))


def tried_on(board: dict[str, Any] | None) -> list[Config]:
    """The configurations on the board of the capture on show, the last ones first."""
    rows = [] if board is None else [row for row in board["rows"] if row["capture"] == board["capture"]]
    return [Config().changed(**row["config"]) for row in reversed(rows)]


def page(
    payloads: list[dict[str, Any]],
    title: str,
    timeline: dict[str, Any] | None = None,
    board: dict[str, Any] | None = None,
) -> str:
    """The page that holds `payloads`, the first of them shown, or as many of them as `MOST_BYTES` allow: at least one."""
    while True:
        held = {"payloads": payloads, "timeline": timeline} | ({} if board is None else {"board": board})
        text = page_of(held, title, to_text(payloads[0]))
        if len(text) <= MOST_BYTES or len(payloads) == 1:
            return text
        payloads = payloads[: max(1, min(len(payloads) - 1, len(payloads) * MOST_BYTES // len(text)))]


def page_of(held: dict[str, Any], title: str, text: str) -> str:
    """The page of the view that holds `held`, or shows `text` without JavaScript. Every string of it is data, never markup;
    the module holds no tag, which tests/widgets/test_html.py asserts."""
    module = (STATIC / "widget.js").read_text(encoding="utf-8")
    return _PAGE.substitute(title=escape(title), text=escape(text), held=encode(held), module=module)
