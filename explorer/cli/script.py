"""A script is run as `python FILE` would run it, and captured.

`__main__` is the file's module, `sys.argv` and `sys.path[0]` are what the file expects, and it ends as it would: an error is
shown with the traceback that Python would show and ends the process with status 1, `sys.exit(3)` ends it with 3.

A script that makes captures of its own (`with tracefuse.capture() as c:`) says what it wants to see: the last of them that ran
to its end is shown, and from the first on nothing else is recorded. Any other script is captured from the first module that
it calls, or the first op that autograd records, to its last line, as one trace; one without either, from its first line. Of
one that trains for several steps, one step is captured.

Private names of torch that this file relies on, on 2.11, 2.13 and 2.15: `torch.autograd._get_sequence_nr`
and `torch.utils._python_dispatch._get_current_dispatch_mode`.
"""

from __future__ import annotations

import builtins
import io
import os
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten

from tracefuse.errors import CaptureError
from tracefuse.recorded import RecordedCapture
from tracefuse.recording.frames import hide_frames
from tracefuse.recording.recorder import Recorder
from tracefuse.step_capture import StepCapture

INTERRUPTED = 130
"""The exit status of a script that Ctrl-C ends."""


class _FromFirstUse(Recorder):
    """A recorder that begins where a module is called or autograd has something to record: before that, a script makes its
    model and its data, which are the inputs of what it is looked at for."""

    has_begun = False
    first_seq: int | None = None

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.has_begun:
            return
        if self.modules.current().kind or _is_differentiated(args, kwargs):
            self.has_begun = True
            self.begin(self.first_seq)
        self.first_seq = torch.autograd._get_sequence_nr()  # autograd numbers an operator before it runs


def _is_differentiated(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    leaves = tree_flatten((args, kwargs))[0] if torch.is_grad_enabled() else []
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)


class _Watch:
    """The capture of the whole script or of one step of it, and those that the script makes itself."""

    def __init__(self, module: ModuleType, train_all: bool, step: int | None) -> None:
        def names() -> dict[str, Any]:
            return vars(module)

        self.is_step = step is not None
        self.whole = RecordedCapture(names, train_all, _FromFirstUse()) if step is None else StepCapture(step, names)
        self.own: list[RecordedCapture] = []

    def __enter__(self) -> _Watch:
        self.whole.__enter__()
        self._is_recording = True
        if not self.is_step:
            RecordedCapture.on_start = self._own_starts
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        RecordedCapture.on_start = None
        self._stop(completed=kind is None or _is_success(error))
        if isinstance(error, KeyboardInterrupt):  # a step that was over by then is one
            self.whole._take_step()

    def _own_starts(self, capture: RecordedCapture) -> None:
        self.own.append(capture)
        # Modes are left in the order in which they were entered: below another one, ours stays, and is not shown.
        if not self.whole.run.is_recording or _get_current_dispatch_mode() is self.whole.run.recorder:
            self._stop(completed=False)

    def _stop(self, completed: bool) -> None:
        if self._is_recording:
            self._is_recording = False
            self.whole._stop(None, completed)

    def has_captured(self) -> bool:
        return any(one.has_run for one in (self.whole, *self.own))

    def shown(self) -> RecordedCapture:
        """The capture to show. Raises `CaptureError` where there is none."""
        if not self.own:
            return self.whole
        finished = [one for one in self.own if one.has_run]
        if not finished:
            raise CaptureError(
                "no capture that the script makes ran to its end: leave the `with` block without an error."
            )
        return finished[-1]


def run_script(
    path: Path, arguments: Sequence[str], train_all: bool = False, step: int | None = None
) -> tuple[RecordedCapture, list[str], int]:
    """Run the file at `path` with `arguments`, and capture it, or its training step number `step`; with the capture, sentences
    on what it is of, and the exit status: 130 of a script that Ctrl-C ended after a step was captured.

    Ends the process as the script would end it: raises `SystemExit` where it exits with another status than 0, or after its
    traceback was shown. Raises `CaptureError` where nothing was captured.
    """
    module = _main_module(os.path.abspath(path))
    sys.modules["__main__"] = module
    sys.argv = [str(path), *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(path.resolve().parent)
    watch = _Watch(module, train_all, step)
    try:
        with watch:
            exec(_code(module), vars(module))
    except SystemExit as ended:
        if not _is_success(ended):
            raise
    except KeyboardInterrupt as error:
        _show(error, module)
        if not watch.has_captured():
            raise SystemExit(INTERRUPTED) from None
        said = "the script was interrupted: what is shown was captured before"
        return watch.shown(), [said, *_remarks(watch, train_all)], INTERRUPTED
    except BaseException as error:
        _show(error, module)
        raise SystemExit(1) from None
    return watch.shown(), _remarks(watch, train_all), 0


def _main_module(path: str) -> ModuleType:
    module = ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    vars(module).update(__file__=path, __loader__=loader, __builtins__=builtins, __cached__=None)
    return module


def _code(module: ModuleType) -> Any:
    path = str(module.__file__)
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _is_success(error: BaseException | None) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _show(error: BaseException, module: ModuleType) -> None:
    """The traceback as Python shows it: from the script's own first frame on, without the recorder's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals is not vars(module):
        trace = trace.tb_next
    error.__traceback__ = trace
    hide_frames(error)
    sys.excepthook(type(error), error, error.__traceback__)


def _remarks(watch: _Watch, train_all: bool) -> list[str]:
    found = []
    finished = sum(one.has_run for one in watch.own)
    if finished > 1:
        found.append(f"the script makes {finished} captures: this is the last one")
    if watch.own and train_all:
        found.append(
            "--train-all is not for captures that the script makes: write tracefuse.capture(train_all=True) there"
        )
    backwards, steps = watch.whole.run.recorder.recording.backwards, watch.whole.steps
    if not watch.own and steps is not None and len(steps) > 1 and steps.captured is not None:
        found.append(f"{steps.headline}: --step N shows another one")
    elif not watch.own and backwards > 1:
        found.append(
            f"the script runs {backwards} backwards, and all of it is one trace: where it loops over training steps, put one "
            "of them into `with tracefuse.capture():` to see that step"
        )
    return found
