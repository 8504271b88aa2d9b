"""`torch.compile(model, backend="tracefuse")`: trains like eager, says what it does not take, and can be looked at."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import tracefuse
from tracefuse.backend import tracefuse as backend
from tracefuse.demo import GPT, batch
from tracefuse.errors import CaptureError, OptionError


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# --- models, each with a reason -----------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Layer norms, a batch norm with running statistics, a second result without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(2))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = x + block(x)
        x = self.norm(x)
        return x.square().mean(), x.detach().abs().mean()


class Tied(nn.Module):
    """One weight read as a table and as a matrix; a buffer that the forward overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen.add_(tokens.double().mean())
        logits = self.head(torch.tanh(self.embed(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Views(nn.Module):
    """Results that are views of the input and of each other, an unused parameter, a parametrized weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.weight_norm(nn.Linear(8, 8))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.linear(x)
        return x.t(), y, y[:, :4]


class Parts(nn.Module):
    """Results whose gradients are added as they come, each to a part of one value's, after a backward op."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.linear(x)
        return y[:, 0].clone(), y[:, 1:].clone(), y.sin()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda t: self.second(F.gelu(self.first(t))), x, use_reentrant=False)


class Broken(nn.Module):
    """Python that dynamo cannot trace in the middle: two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return torch.sigmoid(self.second(x))


class Deciding(nn.Module):
    """A number decides, in Python: one graph of several only hands its inputs on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if y.sum().item() > 0:
            y = y * 2
        print("", end="")
        return self.second(y.relu())


def numbers() -> tuple[Tensor, ...]:
    return (torch.randn(6, 8, dtype=torch.float64),)


def tokens() -> tuple[Tensor, ...]:
    return (torch.randint(11, (2, 5)),)


def text() -> tuple[Tensor, ...]:
    return batch(13, 2, 6)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "residual": (Residual, numbers),
    "tied": (Tied, tokens),
    "views": (Views, numbers),
    "parts": (Parts, numbers),
    "checkpointed": (Checkpointed, numbers),
    "graph break": (Broken, numbers),
    "number that decides": (Deciding, numbers),
    "GPT": (lambda: GPT(layers=2, width=16, heads=2, vocab=13, length=6, dropout=0.0), text),
}


def loss_of(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    outs = out if isinstance(out, tuple) else (out,)
    return sum((one.square().mean() * (at + 1) for at, one in enumerate(outs)), torch.zeros(()))


def train(
    model: Callable,
    parameters: list[Tensor],
    make: Callable[[], tuple[Tensor, ...]],
    steps: int = 3,
    rate: float = 0.1,
) -> list[float]:
    torch.manual_seed(1)
    optimizer, losses = torch.optim.SGD(parameters, rate), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(*make()))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_eager_does(name: str) -> None:
    build, make = CASES[name]
    torch.manual_seed(0)
    eager = build().double()
    model = copy.deepcopy(eager)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ours = train(torch.compile(model, backend=backend), list(model.parameters()), make)
    assert not [one for one in said if "runs op by op" in str(one.message)]
    assert ours == pytest.approx(train(eager, list(eager.parameters()), make), rel=1e-12)
    for (key, mine), theirs in zip(model.state_dict().items(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12, msg=key)
    mine = {key: p.grad is not None for key, p in model.named_parameters()}
    assert mine == {key: p.grad is not None for key, p in eager.named_parameters()}
    assert tracefuse.compiled(model)


def test_without_gradients_only_the_forward_is_compiled() -> None:
    model = Residual().double()
    x = torch.randn(6, 8, dtype=torch.float64)
    with torch.no_grad():
        mine, theirs = torch.compile(copy.deepcopy(model), backend=backend)(x), copy.deepcopy(model)(x)
    torch.testing.assert_close(mine, theirs)


def test_dropout_draws_what_autograds_own_backend_draws() -> None:
    eager = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 8)).double()
    model, other = copy.deepcopy(eager), copy.deepcopy(eager)
    ours = train(torch.compile(model, backend=backend), list(model.parameters()), numbers)
    assert ours == pytest.approx(train(torch.compile(other, backend="aot_eager"), list(other.parameters()), numbers))


