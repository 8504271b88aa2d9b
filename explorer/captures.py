"""Capture: run a block or a function once under the recorder and keep what it did as a `Trace`.

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tracefuse.assembly.program import CapturedProgram, captured_program
from tracefuse.assembly.refusals import note_unrecordable
from tracefuse.assembly.unshown import Dropped
from tracefuse.config.configuration import Config
from tracefuse.device.environment import environment
from tracefuse.errors import CaptureError
from tracefuse.execution.agreement import Agreement, agreement
from tracefuse.execution.replay import replayed
from tracefuse.optimizers.freeze.costs import FrozenCosts, frozen_costs
from tracefuse.optimizers.trace import Trace
from tracefuse.recording.calls import Guard
from tracefuse.recording.host_reads import Stop
from tracefuse.recording.namespace import name_of, namespace_of, visible_from
from tracefuse.recording.recorder import Recorder
from tracefuse.recording.run import Left, Run
from tracefuse.recording.shield import Shield
from tracefuse.variant import Variant, Variants

if TYPE_CHECKING:
    from tracefuse.diagnose.diagnose import Findings
    from tracefuse.diagnose.finding import Finding, Fix
    from tracefuse.widgets.view.explorer import Explorer


class Capture(Variants):
    """A captured program: to look at, to switch passes on and off, to measure. `capture` and `load` make one."""

    @property
    def trace(self) -> Trace:
        """The joint program, forward then backward, built when first asked for. Raises `CaptureError` if nothing has run."""
        return self.program.trace

    @property
    def forward(self) -> Trace:
        """The first half of `trace`: from the inputs to the results and to what is saved for the backward."""
        return self.program.forward

    def __getattr__(self, name: str) -> Any:
        """Says where what a variant has is found. Raises `AttributeError`."""
        if hasattr(type(self), name):
            return object.__getattribute__(
                self, name
            )  # once more: what a property of ours raised is not this name's lack
        where = (
            f": a variant has it, c.optimize().{name}" if not name.startswith("_") and hasattr(Variant, name) else ""
        )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{where}")

    @property
    def backward(self) -> Trace:
        """The second half of `trace`: from saved values and cotangents to gradients; without ops if none was captured."""
        return self.program.backward

    @property
    def example_inputs(self) -> tuple[torch.Tensor, ...]:
        """Tensors that the program read, as they were then, in the order of `trace.inputs`: what replays run on."""
        return self.program.example_inputs

    @property
    def live_inputs(self) -> tuple[torch.Tensor, ...]:
        """The user's own tensors, as they are now; an input that the program overwrote differs from its example."""
        return self.program.live_inputs

    @property
    def rng_states(self) -> tuple[torch.Tensor, ...]:
        """Generator states that the random ops drew from, so that a replay draws the same numbers."""
        return self.program.rng_states

    @property
    def environment(self) -> Mapping[str, str]:
        """The versions, the device and the flags that it ran with."""
        return self.program.environment

    @property
    def device(self) -> torch.device:
        """Where the program computes: the GPU if any of its values lies on one, wherever its inputs lie."""
        return self.program.device

    @property
    def guards(self) -> tuple[Guard, ...]:
        """Python values taken from tensors (`.item()`, `if t:`), with their lines: the trace holds only for these."""
        return self.program.guards

    @property
    def stops(self) -> tuple[Stop, ...]:
        """Where the host reads what a GPU computes, or would if there were one, in the order of the run."""
        return self.program.stops

    @property
    def dropped(self) -> tuple[Dropped, ...]:
        """What autograd computed and nothing got: no part of the trace."""
        return self.program.dropped

    @property
    def unrecorded(self) -> tuple[str, ...]:
        """What of the program the trace does not show, a sentence each with its remedy."""
        return self.program.unrecorded

    @property
    def optimizers(self) -> Mapping[str, frozenset[str]]:
        """The names of the inputs that each optimizer holds, by its variable; optimizers that hold none are left out."""
        return self.program.optimizers

    @property
    def thawed(self) -> tuple[str, ...]:
        """Names of the parameters that were frozen and count as trainable because of `train_all`.

        `c.optimize(freeze=c.thawed)` is the cell as it is written.
        """
        return self.program.thawed

    def frozen_costs(self, patterns: Sequence[str] = ()) -> FrozenCosts:
        """What every parameter's gradient costs, `patterns` (as of `freeze`) frozen: its ops, what the forward keeps for it,
        modelled time. Print it. Raises `UnknownValue` for a pattern that matches nothing."""
        if not any(out.kind == "gradient" for out in self.trace.outputs):
            raise CaptureError("the program has no gradients: call `loss.backward()` in it, and capture it again.")
        return frozen_costs(self.trace, (patterns,) if isinstance(patterns, str) else tuple(patterns), self.datasheet)

    def replay(self) -> tuple[torch.Tensor, ...]:
        """Run the captured trace again op by op: the outputs in the order of `trace.outputs`, bit for bit those of the run."""
        return replayed(self.program)

    def findings(self) -> Findings:
        """What makes the program slow or large as it ran, before any pass: see `Variant.findings`."""
        return self.variant(Config.off()).findings()

    def with_fix(self, fix: Fix | Finding) -> Capture:
        """The capture of the program with `fix`, or with the first that a finding offers: see `tracefuse.diagnose.fixes`.

        One of passes leaves the capture as it is. Raises `FixError` for a fix of another program, or without the GPU it needs.
        """
        from tracefuse.diagnose.fixes import chosen, fixed_program

        program = fixed_program(self.program, chosen(fix))
        return self if program is self.program else Capture(lambda: program, self.machine)

    def optimize(self, **options: Any) -> Variant:
        """The variant with every pass on, changed by `options` (see `tracefuse.config.Config`).

        Raises `OptionError` for a bad option and `PassError` where a pass cannot do what it was asked.
        """
        return self.variant(Config.of(**options)).check()

    def explore(self, **options: Any) -> Explorer:
        """The view of this capture as a widget, with every pass on, changed by `options`; see `Variant.explore`.

        Raises `OptionError` for a bad option; a pass that cannot do what it was asked says so in the view.
        """
        name = name_of(self, visible_from(sys._getframe(1)))
        return self.variant(Config.of(**options)).explore(name)

    def save(self, path: str | Path, inputs: bool = False) -> Path:
        """Write this capture as a session file, with all that was measured of it; `tracefuse.load` opens it anywhere.

        With `inputs`, the captured tensors too (parameters among them), so that it can be replayed and measured where it is
        opened. Returns the path. Raises `SessionError` for what cannot be saved: see `tracefuse.session.files`.
        """
        from tracefuse.session.files import save

        return save(path, self.program, self.measurements, self.machine, inputs)


