"""The still form of a view as an output of its own: what a notebook keeps when there is no kernel behind it.

JupyterLab shows no other form of an output whose widget it cannot find ("model not found"), so that the two cannot be one
output. A living view hides it by its class: see `hidden` in js/shell/connection.js.
"""

from __future__ import annotations

import uuid
from typing import Any

from IPython.display import DisplayHandle, display

from tracefuse.widgets.text import to_static_form, to_text


class StillForm:
    """One view's; `key` is in its class, and in no other's."""

    def __init__(self) -> None:
        self.key = uuid.uuid4().hex
        self._handle: DisplayHandle | None = None

    def bundle(self, payload: dict[str, Any]) -> dict[str, str]:
        """As HTML and as text."""
        html = f'<div class="tf-still-{self.key}">{to_static_form(payload)}</div>'
        return {"text/plain": to_text(payload), "text/html": html}

    def show(self, payload: dict[str, Any]) -> None:
        """Display it below what the cell displayed so far."""
        self._handle = display(self.bundle(payload), raw=True, display_id=self.key)

    def update(self, payload: dict[str, Any]) -> None:
        """Let it say what the view shows now, where it is displayed."""
        if self._handle is not None:
            self._handle.update(self.bundle(payload), raw=True)
