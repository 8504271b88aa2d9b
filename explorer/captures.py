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

from tracefuse.assembly.program import CapturedProgram, ProgramFacts, captured_program
from tracefuse.assembly.refusals import note_unrecordable
from tracefuse.config.configuration import Config, Machine
from tracefuse.device.environment import environment
from tracefuse.errors import CaptureError
from tracefuse.execution.agreement import Agreement, agreement
from tracefuse.execution.replay import replayed
from tracefuse.optimizers.costs.cost import Peaks
from tracefuse.optimizers.costs.datasheets import promised
from tracefuse.optimizers.freeze.costs import FrozenCosts, frozen_costs
from tracefuse.optimizers.passes import Pass, Step
from tracefuse.recording.calls import Value
from tracefuse.recording.host_reads import Stop
from tracefuse.recording.left import Left, left_by, read_from_outside
from tracefuse.recording.namespace import name_of, namespace_of, visible_from
from tracefuse.recording.recorder import Recorder
from tracefuse.recording.roles import Roles, optimizers_of, roles_of
from tracefuse.recording.shield import Shield
from tracefuse.recording.thaw import Thaw
from tracefuse.timeline.measurements import Measurements
from tracefuse.variant import Variant

if TYPE_CHECKING:
    from tracefuse.diagnose.finding import Finding, Fix
    from tracefuse.widgets.view.explorer import Explorer


