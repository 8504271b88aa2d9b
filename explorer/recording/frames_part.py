"""Tracebacks of a recorded program without our frames."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType


def is_recorder(module: str) -> bool:
    """Whether the frames of `module` stand between the user's line and an operator while a cell is recorded."""
    return module.startswith("tracefuse.recording.") or module == "tracefuse.captures"


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
    if not kept:
        return None
    for link, following in zip(kept, [*kept[1:], None], strict=True):
        link.tb_next = following
    return kept[0]


def _module(tb: TracebackType) -> str:
    return tb.tb_frame.f_globals.get("__name__", "")
