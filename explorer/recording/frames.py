"""Which line of the user's a call comes from: the innermost frame of neither torch, Triton nor the recorder or the backend.

Nor of those that own a loop, whose lines are the same in every program: accelerate, Lightning, transformers' Trainer.
"""

from __future__ import annotations

import ast
import dis
import functools
import importlib.util
import itertools
import linecache
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CodeType, FrameType, TracebackType

import torch
from torch import fx

from tracefuse.optimizers.origins import Line, Source


def _installed(*libraries: tuple[str, str]) -> tuple[str, ...]:
    """How the files begin of those of the libraries that are installed, each with what of it is meant."""
    return tuple(
        os.path.join(os.path.dirname(found.origin), within)
        for name, within in libraries
        if (found := importlib.util.find_spec(name)) is not None and found.origin is not None
    )


_OWN_LOOPS = _installed(
    *((name, "") for name in ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")),
    ("transformers", "trainer"),
)
_LIBRARIES = (*_installed(("torch", ""), ("triton", "")), *_OWN_LOOPS)
_PATHS = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_INSTALLED = tuple(os.path.join(path, "") for path in {*_PATHS, os.path.dirname(os.path.dirname(torch.__file__))})
_EXPLORER = os.path.dirname(os.path.dirname(__file__))
_RECORDER = ("recording", "steps", "recorded")
"""The packages and their door whose code stands under a user's line while a cell is recorded."""
_OURS = tuple(
    os.path.join(_EXPLORER, name) + end for name in (*_RECORDER, "dynamo", "backend") for end in (os.sep, ".py")
)

_SUBSCRIPTS = ("BINARY_SUBSCR", "STORE_SUBSCR", "DELETE_SUBSCR")
_SUBSCRIPT_SINCE_3_14 = 26  # as an argument of BINARY_OP, where earlier versions have none of that number

_LOADER = torch.utils.data.dataloader.__file__

# A frame in the stack that dynamo notes.
_FRAME = re.compile(r'File "(?P<file>.+?)", line (?P<line>\d+), in (?P<function>.+)\n\s*(?P<text>.*)')


def user_source() -> Source | None:
    """The user's line that is running; None where there is none (on a thread of autograd's)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_torchs_or_ours(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return None
    return source_of(frame, frame.f_lineno, _called(frame) if is_installed(frame.f_code.co_filename) else None)


def loop_line() -> Line | None:
    """The innermost line of a library that owns a loop; None where a line of the user's runs within it."""
    for frame in _frames():
        file = frame.f_code.co_filename
        if file.startswith(_OWN_LOOPS):
            return _line_of(frame)
        if not is_torchs_or_ours(file):
            return None
    return None


def _called(frame: FrameType) -> Line | None:
    """The innermost line of the user's project around a frame of an installed library."""
    outer = frame.f_back
    while outer is not None:
        file = outer.f_code.co_filename
        if not (is_torchs_or_ours(file) or is_installed(file)):
            return _line_of(outer)
        outer = outer.f_back
    return None


def _line_of(frame: FrameType) -> Line:
    code = frame.f_code
    text = linecache.getline(code.co_filename, frame.f_lineno).strip()
    return Line(code.co_filename, frame.f_lineno, code.co_name, text, label_of(code.co_filename))


def tell_user(message: str) -> None:
    """A `UserWarning` at the user's line that is running, which is none of Python's own library. A filter that makes errors of
    warnings silences it, since the error would end the program, which runs as well without tracefuse."""
    named = ((frame, frame.f_code.co_filename) for frame in _frames())
    frame = next((frame for frame, file in named if not (is_torchs_or_ours(file) or _is_pythons(file))), None)
    with suppress(Warning):
        if frame is None:
            warnings.warn(message, stacklevel=2)
            return
        registry = frame.f_globals.setdefault("__warningregistry__", {})
        name = frame.f_globals.get("__name__")
        warnings.warn_explicit(message, UserWarning, frame.f_code.co_filename, frame.f_lineno, name, registry)


def noted_source(node: fx.Node) -> Source | None:
    """The innermost line of the user's, of the stack that dynamo noted for `node`."""
    return innermost_source(node.meta.get("stack_trace") or "")


def innermost_source(stack: str) -> Source | None:
    """The innermost line of the user's in a stack's text."""
    for frame in reversed(list(_FRAME.finditer(stack))):
        if not is_torchs_or_ours(frame["file"]):
            return Source(frame["file"], int(frame["line"]), frame["function"], frame["text"], label_of(frame["file"]))
    return None


def source_of(frame: FrameType, line: int, called: Line | None = None) -> Source:
    """A line of a frame's file, which `called` called where that is another one."""
    code = frame.f_code
    return _source(code.co_filename, line, code.co_name, linecache.getline(code.co_filename, line), called)


@functools.lru_cache(maxsize=4096)
def _source(file: str, line: int, function: str, text: str, called: Line | None) -> Source:
    return Source(file, line, function, text.strip(), label_of(file), called)


Places = tuple[tuple[CodeType, int], ...]
"""Where a program is: of each frame from the outermost in, the code and the instruction that runs."""


def running_places() -> Places:
    """Where the program is that called this. No frame is kept, since that would keep its variables alive."""
    return tuple((frame.f_code, frame.f_lasti) for frame in _frames())[::-1]


def has_gone_back(since: Places) -> bool | None:
    """Whether the function that led to the place of `since`, and leads here, has gone back to an earlier line: a loop is in
    its next round. None where one line calls one function after another, such as a list of callbacks."""
    for (code, at), (before, was_at) in zip(running_places(), since, strict=False):
        if code is not before:
            return None
        if at != was_at:
            return at < was_at
    return False


def is_called_by(function: str, file: str) -> bool:
    """Whether torch's `function` of `file` is running, for no line of the user's that it has called in turn."""
    for frame in _frames():
        if not is_torchs_or_ours(frame.f_code.co_filename):
            return False
        if frame.f_code.co_name == function and frame.f_code.co_filename == file:
            return True
    return False


def is_called_within(folder: str) -> bool:
    """Whether code of torch's in this folder is running, for no line of the user's that it has called in turn."""
    for frame in _frames():
        file = frame.f_code.co_filename
        if file.startswith(folder) or not is_torchs_or_ours(file):
            return file.startswith(folder)
    return False


def is_subscript() -> bool:
    """Whether the user's line that is running takes elements of something, or sets them: `x[rows]`."""
    frame = _users_frame()
    if frame is None:
        return False
    code, at = frame.f_code.co_code, frame.f_lasti
    name = dis.opname[code[at]]
    return name in _SUBSCRIPTS or (name == "BINARY_OP" and code[at + 1] == _SUBSCRIPT_SINCE_3_14)


def running_call() -> ast.Call | None:
    """The call that the user's line is waiting for, as its text says it; None where that is not at hand, or no call."""
    frame = _users_frame()
    if frame is None:
        return None
    at = itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    return _call_at(frame.f_code.co_filename, *next(at))


def _call_at(file: str, first: int | None, last: int | None, start: int | None, end: int | None) -> ast.Call | None:
    """The call between two columns, which are counted in bytes, of two lines."""
    if first is None or last is None or start is None or end is None:
        return None
    lines = [line.encode() for line in linecache.getlines(file)[first - 1 : last]]
    if len(lines) <= last - first:
        return None
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    try:
        found = ast.parse(f"({b''.join(lines).decode()})", mode="eval").body
    except (SyntaxError, ValueError):  # the file was changed since
        return None
    return found if isinstance(found, ast.Call) else None


def is_in_loader() -> bool:
    """Whether torch's `DataLoader` is running, or what it has called, such as a dataset."""
    return any(frame.f_code.co_filename == _LOADER for frame in _frames())


def is_loading() -> bool:
    """Whether torch's `DataLoader` is running, for no line of the user's that it has called in turn, such as a dataset's."""
    for frame in _frames():
        file = frame.f_code.co_filename
        if file == _LOADER or not is_torchs_or_ours(file):
            return file == _LOADER
    return False


def _users_frame() -> FrameType | None:
    """The innermost frame of the user's."""
    return next((frame for frame in _frames() if not is_torchs_or_ours(frame.f_code.co_filename)), None)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


@functools.lru_cache(maxsize=4096)
def is_installed(file: str) -> bool:
    """Whether the file belongs to Python itself or to a package that was installed, and not to the user's project."""
    return file.startswith(_INSTALLED)


@functools.lru_cache(maxsize=4096)
def _is_pythons(file: str) -> bool:
    """Whether the file is one of Python's own library, below which packages may be installed."""
    within = file.removeprefix(os.path.join(sysconfig.get_path("stdlib"), ""))
    return within != file and not within.startswith(("site-packages", "dist-packages"))


@functools.lru_cache(maxsize=4096)
def owns_a_loop(file: str) -> bool:
    """Whether the file is of a library that trains in a loop of its own: its lines are nobody's, but its variables hold the
    batches."""
    return file.startswith(_OWN_LOOPS)


@functools.lru_cache(maxsize=4096)
def is_torchs_or_ours(file: str) -> bool:
    return file.startswith((*_LIBRARIES, *_OURS, "<frozen", "<string>"))


@functools.lru_cache(maxsize=1024)
def label_of(file: str) -> str:
    """What a person calls the file: "In[3]" for a notebook cell, else its last part."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    cell = shell.compile.format_code_name(file) if shell is not None else None
    return cell[1] if cell else os.path.basename(file)


def is_recorder(module: str) -> bool:
    """Whether the frames of `module` stand between the user's line and an operator while a cell is recorded."""
    return module.startswith("tracefuse.") and module.split(".")[1] in _RECORDER


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
