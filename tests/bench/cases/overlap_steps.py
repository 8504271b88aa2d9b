"""The steps that `trust/overlap_model.py` predicts and measures, on gloo processes or on GPUs.

On a CPU computing is an operator that rests for some milliseconds, as a host does that waits for a GPU, since four processes
on two cores would otherwise compute and exchange at each other's expense; one program multiplies matrices instead. On GPUs all
multiply matrices. "alone" is the same program in a group of one rank: it lays out its buckets and exchanges nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

MIB = 2**20
FORWARD_MS, BACKWARD_MS = 5.0, 10.0

Step = Callable[[], object]


@dataclass(frozen=True)
class Sizes:
    """A square weight of `width`, `rows` of a batch, bucket sizes and sizes of single calls in MiB, how many calls are timed
    in a row, and how many products take longer than the largest exchange."""

    width: int
    rows: int
    layers: int
    dtype: torch.dtype
    buckets_mb: tuple[float, ...]
    calls_mb: dict[str, tuple[float, ...]]
    in_a_row: int
    products: int


SIZES = {
    "cpu": Sizes(
        512, 64, 8, torch.float32, (1.0, 2.0, 4.0, 8.0),
        {"all_reduce": (0.25, 1.0, 2.0, 4.0, 8.0), "all_gather": (0.25, 1.0, 2.0, 4.0)}, 1, 30,
    ),
    "cuda": Sizes(
        4096, 2048, 12, torch.bfloat16, (32.0, 64.0, 128.0, 384.0),
        {
            "all_reduce": (1.0, 32.0, 64.0, 128.0, 384.0),
            "all_gather": (1.0, 32.0, 64.0, 128.0), "reduce_scatter": (1.0, 32.0, 64.0, 128.0),
        },
        4, 24,
    ),
}  # fmt: skip
"""A layer's weight is 1 MiB on a CPU and 32 MiB on a GPU."""

SHARDED = replace(SIZES["cuda"], width=8192, rows=8192, layers=8)
"""For FSDP2, whose host needs longer for each layer: 128 MiB, and so much computing that the host stays ahead."""


@dataclass
class Program:
    """Steps by choice, the options that each choice is, the step to record and the step without an exchange; `kinds` are the
    collectives that its link is fitted to."""

    kinds: tuple[str, ...]
    steps: dict[str, Step]
    options: dict[str, dict[str, Any]]
    record: Step
    alone: Step


@torch.library.custom_op("overlap_bench::rest", mutates_args=())
def rest(x: torch.Tensor, ms: float) -> torch.Tensor:
    time.sleep(ms / 1e3)
    return x.clone()


@rest.register_fake
def _(x: torch.Tensor, ms: float) -> torch.Tensor:
    return torch.empty_like(x)


rest.register_autograd(
    lambda ctx, grad: (rest(grad, BACKWARD_MS), None), setup_context=lambda ctx, inputs, output: None
)


class Layer(nn.Module):
    """A matrix, and a rest of some milliseconds, or of none."""

    def __init__(self, width: int, ms: float) -> None:
        super().__init__()
        self.linear, self.ms = nn.Linear(width, width, bias=False), ms

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return rest(y, self.ms) if self.ms else y.tanh()


class Gathered(nn.Module):
    """Layers whose weights are gathered from all ranks, each `depth` layers before it is needed."""

    def __init__(self, device: str, depth: int) -> None:
        super().__init__()
        self.sizes, self.device, self.depth = SIZES[device], device, depth
        rows, width = self.sizes.width // dist.get_world_size(), self.sizes.width
        options = {"device": device, "dtype": self.sizes.dtype}
        shards = [torch.randn(rows, width, **options) / width for _ in range(self.sizes.layers)]
        self.shards = nn.ParameterList(shards).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        started: list[tuple[torch.Tensor, Any]] = []
        for at in range(len(self.shards)):
            while len(started) < min(len(self.shards), at + 1 + self.depth):
                whole = x.new_empty(self.sizes.width, self.sizes.width)
                shard = self.shards[len(started)].data
                started.append((whole, dist.all_gather_into_tensor(whole, shard, async_op=True)))
            whole, work = started[at]
            work.wait()
            x = computed(x, whole, self.device)
        return x


def computed(x: torch.Tensor, weight: torch.Tensor, device: str) -> torch.Tensor:
    return rest(x @ weight, FORWARD_MS) if device == "cpu" else (x @ weight).tanh()


def stack(device: str, ms: float, sizes: Sizes) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        layers = [Layer(sizes.width, ms) for _ in range(sizes.layers)]
    return nn.Sequential(*layers).to(sizes.dtype)


def trained(net: nn.Module, x: torch.Tensor) -> Step:
    def step() -> None:
        net.zero_grad(set_to_none=True)
        net(x).square().mean().backward()

    return step


