"""One run of a program under a recorder, and what is noted of it when it is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tracefuse.recording.calls import Value
from tracefuse.recording.left import Left, left_by, read_from_outside
from tracefuse.recording.recorder import Recorder
from tracefuse.recording.roles import Roles, optimizers_of, roles_of
from tracefuse.recording.thaw import Thaw


@dataclass(frozen=True, eq=False)
class Ended:
    """What is known once a program has run: who is who, what it left and what it read, the values that somebody still holds,
    those of each optimizer's parameters, and those of the parameters that were thawed."""

    roles: Roles
    left: Mapping[Value, Left]
    read: Sequence[Left]
    alive: frozenset[Value]
    optimized: Mapping[str, frozenset[Value]]
    thawed: frozenset[Value]


class Run:
    """A run from `start` to `stop`. `ended` is None until then, and where the program raised or taking notes failed.

    With `train_all`, frozen parameters count as trainable meanwhile (`tracefuse.recording.thaw`).
    """

    def __init__(self, recorder: Recorder, train_all: bool = False) -> None:
        self.recorder = recorder
        self.train_all = train_all
        self.is_recording = False
        self.ended: Ended | None = None
        self._thaw: Thaw | None = None

    def start(self, namespace: Mapping[str, Any]) -> None:
        if self.train_all:
            self._thaw = Thaw(namespace, self.recorder.shield).__enter__()
        self.recorder.__enter__()
        self.is_recording = True

    def stop(self, namespace: Mapping[str, Any], returned: Any, completed: bool) -> None:
        """Note who is who while the program's tensors are still there; keep nothing of the user's alive."""
        self.recorder.__exit__(None, None, None)
        self.is_recording = False
        try:
            if completed:
                self.ended = self.recorder.shield.note(self._noted, namespace, returned)
        finally:
            if self._thaw is not None:
                self._thaw.__exit__(None, None, None)
            self._thaw = None

    def _noted(self, namespace: Mapping[str, Any], returned: Any) -> Ended:
        recorder, thaw = self.recorder, self._thaw
        gradient_of = _gradient if thaw is None else thaw.gradient_of
        recorder.note_end()
        roles = roles_of(recorder, namespace, returned, gradient_of)
        return Ended(
            roles=roles,
            left=left_by(recorder, roles, namespace, returned, gradient_of),
            read=read_from_outside(recorder),
            alive=recorder.alive(),
            optimized=optimizers_of(recorder, namespace),
            thawed=frozenset(v for p in (thaw.parameters if thaw else ()) if (v := recorder.value_of(p)) is not None),
        )


def _gradient(leaf: torch.Tensor) -> torch.Tensor | None:
    return leaf.grad