class Capture(ProgramFacts):
    """What one block or call did. Enter it as a context manager, or use `capture(fn, *args)`.

    After it, `trace` is the joint program, `forward` and `backward` its halves, `example_inputs` the tensors it read, in
    the order of `trace.inputs`, `rng_states` the generator states its random ops drew from, `guards` the Python values it
    took from tensors, and `environment` the versions, the device and the flags it ran with.

    `namespace` is where a block's variables are looked up when it ends (default: the block's own frame); what is assigned
    to `returned` inside the block counts as its result. With `train_all`, frozen parameters count as trainable in the trace,
    and in nothing else that a cell notices which does not train them itself (`tracefuse.recording.thaw`); `thawed` names them.
    """

    on_start: ClassVar[Callable[[Capture], None] | None] = None
    """Called with each capture before it records: how `tracefuse script.py` knows those that the script makes."""

    def __init__(self, namespace: Mapping[str, Any] | None = None, train_all: bool = False) -> None:
        self._namespace = namespace
        self._train_all = train_all
        self._thaw: Thaw | None = None
        self._thawed: frozenset[Value] = frozenset()
        self.returned: Any = None
        self._recorder = Recorder()
        self.is_recording = False
        self._roles: Roles | None = None
        self._alive: frozenset[Value] = frozenset()
        self._left: Mapping[Value, Left] = {}
        self._read: Sequence[Left] = ()
        self.agreement: Agreement | None = None
        """What `check` found; None until it, or the first measurement, has replayed the trace."""
        self._optimized: Mapping[str, frozenset[Value]] = {}
        self._variants: dict[Config, Variant] = {}
        self.known_steps: dict[tuple[Pass, ...], Step] = {}
        self.environment = self._shield.note(environment) or {}
        self.measurements = Measurements()
        self.restored = Measurements()
        """What was measured where a session file was saved; nothing of a capture of this process."""

    def __repr__(self) -> str:
        if not self.has_run:
            return "<tracefuse.Capture: nothing yet>"
        try:
            forward, backward = self.trace.split()
        except CaptureError as error:
            return f"<tracefuse.Capture: {error}>"
        device = self.environment["device"]
        return f"<tracefuse.Capture on {device}: {forward.op_count} forward and {backward.op_count} backward ops>"

    def __enter__(self) -> Capture:
        # Looking at a frame's variables keeps them alive: not without need.
        names = self._shield.note(self._seen_from, sys._getframe(1)) if self._train_all else None
        self._start(names or {})
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        self._stop(self._shield.note(self._seen_from, sys._getframe(1)) or {}, self.returned, kind is None)

    def _seen_from(self, frame: FrameType) -> Mapping[str, Any]:
        return visible_from(frame) if self._namespace is None else self._namespace

    @property
    def has_run(self) -> bool:
        """Whether its block or call has ended, and without an error."""
        return self._roles is not None or bool(self._shield.failure)

    @property
    def _shield(self) -> Shield:
        return self._recorder.shield

    def _start(self, namespace: Mapping[str, Any]) -> None:
        if self.has_run:
            raise CaptureError("this capture has already run. Make a new one with `tracefuse.capture()`.")
        if Capture.on_start is not None:
            self._shield.note(Capture.on_start, self)
        if self._train_all:
            self._thaw = Thaw(namespace, self._shield).__enter__()
        self._recorder.__enter__()
        self.is_recording = True

    def _stop(self, namespace: Mapping[str, Any], returned: Any, completed: bool) -> None:
        """Note who is who while the program's tensors are still there; keep nothing of the user's alive."""
        self._recorder.__exit__(None, None, None)
        self.is_recording = False
        try:
            if completed:
                self._shield.note(self._finish, namespace, returned)
            elif (error := sys.exception()) is not None:
                self._shield.note(note_unrecordable, error, self._recorder.recording)
        finally:
            if self._thaw is not None:
                self._thaw.__exit__(None, None, None)
            self._namespace = self.returned = self._thaw = None

    def _finish(self, namespace: Mapping[str, Any], returned: Any) -> None:
        gradient_of = _gradient if self._thaw is None else self._thaw.gradient_of
        self._recorder.note_end()
        self._roles = roles_of(self._recorder, namespace, returned, gradient_of)
        self._left = left_by(self._recorder, self._roles, namespace, returned, gradient_of)
        self._read = read_from_outside(self._recorder)
        self._alive = self._recorder.alive()
        self._optimized = optimizers_of(self._recorder, namespace)
        if self._thaw is not None:
            self._thawed = frozenset(v for p in self._thaw.parameters if (v := self._recorder.value_of(p)) is not None)

    @functools.cached_property
    def _built(self) -> CapturedProgram:
        if self._shield.failure:
            raise CaptureError(
                "recording failed inside tracefuse, and your program went on without it. This is a defect: please report it "
                f"with the traceback, or capture a smaller piece.\n\n{self._shield.failure}"
            )
        if self._roles is None:
            raise CaptureError(
                "nothing was captured: the block has not run to its end. Run it again without the error."
            )
        return captured_program(self._recorder, self._roles, self._alive, self._optimized, self._left)

    @property
    def stops(self) -> tuple[Stop, ...]:
        """Where the host reads what a GPU computes, or would if there were one, in the order of the run."""
        return tuple(self._recorder.recording.stops)

    @property
    def rng_states(self) -> tuple[torch.Tensor, ...]:
        """Generator states that the random ops drew from, so that a replay draws the same numbers."""
        return tuple(self._recorder.recording.rng_states)

    @property
    def thawed(self) -> tuple[str, ...]:
        """Names of the parameters that were frozen and count as trainable because of `train_all`.

        `c.optimize(freeze=c.thawed)` is the cell as it is written.
        """
        pairs = zip(self.trace.inputs, self.live_inputs, strict=True)
        return tuple(i.source for i, tensor in pairs if self._recorder.value_of(tensor) in self._thawed)

    def frozen_costs(self, patterns: Sequence[str] = ()) -> FrozenCosts:
        """What every parameter's gradient costs, `patterns` (as of `freeze`) frozen: its ops, what the forward keeps for it,
        modelled time. Print it. Raises `UnknownValue` for a pattern that matches nothing."""
        if not any(out.kind == "gradient" for out in self.trace.outputs):
            raise CaptureError("the program has no gradients: call `loss.backward()` in it, and capture it again.")
        return frozen_costs(self.trace, (patterns,) if isinstance(patterns, str) else tuple(patterns), self.datasheet)

    def replay(self) -> tuple[torch.Tensor, ...]:
        """Run the captured trace again op by op: the outputs in the order of `trace.outputs`, bit for bit those of the run."""
        return replayed(self)

    def check(self) -> Agreement | None:
        """Replay the trace once and hold it against what the program itself left: bit for bit the same, or what differs.

        Results, gradients and overwritten inputs are compared that are still there as the program left them, and nothing is
        once an input was written to, as by `optimizer.step()`: call it before. It is kept as `agreement`, `measure` does it
        first, and the view's notes say it. None for a program that did not run here, such as one from a session file. Raises
        `ReplayError` where an operator does.
        """
        if self.agreement is None and self._built.left:
            self.agreement = agreement(self, self._built.left, self._read)
        return self.agreement

    def with_fix(self, fix: Fix | Finding) -> Capture:
        """The capture of the program with `fix`, or with the first that a finding offers: see `tracefuse.diagnose.fixes`.

        One of passes leaves the capture as it is. Raises `FixError` for a fix of another program, or without the GPU it needs.
        """
        from tracefuse.diagnose.fixes import chosen, with_fix

        return with_fix(self, chosen(fix))

    def variant(self, config: Config) -> Variant:
        """The variant for `config`; equal configurations share one, and variants share the passes they have in common."""
        if config not in self._variants:
            self._variants[config] = self._variant(config)
        return self._variants[config]

    def _variant(self, config: Config) -> Variant:
        return Variant(self, config)

    @property
    def machine(self) -> Machine:
        """The machine that passes make programs for."""
        return Machine.here(self.tf32, self.datasheet)

    @property
    def datasheet(self) -> Peaks:
        """What prices go by: the datasheet of the GPU that the program ran on, for one on a CPU that of an H100."""
        return promised(self.environment.get("device") if self.device.type == "cuda" else None)

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

        return save(self, path, inputs)


def capture(fn: Callable[..., Any] | None = None, /, *args: Any, train_all: bool = False, **kwargs: Any) -> Capture:
    """Without arguments, a context manager that captures its block; with `fn`, the capture of `fn(*args, **kwargs)`.

    Results are the tensors that `backward()` started from and what `fn` returns; a block without a backward yields the
    tensors that it bound to names. With `train_all` the trace has the gradients of frozen parameters too. Raises what the
    program raises, and `CaptureError` (when the trace is first asked for) if there is nothing to show.
    """
    made = Capture(train_all=train_all)
    if fn is None:
        if args or kwargs:
            raise TypeError(f"arguments, but no function to call with them: {[*args, *kwargs]}; give it first")
        return made
    names = functools.partial(made._shield.note, namespace_of, fn, args, kwargs)
    made._start((names() if train_all else None) or {})
    returned, completed = None, False
    try:
        returned = fn(*args, **kwargs)
        completed = True
    finally:
        made._stop(names() or {}, returned, completed)
    return made


def _gradient(leaf: torch.Tensor) -> torch.Tensor | None:
    return leaf.grad