class RecordedCapture(Capture):
    """What one block or call did: enter it as a context manager, or use `capture(fn, *args)`.

    `namespace` is where a block's variables are looked up when it ends (default: the block's own frame); what is assigned
    to `returned` inside the block counts as its result. With `train_all`, frozen parameters count as trainable in the trace,
    and in nothing else that a cell notices which does not train them itself (`tracefuse.recording.thaw`).
    """

    on_start: ClassVar[Callable[[RecordedCapture], None] | None] = None
    """Called with each capture before it records: how `tracefuse script.py` knows those that the script makes."""

    def __init__(
        self, namespace: Mapping[str, Any] | None = None, train_all: bool = False, recorder: Recorder | None = None
    ) -> None:
        super().__init__()
        self.run = Run(recorder or Recorder(), train_all)
        self.returned: Any = None
        self._namespace = namespace
        self._environment = self._shield.note(environment) or {}
        self._left: tuple[Left | None, ...] = ()

    def __repr__(self) -> str:
        if not self.has_run and not self._shield.failure:
            return "<tracefuse.Capture: nothing yet>"
        try:
            forward, backward = self.trace.split()
        except CaptureError as error:
            return f"<tracefuse.Capture: {error}>"
        device = self.environment["device"]
        return f"<tracefuse.Capture on {device}: {forward.op_count} forward and {backward.op_count} backward ops>"

    def __enter__(self) -> RecordedCapture:
        # Looking at a frame's variables keeps them alive: not without need.
        self._start(self._shield.note(self._seen_from, sys._getframe(1)) if self.run.train_all else {})
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        self._stop(self._shield.note(self._seen_from, sys._getframe(1)), self.returned, kind is None)

    def _seen_from(self, frame: FrameType) -> Mapping[str, Any]:
        return visible_from(frame) if self._namespace is None else self._namespace

    @property
    def has_run(self) -> bool:
        """Whether its block or call has ended, and without an error."""
        return self.run.ended is not None

    @property
    def _shield(self) -> Shield:
        return self.run.recorder.shield

    def _start(self, namespace: Mapping[str, Any] | None) -> None:
        if self.has_run:
            raise CaptureError("this capture has already run. Make a new one with `tracefuse.capture()`.")
        if RecordedCapture.on_start is not None:
            self._shield.note(RecordedCapture.on_start, self)
        self.run.start(namespace or {})

    def _stop(self, namespace: Mapping[str, Any] | None, returned: Any, completed: bool) -> None:
        try:
            self.run.stop(namespace or {}, returned, completed)
            if not completed and (error := sys.exception()) is not None:
                self._shield.note(note_unrecordable, error, self.run.recorder.recording)
        finally:
            self._namespace = self.returned = None

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
        program, self._left = captured_program(self.run.recorder, self.run.ended, self._environment)
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
            self.agreement = agreement(program, self._left, self.run.ended.read)
        return self.agreement


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
    names = functools.partial(made._shield.note, namespace_of, fn, args, kwargs)
    made._start(names() if train_all else {})
    returned, completed = None, False
    try:
        returned = fn(*args, **kwargs)
        completed = True
    finally:
        made._stop(names(), returned, completed)
    return made
