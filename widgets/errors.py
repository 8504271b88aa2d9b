"""Tracebacks without our frames: of what a traced cell raises, and of what we raise when a user's line asks for too much."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from tracefuse.optimizers.errors import TracefuseError

# Whose frames stand between the user's line and an operator while a cell is recorded.
RECORDER = {"tracefuse.record", "tracefuse.hooks", "tracefuse.host_reads", "tracefuse.capture"}


def is_recorder(module: str) -> bool:
    return module in RECORDER


def is_ours(module: str) -> bool:
    return module.partition(".")[0] == "tracefuse"


def hide_frames(error: BaseException, is_hidden: Callable[[str], bool] = is_recorder) -> None:
    """Unlink the frames of modules that `is_hidden` from the traceback of `error` and of what it was raised from.

    An operator that fails inside the recorder's dispatch mode would otherwise show our frames, and torch's behind them,
    under the user's line.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        link.__traceback__ = without(link.__traceback__, is_hidden)
        link = link.__cause__ or link.__context__


def without(tb: TracebackType | None, is_hidden: Callable[[str], bool]) -> TracebackType | None:
    kept: list[TracebackType] = []
    inside = False
    while tb is not None:
        module = _module(tb)
        if is_hidden(module):
            # torch gets into a dispatch mode through a wrapper of its compiler's.
            while kept and _module(kept[-1]).startswith(("torch._compile", "torch._dynamo")):
                kept.pop()
        inside = is_hidden(module) or (inside and module.partition(".")[0] == "torch")
        if not inside:
            kept.append(tb)
        tb = tb.tb_next
    for link, following in zip(kept, [*kept[1:], None], strict=True):
        link.tb_next = following
    return kept[0] if kept else None


def _module(tb: TracebackType) -> str:
    return tb.tb_frame.f_globals.get("__name__", "")


# --- in a shell -------------------------------------------------------------------------------------------------------


def _show_ours(
    shell: InteractiveShell, kind: type[BaseException], error: BaseException, tb: Any, tb_offset: int | None = None
) -> list[str]:
    """IPython's custom handler of a `TracefuseError`: its message under the user's own frames.

    A cause of ours has the same message, any other is a defect and shown in full.
    """
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
