"""What the reader takes along: files made of what a view shows, each a row of `TAKEAWAYS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracefuse.widgets.html import to_html

if TYPE_CHECKING:
    from tracefuse.widgets.view import Explorer


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


TAKEAWAYS: dict[str, Callable[[Explorer], File]] = {"html": saved_page, "python": exported}
"""What the view asks for -> what makes it."""
