"""Lines of Python from the frames that a profiler recorded with `with_stack=True`. Pure.

Kineto writes a frame as "folder/file.py(12): function"; the line is where the function begins, not the one that ran.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from tracefuse.timeline.events import Event

_FRAME = re.compile(r"(?P<file>[^<].*)\((?P<line>\d+)\): (?P<function>.+)")
# Frames of torch and of Python itself, wherever they are installed.
_NOT_THE_USERS = re.compile(r"(^|/)(torch|contextlib\.py|threading\.py|runpy\.py|importlib|multiprocessing)(/|\(|$)")


def lines_of(frames: Sequence[Event], events: Iterable[Event]) -> dict[Event, str]:
    """The innermost function of the user's around each event, "run, at train.py:12"; "" where no frame of one is known."""
    found: dict[Event, str] = {}
    own: dict[int, list[Event]] = defaultdict(list)
    for frame in frames:
        if _is_the_users(frame.name):
            own[frame.resource].append(frame)
    waiting: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        waiting[event.resource].append(event)
    for thread, asked in waiting.items():
        found |= _innermost(own[thread], sorted(asked, key=lambda one: one.start_ns))
    return found


def _innermost(frames: Sequence[Event], events: Sequence[Event]) -> dict[Event, str]:
    """Both by start: frames nest, so that those around a time are a stack."""
    found, stack, at = {}, [], 0
    for event in events:
        while at < len(frames) and frames[at].start_ns <= event.start_ns:
            stack.append(frames[at])
            at += 1
        stack = [frame for frame in stack if frame.end_ns > event.start_ns]
        found[event] = _written(stack[-1].name) if stack else ""
    return found


def _is_the_users(name: str) -> bool:
    match = _FRAME.fullmatch(name)
    return match is not None and _NOT_THE_USERS.search(match["file"]) is None


def _written(name: str) -> str:
    match = _FRAME.fullmatch(name)
    assert match is not None
    return f"{match['function']}, at {match['file']}:{match['line']}"
