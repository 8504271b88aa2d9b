"""How long one kernel takes under each of several tunings, on this GPU, and how long the ATen ops that it stands for.

    trial = what the L2 cache holds replaced, then one run of the kernel between two marks of the clock
    round = one trial of each tuning and one of ATen's ops, in an order that rotates, so that drift falls on all alike; then
            one wait

A kernel of a training step finds little of what it reads in the cache, and neither does a trial: memory of four times the
cache's size is read before it. Read, not written, since what was written would have to leave the cache at the kernel's
expense. While the GPU does that, the host has time to queue the run, so that no trial measures the host.

Inputs are random, as the captured ones may be gone: of the captured shapes, strides and dtypes, from a generator of their
own. Integers are valid indices of whatever they index. Where a kernel computes its indices (`cumsum(mask) * mask + 1`) they
are small, and ATen's ops are left out where the indices are still out of range: they would end the process's work on the GPU.

The GPU may be working for others too. So the times are medians of interleaved rounds, and good for comparing these tunings
with each other and with ATen's ops, which get the same inputs, not as the time of the kernel: `measure` and the profiler tell
that.
"""

from __future__ import annotations

import functools
import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from tracefuse.build.kernels import preload
from tracefuse.build.modules import module_of, unload
from tracefuse.device.clocks import Clock, CudaClock
from tracefuse.optimizers.facts import span
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.lowering.gathers import index_bound, indices_of
from tracefuse.optimizers.lowering.layouts import Tuning
from tracefuse.optimizers.trace import Trace, val

ROUNDS = 15
MIN_ROUNDS = 3
HOPELESS = 1.5
"""A tuning so many times slower than the fastest after `MIN_ROUNDS` rounds is not run again."""
MAX_S = 1.0
"""Of one kernel's rounds, when there have been `MIN_ROUNDS`: large kernels need no fifteen."""

MAX_SPILLED = 32
"""Words per thread, stored and loaded again: more than the 8 to 32 elements that a thread is there for."""

INTEGERS_BELOW = 100
"""The bound of integers that index nothing."""
SMALL_BELOW = (2, 1)
"""The bounds of integers that are tried where indices computed of larger ones are out of range."""


@dataclass(frozen=True)
class Trial:
    """Median ms of a kernel under each tuning that was tried, and of the ATen ops that it stands for, in the same rounds;
    `aten_ms` is None where those are no ops that eager runs."""

    times_ms: Mapping[Tuning, float]
    aten_ms: float | None


class Bench:
    """A GPU, called `name`, ready for trials: its clock, and memory to fill its L2 cache with."""

    def __init__(self, device: torch.device, name: str, clock: Clock, cache_nbytes: int) -> None:
        self.device, self.name, self.clock = device, name, clock
        self._lines = torch.zeros(cache_nbytes, dtype=torch.float32, device=device)  # four bytes each

    @classmethod
    def here(cls) -> Bench:
        """Of the current GPU."""
        device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(device)
        return cls(device, torch.cuda.get_device_name(device), CudaClock(), properties.L2_cache_size)

    def evict(self) -> None:
        """Queue what leaves nothing in the L2 cache but zeros that nobody reads."""
        self._lines.sum()

    @functools.cached_property
    def bytes_per_s(self) -> float:
        """How fast this GPU reads."""
        (time_ms,) = medians_ms([self.evict], self.clock, self.evict)
        return self._lines.nbytes / time_ms * 1e3

    def now_s(self) -> float:
        return self.clock.now_s()

    def trial(self, kernel: Kernel, tunings: Sequence[Tuning]) -> Trial:
        """The kernel under each of `tunings` that spills little, the first in any case, and the ATen ops that it stands for.

        All must have passed `build_all`. Raises `torch.OutOfMemoryError` where its tensors do not fit.
        """
        modules = {tuning: module_of(kernel, tuning) for tuning in tunings}
        try:
            words = {tuning: _spilled_words(module, kernel, tuning) for tuning, module in modules.items()}
            kept = [tuning for tuning in tunings if tuning is tunings[0] or words[tuning] <= MAX_SPILLED]
            inputs = random_inputs(kernel, self.device)
            runs = [functools.partial(getattr(modules[tuning], kernel.name), *inputs) for tuning in kept]
            theirs = _aten_run(kernel, inputs)
            times_ms = medians_ms([*runs, *theirs], self.clock, self.evict)
            aten_ms = times_ms[-1] if theirs else None
            return Trial(dict(zip(kept, times_ms, strict=False)), aten_ms)
        finally:
            for module in modules.values():
                unload(module)

    def close(self) -> None:
        """Give the GPU's memory back."""
        del self._lines
        torch.cuda.empty_cache()


