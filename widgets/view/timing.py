"""A view that times what it shows: when it is asked to, and behind its cell though nobody asked.

What is measured is noted under the configuration that was shown when that began; a switch meanwhile shows another one at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import traitlets

from tracefuse.errors import Cancelled
from tracefuse.measure.alone import Disturbed
from tracefuse.measure.rounds import Progress
from tracefuse.measure.timing import MIN_ROUNDS, UNASKED_S
from tracefuse.timeline.events import prepare
from tracefuse.variant import Variant
from tracefuse.widgets.payload.timeline import timeline_record
from tracefuse.widgets.view.answering import IDLE, sentence
from tracefuse.widgets.view.keeping import Keeping
from tracefuse.widgets.view.tasks import WAITS_FOR_CELL, Task, cells, is_timed_elsewhere
from tracefuse.widgets.view.unasked import Unasked

T = TypeVar("T")
BUDGET_S = 5.0  # As long as somebody watches a progress bar; `variant.measure(budget_s=...)` takes any.
LONGEST_S = 60.0
"""The most seconds that measuring again takes, of what was measured in too few rounds to say."""
MARGIN = 1.5
"""A round takes longer than its replays: inputs are laid out anew, memory is freed."""

CANCELLED = "Not measured: cancelled. Press Measure."


class Timing(Keeping):
    """`budget_s` is how long measuring takes, `cuda_graph`, `tune` and `peers` are as `Variant.measure` has them; `gave_up`
    says whether the last measurement took longer than it could."""

    timeline = traitlets.Dict(default_value=None, allow_none=True).tag(sync=True)

    budget_s: float
    cuda_graph: bool
    tune: bool
    peers: tuple[str, ...]
    gave_up = False
    _unasked: Unasked | None = None

    def measure(self, within_s: float = math.inf) -> None:
        """Time the shown variant against the baseline, with progress in the view; an error is shown there too.

        What takes longer than `within_s` seconds is given up, unless what was measured is enough by then, and the view says so
        in place of an error. The profile, op by op, is not begun any more then.
        """
        self.gave_up = False
        self._run("timing", self._of_shown(self._measure), within_s)
        if self.gave_up:
            self._tell(text=_too_long(within_s))

    def measure_behind(self) -> None:
        """The same behind the cell, for at most `UNASKED_S` seconds: once no cell runs and nothing is asked for. A cell that
        starts ends it, and it begins anew behind that. Needs IPython, which tells when a cell starts."""
        prepare()
        self._tell_unasked("")
        give_up = functools.partial(self._tell_over, {"text": CANCELLED})
        self._unasked = Unasked(self._time_unasked, self._waits_for, self._tell_unasked, give_up, UNASKED_S)

    def ablate(self) -> None:
        """Time each pass that is on by leaving it out, with progress in the view; an error is shown there too."""
        self._run("timing", self._of_shown(self._ablate))

    def try_fix(self, finding: str, choice: int = 0) -> None:
        """Time what the finding of this id offers, with progress in the view; an error is shown there too."""
        self._run("findings", self._of_shown(self._try_fix, finding, choice))

    def cancel(self) -> None:
        """Stop what is being measured; what was measured so far is kept if it is enough."""
        super().cancel()
        if self._unasked is not None:
            self._unasked.cancel()

    def close(self) -> None:
        """Nothing is measured for a view that is gone."""
        self.cancel()
        super().close()

    # --- asked for ----------------------------------------------------------------------------------------------------

    def _start(self, panel: str, *given: Any, **more: Any) -> None:
        self._supersede(panel)
        super()._start(panel, *given, **more)

    def _run(self, panel: str, *given: Any, **more: Any) -> None:
        self._supersede(panel)
        super()._run(panel, *given, **more)

    def _supersede(self, panel: str) -> None:
        """Times that are asked for come in place of those that nobody asked for."""
        if panel == "timing" and self._unasked is not None:
            self._unasked.cancel()

    def _of_shown(self, work: Callable[..., T], *more: Any) -> Callable[[Task], T]:
        """`work` on the variant and the baseline that are shown now, whatever is shown once its turn comes."""
        with self._lock:
            variant, baseline = self.variant, self.baseline
        return lambda task: work(task, variant, baseline, *more)

    def _measure(self, task: Task, variant: Variant, baseline: Variant | None) -> None:
        try:
            self._time(task, variant, baseline, self._progress)
        except Cancelled:
            if not task.is_late:
                raise
            self.gave_up = True
        finally:
            self.show()  # what was measured, also where the profile fails

    def _time(self, task: Task, variant: Variant, baseline: Variant | None, report: Progress) -> None:
        """Time the variant against the baseline, then op by op. What nobody asked for is not timed twice."""
        variant.check()
        pair = variant.config, baseline and baseline.config
        forecast = self.measured.clocks.forecast(variant, baseline)
        with task.turn(variant.program.example_inputs, report):
            if task.is_asked or pair not in self.measured.known.timings:
                variant.measure(
                    progress=report,
                    budget_s=self._budget_of(variant, baseline),
                    cuda_graph=self.cuda_graph,
                    tune=self.tune,
                    is_cancelled=task.is_cancelled,
                    peers=self.peers,
                    **_against(baseline),
                )
                self.measured.note(variant, baseline)
                self.measured.clocks.note(variant, baseline, forecast)
            if task.is_cancelled():
                return
            task.take_its_time()
            report(1.0, "profiling op by op")
            try:
                found = timeline_record(self.measured.profile(variant, baseline, report))
            except (Cancelled, Disturbed):  # with the times, which are kept
                return
        with self._lock:
            self.timeline = found

    def _budget_of(self, variant: Variant, baseline: Variant | None) -> float:
        """Seconds of measuring: `budget_s`, or of what that was too short for as long as enough rounds take."""
        timing = self.measured.known.timings.get((variant.config, baseline and baseline.config))
        if timing is None or timing.rounds >= MIN_ROUNDS:
            return self.budget_s
        round_s = timing.inner * sum(one.step_ms.median for one in timing.programs) / 1e3
        return max(self.budget_s, min(LONGEST_S, MARGIN * MIN_ROUNDS * round_s))

    def _ablate(self, task: Task, variant: Variant, _: Variant | None) -> None:
        variant.check()
        with task.turn(variant.program.example_inputs, self._progress):
            # Each pass takes as long as the program that a plain measurement compares with.
            budget_s = self.budget_s * (2 + len(variant.passes)) / 2
            found = variant.ablate(progress=self._progress, budget_s=budget_s, is_cancelled=task.is_cancelled)
        self.measured.known.note_ablation(variant.config, found)
        self.show()

    def _try_fix(self, task: Task, variant: Variant, baseline: Variant | None, finding: str, choice: int) -> None:
        fix = self.measured.fix(variant.check(), baseline, finding, choice)
        with task.turn(variant.program.example_inputs, self._progress):
            # What a fix is for may be a step of half a second, and a verdict takes several rounds.
            found = variant.try_fix(fix, self._progress, 2 * self.budget_s, task.is_cancelled)
        self.measured.note_trial((variant.config, finding, choice), found, variant)
        self.show()

    # --- not asked for ------------------------------------------------------------------------------------------------

    @property
    def _is_at_work(self) -> bool:
        return super()._is_at_work or (self._unasked is not None and self._unasked.is_on)

    def _waits_for(self) -> str:
        """What comes before times that nobody asked for; "" where nothing does."""
        if cells.is_running:
            return WAITS_FOR_CELL
        if self._settler.is_at_work or self._foreseer.is_at_work:
            return "first: what each switch changes"
        return "waiting for another measurement" if self._task.is_running or is_timed_elsewhere() else ""

    def _time_unasked(self, task: Task) -> Callable[[], None] | None:
        """How it is told what that came to; None where a cell came first."""
        said: dict[str, Any] = {}
        try:
            self._of_shown(self._time, self._report_unasked)(task)
        except Cancelled:
            said = {"text": _too_long(UNASKED_S) if task.is_late else CANCELLED}
        except Exception as problem:
            said = {"error": {"panel": "timing", "at": "", "message": sentence(problem)}}
        assert self._unasked is not None
        if task.is_cancelled() and not task.is_late and self._unasked.is_on:
            return None
        return lambda: self._show_timed(said)

    def _show_timed(self, said: Mapping[str, Any]) -> None:
        if self.comm is not None:  # else the view was closed
            self.show()
        self._tell_over(said)

    def _tell_over(self, said: Mapping[str, Any]) -> None:
        if not self._task.is_running:
            self._tell(**{**IDLE, **said})

    def _tell_unasked(self, why: str) -> None:
        self._report_unasked(0.0, why)

    def _report_unasked(self, fraction: float, text: str) -> None:
        """Beside what was asked for, whose status it is."""
        if not self._task.is_running:
            self._progress(fraction, text)


def _against(baseline: Variant | None) -> dict[str, Any]:
    return {} if baseline is None else {"against": baseline}


def _too_long(seconds: float) -> str:
    return f"Not measured: this takes longer than {seconds:.0f} s. Press Measure."
