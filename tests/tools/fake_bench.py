"""A GPU that tuning tries block sizes on, whose times a test chooses."""

from __future__ import annotations

from collections.abc import Sequence

from fake_clock import FakeClock

from tracefuse.build.trials import Bench
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.lowering.layouts import Tuning

WIDE, SLOW = Tuning(1, 1), Tuning(-1, -1)


class FakeBench(Bench):
    """A GPU that reads 1 TB/s, on which each tuning takes as many ms as `times` says, else 1; trials take 10 s per kernel."""

    bytes_per_s = 1e12  # type: ignore[assignment]

    def __init__(self, times: dict[Tuning, float], raises: Exception | None = None) -> None:
        self.name, self.clock = "a GPU", FakeClock()
        self.times, self.raises = times, raises
        self.tried: list[tuple[Kernel, list[Tuning]]] = []
        self.is_closed = False

    def times_ms(self, kernel: Kernel, tunings: Sequence[Tuning]) -> dict[Tuning, float]:
        self.tried.append((kernel, list(tunings)))
        self.clock.now_ms += 10_000  # type: ignore[attr-defined]
        if self.raises:
            raise self.raises
        return {one: self.times.get(one, 1.0) for one in tunings}

    def close(self) -> None:
        self.is_closed = True
