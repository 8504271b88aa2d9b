"""A dispatch mode that is entered and left at any time, whatever other modes are entered and left in between.

torch leaves whatever mode is on top. A mode that is entered on top in the middle of another's `with` would be left in its
place. So ours goes below all others, where nobody leaves it but us, and is taken out from there, wherever it is then.

Each mode keeps, as flags, whether it found another one entered, and says so again when it is left: these are handed on between
neighbours, as in any list from which a link is taken.

Private names of torch that this file relies on, on 2.11, 2.13 and 2.15: `torch.utils._python_dispatch._pop_mode`,
`_push_mode` and `_get_current_dispatch_mode_stack`, and the flags of a mode, `old_…_flags`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)


def enter_below(mode: TorchDispatchMode) -> None:
    """Enter `mode` below all that are entered on this thread but torch's own, which it keeps at the bottom."""
    above = [one for one in _get_current_dispatch_mode_stack() if getattr(one, "_mode_key", None) is None]
    for _ in above:
        _pop_mode()
    TorchDispatchMode.__enter__(mode)
    for one in above:
        _push_mode(one)
    if not above:
        return
    try:
        for mine, lowest in _flags(mode, above[0]):
            mine[-1], lowest[0] = lowest[0], True
    except BaseException:
        _take_out(mode, above)
        raise


def _take_out(mode: TorchDispatchMode, above: list[TorchDispatchMode]) -> None:
    """Take `mode` from below those `above` it."""
    for _ in (mode, *above):
        _pop_mode()
    for one in above:
        _push_mode(one)


def leave(mode: TorchDispatchMode) -> None:
    """Leave `mode`, wherever it is among those that are entered on this thread; nothing happens where it is not."""
    entered = _get_current_dispatch_mode_stack()
    if mode not in entered:
        return
    above = entered[entered.index(mode) + 1 :]
    if not above:
        TorchDispatchMode.__exit__(mode, None, None, None)
        return
    try:
        _take_out(mode, above)
    finally:  # or torch would say for good that a mode is entered
        for mine, lowest in _flags(mode, above[0]):
            lowest[0] = mine.pop()


def _flags(mode: TorchDispatchMode, other: TorchDispatchMode) -> Iterator[tuple[deque[bool], deque[bool]]]:
    """What the two have kept of each flag; a mode that is entered twice is lowest where it was entered first."""
    for name, mine in vars(mode).items():
        if name.startswith("old_") and name.endswith("_flags") and vars(other).get(name):
            yield mine, vars(other)[name]
