"""What an allocator counts while something runs, on a GPU and on the CPU.

On a GPU that is torch's caching allocator, whose blocks are rounded up to 512 bytes; on the CPU torch's profiler, which hears
of every request in bytes as asked for. Neither sees what a library takes past torch's allocators. Of the profiler's events
those called `[memory]` are read here, as torch 2.11 and 2.13 record them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch.autograd import DeviceType

from tracefuse.timeline.events import MARK

_ALLOCATION = "[memory]"


def added_peak(run: Callable[[], Any], device: str | torch.device) -> int:
    """The most bytes that one call of `run` adds to what is allocated on `device`; what it returns is held meanwhile.

    Runs it once: call it before, so that libraries have what they keep. Raises `ValueError` for a device that torch keeps no
    such count of.
    """
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"torch counts no allocations on {kind}: pass cpu or cuda")
    gc.collect()  # What is dropped in between would count as memory that the run gives back.
    return _on_gpu(run) if kind == "cuda" else _on_cpu(run)


def _on_gpu(run: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    held = run()
    torch.cuda.synchronize()
    del held
    return torch.cuda.max_memory_allocated() - before


def workspaces(run: Callable[[], Any], device: str | torch.device) -> dict[str, int]:
    """Bytes that each op had at its highest beyond what it found and what it left behind: the workspace of a convolution,
    copies that an operator makes for itself; ops without any are absent.

    `run` runs its ops in ranges of `tracefuse.timeline.events.marked`. It runs once, watched.
    """
    wanted = DeviceType.CUDA if torch.device(device).type == "cuda" else DeviceType.CPU
    found: dict[str, int] = {}
    level, levels, inside = 0, [0], ""
    for _, name, nbytes in sorted(_steps(_watched(run), wanted)):
        if name:
            beyond = max(levels) - max(levels[0], level)
            if inside and beyond > 0:
                found[inside] = beyond
            inside, levels = ("" if name == inside else name), [level]
        level += nbytes
        levels.append(level)
    return found


def _steps(events: Iterable[Any], device: Any) -> Iterator[tuple[int, str, int]]:
    """(when, the op whose range begins or ends there or "", bytes allocated there)."""
    for event in events:
        if event.name() == _ALLOCATION and event.device_type() == device:
            yield event.start_ns(), "", event.nbytes()
        elif event.name().startswith(MARK) and event.device_type() == DeviceType.CPU:
            name = event.name().removeprefix(MARK)
            yield event.start_ns(), name, 0
            yield event.end_ns(), name, 0


def _watched(run: Callable[[], Any]) -> list[Any]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        held = run()
    del held
    return list(profiler.profiler.kineto_results.events())  # type: ignore[union-attr]


def _on_cpu(run: Callable[[], Any]) -> int:
    ours = sorted(_steps(_watched(run), DeviceType.CPU))
    return max(accumulate((nbytes for _, _, nbytes in ours), initial=0))
