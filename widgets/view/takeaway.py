"""What the reader takes along: files made of what a view shows, each a row of `TAKEAWAYS`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tracefuse.errors import MeasureError
from tracefuse.timeline.chrome_trace import to_chrome_trace
from tracefuse.widgets.html import to_html

if TYPE_CHECKING:
    from tracefuse.widgets.view.explorer import Explorer


@dataclass(frozen=True)
class File:
    """A file as the browser saves it."""

    name: str
    mime: str
    data: bytes


def saved_page(explorer: Explorer) -> File:
    """The view as one page without a kernel, with what was measured."""
    page = to_html(explorer.variant, explorer.name, explorer.held, explorer.measured.timeline)
    return File("tracefuse.html", "text/html", page.encode())


def exported(explorer: Explorer) -> File:
    """The shown variant as a Python file. Raises `PassError` or `ExportError` where there is none."""
    return File("step.py", "text/x-python", explorer.variant.check().source.encode())


def chrome_trace(explorer: Explorer) -> File:
    """The timeline for Perfetto. Raises `MeasureError` where nothing was profiled."""
    found = explorer.measured.op_by_op.last
    if found is None:
        raise MeasureError("there is no timeline yet: press Measure, which takes one")
    return _json("trace.json", to_chrome_trace(found))


def model_explorer(explorer: Explorer) -> File:
    """Both traces for Google's Model Explorer."""
    return _json("model_explorer.json", explorer.variant.to_model_explorer())


def dot(explorer: Explorer) -> File:
    """Both traces in Graphviz's language."""
    return File("trace.dot", "text/vnd.graphviz", explorer.variant.to_dot().encode())


def svg(explorer: Explorer) -> File:
    """Both traces drawn. Raises `NotSupported` where no Graphviz is installed."""
    return File("trace.svg", "image/svg+xml", explorer.variant.to_svg().encode())


def _json(name: str, content: dict[str, Any]) -> File:
    return File(name, "application/json", json.dumps(content, allow_nan=False).encode())


TAKEAWAYS: dict[str, Callable[[Explorer], File]] = {
    "html": saved_page,
    "python": exported,
    "chrome_trace": chrome_trace,
    "model_explorer": model_explorer,
    "dot": dot,
    "svg": svg,
}
"""What the view asks for -> what makes it."""
