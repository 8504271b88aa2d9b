"""A clock that tests move on: time passes only when a program says so."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tracefuse.execution.replays import Replays


@dataclass
class FakeClock:
    """Time passes only when a program says so."""

    now_ms: float = 0.0
    log: list[str] = field(default_factory=list)

    def mark(self) -> float:
        return self.now_ms

    def between_ms(self, start: float, end: float) -> float:
        return end - start

    def wait(self) -> None:
        self.log.append("wait")

    def now_s(self) -> float:
        return self.now_ms / 1e3

    def program(self, name: str, forward_ms, backward_ms=None, value: float = 1.0) -> Replays:
        """A program whose phases take as long as the given functions say, or always as long as the given numbers."""

        def spend(phase: str, duration) -> None:
            self.log.append(f"{name} {phase}")
            self.now_ms += duration() if callable(duration) else duration

        def forward() -> tuple[tuple[Tensor, ...], str]:
            spend("forward", forward_ms)
            return (torch.tensor([value]),), name

        def backward(state: tuple) -> tuple[Tensor, ...]:
            assert state[1] == name
            spend("backward", backward_ms)
            return (torch.tensor([2 * value]),)

        return Replays(forward, None if backward_ms is None else backward)
