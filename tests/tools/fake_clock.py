"""A clock that tests move on, a GPU that tuning tries block sizes on, and kernels that lose, whose times a test chooses."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tracefuse.build.trials import Bench, Trial
from tracefuse.execution.program import Replays
from tracefuse.optimizers.fuse.timed import TimedKernel
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.lowering.layouts import Tuning
from tracefuse.variant import Variant

WIDE, SLOW = Tuning(1, 1), Tuning(-1, -1)


@dataclass
class FakeClock:
    """Time passes only when a program says so."""

    queues = False
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


class FakeBench(Bench):
    """A GPU that reads 1 TB/s, on which each tuning takes as many ms as `times` says, else 1, and ATen's ops as many as
    `aten_ms` says by the kernel's name, else 5; trials take 10 s per kernel."""

    bytes_per_s = 1e12  # type: ignore[assignment]

    def __init__(
        self,
        times: dict[Tuning, float],
        raises: Exception | None = None,
        aten_ms: Mapping[str, float | None] | None = None,
    ) -> None:
        self.name, self.clock = "a GPU", FakeClock()
        self.times, self.raises, self.aten_ms = times, raises, aten_ms or {}
        self.tried: list[tuple[Kernel, list[Tuning]]] = []
        self.is_closed = False

    def trial(self, kernel: Kernel, tunings: Sequence[Tuning]) -> Trial:
        self.tried.append((kernel, list(tunings)))
        self.clock.now_ms += 10_000  # type: ignore[attr-defined]
        if self.raises:
            raise self.raises
        return Trial({one: self.times.get(one, 1.0) for one in tunings}, self.aten_ms.get(kernel.name, 5.0))

    def close(self) -> None:
        self.is_closed = True


def decide_all(variant: Variant, losing: int) -> set[str]:
    """The keys of the kernels that were decided, `losing` of four of which lost, and of those made in their place as many."""
    known = dict[str, TimedKernel]()
    while new := {kernel.key for kernel in variant.kernels} - known.keys():
        for key in new:
            loses = zlib.crc32(key.encode()) % 4 < losing
            known[key] = TimedKernel(key, 2.0, 1.0 if loses else 3.0, "a GPU")
        variant.capture.know(known.values(), known)
    return set(known)
