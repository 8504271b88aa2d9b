"""The yardstick: how fast this machine copies, since no kernel that reads and writes memory can be faster.

Measured, because datasheets promise more than a copy gets and do not know every model's name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tracefuse.clocks import Clock, clock_of, device_label
from tracefuse.measure import Program, measure
from tracefuse.timing import Estimate


@dataclass(frozen=True)
class Bandwidth:
    """Bytes read plus bytes written per second of one large copy, with where it was measured."""

    bytes_per_s: Estimate
    device: str

    def __str__(self) -> str:
        return f"{self.bytes_per_s.median / 1e12:.3g} TB/s copied, {self.device}"


def copy_program(nbytes: int, device: str | torch.device) -> Program:
    """One copy that reads `nbytes` and writes as many."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Program(lambda: ((target.copy_(source),),), compared=False)


def copy_bandwidth(
    device: str | torch.device = "cuda", nbytes: int | None = None, clock: Clock | None = None, budget_s: float = 2.0
) -> Bandwidth:
    """The measured bandwidth of copying `nbytes` (default: 1 GiB on a GPU, 64 MiB on a CPU), both ways counted."""
    clock = clock or clock_of(device)
    size = nbytes or (1 << 30 if torch.device(device).type == "cuda" else 1 << 26)
    time_ms = measure({"copy": copy_program(size, device)}, device=device, clock=clock, budget_s=budget_s)
    copied = time_ms.baseline.times_ms["forward"]
    rate = [2 * size / (ms * 1e-3) for ms in (copied.median, copied.high, copied.low)]
    return Bandwidth(Estimate(*rate, copied.coverage, copied.samples), device_label(device))


_known: dict[str, Bandwidth] = {}


def known_bandwidth(budget_s: float = 1.0) -> Bandwidth | None:
    """The current GPU's, measured in `budget_s` seconds when a process first asks for it.

    None where there is no GPU in use, or no room in its memory for the copy.
    """
    if not torch.cuda.is_initialized():
        return None
    device = device_label("cuda")
    if device not in _known:
        try:
            _known[device] = copy_bandwidth("cuda", budget_s=budget_s)
        except torch.OutOfMemoryError:
            return None
        finally:
            torch.cuda.empty_cache()
    return _known[device]
