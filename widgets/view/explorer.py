"""The live view is one widget on one variant. A switch re-runs the pipeline, a button measures, a click selects.

Messages from the view are `Message` in `js/types.d.ts`. What takes seconds is done in a thread, one at a time, all else at
once; whatever they raise goes back to the panel that asked, in `status.error`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import traitlets
from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle, display

from tracefuse.config.configuration import PASS_OF
from tracefuse.errors import OptionError, PassError
from tracefuse.measure.tried import Tried
from tracefuse.optimizers.gc_pause import uncollected
from tracefuse.variant import Variant
from tracefuse.widgets.html import STATIC, write_html
from tracefuse.widgets.payload.measured import Measured
from tracefuse.widgets.payload.passes import change_record, changes_record, config_record
from tracefuse.widgets.payload.timeline import timeline_record
from tracefuse.widgets.text import board_text, to_text
from tracefuse.widgets.view.report import report
from tracefuse.widgets.view.takeaway import TAKEAWAYS
from tracefuse.widgets.view.timing import BUDGET_S, Timing

CHOICES = ("configure", "pin", "unpin", "clock", "return")
"""What the view shows as chosen before there are numbers of it, until it hears that the message is answered."""


class Explorer(Timing):
    """Both traces of a variant, its passes as switches, times and kernels.

    `variant` is what is shown now, `baseline` the pinned variant that it is compared with (None: the captured program).

    Traits, which other widgets can link to: `selected`, the name of the value that is selected, from either side; `config`,
    the shown configuration by its options, which reconfigures when it is set (`{**explorer.config, "cat": False}`; what is
    left out stays, a bad value raises `TraitError`); `payload` and `timeline`, what is shown; `status`, what the view waits
    for.
    """

    _esm = (STATIC / "widget.js").read_text(encoding="utf-8")  # of a path, anywidget keeps every widget for good
    selected = traitlets.Unicode("").tag(sync=True)
    config = traitlets.Dict().tag(sync=True)
    live = traitlets.Bool(True).tag(sync=True)
    key = traitlets.Unicode().tag(sync=True)
    step = traitlets.Dict(default_value=None, allow_none=True).tag(sync=True)
    tab = traitlets.Unicode("").tag(sync=True)

    def __init__(
        self,
        variant: Variant,
        name: str | None = None,
        budget_s: float | None = None,
        cuda_graph: bool = False,
        tune: bool = False,
        peers: Sequence[str] = (),
        others: Sequence[tuple[str, Variant]] = (),
        tab: str = "",
    ) -> None:
        """`name` is the user's variable that holds the capture; `budget_s` how long measuring takes (default: `BUDGET_S`).

        With `cuda_graph`, measuring times replays of CUDA graphs too; with `tune`, block sizes are tried first;
        `peers` are other ways to run the step: see `Variant.measure`. `others` are variants of other captures that join the
        board, each with what its capture is called; `tab` is the panel that is open first.
        """
        self.variant = variant
        self.baseline: Variant | None = None
        self.name = name
        self.budget_s = BUDGET_S if budget_s is None else budget_s
        self.cuda_graph, self.tune, self.peers = cuda_graph, tune, tuple(peers)
        self.measured = Measured.of(variant)
        self.measured.adopt(variant)
        self._begin()
        self._begin_board(others)
        self._begin_keeping()
        last = self.measured.last
        super().__init__(
            payload=self.held(variant),
            board=self._board(),
            tab=tab,
            config=config_record(variant.config),
            key=self.still.key,
            timeline=None if last is None else timeline_record(last),
        )
        self.on_msg(self._on_message)

    # --- what is shown ------------------------------------------------------------------------------------------------

    def show(self, variant: Variant | None = None) -> None:
        """Show another variant of a capture on the board (default: the same, with what is known by now)."""
        self._show(variant)
        self.settle()

    def _show(self, variant: Variant | None = None) -> None:
        with self._lock:
            before = self.variant
            is_switch = variant is not None and variant.capture is before.capture and variant.config != before.config
            self.variant = variant = variant or self.variant
            self._follow_capture()
            self.measured.adopt(variant)
            if is_switch:
                self._tell_numbers(variant)
            else:
                self._tell_payload(self.held(variant))
            self.board = self._board()
            self.config = config_record(variant.config)
            if self.step is not None:
                self.show_pass(self.step["pass"])

    def show_pass(self, name: str) -> None:
        """Show beside the whole what the pass called `name` alone changed, as the trait `step`; for "*" what all of them did,
        with the text before, and nothing for "" or while the pass is off."""
        with self._lock:
            shown, beside = self.variant, self.baseline or self.variant.baseline
            if name == "*":
                updates = (
                    None if shown.update is None or beside.update is None else (beside.update.trace, shown.update.trace)
                )
                self.step = changes_record(name, (beside.trace, shown.trace), updates)
            else:
                self.step = change_record(name, shown.passes, () if shown.update is None else shown.update.passes)

    def configure(self, changes: dict[str, Any]) -> None:
        """Re-run the pipeline with some options changed. Raises `OptionError` for options that do not exist, and `PassError`
        for those with which the pass that takes them fails: what was shown stays."""
        with self._answering():
            self._configure(changes)
        self.settle()

    @uncollected()
    def _configure(self, changes: dict[str, Any]) -> None:
        variant = self.variant.with_config(**changes)
        before, after = config_record(self.variant.config), config_record(variant.config)
        changed = {PASS_OF.get(option, option) for option in after if after[option] != before.get(option)}
        if why := next((one.error for one in variant.passes if one.error and one.name in changed), None):
            raise PassError(why)
        self._show(variant)

    def pin(self, variant: Variant | None = None) -> None:
        """Compare with `variant` (default: the shown one) from now on, in place of the captured program."""
        self.baseline = (variant or self.variant).check()
        self.show()

    def unpin(self) -> None:
        """Compare with the captured program again."""
        self.baseline = None
        self.show()

    def show_times_of(self, device: str) -> None:
        """Show times of `device` everywhere, of the programs that the passes make for it: "here" is what it runs on, "default"
        what `tracefuse.target` says; the others are those of `tracefuse.optimizers.costs.datasheets.TARGETS`, modelled. Raises
        `OptionError` for one that is not known."""
        self.measured.clocks.choose(device, self.variant)
        with self._lock:
            if self.baseline is not None:
                self.baseline = self.baseline.under(self.baseline.config)
            self.show(self.variant.under(self.variant.config))

    @traitlets.validate("config")
    def _checked(self, proposal: Any) -> dict[str, Any]:
        try:
            return config_record(self.variant.config.changed(**proposal["value"]))
        except OptionError as error:
            raise traitlets.TraitError(str(error)) from error

    @traitlets.observe("config")
    def _follow(self, change: Any) -> None:
        if change["new"] != config_record(self.variant.config):
            self._answer("passes", lambda: self.configure(change["new"]))
            self.config = config_record(self.variant.config)  # also where it was refused

    def set_state(self, sync_data: dict[str, Any]) -> None:
        """What the front end sets, another widget's link included; it is told of values that were refused."""
        with self._lock:  # traitlets holds notifications meanwhile, those of other threads too
            try:
                super().set_state(sync_data)
            except traitlets.TraitError as error:
                self._tell(error={"panel": "passes", "at": "", "message": str(error)})
                self.send_state([name for name in sync_data if name in self.keys])

    # --- what is written, and made when it is asked for ---------------------------------------------------------------

    def save_html(self, path: str | Path) -> Path:
        """Write what is shown, the neighbouring configurations and the timeline as one page without a kernel; its path."""
        return write_html(self.variant, path, self.name, self.held, self.measured.timeline, self.board)

    def save_report(self, path: str | Path, tried: Iterable[Tried] = ()) -> Path:
        """Write what is shown, and what was `tried` beside it, as JSON: see `tracefuse.widgets.view.report`. Its path."""
        path = Path(path)
        path.write_text(json.dumps(report(self, tried), allow_nan=False, indent=1), encoding="utf-8")
        return path

    def export(self, path: str | Path) -> Path:
        """Write the shown variant as a Python file: see `Variant.export`."""
        return self.variant.check().export(path)

    def _inspect(self, kernel: str) -> None:
        self.measured.inspect(self.variant, kernel)
        self.show()

    def _take(self, what: str) -> None:
        if what not in TAKEAWAYS:
            raise OptionError(f"there is nothing called {what!r} to take away: choose from {', '.join(TAKEAWAYS)}")
        file = TAKEAWAYS[what]
        data = file.text(self).encode()
        self.send({"type": "file", "name": file.name, "mime": file.mime}, buffers=[data])

    # --- messages and answers -----------------------------------------------------------------------------------------

    def _on_message(self, _: Any, message: dict[str, Any], __: Any) -> None:
        try:
            self._do(message)
        finally:
            if message.get("type") in CHOICES:
                self.send({"type": "answered", "to": message})

    def _do(self, message: dict[str, Any]) -> None:
        kind = message.get("type")
        if kind == "configure":
            changes = message["changes"]
            option = next(iter(changes), "")
            self._answer("passes", lambda: self._configure(changes), at=PASS_OF.get(option, option))
        elif kind == "pin":
            given = message.get("config")
            pinned = self.variant.with_config(**given) if given else None
            self._answer("passes", lambda: self.pin(pinned))
        elif kind == "unpin":
            self._answer("passes", self.unpin)
        elif kind == "clock":
            self._answer("passes", lambda: self.show_times_of(message["device"]))
        elif kind == "show_pass":
            with self._answering(), self._between_rounds():
                self.show_pass(message["pass"])
        elif kind == "cancel":
            self.cancel()
        elif kind == "hello":
            return
        elif kind == "measure":
            self._start("timing", self._of_shown(self._measure), is_timed=True)
        elif kind == "ablate":
            self._start("timing", self._of_shown(self._ablate), is_timed=True)
        elif kind == "try":
            finding, choice = message["finding"], message["choice"]
            at = f"{finding} {choice}"
            self._start("findings", self._of_shown(self._try_fix, finding, choice), is_timed=True, at=at)
        elif kind == "inspect":
            self._start("kernels", lambda _: self._inspect(message["kernel"]), at=message["kernel"])
        elif kind == "take":
            self._start("take", lambda _: self._take(message["what"]))
        elif not self._answer_board(message):
            raise ValueError(
                f"the view sent {kind!r}, which is none of its messages: restart the kernel after an update"
            )

    # --- other forms --------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """The board where several captures are on it or it was opened with that, and the report of the one on show."""
        board = [board_text(self.board)] if self.tab == "board" or len(self.board["captures"]) > 1 else []
        return "\n\n".join([*board, to_text(self.payload)])

    __repr__ = __str__

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        bundle, metadata = super()._repr_mimebundle_(**kwargs)
        return {**bundle, **self.still.bundle(self.payload)}, metadata

    def _ipython_display_(self) -> None:
        """The view, and its still form below it; a terminal has only the text."""
        if not hasattr(get_ipython(), "kernel"):
            display({"text/plain": str(self)}, raw=True)
            return
        self.display_at(None)

    def display_at(self, handle: DisplayHandle | None) -> None:
        """Display the view in place of an output that there is, or as a new one; its still form stands below all outputs."""
        view, metadata = super()._repr_mimebundle_()
        shown = {**view, "text/plain": "tracefuse: the view"}
        if handle is None:
            display(shown, metadata=metadata, raw=True)
        else:
            handle.update(shown, metadata=metadata, raw=True)
        self._show_still()
