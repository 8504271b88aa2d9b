"""When a run has made an update: what an optimizer's step is to the code that called it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from tracefuse.recording.hooks import BackwardHook, OptimizerHook
from tracefuse.recording.shield import Shield, shielded


class UpdateHook:
    """Calls `starts()` before and `ended(optimizer, has_backward)` after each update on this thread: whether a backward has
    started since the update before. An optimizer that lets another one step, as Lookahead does, makes one update. Calls
    `elsewhere()` after one on another thread."""

    def __init__(
        self,
        shield: Shield,
        starts: Callable[[], None],
        ended: Callable[[torch.optim.Optimizer, bool], None],
        elsewhere: Callable[[], None],
    ) -> None:
        self.shield = shield
        self._starts, self._ended, self._elsewhere = starts, ended, elsewhere
        self._has_backward = False
        self._stepping: list[torch.optim.Optimizer] = []

    def attach(self) -> None:
        self._thread = threading.get_ident()
        OptimizerHook.enter(self)
        BackwardHook.enter(self)

    def detach(self) -> None:
        try:
            BackwardHook.leave(self)
        finally:
            OptimizerHook.leave(self)
            self._stepping.clear()

    @shielded
    def backward_starts(self, outputs: Any, gradients: Any = ()) -> None:
        self._has_backward |= threading.get_ident() == self._thread

    @shielded
    def backward_ended(self, inputs: Any, found: Any) -> None:
        pass

    @shielded
    def update_starts(self, optimizer: torch.optim.Optimizer) -> None:
        if threading.get_ident() == self._thread:
            self._forget(optimizer)
            self._stepping.append(optimizer)
            if len(self._stepping) == 1:
                self._starts()

    @shielded
    def update_ended(self, optimizer: torch.optim.Optimizer) -> None:
        if threading.get_ident() != self._thread:
            self._elsewhere()
            return
        self._forget(optimizer)
        if not self._stepping:
            has_backward, self._has_backward = self._has_backward, False
            self._ended(optimizer, has_backward)

    def _forget(self, optimizer: torch.optim.Optimizer) -> None:
        """A step that raised has no end: no optimizer steps within its own step."""
        at = next((position for position, one in enumerate(self._stepping) if one is optimizer), len(self._stepping))
        del self._stepping[at:]
