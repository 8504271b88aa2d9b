"""decompose: the backward of an embedding becomes sums over sorted places, added to the weight's other gradient."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuda_traces import on_cuda
from torch import Tensor, nn
from traces import Tried, captured, tried

import tracefuse
from tracefuse.optimizers.costs.cost import bytes_read, bytes_written
from tracefuse.optimizers.decompose import Decompose, embeddings
from tracefuse.optimizers.decompose.embeddings import ADD_EMBEDDING_GRADIENT
from tracefuse.optimizers.liveness import peak_bytes, reused
from tracefuse.optimizers.passes import Decision
from tracefuse.optimizers.trace import Trace
from tracefuse.optimizers.verify import verify

ROWS, WIDTH, PLACES = 40, 8, 30
OPERATOR = "add_embedding_gradient"


@pytest.fixture
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rewrite on a CPU, where ATen's op runs in the operator, however few the places are."""
    monkeypatch.setattr(embeddings, "DEVICES", {"cuda", "cpu"})
    monkeypatch.setattr(embeddings, "FEW", 0)


class Tied(nn.Module):
    """Words and a head that shares their weight if it `is_tied`, and is in bfloat16 if it `is_halved`."""

    def __init__(self, is_tied: bool = True, is_halved: bool = False, padding: int | None = None) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, padding_idx=padding)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.is_halved = is_halved
        if is_tied:
            self.head.weight = self.words.weight

    def forward(self, places: Tensor) -> Tensor:
        x = self.words(places).tanh()
        if not self.is_halved:
            return self.head(x).square().mean()
        return F.linear(x.bfloat16(), self.head.weight.bfloat16()).float().square().mean()