@pytest.mark.gpu
def test_kernels_train_as_autograds_own_backend_does_with_the_same_dropout() -> None:
    torch.manual_seed(0)
    eager = GPT(layers=2, width=64, heads=4, vocab=61, length=32, dropout=0.2).cuda()
    model = copy.deepcopy(eager)

    def make() -> tuple[Tensor, ...]:
        return batch(61, 4, 32, "cuda")

    ours = train(torch.compile(model, backend=backend), list(model.parameters()), make, steps=8, rate=1e-3)
    theirs = train(torch.compile(eager, backend="aot_eager"), list(eager.parameters()), make, steps=8, rate=1e-3)
    assert ours == pytest.approx(theirs, rel=1e-4)
    (graph,) = tracefuse.compiled(model)
    assert graph.optimize().kernels


def test_a_result_may_be_written_to_where_a_view_makes_it() -> None:
    """As it may in eager: Wav2vec 2 masks its features in a second graph, behind a dropout of nothing."""
    norm, project = nn.LayerNorm(8).double(), nn.Linear(8, 8).double()
    weights, x = [*norm.parameters(), *project.parameters()], torch.randn(3, 6, 8, dtype=torch.float64)

    def features() -> tuple[Tensor, Tensor]:
        normed = norm(x)
        return F.dropout(project(normed), 0.0), normed

    def gradients(run: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        hidden, normed = run()
        hidden[:, :2] = 1.5
        return torch.autograd.grad((hidden * normed).square().sum(), weights)

    torch.testing.assert_close(gradients(torch.compile(features, backend=backend)), gradients(features))


ALIASES: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "a view and the value detached": lambda h: (h.view(-1), h.detach()),
    "the value detached and a view": lambda h: (h.detach(), h.t()),
    "all three": lambda h: (h, h.detach(), h.flatten()),
    "a view, detached too": lambda h: (h.view(-1), h.view(-1).detach(), h.detach()),
    "the same twice": lambda h: (h, h),
}


@pytest.mark.parametrize("aliases", ALIASES)
def test_results_in_the_same_memory_have_the_gradients_of_eager(aliases: str) -> None:
    """Passes know a value and what was detached from it as one."""
    layer, x = nn.Linear(6, 6).double(), torch.randn(4, 6, dtype=torch.float64)

    def step(x: Tensor) -> tuple[Tensor, ...]:
        return ALIASES[aliases](layer(x))

    def trained(run: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[list[bool], list[Tensor], Tensor]:
        results = run(x)
        loss = sum((one.square().sum() for one in results if one.requires_grad), x.new_zeros(()))
        (gradient,) = torch.autograd.grad(loss, [layer.weight])
        return [one.requires_grad for one in results], [one.detach() for one in results], gradient

    ours, theirs = trained(torch.compile(step, backend=backend)), trained(step)
    assert ours[0] == theirs[0]
    torch.testing.assert_close(ours[1:], theirs[1:])


# --- options ------------------------------------------------------------------------------------------------------------


def test_frozen_parameters_get_no_gradient() -> None:
    model = Residual().double()
    torch.compile(model, backend=backend, options={"freeze": "blocks.0.*"})(*numbers())[0].backward()
    frozen = {name: parameter.grad is None for name, parameter in model.named_parameters()}
    assert frozen == {name: name.startswith("blocks.0.") for name in frozen}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"options": {"remta": 0}}, r"did you mean remat\?.*, fuse, .*cuda_graph"),
        ({"options": {"cuda_graphs": True}}, r"did you mean cuda_graph\?"),
        ({"mode": "max-autotune"}, r"has no mode"),
    ],
)
def test_what_it_does_not_take(given: dict, said: str) -> None:
    with pytest.raises(Exception, match=said) as caught:
        torch.compile(nn.Linear(8, 8), backend=backend, **given)(torch.randn(2, 8))
    assert isinstance(caught.value.__cause__ or getattr(caught.value, "inner_exception", None), OptionError)


# --- falling back -------------------------------------------------------------------------------------------------------


def test_each_size_is_compiled_where_they_are_symbols() -> None:
    eager = Residual().double()
    model = copy.deepcopy(eager)
    run = torch.compile(model, backend=backend)
    for rows in (6, 5, 4, 5):
        x = torch.randn(rows, 8, dtype=torch.float64)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mine, theirs = run(x)[0], eager(x)[0]
        assert not [one for one in caught if "op by op" in str(one.message)]
        torch.testing.assert_close(mine, theirs)
    assert len(tracefuse.compiled(model)) == 3


