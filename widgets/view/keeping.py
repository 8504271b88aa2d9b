"""What a notebook keeps of a view: its still form, which becomes the view itself once the kernel has time to make it.

A page of the shown configuration is made as soon as nothing was asked for a while, then one with its neighbours, configuration
by configuration, and only while no cell runs and nothing is measured. A small program's page is made at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from tracefuse.variant import Variant
from tracefuse.widgets.html import held_configurations, page, tried_on
from tracefuse.widgets.view.boarding import Boarding
from tracefuse.widgets.view.still import StillForm
from tracefuse.widgets.view.tasks import POLL_S, cells, idle_turn

QUIET_S = 3.0
"""How long nothing was asked for."""
MOST_AT_ONCE = 300
"""Values of a program whose page is made with the cell's output: a larger one's takes a part of a second."""


class Keeper:
    """Calls `work(is_stale)` in a thread `QUIET_S` seconds after the last `touch`; what is stale then ends early."""

    def __init__(self, work: Callable[[Callable[[], bool]], None]) -> None:
        self._work = work
        self._asked = 0
        self._timer: threading.Timer | None = None

    def touch(self) -> None:
        self._asked += 1
        if self._timer is not None:
            self._timer.cancel()
        mine = self._asked
        self._timer = threading.Timer(QUIET_S, lambda: self._work(lambda: self._asked != mine))
        self._timer.daemon = True
        self._timer.start()


class Keeping(Boarding):
    """A view that keeps its still form up to date."""

    payload: Any
    held: Callable[[Variant], dict[str, Any]]

    def _begin_keeping(self) -> None:
        """Called before the widget is made."""
        self.still = StillForm()
        self._keeper = Keeper(self._keep)

    def _page(self, payloads: list[dict[str, Any]]) -> str:
        return page(payloads, f"tracefuse: {self.variant.config.as_code()}", self.measured.timeline, self.board)

    def _show_still(self) -> None:
        """Display it; called by the cell that displays the view."""
        if len(self.payload["values"]) <= MOST_AT_ONCE:
            self.still.page = self._page([self.payload])
        self.still.show(self.payload)
        self._keeper.touch()

    def _update_still(self) -> None:
        """Let it say what is shown now, as tables first."""
        self.still.update(self.payload)
        if self.still.is_shown:
            self._keeper.touch()

    def _keep(self, is_stale: Callable[[], bool]) -> None:
        """Make the page of what is shown, then that of its neighbours too."""
        shown, payload = self.variant, self.payload
        further = held_configurations(shown, tried_on(self.board))
        payloads = [payload]
        for config in (None, *further):
            if not self._is_idle(is_stale):
                return
            with idle_turn():
                if config is not None:
                    payloads.append(self.held(shown.under(config)))
                if config is None or config == further[-1]:
                    text = self._page(payloads)
            if is_stale():
                return
            if config is None or config == further[-1]:
                self.still.update(payload, text)

    def _is_idle(self, is_stale: Callable[[], bool]) -> bool:
        """Wait until no cell runs and no task is at work; False once something else is shown."""
        while not is_stale() and (cells.is_running or self._task.is_running):
            time.sleep(POLL_S)
        return not is_stale()
