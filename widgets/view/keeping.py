"""What a notebook keeps of a view: its still form, which becomes the view itself once the kernel has time to make it.

A page of the shown configuration is made as soon as nothing was asked for a while, then one with its neighbours, configuration
by configuration, and only while no cell runs and nothing is measured. A small program's page is made at once.

The still form is an output of its own: the view itself, as a page in a frame that is made when it comes into sight; where no
script runs, as in a notebook that is not trusted, it is tables. JupyterLab shows no other form of an output whose widget it
cannot find ("model not found"), so that the two cannot be one output. A living view hides it by its class: see `hidden` in
js/shell/connection.js.
"""

from __future__ import annotations

import base64
import gzip
import threading
import time
import uuid
from collections.abc import Callable
from string import Template
from typing import Any

from IPython.display import DisplayHandle, display

from tracefuse.variant import Variant
from tracefuse.widgets.html import held_configurations, page, tried_on
from tracefuse.widgets.text import to_static_form, to_text
from tracefuse.widgets.view.boarding import Boarding
from tracefuse.widgets.view.tasks import POLL_S, cells, idle_turn

_FRAMED = Template("""<div class="tf-still-$key"><div>$tables</div><script type="text/plain">$page</script><script>
for (const host of document.querySelectorAll(".tf-still-$key")) {
  const [tables, held] = host.children;
  if (!("DecompressionStream" in globalThis) || tables.dataset.watched) continue;
  tables.dataset.watched = "1";
  new IntersectionObserver(async (seen, watch) => {
    if (!seen.some((one) => one.isIntersecting)) return;
    watch.disconnect();
    const bytes = Uint8Array.from(atob(held.textContent), (one) => one.charCodeAt(0));
    const page = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const frame = document.createElement("iframe");
    frame.title = "tracefuse: the view, as it was saved";
    frame.sandbox = "allow-scripts allow-downloads";
    frame.style = "display:block;width:100%;height:820px;border:0";
    frame.srcdoc = await new Response(page).text();
    tables.replaceWith(frame);
    const lost = host.closest(".jp-OutputArea-child")?.previousElementSibling;
    if (lost && /Loading widget|Error displaying widget/.test(lost.textContent)) lost.style.display = "none";
  }).observe(tables);
}
</script></div>""")


class StillForm:
    """One view's; `key` is in its class, and in no other's."""

    def __init__(self) -> None:
        self.key = uuid.uuid4().hex
        self.page = ""
        self._handle: DisplayHandle | None = None

    @property
    def is_shown(self) -> bool:
        """Whether an output of a notebook holds it."""
        return self._handle is not None

    def bundle(self, payload: dict[str, Any]) -> dict[str, str]:
        """As HTML and as text."""
        tables = to_static_form(payload)
        packed = base64.b64encode(gzip.compress(self.page.encode(), mtime=0)).decode()
        framed = _FRAMED.substitute(key=self.key, tables=tables, page=packed)
        html = framed if self.page else f'<div class="tf-still-{self.key}">{tables}</div>'
        return {"text/plain": to_text(payload), "text/html": html}

    def show(self, payload: dict[str, Any]) -> None:
        """Display it below what the cell displayed so far."""
        self._handle = display(self.bundle(payload), raw=True, display_id=self.key)

    def update(self, payload: dict[str, Any], page: str = "") -> None:
        """Let it say what the view shows now, where it is displayed; `page` is the view as a page of its own."""
        self.page = page
        if self._handle is not None:
            self._handle.update(self.bundle(payload), raw=True)


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
