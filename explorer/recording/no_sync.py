"""`assert_no_sync`: a test that a step never makes the host wait for the GPU, with or without a GPU.

    def test_the_step_does_not_stop():
        with tracefuse.assert_no_sync():
            step(model, batch)                  SyncError: `.item()` makes the host wait ... train.py:41  loss.item()

What counts is what `tracefuse.recording.host_reads` lists. Where CUDA is, torch's own check
(`torch.cuda.set_sync_debug_mode`) is on too, which also knows of copies from pageable memory and of libraries that read by
themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tracefuse.distributed.groups import hold_no_default_group
from tracefuse.errors import SyncError
from tracefuse.optimizers.origins import Source
from tracefuse.optimizers.trace import human_bytes
from tracefuse.recording.frames import source_of, user_source
from tracefuse.recording.host_reads import HostRead, Listener, Methods, read_by
from tracefuse.recording.shield import Shield, shielded

# What torch raises in the mode "error", seen on 2.11, 2.13 and 2.15.
_TORCHS_MESSAGE = "called a synchronizing CUDA operation"


@contextmanager
def assert_no_sync(on_cpu: bool | None = None) -> Iterator[None]:
    """Raise `SyncError` at the first operation inside that makes the host wait for a GPU, with its name and your line.

    Reads that do so: `.item()`, `bool(t)`, `float(t)`, `if t`, `print(t)`, `.tolist()`, `.cpu()`, `nonzero`, `unique`,
    indexing by a boolean mask, and their like. With `on_cpu` such reads of tensors on the CPU count as well, for tests on
    machines without a GPU, where it is the default: what is to stay on the CPU even where there is one (lengths, a
    learning rate) then goes outside, or into `.tolist()` before. Steps that torch's optimizers count there do not count.
    `.to("cpu")` of a tensor on the CPU does nothing and leaves nothing to see.

    It nests, serves as a decorator, follows autograd into its threads and changes no result. Where CUDA is, torch's sync
    debug mode is "error" for the whole process until the end, then what it was. `torch.cuda.synchronize()`, which is asked
    for, is allowed.
    """
    shield, undo = Shield("assert_no_sync"), ExitStack()
    try:
        with _NoSync(not torch.cuda.is_available() if on_cpu is None else on_cpu, shield):
            shield.note(_watch, undo, shield)
            yield
    except RuntimeError as error:
        if _TORCHS_MESSAGE not in str(error):
            raise
        raise SyncError(_sentence("an operation", "", _raised_at(error))) from error
    finally:
        shield.survive(undo.close)


def _watch(undo: ExitStack, shield: Shield) -> None:
    undo.enter_context(shield)
    hold_no_default_group()
    Methods.enter()
    undo.callback(Methods.leave)
    if torch.cuda.is_available():
        undo.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
        torch.cuda.set_sync_debug_mode("error")


class _NoSync(TorchDispatchMode, Listener):
    def __init__(self, on_cpu: bool, shield: Shield) -> None:
        super().__init__()
        self._on_cpu = on_cpu
        self.shield = shield

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.shield.note(self._look_at, func, args, kwargs)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if _TORCHS_MESSAGE not in str(error):
                raise
            raise SyncError(_sentence(Methods.word() or str(func), "", user_source())) from error

    def _look_at(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (read := read_by(func, args, kwargs)) is not None:
            self.heard(read, str(func))

    @shielded
    def heard(self, read: HostRead, operator: str = "") -> None:
        if read.device.type != "cpu" or self._on_cpu:
            amount = f"{human_bytes(read.nbytes)} from {read.device}" if read.nbytes else f"a shape, on {read.device}"
            details = ", ".join(filter(None, (operator, amount)))
            raise SyncError(_sentence(read.how, f" ({details})", user_source(), read.device.type == "cpu"))


def _sentence(how: str, details: str, source: Source | None, is_on_cpu: bool = False) -> str:
    node = torch._C._current_autograd_node()
    where = f" in the backward ({node.name()})" if node is not None else ""
    line = f" at {source}" if source is not None else ""
    does = "would make the host wait for a GPU" if is_on_cpu else "makes the host wait for the GPU"
    return f"{how} {does}{details}{where}{line}. Keep it a tensor, or read it outside of `assert_no_sync()`."


def _raised_at(error: BaseException) -> Source | None:
    """The innermost line of the user's in a traceback."""
    found, link = None, error.__traceback__
    while link is not None:
        file = link.tb_frame.f_globals.get("__name__", "").partition(".")[0]
        found = found if file in ("torch", "tracefuse", "contextlib") else source_of(link.tb_frame, link.tb_lineno)
        link = link.tb_next
    return found
