"""Record: run a block or a function once under the recorder and keep what it did as a `Capture`.

    with tracefuse.capture() as c:        c = tracefuse.capture(step, x, y)
        loss = model(x, y)
        loss.backward()

The program runs once, exactly as it would without. The trace is built when it is first asked for. With `train_all=True`
the gradients of frozen parameters are captured too (`tracefuse.recording.thaw`), so that any choice of what to train
can be tried.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from tracefuse.assembly.program import CapturedProgram, captured_program
from tracefuse.assembly.refusals import note_unrecordable
from tracefuse.captures import Capture
from tracefuse.device.environment import environment
from tracefuse.distributed.order import missed
from tracefuse.errors import CaptureError
from tracefuse.execution.agreement import Agreement, agreement
from tracefuse.execution.replay import replayed
from tracefuse.optimizers.gc_pause import uncollected
from tracefuse.recording.frames import tell_user
from tracefuse.recording.namespace import namespace_of, visible_from
from tracefuse.recording.recorder import Recorder
from tracefuse.recording.run import Left, Run
from tracefuse.recording.shield import Shield
from tracefuse.steps.steps import Steps
from tracefuse.steps.watch import Plan, StepWatch
from tracefuse.training.refusals import never_compiled

Names = Callable[[], Mapping[str, Any]]


class RecordedCapture(Capture):
    """What one block or call did: enter it as a context manager, or use `capture(fn, *args)`.

    `names` gives a block's variables when it ends (default: those of the block's own frame); what is assigned to `returned`
    inside the block counts as its result. Of a block that trains for several steps, one is captured: see `steps`; its results
    are what was assigned last before the next one began. With `train_all`, frozen parameters count as trainable in the trace,
    and in nothing else that a cell notices which does not train them itself (`tracefuse.recording.thaw`).
    """

    on_start: ClassVar[Callable[[RecordedCapture], None] | None] = None
    """Called with each capture before it records: how `tracefuse script.py` knows those that the script makes."""

    def __init__(self, names: Names | None = None, train_all: bool = False, recorder: Recorder | None = None) -> None:
        super().__init__()
        self.run = Run(recorder or Recorder(), train_all)
        self.returned: Any = None
        self._names = names
        self._watch: StepWatch | None = None
        self._environment = self._shield.note(environment) or {}
        self._left: tuple[Left | None, ...] = ()
        self._read: Sequence[Left] = ()
        self._is_over = False

    def __repr__(self) -> str:
        if not self.has_run and not self._is_over and not self._shield.failure:
            return "<tracefuse.Capture: nothing yet>"
        try:
            said = f"<tracefuse.Capture on {self.environment['device']}: {self.counts}>"
            return "\n".join(filter(None, [said, never_compiled(self.program)]))
        except CaptureError as error:
            return f"<tracefuse.Capture: {error}>"

    def __enter__(self) -> RecordedCapture:
        self._start(self._names or functools.partial(visible_from, sys._getframe(1)))
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        self._stop(self.returned, kind is None)
        self._is_over = True

    @property
    def has_run(self) -> bool:
        """Whether its block or call has ended, and without an error."""
        return self.run.ended is not None

    @property
    def _shield(self) -> Shield:
        return self.run.recorder.shield

    @property
    def steps(self) -> Steps | None:
        return None if self._watch is None else self._shield.note(lambda: self._watch.steps)

    def _begin(self) -> None:
        if self.has_run:
            raise CaptureError("this capture has already run. Make a new one with `tracefuse.capture()`.")
        if RecordedCapture.on_start is not None:
            self._shield.note(RecordedCapture.on_start, self)

    def _start(self, names: Names) -> None:
        self._begin()
        self._names = names
        # Looking at a frame's variables keeps them alive: not without need.
        self.run.start((self._shield.note(names) or {}) if self.run.train_all else {})
        if not self.run.train_all:  # whose gradients are added up until the block ends
            self._shield.note(self._watch_steps, Plan(), names, self.run)

    def _watch_steps(self, plan: Plan, names: Names, block: Run | None = None) -> None:
        own = weakref.ref(self)
        self._watch = StepWatch(plan, names, self._shield, block, lambda: getattr(own(), "returned", None))
        self._watch.start()

    def _stop(self, returned: Any, completed: bool) -> None:
        try:
            if self._watch is not None:
                self._shield.survive(self._watch.stop)
            if self.run.is_recording:
                self.run.stop(self._shield.note(self._names) or {}, returned, completed)
            elif completed:
                self._take_step()
            if not completed and (error := sys.exception()) is not None:
                self._shield.note(note_unrecordable, error, self.run.recorder.recording)
            self._shield.note(_tell_missed, completed)
        finally:
            self._names = self.returned = None

    def _take_step(self) -> None:
        """What is captured is a step of what ran, if one was recorded."""
        watch = self._watch
        run = None if watch is None else self._shield.note(lambda: watch.run)
        self.run = run or self.run

    def _captured(self) -> CapturedProgram:
        if self._shield.failure:
            raise CaptureError(
                "taking notes failed inside tracefuse, and your program went on without it. Report this traceback, or "
                f"capture a smaller piece.\n\n{self._shield.failure}"
            )
        if self.run.ended is None:
            raise CaptureError(
                "nothing was captured: the block has not run to its end. Run it again without the error."
            )
        with uncollected():
            program, self._left, self._read = captured_program(
                self.run.recorder, self.run.ended, self._environment, replayed
            )
        return program

    def check(self) -> Agreement | None:
        """Replay the trace once and hold it against what the program itself left: bit for bit the same, or what differs.

        Results, gradients and overwritten inputs are compared that are still there as the program left them, and nothing is
        once an input was written to, as by `optimizer.step()`: call it before. It is kept as `agreement`, `measure` does it
        first, and the view's notes say it. None for a program that did not run here, such as one from a session file. Raises
        `ReplayError` where an operator does.
        """
        program = self.program
        if self.agreement is None and self.run.ended is not None:
            self.agreement = agreement(program, self._left, self._read)
        return self.agreement


def _tell_missed(completed: bool) -> None:
    """Say where another rank waits, in its own capture, in a collective that this one has not come to. One that ended in an
    error of its own has nothing to say, and tells the others only that it is over."""
    said = missed() if completed else missed(patience_s=0.0)
    if said:
        tell_user(
            f"this rank's capture is over, and {said}. If this rank never starts that, the job hangs: let every rank start "
            "the same collectives in the same order, none in a branch that depends on the rank or on its data."
        )


def capture(
    fn: Callable[..., Any] | None = None, /, *args: Any, train_all: bool = False, **kwargs: Any
) -> RecordedCapture:
    """Without arguments, a context manager that captures its block; with `fn`, the capture of `fn(*args, **kwargs)`.

    Results are the tensors that `backward()` started from and what `fn` returns; a block without a backward yields the
    tensors that it bound to names. With `train_all` the trace has the gradients of frozen parameters too. Raises what the
    program raises, and `CaptureError` (when the trace is first asked for) if there is nothing to show.
    """
    made = RecordedCapture(train_all=train_all)
    if fn is None:
        if args or kwargs:
            raise TypeError(f"arguments, but no function to call with them: {[*args, *kwargs]}; give it first")
        return made
    made._start(functools.partial(namespace_of, fn, args, kwargs))
    returned, completed = None, False
    try:
        returned = fn(*args, **kwargs)
        completed = True
    finally:
        made._stop(returned, completed)
    return made
