"""A wrapped model of which torch.compile compiles nothing is told with the order that works, and any other is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from ranks import needs_gloo
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tracefuse

pytestmark = needs_gloo

Wrap = Callable[[nn.Module], nn.Module]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sequential": lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU()),
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0),
    "own forward": Net,
    "own forward within": lambda: nn.Sequential(Net(), nn.GELU()),
}
WRAPPERS: dict[str, Wrap] = {"DistributedDataParallel": DistributedDataParallel, "fully_shard": fully_shard}


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(model: nn.Module, backend: str = "tracefuse") -> tuple[nn.Module, list[str]]:
    """The model, and what `torch.compile` told."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = torch.compile(model, backend=backend)
    return found, [str(one.message) for one in caught if "is compiled" in str(one.message)]


def graphs(model: nn.Module) -> int:
    model(torch.randn(4, 8)).square().mean().backward()
    return len(tracefuse.compiled(model))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", ["sequential", "encoder"])
def test_nothing_is_compiled_of_torchs_own_layers_and_the_order_that_works_is_told(name: str, wrapper: str) -> None:
    tracefuse.compiled(MODELS[name]())  # the backend is there
    model, told = compiled(WRAPPERS[wrapper](MODELS[name]()))
    assert graphs(model) == 0
    assert len(told) == 1
    assert f'{wrapper}(torch.compile(model, backend="tracefuse"))' in told[0]
    inside, told = compiled(MODELS[name]())
    assert told == []
    assert graphs(WRAPPERS[wrapper](inside)) == 1


@pytest.mark.parametrize("name", ["own forward", "own forward within"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_forward_of_ones_own_is_compiled_within_the_wrapper_and_nothing_is_told(name: str, wrapper: str) -> None:
    model, told = compiled(WRAPPERS[wrapper](MODELS[name]()))
    assert told == []
    model(torch.randn(4, 8)).square().mean().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


def test_other_backends_are_left_alone() -> None:
    assert compiled(DistributedDataParallel(MODELS["sequential"]()), "eager")[1] == []


def test_explore_says_the_same() -> None:
    model, _ = compiled(DistributedDataParallel(nn.Sequential(nn.Linear(8, 13))))  # no other test compiles one like it
    model(torch.randn(4, 8))
    with pytest.raises(tracefuse.TracefuseError, match="Compile the model before it is wrapped"):
        tracefuse.explore(model)
