"""Files that a reader takes along are made of what a view shows; each is a row of `TAKEAWAYS`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tracefuse.errors import MeasureError
from tracefuse.timeline.chrome_trace import to_chrome_trace
from tracefuse.widgets.html import to_html
from tracefuse.widgets.view.shown import Shown


@dataclass(frozen=True)
class File:
    """A file as the browser saves it."""

    name: str
    mime: str
    data: bytes


def saved_page(shown: Shown) -> File:
    """The view as one page without a kernel, with what was measured."""
    page = to_html(shown.variant, shown.name, shown.held, shown.measured.timeline)
    return File("tracefuse.html", "text/html", page.encode())


def exported(shown: Shown) -> File:
    """The shown variant as a Python file. Raises `PassError` or `ExportError` where there is none."""
    return File("step.py", "text/x-python", shown.variant.check().source.encode())


def chrome_trace(shown: Shown) -> File:
    """The timeline for Perfetto. Raises `MeasureError` where nothing was profiled."""
    found = shown.measured.op_by_op.last
    if found is None:
        raise MeasureError("there is no timeline yet: press Measure, which takes one")
    return _json("trace.json", to_chrome_trace(found))


def model_explorer(shown: Shown) -> File:
    """Both traces for Google's Model Explorer."""
    return _json("model_explorer.json", shown.variant.to_model_explorer())


def dot(shown: Shown) -> File:
    """Both traces in Graphviz's language."""
    return File("trace.dot", "text/vnd.graphviz", shown.variant.to_dot().encode())


def svg(shown: Shown) -> File:
    """Both traces drawn. Raises `NotSupported` where no Graphviz is installed."""
    return File("trace.svg", "image/svg+xml", shown.variant.to_svg().encode())


def _json(name: str, content: dict[str, Any]) -> File:
    return File(name, "application/json", json.dumps(content, allow_nan=False).encode())


TAKEAWAYS: dict[str, Callable[[Shown], File]] = {
    "html": saved_page,
    "python": exported,
    "chrome_trace": chrome_trace,
    "model_explorer": model_explorer,
    "dot": dot,
    "svg": svg,
}
"""What the view asks for -> what makes it."""
