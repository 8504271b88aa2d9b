"""Kernels beside the ATen ops that they stand for, timed on this GPU: the pairs of times, and the table that keeps them.

    judge(kernels)       times those that the table lacks, both in the same rounds (`trials`), and adds them to it
    timed_kernels()      the table: data of the machine, which `fuse` decides by

The table belongs to a GPU and to versions of torch and triton (the folder of the cache), and to the generator of our kernels:
the text of its files is a part of the table's key, so that kernels of another generator are timed anew. It keeps the last
`MOST_TIMED` pairs. Processes that add to it at a time may lose each other's pairs, which are then timed again.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

import tracefuse.optimizers
from tracefuse.build import cache
from tracefuse.build.kernels import Progress, build_all, this_gpu
from tracefuse.build.trials import Bench, is_of_aten
from tracefuse.optimizers.fuse.timed import TimedKernel
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.kernels.lists import ListKernel
from tracefuse.optimizers.kernels.long_sum import LongSum
from tracefuse.optimizers.lowering.layouts import GUESS, Tuning
from tracefuse.optimizers.trace import val

MOST_TIMED = 2_000
BUDGET_S = 10.0
"""Of the trials of one program's kernels; compiling comes on top."""
GENERATOR = ("formulas", "kernels", "lowering")
"""The folders whose files decide how a kernel of a given key is written."""


def judge(
    kernels: Iterable[Kernel],
    tunings: Mapping[str, Tuning] | None = None,
    progress: Progress | None = None,
    budget_s: float = BUDGET_S,
    bench: Bench | None = None,
) -> tuple[TimedKernel, ...]:
    """The pairs of those of `kernels` that can be timed beside ATen's ops, timed now where the table lacks them.

    Each kernel runs under its tuning of `tunings`, else under the guess; the largest come first, and trials end after
    `budget_s` seconds. A kernel that cannot run, or whose tensors do not fit twice, has no pair: it is decided by the model,
    and tried again by the next call. Without a GPU nothing is timed. `bench` is a test's. Raises `BuildError` where the cache
    cannot be written.
    """
    known, tunings = {one.key: one for one in timed_kernels()}, tunings or {}
    asked = {kernel.key: kernel for kernel in kernels if is_judged(kernel)}
    waiting = [kernel for key, kernel in asked.items() if key not in known]
    if this_gpu() is None or not waiting:
        return tuple(known[key] for key in asked if key in known)
    bench = bench or Bench.here()
    try:
        found = _timed(waiting, tunings, bench, progress or (lambda fraction, text: None), budget_s)
    finally:
        bench.close()
    remember(found)
    known |= {one.key: one for one in found}
    return tuple(known[key] for key in asked if key in known)


def is_judged(kernel: Kernel) -> bool:
    """Whether a kernel runs on a GPU and stands for ops of ATen alone, each of which eager could run."""
    if isinstance(kernel, (LongSum, ListKernel)) or not is_of_aten(kernel):
        return False
    return all(val(p).device.type == "cuda" for p in kernel.body.placeholders)


def _timed(
    kernels: list[Kernel], tunings: Mapping[str, Tuning], bench: Bench, report: Progress, budget_s: float
) -> list[TimedKernel]:
    pairs = [(kernel, tunings.get(kernel.name, GUESS)) for kernel in sorted(kernels, key=lambda k: -k.nbytes)]
    refused = build_all(pairs, report)
    found, start_s = [], bench.now_s()
    for count, (kernel, tuning) in enumerate(pairs):
        if bench.now_s() - start_s >= budget_s:
            break
        report(count / len(pairs), f"timing {count + 1} of {len(pairs)} kernels beside ATen's ops")
        if (kernel, tuning) not in refused and (times := _pair(kernel, tuning, bench)) is not None:
            found.append(TimedKernel(kernel.key, *times, bench.name))
    report(1.0, "timed")
    return found


def _pair(kernel: Kernel, tuning: Tuning, bench: Bench) -> tuple[float, float] | None:
    """Microseconds of the kernel and of ATen's ops; None where their tensors do not fit."""
    try:
        trial = bench.trial(kernel, [tuning])
    except torch.OutOfMemoryError:
        return None
    return None if trial.aten_ms is None else (trial.times_ms[tuning] * 1e3, trial.aten_ms * 1e3)


# --- the table --------------------------------------------------------------------------------------------------------


def timed_kernels() -> tuple[TimedKernel, ...]:
    """The table of this machine's GPU, the pairs that were added last at its end; empty without a GPU."""
    return () if this_gpu() is None else _table()


def remember(found: Iterable[TimedKernel]) -> None:
    """Add pairs to the table; a newer one of a kernel takes the place of the old one."""
    table = {one.key: one for one in _table()}
    for one in found:
        table.pop(one.key, None)
        table[one.key] = one
    rows = [[one.key, one.ours_us, one.aten_us, one.on] for one in table.values()]
    cache.write_json(_name(), rows[-MOST_TIMED:])


def _table() -> tuple[TimedKernel, ...]:
    rows = cache.read_json(_name())
    return tuple(TimedKernel(*row) for row in rows if _is_pair(row)) if isinstance(rows, list) else ()


def _is_pair(row: object) -> bool:
    if not (isinstance(row, list) and [type(part) for part in row] == [str, float, float, str]):
        return False
    return all(math.isfinite(part) and part > 0 for part in row[1:3])


@functools.cache
def _name() -> str:
    root = Path(tracefuse.optimizers.__file__).parent
    files = sorted(path for folder in GENERATOR for path in (root / folder).glob("*.py"))
    meaning = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    return f"timed kernels {meaning}"
