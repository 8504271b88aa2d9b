"""A Python file run as `python FILE` would run it, and captured.

`__main__` is the file's module, `sys.argv` and `sys.path[0]` are what the file expects, and it ends as it would: an error is
shown with the traceback that Python would show and ends the process with status 1, `sys.exit(3)` ends it with 3.

A script that makes captures of its own (`with tracefuse.capture() as c:`) says what it wants to see: the last of them that ran
to its end is shown, and from the first on nothing else is recorded. Any other script is captured from its first line to its
last, as one trace.
"""

from __future__ import annotations

import builtins
import io
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode

from tracefuse import capture as captures
from tracefuse.capture import Capture
from tracefuse.errors import CaptureError

LONG = 20_000
"""Recorded ops from which a script is probably a loop over steps."""


class _Watch:
    """The capture of the whole script, and those that the script makes itself."""

    def __init__(self, module: ModuleType, train_all: bool) -> None:
        self.whole = Capture(vars(module), train_all=train_all)
        self.own: list[Capture] = []

    def __enter__(self) -> _Watch:
        self.whole.__enter__()
        captures.on_start = self._own_starts
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        captures.on_start = None
        if self.whole.is_recording:
            self.whole._stop(self.whole._namespace or {}, None, completed=kind is None or _is_success(error))

    def _own_starts(self, capture: Capture) -> None:
        self.own.append(capture)
        # Modes are left in the order in which they were entered: below another one, ours stays, and is not shown.
        if self.whole.is_recording and _get_current_dispatch_mode() is self.whole._recorder:
            self.whole._stop({}, None, completed=False)

    def shown(self) -> Capture:
        """The capture to show. Raises `CaptureError` where there is none."""
        if not self.own:
            return self.whole
        finished = [one for one in self.own if one.has_run]
        if not finished:
            raise CaptureError(
                "no capture that the script makes ran to its end: leave the `with` block without an error."
            )
        return finished[-1]


def run_script(path: Path, arguments: Sequence[str], train_all: bool = False) -> tuple[Capture, list[str]]:
    """Run the file at `path` with `arguments`, and capture it; with the capture, sentences on what it is of.

    Ends the process as the script would end it: raises `SystemExit` where it exits with another status than 0, or after its
    traceback was shown. Raises `CaptureError` where nothing was captured.
    """
    module = _main_module(path)
    sys.modules["__main__"] = module
    sys.argv = [str(path), *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(path.resolve().parent)
    watch = _Watch(module, train_all)
    try:
        with watch:
            exec(_code(path), vars(module))
    except SystemExit as ended:
        if not _is_success(ended):
            raise
    except BaseException as error:
        _show(error, path)
        raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else 1) from None
    return watch.shown(), _remarks(watch, train_all)


def _main_module(path: Path) -> ModuleType:
    module = ModuleType("__main__")
    loader = SourceFileLoader("__main__", str(path))
    vars(module).update(__file__=str(path), __loader__=loader, __builtins__=builtins, __cached__=None)
    return module


def _code(path: Path) -> Any:
    with io.open_code(str(path.resolve())) as file:
        return compile(file.read(), str(path), "exec", dont_inherit=True)


def _is_success(error: BaseException | None) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _show(error: BaseException, path: Path) -> None:
    """The traceback as Python shows it: from the script's own first frame on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != str(path):
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _remarks(watch: _Watch, train_all: bool) -> list[str]:
    found = []
    finished = sum(one.has_run for one in watch.own)
    if finished > 1:
        found.append(f"the script makes {finished} captures: this is the last one")
    if watch.own and train_all:
        found.append(
            "--train-all is not for captures that the script makes: write tracefuse.capture(train_all=True) there"
        )
    recorded = len(watch.whole._recorder.recording.calls)
    if not watch.own and recorded > LONG:
        found.append(
            f"the whole script is one trace, of {recorded} recorded ops: to see one step of a loop, put it into "
            "`with tracefuse.capture():`"
        )
    return found
