"""The still form of a view as an output of its own: what a notebook keeps when there is no kernel behind it.

It is the view itself, as a page in a frame that is made when it comes into sight; where no script runs, as in a notebook that
is not trusted, it is tables. JupyterLab shows no other form of an output whose widget it cannot find ("model not found"), so
that the two cannot be one output. A living view hides it by its class: see `hidden` in js/shell/connection.js.
"""

from __future__ import annotations

import base64
import gzip
import uuid
from string import Template
from typing import Any

from IPython.display import DisplayHandle, display

from tracefuse.widgets.text import to_static_form, to_text

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
