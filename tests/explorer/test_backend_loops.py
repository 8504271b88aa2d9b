"""Training loops as people write them, through `torch.compile(model, backend="tracefuse")`: three steps, eager's numbers."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import tracefuse
from tracefuse.backend import tracefuse as backend


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    """Tied weights, a norm, and a part that may be checkpointed."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embed, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + (checkpoint(self.mlp, x, use_reentrant=False) if self.checkpointed else self.mlp(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(1, 1).flatten())


Step = Callable[[Callable, nn.Module, torch.optim.Optimizer, Tensor], Tensor]
AdamW = partial(torch.optim.AdamW, lr=0.05)


def plain(run: Callable, model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = run(tokens)
    loss.backward()
    optimizer.step()
    return loss


def train(run: Callable, model: nn.Module, step: Step, made: Callable[..., torch.optim.Optimizer]) -> list[Tensor]:
    """The losses of three steps, then what the parameters are after them."""
    generator = torch.Generator().manual_seed(1)
    optimizer = made(model.parameters())
    batches = [torch.randint(11, (4, 6), generator=generator) for _ in range(3)]
    losses = [step(run, model, optimizer, tokens).detach() for tokens in batches]
    return [*losses, *(p.detach() for p in model.parameters())]


def agree(
    step: Step = plain,
    made: Callable[..., torch.optim.Optimizer] = AdamW,
    build: Callable[[], nn.Module] = Net,
    wrapped: Callable[[nn.Module], nn.Module] = lambda model: model,
    dtype: torch.dtype = torch.float64,
    **close: float,
) -> list[tracefuse.CompiledGraph]:
    """Train eager and compiled from the same weights; the graphs with the model's parameters, all of them ours."""
    torch.manual_seed(0)
    first = build().to(dtype)
    eager, model = wrapped(copy.deepcopy(first)), wrapped(copy.deepcopy(first))
    theirs = train(eager, eager, step, made)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ours = train(torch.compile(model, backend=backend), model, step, made)
    assert not [one for one in said if "runs op by op" in str(one.message)]
    torch.testing.assert_close(ours, theirs, **close)
    return tracefuse.compiled(model)


# --- optimizers -------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "AdamW, foreach": partial(AdamW, foreach=True),
    "AdamW, fused": partial(AdamW, fused=True),
    "SGD, foreach": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "SGD, fused": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    assert agree(made=OPTIMIZERS[name])


def test_tied_weights_are_one_input() -> None:
    (graph,) = agree()
    sources = [entry.source for entry in graph.trace.inputs if entry.kind == "parameter"]
    assert sources.count("embed.weight") == 1
    assert "head.weight" not in sources


def test_clipped_gradients() -> None:
    def step(run: Callable, model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = run(tokens)
        loss.backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
        optimizer.step()
        return loss

    assert agree(step)


def test_scaled_losses() -> None:
    """The scale is a power of two, so that it changes no number."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def step(run: Callable, model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = run(tokens)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        return loss

    assert agree(step, dtype=torch.float32)
    assert scaler.get_scale() == 2.0**10


# --- what changes between steps ---------------------------------------------------------------------------------------


def test_evaluation_in_between() -> None:
    def step(run: Callable, model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
        loss = plain(run, model, optimizer, tokens)
        model.eval()
        with torch.no_grad():
            other = run(tokens.flip(1))
        model.train()
        return loss + other

    training, evaluation = agree(step)
    assert training.trace.split()[1].op_count
    assert not evaluation.trace.split()[1].op_count


def test_parameters_that_are_frozen_for_a_step() -> None:
    steps, counted = itertools.cycle(range(3)), CompileCounterWithBackend("eager")

    def step(run: Callable, model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
        model.up.requires_grad_(next(steps) != 1)
        loss = plain(run, model, optimizer, tokens)
        assert (model.up.weight.grad is None) == (not model.up.weight.requires_grad)
        return loss

    graphs = agree(step)
    model = Net().double()
    train(torch.compile(model, backend=counted), model, step, AdamW)
    assert len(graphs) == counted.frame_count  # torch 2.11 has no guard on what is frozen: one, and right all the same
    wanted = [{out.of for out in graph.trace.outputs if out.kind == "gradient"} for graph in graphs]
    assert all(wanted[0] - others == {"up_weight", "up_bias"} for others in wanted[1:])


def test_a_checkpoint_inside_the_model() -> None:
    assert agree(build=partial(Net, checkpointed=True))


def test_accumulated_gradients() -> None:
    def step(run: Callable, model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        losses = [run(part) / 2 for part in tokens.chunk(2)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        return sum(losses, torch.zeros(()))

    assert agree(step)


def test_autocast() -> None:
    def step(run: Callable, model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(run, model, optimizer, tokens)

    made = partial(torch.optim.SGD, lr=0.1)
    (graph,) = agree(step, made, dtype=torch.float32, rtol=1.6e-2, atol=1e-3)
    assert "bfloat16" in graph.trace.code


# --- torch.distributed ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_process")
def test_distributed_data_parallel() -> None:
    assert agree(wrapped=DistributedDataParallel)


@pytest.mark.usefixtures("one_process")
def test_fully_sharded() -> None:
    def sharded(model: nn.Module) -> nn.Module:
        return fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))

    graphs = agree(wrapped=sharded)
    assert graphs
    assert graphs[-1].optimize().measure(budget_s=0.1).rounds