def _aten_run(kernel: Kernel, inputs: Sequence[torch.Tensor]) -> list[Callable[[], Any]]:
    """The run of a kernel's ATen ops; none where eager has no such ops, an index that they compute is out of range, or their
    intermediate results do not fit."""
    if not is_of_aten(kernel) or not has_valid_indices(kernel.body, inputs):
        return []
    run = functools.partial(kernel, *inputs)
    try:
        run()
    except torch.OutOfMemoryError:
        return []
    return [run]


def is_of_aten(kernel: Kernel) -> bool:
    """Whether a kernel stands for ATen's ops alone: the parts that dropout was split into are none of eager's."""
    ops = (node.target for node in kernel.body.ops)
    return all(op is operator.getitem or getattr(op, "namespace", "") == "aten" for op in ops)


def _spilled_words(module: ModuleType, kernel: Kernel, tuning: Tuning) -> float:
    """The most that a thread of any launch spills; infinite where the GPU cannot hold a program; 0 without a GPU."""
    from triton import OutOfResources

    try:
        launches = preload(module, [kernel], {kernel.name: tuning})
    except OutOfResources:
        return float("inf")
    # As the driver tells Triton when it loads machine code: `CompiledKernel.n_spills`, seen on 3.6, 3.7 and 3.9.
    return max((made.n_spills for made in launches), default=0)


# --- rounds -----------------------------------------------------------------------------------------------------------


def medians_ms(runs: Sequence[Callable[[], Any]], clock: Clock, evict: Callable[[], None]) -> list[float]:
    """Median ms of each of `runs`, after one that is not timed, in which machine code is loaded."""
    times_ms: list[list[float]] = [[] for _ in runs]
    left, start_s = list(range(len(runs))), clock.now_s()
    for run in runs:
        run()
    clock.wait()
    for turn in range(ROUNDS):
        first = turn % len(left)
        for at, time_ms in _round(runs, [*left[first:], *left[:first]], clock, evict).items():
            times_ms[at].append(time_ms)
        if turn + 1 == MIN_ROUNDS:
            left = _hopeful(times_ms)
        if turn + 1 >= MIN_ROUNDS and clock.now_s() - start_s > MAX_S:
            break
    return [statistics.median(times) for times in times_ms]


def _round(
    runs: Sequence[Callable[[], Any]], order: Sequence[int], clock: Clock, evict: Callable[[], None]
) -> dict[int, float]:
    marks = {}
    for at in order:
        evict()
        start = clock.mark()
        runs[at]()
        marks[at] = (start, clock.mark())
    clock.wait()
    return {at: clock.between_ms(start, end) for at, (start, end) in marks.items()}


def _hopeful(times_ms: Sequence[Sequence[float]]) -> list[int]:
    medians = [statistics.median(times) for times in times_ms]
    return [at for at, median in enumerate(medians) if median <= HOPELESS * min(medians)]


def random_inputs(kernel: Kernel, device: torch.device | str) -> list[torch.Tensor]:
    """A tensor on `device` for each of the kernel's parameters, which leaves all of torch's generators as they are."""
    bound = index_bound(kernel.body) or INTEGERS_BELOW
    for below in (bound, *SMALL_BELOW):
        generator = torch.Generator(device).manual_seed(0)
        inputs = [_random(placeholder, below, device, generator) for placeholder in kernel.body.placeholders]
        if has_valid_indices(kernel.body, inputs):
            break
    return inputs


def has_valid_indices(body: Trace, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether all indices that a kernel's body computes of `inputs` are in range: computed op by op, up to one that is not."""
    computed = [index for node in body.ops for index, _, _ in indices_of(node) if index.op != "placeholder"]
    needed = set(computed)
    while computed:
        before = set(computed.pop().all_input_nodes) - needed
        needed |= before
        computed += before
    values: dict[fx.Node, Any] = dict(zip(body.placeholders, inputs, strict=True))
    for node in body.ops:
        chosen = [(values[index], low, end) for index, low, end in indices_of(node) if index in needed]
        if not all(bool(((index >= low) & (index < end)).all()) for index, low, end in chosen):
            return False
        if node in needed:
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return True


def _random(placeholder: fx.Node, bound: int, device: torch.device | str, generator: torch.Generator) -> torch.Tensor:
    like = val(placeholder)
    memory = torch.empty(span(like.shape, like.stride()), dtype=like.dtype, device=device)
    if like.dtype.is_floating_point:
        memory.normal_(generator=generator)
    elif memory.numel():
        below = 2 if like.dtype is torch.bool else min(bound, torch.iinfo(like.dtype).max)
        memory.random_(0, below, generator=generator)
    return memory.as_strided(like.shape, like.stride())
