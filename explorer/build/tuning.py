"""Block sizes by trial: each kernel under a few tunings, timed once per GPU and remembered.

The guess (`tracefuse.optimizers.lowering.layouts`) is near the best for most kernels, so trials are few and only where they
can pay: not for kernels so small that launching them takes as long, and not for sums of many tensors, whose loop has no block
to choose.

What is remembered holds for a kernel (its key), a GPU and versions of torch and triton (the folder of the cache), the text
that the guess gives and the list of candidates: a generator that writes other text is tuned anew.

The trials run the kernel's ATen ops too, and both times go into the table of `timed`, by which `fuse` keeps a kernel or not.

A tuning changes how elements are shared out, not what is computed; only sums may be added in another order.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from tracefuse.build import cache
from tracefuse.build.kernels import Progress, build_all, this_gpu
from tracefuse.build.timed import remember
from tracefuse.build.trials import Bench
from tracefuse.optimizers.fuse.timed import TimedKernel
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.kernels.lists import ListKernel
from tracefuse.optimizers.kernels.long_sum import LongSum
from tracefuse.optimizers.kernels.text import kernel_source
from tracefuse.optimizers.lowering.layouts import GUESS, Tuning
from tracefuse.optimizers.trace import val

_STEPS = ((0, 0), (1, 0), (1, 1), (0, 1), (0, -1), (-1, -1), (-1, 0), (2, 1))
CANDIDATES = tuple(Tuning(block, warps) for block, warps in _STEPS)
GAIN = 1.02
"""The guess over a tuning's time below which the guess stays: as small a difference is seen between equal programs."""
TINY_S = 20e-6
"""A kernel whose bytes take less is not tuned: its launch takes a good part of that."""
BUDGET_S = 60.0
"""Of trials; compiling comes on top."""


def candidates(kernel: Kernel) -> list[Tuning]:
    """The tunings of `CANDIDATES` that give different text, in that order. Raises `NotFusible` as `kernel_source` does."""
    texts = {kernel_source(kernel, tuning): tuning for tuning in reversed(CANDIDATES)}
    return [tuning for tuning in CANDIDATES if tuning in texts.values()]


def choose(times: Sequence[float]) -> int:
    """The place of the least time; 0, the guess's, unless the guess takes at least `GAIN` times as long."""
    best = min(range(len(times)), key=times.__getitem__)
    return best if times[0] >= GAIN * times[best] else 0


def is_tunable(kernel: Kernel) -> bool:
    """Whether block sizes can be chosen for a kernel: it has some, and runs on a GPU."""
    is_one_size = not isinstance(kernel, (LongSum, ListKernel))
    return is_one_size and all(val(p).device.type == "cuda" for p in kernel.body.placeholders)


def tune(
    kernels: Iterable[Kernel], progress: Progress | None = None, budget_s: float = BUDGET_S, bench: Bench | None = None
) -> dict[str, Tuning]:
    """The tunings of `kernels` by name, found by trials on the current GPU where the cache lacks them, and remembered.

    `progress` is called with the fraction done and with `tuning 7 of 31 kernels`. Trials end after `budget_s` seconds; a
    kernel that had none, or whose tensors do not fit into the GPU's memory, keeps the guess, its note says why, and the next
    call tries again. Kernels that are not worth trials, or cannot run at all, are left out. Without a GPU that is all.
    `bench` is a test's. Raises `BuildError` where the cache cannot be written.
    """
    kernels = list(dict.fromkeys(kernels))
    found = tuned(kernels)
    waiting = [k for k in kernels if is_tunable(k) and k.name not in found]
    if this_gpu() is None or not waiting:
        return found
    bench = bench or Bench.here()
    try:
        return found | _tried(waiting, bench, progress or (lambda fraction, text: None), budget_s)
    finally:
        bench.close()


def _tried(kernels: Sequence[Kernel], bench: Bench, report: Progress, budget_s: float) -> dict[str, Tuning]:
    """By trials, from the kernel with the most bytes to that with the least: what a budget leaves out matters least."""
    asked = {k: candidates(k) for k in kernels if k.nbytes >= TINY_S * bench.bytes_per_s}
    asked = {k: tunings for k, tunings in asked.items() if len(tunings) > 1}
    refused = build_all([(k, tuning) for k, tunings in asked.items() for tuning in tunings], report)
    runnable = {k: [t for t in tunings if (k, t) not in refused] for k, tunings in asked.items()}
    ordered = sorted((k for k, tunings in runnable.items() if GUESS in tunings), key=lambda k: -k.nbytes)
    found, start_s = {}, bench.now_s()
    for count, kernel in enumerate(ordered):
        report(count / len(ordered), f"tuning {count + 1} of {len(ordered)} kernels")
        if bench.now_s() - start_s >= budget_s:
            found[kernel.name] = Tuning(note=f"blocks guessed: other kernels' trials took {budget_s:g} s; tune again")
        else:
            found[kernel.name] = _fastest(kernel, runnable[kernel], bench)
    report(1.0, "tuned")
    return found


def _fastest(kernel: Kernel, tunings: Sequence[Tuning], bench: Bench) -> Tuning:
    try:
        trial = bench.trial(kernel, tunings)
    except torch.OutOfMemoryError:
        return Tuning(note="blocks guessed: trials need more memory than is free on the GPU; free some and tune again")
    times_ms = trial.times_ms
    timed = list(times_ms)
    best = timed[choose(list(times_ms.values()))]
    speedup = times_ms[GUESS] / times_ms[best]
    value = {"block": best.block, "warps": best.warps, "speedup": speedup, "tried": len(timed), "gpu": bench.name}
    cache.write_json(_key(kernel), value)
    if trial.aten_ms is not None:
        blocks = best.block, best.warps
        remember([TimedKernel(kernel.key, times_ms[best] * 1e3, trial.aten_ms * 1e3, bench.name, blocks)])
    return _remembered(value)


# --- what is remembered -----------------------------------------------------------------------------------------------


def tuned(kernels: Iterable[Kernel]) -> dict[str, Tuning]:
    """The tunings that the cache has for `kernels` on the current GPU, by name; none without a GPU."""
    if this_gpu() is None:
        return {}
    known = {k.name: cache.read_record(_key(k), _REMEMBERED) for k in kernels if is_tunable(k)}
    return {name: _remembered(value) for name, value in known.items() if value is not None}


@functools.lru_cache(maxsize=1024)
def _key(kernel: Kernel) -> str:
    meaning = hashlib.sha256(f"{kernel_source(kernel)} {CANDIDATES}".encode()).hexdigest()
    return f"tuning {kernel.key} {meaning}"


_REMEMBERED = {"block": int, "warps": int, "speedup": float, "tried": int, "gpu": str}


def _remembered(value: Mapping[str, Any]) -> Tuning:
    found = f"{value['speedup']:.2f} x faster than the guess"
    if (value["block"], value["warps"]) == (GUESS.block, GUESS.warps):
        found = f"the guess is within {GAIN - 1:.0%} of the fastest of {value['tried']}"
    return Tuning(value["block"], value["warps"], f"blocks tuned on {value['gpu']}: {found}")