def by_buckets(device: str, ms: float, rows: int, alone: Any) -> Program:
    """`DistributedDataParallel` with buckets of several sizes."""
    sizes = SIZES[device]
    x = torch.randn(rows, sizes.width, device=device, dtype=sizes.dtype)

    def net(mb: float, group: Any = None) -> Step:
        options = {"bucket_cap_mb": mb, "gradient_as_bucket_view": True, "process_group": group}
        return trained(nn.parallel.DistributedDataParallel(stack(device, ms, sizes), **options), x)

    steps = {f"bucket_mb={mb:g}": net(mb) for mb in sizes.buckets_mb}
    options = {f"bucket_mb={mb:g}": {"bucket_mb": mb} for mb in sizes.buckets_mb}
    return Program(("all_reduce",), steps, options, [*steps.values()][-1], net(sizes.buckets_mb[-1], alone))


def by_depths(device: str) -> Program:
    """Gathers started by hand, so many layers ahead."""
    sizes = SIZES[device]
    x = torch.randn(8 if device == "cpu" else sizes.rows, sizes.width, device=device, dtype=sizes.dtype)
    loops = {depth: Gathered(device, depth) for depth in (0, 1, 2, 4)}
    weight = torch.zeros(sizes.width, sizes.width, device=device, dtype=sizes.dtype)
    steps: dict[str, Step] = {f"prefetch={depth}": lambda loop=loop: loop(x) for depth, loop in loops.items()}  # type: ignore[misc]
    options = {f"prefetch={depth}": {"prefetch": depth} for depth in loops}
    alone: Step = lambda: [computed(x, weight, device) for _ in range(sizes.layers)]  # noqa: E731
    return Program(("all_gather",), steps, options, steps["prefetch=0"], alone)


def sharded(device: str, ahead: int = 1, mesh: Any = None, **options: Any) -> nn.Module:
    net = stack(device, 0.0, SHARDED)
    layers = list(net.children())
    for layer in layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    for at, layer in enumerate(layers if ahead > 1 else ()):
        layer.set_modules_to_forward_prefetch(layers[at + 1 : at + 1 + ahead])
        layer.set_modules_to_backward_prefetch(layers[max(0, at - ahead) : at][::-1])
    return net


def by_fsdp(device: str) -> Program:
    """FSDP2 as it comes, which gathers one layer ahead; two layers ahead; and with gathered parameters kept."""
    x = torch.randn(SHARDED.rows, SHARDED.width, device=device, dtype=SHARDED.dtype)
    alone = init_device_mesh(device, (dist.get_world_size(), 1), mesh_dim_names=("others", "alone"))["alone"]
    steps = {
        "as it comes": trained(sharded(device), x),
        "two ahead": trained(sharded(device, ahead=2), x),
        "kept": trained(sharded(device, reshard_after_forward=False), x),
    }
    options = {"as it comes": {"prefetch": 1}, "two ahead": {"prefetch": 2}, "kept": {"prefetch": 1, "reshard": False}}
    without = trained(sharded(device, mesh=alone), x)
    return Program(("all_gather", "reduce_scatter"), steps, options, steps["as it comes"], without)


def programs(device: str) -> dict[str, Program]:
    """By name."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    alone = groups[dist.get_rank()]
    if device == "cpu":
        return {
            "DDP, bucket size": by_buckets(device, FORWARD_MS, 8, alone),
            "DDP, bucket size, with matrices": by_buckets(device, 0.0, SIZES[device].rows, alone),
            "gathers by hand, prefetch depth": by_depths(device),
        }
    return {
        "DDP, bucket size, with matrices": by_buckets(device, 0.0, SIZES[device].rows, alone),
        "gathers by hand, prefetch depth, with matrices": by_depths(device),
        "FSDP2, with matrices": by_fsdp(device),
    }


def beside(device: str) -> dict[str, Step]:
    """Computing, an exchange, and both at once: computing takes longer than the exchange."""
    sizes = SIZES[device]
    whole = torch.zeros(
        int(sizes.calls_mb["all_reduce"][-1] * MIB) // sizes.dtype.itemsize, device=device, dtype=sizes.dtype
    )
    x = torch.randn(sizes.rows, sizes.width, device=device, dtype=sizes.dtype)
    weight = torch.zeros(sizes.width, sizes.width, device=device, dtype=sizes.dtype)

    def computing() -> None:
        for _ in range(sizes.products):
            (x @ weight).tanh()

    def both() -> None:
        work = dist.all_reduce(whole, async_op=True)
        computing()
        work.wait()

    return {"computing": computing, "exchange": lambda: dist.all_reduce(whole), "both": both}


def calls(device: str) -> dict[tuple[str, int], Step]:
    """Single collectives, by kind and bytes, each some times in a row."""
    sizes, found = SIZES[device], dict[tuple[str, int], Step]()
    for kind, sizes_mb in sizes.calls_mb.items():
        for size in sizes_mb:
            whole = torch.zeros(int(size * MIB) // sizes.dtype.itemsize, device=device, dtype=sizes.dtype)
            part = whole[: len(whole) // dist.get_world_size()].clone()
            one: Step = {
                "all_reduce": lambda whole=whole: dist.all_reduce(whole),
                "all_gather": lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part),
                "reduce_scatter": lambda whole=whole, part=part: dist.reduce_scatter_tensor(part, whole),
            }[kind]
            found[kind, whole.nbytes] = lambda one=one: [one() for _ in range(sizes.in_a_row)]
    return found
