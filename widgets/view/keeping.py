"""What is made while nobody asks for anything: what a switch left to be made, what each switch would change, and the still
form that a notebook keeps.

What a switch changes is told by the step without that pass. Its passes run right after the view is shown, while no cell runs
and nothing is measured, and are at hand when the switch is used; so is what the view says of its traces, which is worked out
once for each trace and takes longer than what it says of them together. What a click would wait for longest comes first: the
least input weight of `remat`, with which layers that are alike get kernels that differ, then the switches in the order of the
passes, since all behind a switch run anew; its other weights follow. A switch that is used meanwhile does not wait for the
others: they stop, passes in their midst, and go on behind the answer.

The still form becomes the view itself once the kernel has time to make it. A page of the shown configuration is made as soon
as nothing was asked for a while, then one with its neighbours, configuration by configuration, and only while no cell runs and
nothing is measured. A small program's page is made at once.

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
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from string import Template
from typing import Any

from IPython.display import DisplayHandle, display

from tracefuse.config.configuration import Config
from tracefuse.optimizers.gc_pause import uncollected
from tracefuse.variant import Variant
from tracefuse.widgets.html import held_configurations, page, tried_on
from tracefuse.widgets.payload.facts import step_size
from tracefuse.widgets.payload.without import foreseen, reweighed
from tracefuse.widgets.text import to_static_form, to_text
from tracefuse.widgets.view.ending import publish
from tracefuse.widgets.view.late import PARTS
from tracefuse.widgets.view.tasks import POLL_S, cells, idle_turn, is_timed_elsewhere, is_unasked_timed
from tracefuse.widgets.view.telling import Telling

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
    // Whose theme is on, where the notebook says so: the page's own is the browser's.
    const { jpThemeLight: isLight, vscodeThemeKind: kind } = document.body.dataset;
    const scheme = isLight || kind ? (isLight === "true" || /light/.test(kind) ? "light" : "dark") : "light dark";
    const style = "<style>:root, .tf { color-scheme: " + scheme + " !important; }</style>";
    frame.srcdoc = await new Response(page).text() + style;
    tables.replaceWith(frame);
    const lost = host.closest(".jp-OutputArea-child")?.previousElementSibling;
    if (!lost) return;
    const look = () => lost.style.display = /Loading widget|Error displaying widget/.test(lost.textContent) ? "none" : "";
    new MutationObserver(look).observe(lost, { childList: true, subtree: true, characterData: true });
    look();
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
        if (handle := self._handle) is not None:
            bundle = self.bundle(payload)
            publish(lambda: handle.update(bundle, raw=True))


QUIET_S = 3.0
"""How long nothing was asked for before a page is made."""
SOON_S = 0.2
"""The same before the passes run for the configurations one switch away."""
SETTLED_S = 0.8
"""The same before the payload of a switch is made and sent, which keeps the kernel busy: the next click may follow."""
MOST_AT_ONCE = 300
"""Values of a program whose page is made with the cell's output: a larger one's takes a part of a second."""


class Keeper:
    """Calls `work(is_stale)` in a thread so many seconds after the last `touch`; what is stale then ends early."""

    def __init__(self, work: Callable[[Callable[[], bool]], None]) -> None:
        self._work = work
        self._asked = 0
        self._timer: threading.Timer | None = None

    def touch(self, after_s: float) -> None:
        self._asked += 1
        if self._timer is not None:
            self._timer.cancel()
        mine = self._asked
        self._timer = threading.Timer(after_s, lambda: self._work(lambda: self._asked != mine))
        self._timer.daemon = True
        self._timer.start()

    @property
    def is_at_work(self) -> bool:
        """Whether it works, or will within the time that it waits."""
        return self._timer is not None and self._timer.is_alive()

    def stop(self) -> None:
        """What is done, and what would be, is stale."""
        self._asked += 1
        if self._timer is not None:
            self._timer.cancel()


class Keeping(Telling):
    """A view that foresees what its switches change, and keeps its still form up to date."""

    def _begin_keeping(self) -> None:
        """Called before the widget is made."""
        self.still = StillForm()
        self._settler = Keeper(self._settle_unasked)
        self._foreseer, self._keeper = Keeper(self._foresee), Keeper(self._keep)

    def _page(self, payloads: list[dict[str, Any]]) -> str:
        return page(payloads, f"tracefuse: {self.variant.config.as_code()}", self.measured.timeline, self.board)

    def _show_still(self) -> None:
        """Display it; called by the cell that displays the view."""
        if len(self.payload["values"]) <= MOST_AT_ONCE:
            self.still.page = self._page([self.payload])
        self.still.show(self.payload)
        self._touch()

    def _update_still(self) -> None:
        """Let it say what is shown now, as tables first."""
        self.still.update(self.payload)
        self._touch()

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Somebody waits for what is done inside: what nobody asked for stops, and begins anew a while later."""
        for one in (self._settler, self._foreseer, self._keeper):
            one.stop()
        try:
            yield
        finally:
            self._touch()

    def _answer(self, panel: str, act: Callable[[], None], at: str = "", is_main: bool = False) -> None:
        with self._answering() if panel == "passes" else nullcontext():
            super()._answer(panel, act, at, is_main)

    def _touch(self) -> None:
        """Begin anew with what is made while nobody asks for anything, for a view that somebody may see."""
        if self._unsettled is not None:
            self._settler.touch(SETTLED_S)
        elif self.still.is_shown:
            self._foreseer.touch(SOON_S)
            self._keeper.touch(QUIET_S)

    def _foresee(self, is_stale: Callable[[], bool]) -> None:
        """Tell what each switch changes, then work out what the view says of it once it is used."""
        shown = self.variant
        switches, weights = foreseen(shown), reweighed(shown.config)
        first, others = [*weights[:1], *switches], weights[1:]
        if not self._run_passes(shown, first, is_stale):
            return
        with self._lock:
            if is_stale():
                return
            self._tell_changed(shown)

        def work_out(variant: Variant, parts: Set[str] = frozenset()) -> None:
            _, rest = self.measured.in_two(variant, self.baseline, self.name)
            if not is_stale():
                rest(parts)

        # Of all their numbers before the rest of any.
        if self._ahead(shown, first, work_out, is_stale) and self._run_passes(shown, others, is_stale):
            self._ahead(shown, others, work_out, is_stale)
            self._ahead(shown, [*first, *others], lambda variant: work_out(variant, PARTS), is_stale)

    def _run_passes(self, shown: Variant, configs: Sequence[Config], is_stale: Callable[[], bool]) -> bool:
        """Run the passes of `configs`, whose sizes and payloads cost little then; False once something else is shown."""

        def run(variant: Variant) -> None:
            if variant.run_ahead(is_stale) and (variant.update is None or variant.update.run_ahead(is_stale)):
                step_size(variant)

        return self._ahead(shown, configs, run, is_stale)

    def _ahead(
        self,
        shown: Variant,
        configs: Sequence[Config],
        work: Callable[[Variant], None],
        is_stale: Callable[[], bool],
    ) -> bool:
        """Do `work` for the variant of each of `configs` while nobody asks for anything, with a look for garbage behind the
        last one or before a wait; False once something else is shown."""
        left = deque(configs)
        while left and self._is_idle(is_stale):
            with uncollected():
                while left and not is_stale() and not self._is_busy():
                    with idle_turn():
                        work(shown.under(left.popleft()))
        return not is_stale()

    def _keep(self, is_stale: Callable[[], bool]) -> None:
        """Make the page of what is shown, then that of its neighbours too."""
        shown = self.variant
        if not self._is_idle(is_stale, is_hurried=False):
            return
        with idle_turn():
            payload, payloads = self.payload, list[dict[str, Any]]()
            text = self._page([payload])
        if is_stale():
            return
        self.still.update(payload, text)
        further = held_configurations(shown, tried_on(self.board))
        if not self._run_passes(shown, further, is_stale):
            return
        for config in (shown.config, *further):
            if not self._is_idle(is_stale, is_hurried=False):
                return
            with idle_turn():
                payloads.append(self.held(shown.under(config)))
        with idle_turn():
            text = self._page(payloads)
        if not is_stale():
            self.still.update(payloads[0], text)

    def _is_idle(self, is_stale: Callable[[], bool], is_hurried: bool = True) -> bool:
        """Wait until no cell runs and no task is at work; False once something else is shown. What `is_hurried`, since a click
        may wait for it, comes before what is measured though nobody asked."""
        while not is_stale() and (self._is_busy() or not (is_hurried or self._is_quiet)):
            time.sleep(POLL_S)
        return not is_stale()

    def _is_busy(self) -> bool:
        return cells.is_running or self._task.is_running or (is_timed_elsewhere() and not is_unasked_timed())

    @property
    def _is_quiet(self) -> bool:
        """Whether nothing is measured, or about to be, asked or not."""
        return not (self._is_at_work or is_timed_elsewhere())
