"""Tracebacks of what we raise, when a user's line asks for too much, are shown without our frames."""

from __future__ import annotations

from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from tracefuse.optimizers.errors import TracefuseError
from tracefuse.recording.frames import without


def is_ours(module: str) -> bool:
    return module.partition(".")[0] == "tracefuse"


# --- in a shell -------------------------------------------------------------------------------------------------------


def _show_ours(
    shell: InteractiveShell, kind: type[BaseException], error: BaseException, tb: Any, tb_offset: int | None = None
) -> list[str]:
    """IPython's custom handler of a `TracefuseError`: its message under the user's own frames. A cause of ours has the same
    message, any other is a defect and shown in full."""
    error.__traceback__ = without(tb, is_ours)
    if isinstance(error.__cause__ or error.__context__, TracefuseError):
        error.__cause__ = None  # which suppresses the context too
    lines = shell.InteractiveTB.structured_traceback(kind, error, error.__traceback__, tb_offset=tb_offset)
    shell._showtraceback(kind, error, lines)
    return lines


def install(shell: InteractiveShell) -> None:
    """Show our errors in `shell` without our frames, unless the user has a handler of their own: there is only one."""
    if not shell.custom_exceptions:
        shell.set_custom_exc((TracefuseError,), _show_ours)


def uninstall(shell: InteractiveShell) -> None:
    # By name: after a reload, what is installed is another class of the same name.
    if [kind.__name__ for kind in shell.custom_exceptions] == [TracefuseError.__name__]:
        shell.set_custom_exc((), None)
