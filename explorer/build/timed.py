"""Kernels beside the ATen ops that they stand for, timed on this GPU: the pairs of times, and the table that keeps them.

    judge(kernels)       times those that the table lacks, or has with other block sizes, both in the same rounds (`trials`),
                         and adds them to it
    timed_kernels()      the table: data of the machine, which `fuse` decides by

The table belongs to a GPU and to versions of torch and triton (the folder of the cache), and to the generator of our kernels:
the text of its files is a part of the table's key, so that kernels of another generator are timed anew. It keeps the last
`MOST_TIMED` pairs. Processes that add to it at a time may lose each other's pairs, which are then timed again.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

import tracefuse.optimizers
from tracefuse.build import cache
from tracefuse.build.kernels import Asked, Progress, build_all, this_gpu
from tracefuse.build.trials import Bench, is_of_aten
from tracefuse.optimizers.fuse.timed import TimedKernel
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.kernels.lists import ListKernel
from tracefuse.optimizers.kernels.long_sum import LongSum
from tracefuse.optimizers.lowering.layouts import GUESS, Tuning
from tracefuse.optimizers.trace import val

MOST_TIMED = 2_000
BUDGET_S = 10.0
"""Of the trials of one program's kernels, compiling included."""
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

    Each kernel runs under its tuning of `tunings`, else under the guess; a pair of other block sizes is not its. The largest
    come first, as many compiled at a time as there are processors. No more are begun once `budget_s` seconds would not last
    for them, as long as the slowest so far took; so one compilation is the most by which that is exceeded. A kernel that
    cannot run, or whose tensors do not fit twice, has no pair: it is decided by the model, and tried again by the next call.
    Without a GPU nothing is timed. `bench` is a test's. Raises `BuildError` where the cache cannot be written.
    """
    asked = {kernel.key: kernel for kernel in kernels if is_judged(kernel)}
    under = {key: (tunings or {}).get(kernel.name, GUESS) for key, kernel in asked.items()}
    known = {one.key: one for one in timed_kernels() if one.key in asked and one.blocks == _blocks(under[one.key])}
    waiting = [(kernel, under[key]) for key, kernel in asked.items() if key not in known]
    if this_gpu() is not None and waiting:
        bench = bench or Bench.here()
        try:
            found = _timed(waiting, bench, progress or (lambda fraction, text: None), budget_s)
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


def _timed(waiting: Sequence[Asked], bench: Bench, report: Progress, budget_s: float) -> list[TimedKernel]:
    ordered = sorted(waiting, key=lambda one: -one[0].nbytes)
    found: list[TimedKernel] = []
    start_s, slowest_s, at_once = bench.now_s(), 0.0, os.cpu_count() or 1
    for count, (kernel, tuning) in enumerate(ordered):
        begun_s = bench.now_s()
        if begun_s - start_s + slowest_s >= budget_s:
            break
        report(count / len(ordered), f"timing {count + 1} of {len(ordered)} kernels beside ATen's ops")
        if count % at_once == 0:
            refused = build_all(ordered[count : count + at_once])
        if (kernel, tuning) not in refused and (times := _pair(kernel, tuning, bench)) is not None:
            found.append(TimedKernel(kernel.key, *times, bench.name, _blocks(tuning)))
        slowest_s = max(slowest_s, bench.now_s() - begun_s)
    report(1.0, "timed")
    return found


def _blocks(tuning: Tuning) -> tuple[int, int]:
    return tuning.block, tuning.warps


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
    rows = [[one.key, one.ours_us, one.aten_us, one.on, *one.blocks] for one in table.values()]
    cache.write_json(_name(), rows[-MOST_TIMED:])


def _table() -> tuple[TimedKernel, ...]:
    rows = cache.read_json(_name())
    read = [row for row in rows if _is_pair(row)] if isinstance(rows, list) else []
    return tuple(TimedKernel(*times, (block, warps)) for *times, block, warps in read)


def _is_pair(row: object) -> bool:
    if not (isinstance(row, list) and [type(part) for part in row] == [str, float, float, str, int, int]):
        return False
    return all(math.isfinite(part) and part > 0 for part in row[1:3])


@functools.cache
def _name() -> str:
    root = Path(tracefuse.optimizers.__file__).parent
    files = sorted(path for folder in GENERATOR for path in (root / folder).glob("*.py"))
    meaning = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    return f"timed kernels {meaning}"