def training(model: nn.Module, dtype: torch.dtype = torch.float64) -> tracefuse.Capture:
    torch.manual_seed(0)
    model.to(dtype)
    places = torch.randint(ROWS, (PLACES // 2, 2))

    def run() -> Tensor:
        loss = model(places)
        loss.backward()
        return loss

    return captured(run)


def rewritten(model: nn.Module, dtype: torch.dtype = torch.float64) -> Tried:
    """The pass tried on a training cell; every law is checked, the numbers among them."""
    return tried(Decompose(), training(model, dtype))


def operators(trace: Trace) -> list[Any]:
    return [node for node in trace.ops if node.target is ADD_EMBEDDING_GRADIENT]


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_sums_are_added_to_the_gradient_of_a_head_with_the_same_weight(dtype: torch.dtype, padding: int | None) -> None:
    result = rewritten(Tied(padding=padding), dtype)
    assert result.ops.count(OPERATOR) == 1
    assert not {"embedding_dense_backward", "full", "add"} & set(result.ops)
    (node,) = operators(result.after)
    assert reused(result.after) == {node: node.args[0]}
    (reason,) = result.reasons("decompose")
    assert "are neither written nor read" in reason


@pytest.mark.usefixtures("on_any_device")
def test_a_cast_is_made_right_before() -> None:
    capture = training(Tied(is_halved=True), torch.float32)
    result = tried(Decompose(), capture)
    (node,) = operators(result.after)
    assert node.args[0].target is torch.ops.aten._to_copy.default
    assert node.prev is node.args[0]
    assert peak_bytes(result.after) <= peak_bytes(capture.trace)


@pytest.mark.usefixtures("on_any_device")
def test_without_another_gradient_they_are_added_to_zeros() -> None:
    result = rewritten(Tied(is_tied=False))
    (node,) = operators(result.after)
    assert node.args[0].target is torch.ops.aten.full.default
    assert reused(result.after) == {node: node.args[0]}


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH)

    def forward(self, places: Tensor) -> Tensor:
        return (self.words(places).tanh() * self.words(places.flip(0)).exp()).sum()


@pytest.mark.usefixtures("on_any_device")
def test_two_embeddings_of_one_weight_are_added_in_one_place() -> None:
    result = rewritten(Twice())
    assert result.ops.count(OPERATOR) == 2
    assert result.ops.count("full") == 1
    assert "add" not in result.ops
    assert len(reused(result.after)) == 2


@pytest.mark.usefixtures("on_any_device")
def test_a_gradient_that_was_there_stays_and_is_added_to() -> None:
    model = Tied(is_tied=False).double()
    places = torch.randint(ROWS, (PLACES,))

    def run() -> None:
        model(places).backward()
        model(places).backward()

    result = tried(Decompose(), captured(run))
    assert result.ops.count(OPERATOR) == 2


@pytest.mark.usefixtures("on_any_device")
def test_a_gradient_in_another_order_is_added_by_an_op_of_its_own() -> None:
    model = nn.Embedding(ROWS, WIDTH).double()
    places = torch.randint(ROWS, (PLACES,))

    def run() -> None:
        scales = torch.linspace(0, 1, ROWS, dtype=torch.float64) + torch.zeros(WIDTH, 1, dtype=torch.float64)
        (model(places).square().sum() + (model.weight.t().contiguous() * scales).sum()).backward()

    result = tried(Decompose(), captured(run))
    assert OPERATOR in result.ops


# --- what stays -------------------------------------------------------------------------------------------------------


def test_on_a_cpu_it_stays() -> None:
    result = rewritten(Tied())
    assert OPERATOR not in result.ops
    assert "embedding_dense_backward" in result.ops


@pytest.mark.usefixtures("on_any_device")
def test_gradients_scaled_by_how_often_a_row_is_named_stay() -> None:
    model = Tied()
    model.words.scale_grad_by_freq = True
    result = rewritten(model)
    assert OPERATOR not in result.ops
    (reason,) = result.reasons("leave")
    assert "how often" in reason


def of_gpu(capture: tracefuse.Capture) -> tuple[Trace, list[Decision]]:
    decisions: list[Decision] = []
    after = Decompose().run(on_cuda(capture.trace), decisions.append)
    verify(after)
    return after, decisions


def embedded(count: int, rows: int, width: int) -> tracefuse.Capture:
    model = nn.Embedding(rows, width)
    places = torch.randint(rows, (count,))

    def run() -> None:
        (model(places).square().sum() + model.weight.square().sum()).backward()

    return captured(run)


def test_of_few_places_on_a_gpu_it_stays() -> None:
    after, (decision,) = of_gpu(embedded(100, ROWS, WIDTH))
    assert not operators(after)
    assert decision.action == "leave"
    assert decision.reason == "ATen adds up 100 places in one kernel"


@pytest.mark.parametrize(("count", "rows", "width"), [(embeddings.FEW + 1, ROWS, WIDTH), (100, 2**16, 64)])
def test_of_many_places_or_rows_on_a_gpu_it_becomes_sums(count: int, rows: int, width: int) -> None:
    after, (decision,) = of_gpu(embedded(count, rows, width))
    assert len(operators(after)) == 1
    assert decision.action == "decompose"


def test_it_moves_the_rows_that_are_added() -> None:
    after, _ = of_gpu(embedded(100, 2**16, 64))
    (node,) = operators(after)
    rows, places = 100 * 64 * 4, 100 * 8
    assert (bytes_read(node), bytes_written(node)) == (2 * rows + places, rows)


# --- compiled ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("on_any_device")
def test_files_call_it_and_write_over_what_it_is_added_to() -> None:
    variant = training(Tied(), torch.float32).optimize().check()
    assert f"{OPERATOR}(" in variant.source
    assert ", over=" in variant.source.split(f"= {OPERATOR}(")[1].split("\n")[0]
    assert variant.source.count("def add_runs_kernel(") == 1


@pytest.mark.usefixtures("on_any_device")
def test_a_gradient_that_other_ops_read_has_a_name_of_its_own() -> None:
    weight, places = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randint(ROWS, (PLACES,))

    def run() -> Tensor:
        loss = F.embedding(places, weight.exp()).tanh().sum()
        loss.backward()
        return loss

    capture = captured(run)
    variant = capture.optimize().check()
    assert f" = {OPERATOR}(" in variant.source
    assert f"    {OPERATOR} = " not in variant.source
    found = variant.compile()(weight, places)
    (grad,) = torch.autograd.grad(found, [weight])
    (wanted,) = torch.autograd.grad(F.embedding(places, weight.exp()).tanh().sum(), [weight])
    torch.testing.assert_close(grad, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("is_tied", [True, False])
def test_on_a_gpu_a_file_checks_itself(is_tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied(is_tied).to("cuda", torch.float64)
    places = torch.randint(ROWS, (4000,), device="cuda")
    capture = captured(lambda: model(places).backward())
    variant = capture.optimize()
    assert operators(variant.trace)
    command = [sys.executable, str(variant.export(tmp_path / "step.py"))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


def trained(device: str, dtype: torch.dtype, is_tied: bool) -> tuple[nn.Module, torch.optim.Optimizer, list[Tensor]]:
    torch.manual_seed(0)
    rows, width = (5003, 128) if device == "cuda" else (ROWS, WIDTH)
    model = nn.Sequential(nn.Embedding(rows, width), nn.Linear(width, width), nn.Linear(width, rows, bias=False))
    if is_tied:
        model[2].weight = model[0].weight
    model.to(device, dtype)
    count = 4096 if device == "cuda" else PLACES
    data = [torch.randint(rows, (count,), device=device) for _ in range(6)]
    return model, torch.optim.AdamW(model.parameters(), fused=True), data


def steps(device: str, dtype: torch.dtype, is_tied: bool, is_compiled: bool, cuda_graph: bool = False) -> list[Tensor]:
    """The weights after six steps, the last two of them compiled."""
    model, opt, data = trained(device, dtype, is_tied)

    def step(places: Tensor) -> None:
        opt.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=dtype is torch.float32):
            loss = F.cross_entropy(model(places).float() if dtype is torch.float32 else model(places), places.flip(0))
        loss.backward()
        opt.step()

    if not is_compiled:
        for places in data:
            step(places)
        return [p.detach().clone() for p in model.parameters()]
    with tracefuse.capture_step(n=2) as c:
        for places in data[:4]:
            step(places)
    variant = c.optimize()
    assert operators(variant.trace)
    again = variant.compile(cuda_graph=cuda_graph)
    for places in data[4:]:
        again(places)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize("is_tied", [True, False])
def test_steps_with_it_train_as_eager(is_tied: bool) -> None:
    eager, ours = (steps("cpu", torch.float64, is_tied, is_compiled) for is_compiled in (False, True))
    torch.testing.assert_close(ours, eager)


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_on_a_gpu_steps_with_it_train_as_eager(dtype: torch.dtype, is_tied: bool, cuda_graph: bool) -> None:
    eager = steps("cuda", dtype, is_tied, is_compiled=False)
    ours = [steps("cuda", dtype, is_tied, is_compiled=True, cuda_graph=cuda_graph) for _ in range(2)]
    first = trained("cuda", dtype, is_tied)[0].parameters()
    for one, again, wanted, before in zip(*ours, eager, first, strict=True):
        # AdamW makes a step of full length of a gradient that is nearly none, whose sign its rounding decides.
        moved = (wanted - before).norm()
        assert (one - wanted).norm() <= (1e-7 if dtype is torch.float64 else 0.1) * moved
        assert torch.equal(one, again), "other bits in another run"
