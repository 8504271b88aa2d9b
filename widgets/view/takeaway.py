"""Files that a reader takes along are made of what a view shows; each is a row of `TAKEAWAYS`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from tracefuse.errors import MeasureError
from tracefuse.timeline.chrome_trace import to_chrome_trace
from tracefuse.widgets.html import to_html
from tracefuse.widgets.view.report import Shown


class TakeAway(NamedTuple):
    """A file as the browser saves it, and what makes its text. Raises what making that raises."""

    name: str
    mime: str
    text: Callable[[Shown], str]


def _page(shown: Shown) -> str:
    return to_html(shown.variant, shown.name, shown.held, shown.measured.timeline, shown.board)


def _chrome_trace(shown: Shown) -> str:
    if shown.measured.last is None:
        raise MeasureError("there is no timeline yet: press Measure, which takes one")
    return _json(to_chrome_trace(shown.measured.last))


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, allow_nan=False)


TAKEAWAYS: dict[str, TakeAway] = {
    "html": TakeAway("tracefuse.html", "text/html", _page),
    "python": TakeAway("step.py", "text/x-python", lambda shown: shown.variant.check().exported),
    "chrome_trace": TakeAway("trace.json", "application/json", _chrome_trace),
    "model_explorer": TakeAway(
        "model_explorer.json", "application/json", lambda shown: _json(shown.variant.to_model_explorer())
    ),
    "dot": TakeAway("trace.dot", "text/vnd.graphviz", lambda shown: shown.variant.to_dot()),
    "svg": TakeAway("trace.svg", "image/svg+xml", lambda shown: shown.variant.to_svg()),
}
"""By what the view asks for."""