def test_each_size_is_compiled_where_none_may_be_a_symbol() -> None:
    model = Residual().double()
    run = torch.compile(model, backend=backend, dynamic=False)
    for rows in (6, 5):
        run(torch.randn(rows, 8, dtype=torch.float64))[0].backward()
    assert len(tracefuse.compiled(model)) == 2


# --- looking at it ------------------------------------------------------------------------------------------------------


def test_a_compiled_graph_is_a_capture_with_the_users_names() -> None:
    model = Tied().double()
    torch.compile(model, backend=backend)(*tokens()).backward()
    (graph,) = tracefuse.compiled(model)
    assert {entry.source for entry in graph.trace.inputs if entry.kind != "cotangent"} == {
        "embed.weight",
        "seen",
        "tokens",
    }
    assert any("self.seen.add_" in line for line in graph.trace.code.splitlines())
    assert {row.path for row in graph.optimize().layers()} >= {"embed", "head"}
    timing = graph.optimize().measure(budget_s=0.2)
    assert timing.programs[1].difference.gradients < 1e-9
    assert "def forward" in graph.optimize(fuse=False).source


def test_a_compiled_graph_that_overwrites_buffers_hands_out_its_results() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    torch.compile(model, backend=backend)(torch.randn(8, 4)).sum().backward()
    variant = tracefuse.compiled(model)[0].optimize()
    assert variant.compile()().shape == (8, 4)
    timing = variant.measure(peers=["eager"], budget_s=0.2)
    assert not timing.failed
    assert timing.program("eager").difference.results < 1e-5


def test_a_compiled_graph_of_numbers_that_cannot_be_drawn_is_measured() -> None:
    model = nn.Linear(8, 8)
    torch.compile(lambda x: model(x.float()), backend=backend)(
        torch.randn(4, 8).to(torch.float8_e4m3fn)
    ).sum().backward()
    assert tracefuse.compiled(model)[0].optimize().measure(budget_s=0.1).rounds


def test_a_graph_keeps_no_input_alive() -> None:
    model, given = Tied().double(), tokens()
    memory = StorageWeakRef(given[0].untyped_storage())
    torch.compile(model, backend=backend)(*given).backward()
    del given
    gc.collect()
    assert memory.expired()
    assert tracefuse.compiled(model)[0].optimize().measure(budget_s=0.1).rounds


def test_a_graph_goes_with_its_model() -> None:
    model = Tied().double()
    torch.compile(model, backend=backend)(*tokens()).backward()
    graph = tracefuse.compiled(model)[0]
    del model
    torch._dynamo.reset()
    gc.collect()
    with pytest.raises(CaptureError, match="keep the model"):
        graph.optimize().measure(budget_s=0.1)


def test_a_model_that_runs_by_the_graph_of_another() -> None:
    first, second = Tied().double(), Tied().double()
    for model in (first, second):
        torch.compile(model, backend=backend)(*tokens()).backward()
    (graph,) = tracefuse.compiled(first)
    assert graph in tracefuse.compiled(second)
    assert second.embed.weight.grad is not None


def test_a_model_that_nobody_compiled() -> None:
    with pytest.raises(CaptureError, match="call it once after"):
        tracefuse.explore(nn.Linear(2, 2))


def test_torch_finds_it_by_name() -> None:
    (found,) = entry_points(group="torch_dynamo_backends", name="tracefuse")
    assert found.load() is backend


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).sigmoid() * 2 + 1)


def test_a_kernel_that_writes_over_an_operand_runs_in_a_graph() -> None:
    """Its first call goes through what tries it."""
    torch.manual_seed(0)
    model, x = Gated(), torch.randn(8, 16)
    with torch.no_grad():
        compiled = torch.compile(model, backend="tracefuse")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                torch.testing.assert_close(compiled(x), model(x))
    (graph,) = tracefuse.compiled(model)
    assert "over=" in graph.optimize().source


def test_a_batch_norm_under_autocast_on_a_cpu_keeps_its_statistics() -> None:
    """Fake tensors say that they are halves, and the operator yields float32."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1, bias=False), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x).relu() + self.norm(self.conv(x))

    torch.manual_seed(0)
    model, x = Residual(), torch.randn(2, 3, 8, 8)
    gradients = []
    for run in (model, torch.compile(model, backend="tracefuse")):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            result = run(x)
        result.float().square().mean().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for eager, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-2)
