"""The mode of a trace's fake tensors, which several threads may use at once: a view works ahead while a cell runs passes.

Torch's own notes on the mode itself that an operator runs inside, and which modes it was entered from. A second thread then
reads the first one's notes: a fake tensor's device is "meta" for a moment, or a thread is left inside a mode that it has left.

Private: the attributes `in_kernel_invocation` and `enter_stack`, seen on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

import threading
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode


class _Notes(threading.local):
    def __init__(self) -> None:
        self.is_inside = False
        self.entered: list[Any] = []


class FakeMode(FakeTensorMode):
    """A `FakeTensorMode` that notes for each thread apart what it runs and where it was entered."""

    def __init__(self, **options: Any) -> None:
        self._notes = _Notes()
        super().__init__(**options)

    @property
    def in_kernel_invocation(self) -> bool:  # type: ignore[override]
        return self._notes.is_inside

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, is_inside: bool) -> None:
        self._notes.is_inside = is_inside

    @property
    def enter_stack(self) -> list[Any]:  # type: ignore[override]
        return self._notes.entered

    @enter_stack.setter
    def enter_stack(self, entered: list[Any]) -> None:
        self._notes.entered = entered
