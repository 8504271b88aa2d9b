"""The live view: one widget on one variant. A switch re-runs the pipeline, a button measures, a click selects.

Messages from the view: `{"type": "configure", "changes": {...}}` and `{"type": "measure"}`. Whatever they raise goes back to
the panel that asked, in `status.error`.
"""

from __future__ import annotations

import html
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from tracefuse.config import PASS_OF, Config
from tracefuse.optimizers.errors import TracefuseError
from tracefuse.profile import Profile, profile
from tracefuse.timing import Timing
from tracefuse.variant import Variant
from tracefuse.widgets.payload import payload
from tracefuse.widgets.text import to_text
from tracefuse.widgets.timeline_payload import OpByOp, timeline_record

STATIC = Path(__file__).parent / "static"
BUDGET_S = 5.0  # As long as somebody watches a progress bar; `variant.measure(budget_s=...)` takes any.
IDLE: dict[str, Any] = {"busy": "", "progress": None, "text": "", "error": None}


class Explorer(anywidget.AnyWidget):
    """Both traces of a variant, its passes as switches, times and kernels.

    `variant` is what is shown now, `selected` the name of the value that is selected, from either side.
    """

    _esm = STATIC / "widget.js"
    payload = traitlets.Dict().tag(sync=True)
    selected = traitlets.Unicode("").tag(sync=True)
    status = traitlets.Dict(IDLE).tag(sync=True)
    live = traitlets.Bool(True).tag(sync=True)
    timeline = traitlets.Dict(default_value=None, allow_none=True).tag(sync=True)

    def __init__(
        self,
        variant: Variant,
        name: str | None = None,
        budget_s: float | None = None,
        cuda_graph: bool = False,
        tune: bool = False,
    ) -> None:
        """`name` is the user's variable that holds the capture; `budget_s` how long measuring takes (default: `BUDGET_S`).

        With `cuda_graph`, measuring times replays of CUDA graphs too; with `tune`, block sizes are tried first.
        """
        self.variant = variant
        self.name = name
        self.budget_s = BUDGET_S if budget_s is None else budget_s
        self.cuda_graph, self.tune = cuda_graph, tune
        self.timed: tuple[Timing, Config] | None = (variant.timing, variant.config) if variant.timing else None
        self.profiles: dict[Config, Profile] = {}
        self.op_by_op = OpByOp()
        super().__init__(payload=payload(variant, self.timed, name=name))
        self.on_msg(self._on_message)

    def show(self, variant: Variant) -> None:
        """Show another variant of the same capture; times of the one before stay, marked as stale."""
        if variant.timing is not None:
            self.timed = (variant.timing, variant.config)
        self.variant = variant
        shown = self.op_by_op.shown(variant)
        self.payload = payload(variant, self.timed, self.profiles.get(variant.config), self.name, **shown)

    def configure(self, changes: dict[str, Any]) -> None:
        """Re-run the pipeline with some options changed. Raises `OptionError` for options that do not exist."""
        self.show(self.variant.with_config(**changes))

    def measure(self) -> None:
        """Time the shown variant against the eager replay, with progress in the view; an error is shown there too."""
        self._answer("timing", self._measure)

    def _measure(self) -> None:
        self.variant.check().measure(
            progress=self._progress, budget_s=self.budget_s, cuda_graph=self.cuda_graph, tune=self.tune
        )
        if self.variant.runs_triton:
            self._progress(1.0, "profiling the kernels")
            self.profiles[self.variant.config] = _profiled(self.variant)
        self._progress(1.0, "profiling op by op")
        self.timeline = timeline_record(self.op_by_op.measure(self.variant))
        self.show(self.variant)

    def _progress(self, fraction: float, text: str) -> None:
        self.status = {"busy": "timing", "progress": fraction, "text": text, "error": None}

    def _on_message(self, _: Any, message: dict[str, Any], __: Any) -> None:
        kind = message.get("type")
        if kind == "configure":
            changes = message["changes"]
            option = next(iter(changes), "")
            self._answer("passes", lambda: self.configure(changes), at=PASS_OF.get(option, option))
        elif kind == "measure":
            self._answer("timing", self._measure)
        else:
            raise ValueError(
                f"the view sent {kind!r}, which is none of its messages: restart the kernel after an update"
            )

    def _answer(self, panel: str, act: Callable[[], None], at: str = "") -> None:
        """Run `act` for `panel`, at the pass called `at`. Nothing else shows what a widget's callback raises."""
        self.status = {**IDLE, "busy": panel}
        try:
            act()
        except Exception as error:
            self.status = {**IDLE, "error": {"panel": panel, "at": at, "message": _sentence(error)}}
        except BaseException:  # an interrupt: leave, but not with a view that says it is busy
            self.status = {**IDLE, "error": {"panel": panel, "at": at, "message": "interrupted"}}
            raise
        else:
            self.status = IDLE

    def __str__(self) -> str:
        return to_text(self.payload)

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        bundle, metadata = super()._repr_mimebundle_(**kwargs)
        text = str(self)
        return {**bundle, "text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>"}, metadata


def _profiled(variant: Variant) -> Profile:
    """The variant's kernels in one more replay: the profiler slows what it watches, so that it stays out of the timed ones."""
    replay = variant.compile().replays(variant.capture.example_inputs, variant.capture.rng_states)

    def run() -> None:
        state = replay.forward()
        if replay.backward is not None:
            replay.backward(state)

    return profile(run)


def _sentence(error: Exception) -> str:
    """Our own errors say what to do; of any other, the traceback's end says where it happened."""
    if isinstance(error, TracefuseError):
        return str(error)
    return "".join(traceback.format_exception(error)[-3:]).rstrip()
