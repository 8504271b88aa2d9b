"""One program under several compilers: the columns, whether they compute the same, their times in turn, and their kernels."""

from __future__ import annotations

import contextlib
import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tracefuse.device.clocks import clock_of

ROUNDS, IN_A_ROW = 12, 5
SETTLED = 6
"""Steps behind the first one until every column does what it goes on doing: CUDA graphs, of torch and of ours, come late."""
SHOWN = 8
"""Kernels of a column that are noted, those that take the most time."""
COMPILERS: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "eager": lambda model: model,
    "torch.compile": torch.compile,
    "reduce-overhead": lambda model: torch.compile(model, mode="reduce-overhead"),
    "ours": lambda model: torch.compile(model, backend="tracefuse"),
    "ours, graph": lambda model: torch.compile(model, backend="tracefuse", mode="reduce-overhead"),
}


@dataclass(frozen=True)
class Work:
    """A model, its input, and how its step is run: under bf16 autocast or not."""

    model: nn.Module
    x: Tensor
    autocast: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """What the model is in; its results have its precision, or that of autocast."""
        return next(self.model.parameters()).dtype

    def double(self) -> Work:
        """The same in float64, without autocast."""
        x = self.x.detach()
        return Work(copy.deepcopy(self.model).double(), x.double().requires_grad_() if x.is_floating_point() else x)


class Column:
    """A training step, forward and backward, of a copy of the model under one compiler."""

    def __init__(self, name: str, work: Work) -> None:
        self.name, self.autocast = name, work.autocast
        self.model, self.x = copy.deepcopy(work.model), work.x.detach().clone().requires_grad_(work.x.requires_grad)
        self.run = COMPILERS[name](self.model)
        self.cotangent: Tensor | None = None

    def step(self) -> Tensor:
        """The result of one step, whose gradients are those of this step alone."""
        self.model.zero_grad(set_to_none=True)
        self.x.grad = None
        if self.name in ("reduce-overhead", "ours, graph"):
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(self.x.device.type, torch.bfloat16, enabled=self.autocast):
            y = self.run(self.x)
        if self.cotangent is None:
            generator = torch.Generator().manual_seed(1)
            self.cotangent = torch.randn(y.shape, generator=generator).to(y.device, y.dtype)
        y.backward(self.cotangent)
        return y

    def steps(self) -> None:
        """`IN_A_ROW` steps, none of which waits for another."""
        for _ in range(IN_A_ROW):
            self.step()

    def values(self) -> dict[str, Tensor]:
        """What a step yields: its result, the gradients, and the buffers that it wrote, in float64."""
        y = self.step()
        found = {"result": y.detach(), "gradient of the input": self.x.grad}
        found |= {f"gradient of {name}": p.grad for name, p in self.model.named_parameters()}
        found |= {name: b for name, b in self.model.named_buffers() if b.is_floating_point()}
        return {name: value.double().clone() for name, value in found.items() if value is not None}


@contextlib.contextmanager
def fresh() -> Iterator[None]:
    """Nothing that was compiled before, nor after."""
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()


def differences(work: Work, names: tuple[str, ...]) -> dict[str, float]:
    """By column the largest distance of a value from the same step in float64, over the largest element of that value."""
    exact = Column("eager", work.double()).values()
    # The bias before a batch norm has no gradient but rounding: it is held against the others.
    least = 0.1 * max(value.abs().max().item() for key, value in exact.items() if "gradient" in key)
    found = {}
    for name in names:
        mine = Column(name, work).values()
        found[name] = max(_distance(mine[key], exact[key], least) for key in exact)
    return found


def _distance(mine: Tensor, exact: Tensor, least: float) -> float:
    if mine.shape != exact.shape:
        return float("inf")
    return (mine - exact).abs().max().item() / (max(exact.abs().max().item(), least) or 1.0)


