"""One training step of a run, wherever its loop lives.

    with tracefuse.capture_step(n=3) as c:
        trainer.train()

Torch's own hooks on every optimizer's step tell where steps end, so that it does not matter who owns the loop. The third
step is recorded with all its micro-batches, the one before it and the next three are followed to know what it reads and what
varies, and all others run as without us.
"""

from __future__ import annotations

import functools
import sys

from tracefuse.assembly.program import CapturedProgram
from tracefuse.errors import CaptureError, OptionError
from tracefuse.recorded import Names, RecordedCapture
from tracefuse.recording.namespace import visible_from
from tracefuse.steps.watch import SHOWN, Plan, StepWatch
from tracefuse.text import counted

MADE_ANEW = 3
"""Optimizers of one class from which on a run whose updates never repeat is taken to make them in its loop."""


class StepCapture(RecordedCapture):
    """The capture of the step number `n` of what runs in the block. Enter it once. Raises `OptionError` for no such number."""

    def __init__(self, n: int, names: Names | None = None) -> None:
        if not isinstance(n, int) or n < 1:
            raise OptionError(f"step {n!r}: steps are counted from 1: pass a whole number, such as {SHOWN}")
        super().__init__(names)
        self._plan = Plan(n, first=n)

    def __enter__(self) -> StepCapture:
        self._begin()
        names = self._names or functools.partial(visible_from, sys._getframe(1))
        self._shield.note(self._watch_steps, self._plan, names)
        return self

    def _stop(self, returned: object, completed: bool) -> None:
        if self._watch is not None:
            self._shield.survive(self._watch.stop)
        self._take_step()
        self.returned = None

    def _captured(self) -> CapturedProgram:
        if self._watch is not None and not self._shield.failure and self.run.ended is None:
            raise CaptureError(self._why(self._watch))
        return super()._captured()

    def _why(self, watch: StepWatch) -> str:
        """Why there is no step to show, and what to do."""
        if watch.refusal:
            return watch.refusal
        n, steps = self._plan.n, watch.updates.steps
        if not steps:
            return watch.elsewhere or (
                "no optimizer of torch's made a step: nothing tells where a step ends. Capture one step by itself, with "
                "`with tracefuse.capture():` around it."
            )
        if steps == 1 and max(watch.kinds.values()) >= MADE_ANEW:
            made = " and ".join(f"{count} of {kind}" for kind, count in watch.kinds.items())
            return (
                "the updates of this run never repeat, so that all count as one step: new optimizers are made on the way "
                f"({made} stepped), as the inner ones of MAML. Capture one forward and its backward by themselves "
                "(`with tracefuse.capture():` around these two)."
            )
        earlier = max(1, steps - 1)  # the one behind it is compared with it
        return (
            f"the run ended after {counted(steps, 'whole step')}, before step {n} was over: train for more steps, or capture "
            f"an earlier one (`capture_step(n={earlier})`, `--step {earlier}`)."
        )


def capture_step(n: int = SHOWN) -> StepCapture:
    """A context manager that captures the step number `n` of what trains in its block, 1 being the first.

    A step is the shortest sequence of forwards, backwards and updates that repeats: with one optimizer from one update to the
    next. All other steps run untouched, but for the one before it and the three after it, of which it is noted which operators
    ran. Raises `CaptureError` (when the trace is first asked for) where the run ended before that step, `OptionError` for no
    such number.
    """
    return StepCapture(n)
