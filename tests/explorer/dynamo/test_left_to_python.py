"""A wrapped model of which torch.compile compiles nothing is told with the order that works, and any other is not."""

from __future__ import annotations

import copy
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


def by_method(model: nn.Module, backend: str) -> Callable[..., torch.Tensor]:
    model.compile(backend=backend)
    return model


def by_function(model: nn.Module, backend: str) -> Callable[..., torch.Tensor]:
    return torch.compile(lambda x: model(x * 2).sin(), backend=backend)


def told_while_running(
    compile: Callable[..., Callable[..., torch.Tensor]], model: nn.Module, backend: str
) -> list[str]:
    """What two calls told of a model, whose results and gradients are those of eager."""
    torch.compile(lambda x: x.sin() + 1, backend="tracefuse")(torch.ones(2))  # the backend is there
    run, x = compile(model, backend), torch.randn(4, 8)
    twin = copy.deepcopy(getattr(model.module, "_orig_mod", model.module))
    expected = twin(x) if compile is by_method else twin(x * 2).sin()
    expected.square().sum().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.zero_grad()
            found = run(x)
            found.square().sum().backward()
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert all(one.filename == __file__ for one in caught if "is compiled" in str(one.message))
    return [str(one.message) for one in caught if "is compiled" in str(one.message)]


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


@pytest.mark.parametrize("by", [by_method, by_function])
def test_its_own_compile_and_a_compiled_function_that_calls_it_are_told_once(by: Callable) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.GELU(), nn.Linear(8, 17)))  # no other test compiles one like it
    (told,) = told_while_running(by, model, "tracefuse")
    assert 'DistributedDataParallel(torch.compile(model, backend="tracefuse"))' in told
    assert tracefuse.compiled(model) == []


@pytest.mark.parametrize("by", [by_method, by_function])
@pytest.mark.parametrize("name", ["own forward", "own forward within"])
def test_nothing_is_told_of_a_forward_of_ones_own(name: str, by: Callable) -> None:
    assert told_while_running(by, DistributedDataParallel(MODELS[name]()), "tracefuse") == []


def test_nothing_is_told_of_the_order_that_works_in_a_compiled_function() -> None:
    inside = torch.compile(MODELS["sequential"](), backend="tracefuse")
    model = DistributedDataParallel(inside)
    assert told_while_running(by_function, model, "tracefuse") == []
    assert tracefuse.compiled(model)


def test_its_own_compile_is_told_after_a_reset_of_dynamo() -> None:
    tracefuse.compiled(nn.Linear(8, 8))  # the backend is there
    torch._dynamo.reset()
    model = DistributedDataParallel(nn.Sequential(nn.GELU(), nn.Linear(8, 19)))  # no other test compiles one like it
    with pytest.warns(UserWarning, match="nothing of this model is compiled"):
        by_method(model, "tracefuse")(torch.randn(4, 8)).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


@pytest.mark.parametrize("by", [by_method, by_function])
def test_nor_of_another_backend(by: Callable) -> None:
    assert told_while_running(by, DistributedDataParallel(MODELS["sequential"]()), "eager") == []


def test_it_is_told_once_of_a_model_that_is_compiled_twice() -> None:
    model = DistributedDataParallel(MODELS["sequential"]())
    assert len(compiled(model)[1]) == 1
    assert told_while_running(by_method, model, "tracefuse") == []


def test_other_backends_are_left_alone() -> None:
    assert compiled(DistributedDataParallel(MODELS["sequential"]()), "eager")[1] == []


def test_explore_says_the_same() -> None:
    model, _ = compiled(DistributedDataParallel(nn.Sequential(nn.Linear(8, 13))))  # no other test compiles one like it
    model(torch.randn(4, 8))
    with pytest.raises(tracefuse.TracefuseError, match="Compile the model before it is wrapped"):
        tracefuse.explore(model)
