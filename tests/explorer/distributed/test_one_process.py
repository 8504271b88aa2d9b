"""FSDP2 in one process: nothing is gathered, and what each capture and compiled graph is of is known all the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tracefuse
from tracefuse.distributed import schemas
from tracefuse.errors import CaptureError


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    torch._dynamo.reset()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


class Block(nn.Module):
    """A residual block; its last layer is never called, so that FSDP gathers what nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.unused = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 2))


def nested(model: nn.Sequential, **options: object) -> nn.Sequential:
    for block in (model[0], model[1]):
        fully_shard(block, mesh=dist.init_device_mesh("cpu", (1,)), **options)
    return fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)), **options)


def at_the_root(model: nn.Sequential) -> nn.Sequential:
    return fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))


def frozen(model: nn.Sequential) -> nn.Sequential:
    model[0].requires_grad_(False)
    return nested(model)


Wrap = Callable[[nn.Sequential], nn.Sequential]
WRAPPED: dict[str, Wrap] = {
    "nested": nested,
    "at the root": at_the_root,
    "kept": lambda model: nested(model, reshard_after_forward=False),
    "bf16": lambda model: nested(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "frozen": frozen,
}


def step(model: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    return loss


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


@pytest.mark.parametrize("wrapped", WRAPPED.values(), ids=WRAPPED)
def test_each_backward_is_captured_from_the_first_on(wrapped: Wrap) -> None:
    model, x = wrapped(blocks()), torch.randn(4, 8)
    for _ in range(2):
        capture = tracefuse.capture(lambda: model(x).float().square().mean().backward())
        assert {entry.kind for entry in capture.trace.outputs} <= {"result", "gradient"}
        names = {entry.name: entry.source for entry in capture.trace.inputs}
        replayed = {names.get(o.of): t for o, t in zip(capture.trace.outputs, capture.replay(), strict=True)}
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert len(gradients) >= 6
        for name, gradient in gradients.items():
            assert torch.equal(replayed[name], gradient._local_tensor), name
        model.zero_grad()


@pytest.mark.parametrize("wrapped", WRAPPED.values(), ids=WRAPPED)
def test_a_forward_is_captured_by_itself(wrapped: Wrap) -> None:
    model, x = wrapped(blocks()), torch.randn(4, 8)
    for _ in range(2):
        with torch.no_grad():
            capture = tracefuse.capture(model, x)
            assert torch.equal(capture.replay()[0], model(x))
        assert [entry.kind for entry in capture.trace.outputs] == ["result"]


@pytest.mark.parametrize("wrapped", WRAPPED.values(), ids=WRAPPED)
def test_a_compiled_step_trains_as_the_sharded_model_does(wrapped: Wrap) -> None:
    model, other, x = wrapped(blocks()), wrapped(blocks()), torch.randn(4, 8)
    optimizer, others = sgd(model), sgd(other)
    expected = [step(other, others, x) for _ in range(7)]
    with tracefuse.capture_step(n=3) as capture:
        for _ in range(4):
            step(model, optimizer, x)
    compiled = capture.optimize(fuse=False).compile()
    torch.testing.assert_close([compiled(x), compiled(x)], expected[4:6])
    torch.testing.assert_close(step(model, optimizer, x), expected[6])
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine._local_tensor, theirs._local_tensor)


def test_clipped_gradients_are_of_the_update() -> None:
    model, x = nested(blocks()), torch.randn(4, 8)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with tracefuse.capture_step(n=2) as capture:
        for _ in range(3):
            model(x).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    assert capture.program.update is not None, capture.program.uncut
    assert "bit for bit" in str(capture.check())


def test_memory_of_the_user_that_is_written_to_under_two_layouts_is_refused_as_ever() -> None:
    model, x = nested(blocks()), torch.randn(4, 8)
    flat = torch.zeros(16)
    square = flat.view(4, 4)

    def run() -> Tensor:
        flat.copy_(model(x).detach().flatten().repeat(2))
        return model(x).sum() + square.sum()

    with pytest.raises(tracefuse.TracefuseError, match="lies in the same memory"):
        _ = tracefuse.capture(run).trace


def test_overlap_says_where_torch_keeps_the_collectives_of_a_sharded_model() -> None:
    compiled = torch.compile(nested(blocks()), backend="tracefuse", options={"overlap": True})
    with pytest.warns(UserWarning, match="in hooks between graphs.*DTensors"):
        compiled(torch.randn(4, 8)).sum().backward()


@pytest.mark.parametrize("wrapped", [nested, at_the_root], ids=["nested", "at the root"])
def test_graphs_of_own_modules_within_a_container_are_known(wrapped: Wrap) -> None:
    first = blocks()
    other = nn.Sequential(*copy.deepcopy(first)[:2])
    model = wrapped(first)
    compiled = torch.compile(model, backend="tracefuse")
    for _ in range(2):
        compiled(torch.randn(4, 8)).sum().backward()
    graphs = tracefuse.compiled(model)
    assert len(graphs) == 2  # the second block's input has a gradient
    assert graphs == tracefuse.compiled(compiled)
    assert {i.source for i in graphs[0].trace.inputs if i.kind == "parameter"} >= {"up.weight", "down.bias"}
    assert tracefuse.compiled(other) == []


@pytest.mark.parametrize("gather", [fc.all_gather_tensor, fc.all_gather_tensor_autograd])
def test_a_collective_that_nobody_knows_is_refused(
    gather: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(4, 4, requires_grad=True)

    def gathered() -> Tensor:
        return (gather(torch.ones(3, 4) @ weight, 0, dist.group.WORLD) * 2).sum()

    assert "all_gather" in str(tracefuse.capture(gathered).trace)
    monkeypatch.delitem(schemas._KINDS, "all_gather_into_tensor")
    with pytest.raises(CaptureError, match=r"all_gather_into_tensor.*test_one_process.py:\d+.*does not know"):
        print(tracefuse.capture(gathered).trace)