def timed(work: Work, names: tuple[str, ...], budget_s: float) -> dict[str, dict[str, Any]]:
    """By column its first step in seconds, then the least and the median ms of up to `ROUNDS` rounds, in each of which every
    column runs once, beginning with another one: `least_ms` of a step that waits for the one before it, as in a test, and
    `row_ms` of one of `IN_A_ROW` that do not, as in a loop. A column that fails has its reason instead."""
    device = work.x.device.type
    clock, found, columns = clock_of(device), dict[str, dict[str, Any]](), dict[str, Column]()
    for name in names:
        before = _held(device)
        try:
            columns[name] = column = Column(name, work)
            start_s = time.perf_counter()
            column.step()
            clock.wait()
            found[name] = {"first_step_s": time.perf_counter() - start_s}
            print(f"  {name}: the first step took {found[name]['first_step_s']:.1f} s", flush=True)
            for _ in range(SETTLED):
                column.step()
            found[name] |= _added(column, before)
        except Exception as error:
            columns.pop(name, None)
            found[name] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    times = rounds({name: column.step for name, column in columns.items()}, clock, budget_s)
    several = rounds({name: column.steps for name, column in columns.items()}, clock, budget_s / 2)
    in_a_row_ms = {name: min(ms) / IN_A_ROW for name, ms in several.items()}
    for name, ms in times.items():
        found[name] |= {"least_ms": min(ms), "median_ms": statistics.median(ms), "rounds": len(ms)}
        found[name]["row_ms"] = in_a_row_ms[name]
    for name in _worth_a_look(found):
        found[name]["kernels"] = kernels_of(columns[name])
    return found


def rounds(steps: Mapping[str, Callable[[], Any]], clock: Any, budget_s: float) -> dict[str, list[float]]:
    """The ms of each of `steps` in every round, of which there are two at least."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    names, start_s = list(steps), clock.now_s()
    for turn in range(ROUNDS):
        for at in range(len(names)):
            name = names[(turn + at) % len(names)]
            start = clock.mark()
            steps[name]()
            end = clock.mark()
            clock.wait()
            times[name].append(clock.between_ms(start, end))
        if turn and clock.now_s() - start_s > budget_s:
            break
    return times


def added(name: str, work: Work) -> dict[str, int]:
    """What a step of the column `name` adds to memory on a GPU, once it is settled."""
    before = _held("cuda")
    column = Column(name, work)
    for _ in range(1 + SETTLED):
        column.step()
    return _added(column, before)


def _held(device: str) -> tuple[int, int]:
    """The bytes of tensors that are alive, and those that the allocator holds for them and for graphs; (0, 0) on a CPU."""
    if device != "cuda":
        return 0, 0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def _added(column: Column, before: tuple[int, int]) -> dict[str, int]:
    """What a column adds to what was held `before` it, its model and gradients included: the most bytes of tensors alive in
    a step, and the most that the allocator held. Of a graph, whose memory is no tensor's, the latter tells. None on a CPU."""
    if not column.x.is_cuda:
        return {}
    _held("cuda")
    torch.cuda.reset_peak_memory_stats()
    column.step()
    torch.cuda.synchronize()
    alive, held = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"added_nbytes": alive - before[0], "held_nbytes": held - before[1]}


def _worth_a_look(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The columns whose kernels tell why ours lost: ours and the fastest other; none where it did not lose."""
    ms = {name: one["least_ms"] for name, one in found.items() if "least_ms" in one}
    others = {name: one for name, one in ms.items() if not name.startswith("ours")}
    if "ours" not in ms or not others or ms["ours"] <= LOSS * min(others.values()):
        return []
    return ["ours", min(others, key=others.__getitem__)]


LOSS = 1.02
"""Slower by more than 2 % is a loss."""


def kernels_of(column: Column) -> list[tuple[str, int, float]]:
    """The kernels of a step by name, each with its launches and its microseconds in all; on a CPU the operators."""
    on_gpu = column.x.is_cuda
    kinds = [torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU]
    column.step()
    with torch.profiler.profile(activities=kinds) as profile:
        column.step()
        clock_of(column.x.device).wait()
    spent = [
        (e.key, e.count, e.self_device_time_total if on_gpu else e.self_cpu_time_total) for e in profile.key_averages()
    ]
    return sorted(spent, key=lambda row: -row[2])[:SHOWN]
