"""`torch.compile(model, backend="tracefuse", mode="reduce-overhead")`: eager's numbers in every order of calls, replayed where
that can be, with a reason where not. On a CPU the graphs are stand-ins (`fake_graphs`), on a GPU they are CUDA's."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from fake_graphs import FakeGraphs
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tracefuse.backend import tracefuse as backend
from tracefuse.dynamo import graphed_halves
from tracefuse.execution import sharing

gpu = pytest.mark.gpu


class Recorded(list):
    """The graphs that were made."""

    def replays(self) -> int:
        """How often a half has run by a graph."""
        return sum(graphs.turn for graphs in self)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["copied", "shared"])
def recorded(device: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    """Graphs that copy all of these small tensors, and graphs that share what they may."""
    torch._dynamo.reset()
    if request.param == "shared":
        monkeypatch.setattr(sharing, "LEAST", 1)
    made = Recorded()
    kind = FakeGraphs if device == "cpu" else graphed_halves.Graphs

    def making(*given: object) -> object:
        made.append(kind(*given))
        return made[-1]

    monkeypatch.setattr(graphed_halves, "Graphs", making)
    if device == "cpu":
        monkeypatch.setattr(graphed_halves, "check_replayable", lambda trace, overwrites: None)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield made
    torch._dynamo.reset()


class Net(nn.Module):
    """A batch norm, whose statistics the forward overwrites, between matmuls and what fuses."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.norm(self.up(x)))) + x


def pair(device: str, build: Callable[[], nn.Module] = Net) -> tuple[nn.Module, nn.Module, Callable]:
    """Eager, a copy, and the copy compiled."""
    torch.manual_seed(0)
    eager = build().double().to(device)
    model = copy.deepcopy(eager)
    return eager, model, torch.compile(model, backend=backend, mode="reduce-overhead")


def draw(device: str, rows: int = 5) -> Tensor:
    return torch.randn(rows, 6, dtype=torch.float64, device=device)


def meet(model: nn.Module, run: Callable, device: str) -> None:
    """The first step of a model, which no graph replays, whose gradients go."""
    run(draw(device)).sum().backward()
    model.zero_grad(set_to_none=True)


def train(device: str, count: int, *runs: Callable) -> None:
    """So many forwards and backwards of each, on the same data."""
    for _ in range(count):
        x = draw(device)
        for run in runs:
            run(x).square().mean().backward()


def same(model: nn.Module, eager: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)
        torch.testing.assert_close(mine.grad, theirs.grad, msg=f"gradient of {name}")
    for (name, mine), theirs in zip(model.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)


def quietly(run: Callable[[], object]) -> None:
    """`run`, which must say nothing of a plain run."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            run()
        finally:  # what is said explains what goes wrong from there on
            assert not [str(one.message) for one in said if "without CUDA graphs" in str(one.message)]


class Doubled(nn.Module):
    """Gives a view of a value, and the value detached, which passes know as one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.up(x)
        return h.view(-1), h.detach()


def test_results_in_the_same_memory_have_the_gradients_of_eager(device: str, recorded: Recorded) -> None:
    eager, model, run = pair(device, Doubled)
    for _ in range(6):
        x = draw(device)
        for net, step in ((eager, eager), (model, run)):
            net.zero_grad(set_to_none=True)
            viewed, detached = step(x)
            assert (viewed.requires_grad, detached.requires_grad) == (True, False)
            (viewed.square().sum() * (1 + detached.sum())).backward()
        same(model, eager)
    assert recorded.replays()


def test_a_loop_replays_both_halves_at_every_step(device: str, recorded: Recorded) -> None:
    eager, model, run = pair(device)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (eager, model)]

    def steps() -> None:
        for _ in range(5):
            x = draw(device)
            for called, optimizer in zip((eager, run), optimizers, strict=True):
                optimizer.zero_grad()
                called(x).square().mean().backward()
                optimizer.step()

    quietly(steps)
    same(model, eager)
    assert len(recorded) == 1
    assert recorded.replays() == 8


def test_what_is_compiled_again_at_the_second_call_holds_no_graph_of_the_first(device: str, recorded: Recorded) -> None:
    class Configured(Net):
        """Like a classifier of transformers, which finds the kind of its loss in its first call."""

        kind: str | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.kind is None:
                self.kind = "regression"
            return super().forward(x)

    eager, model, run = pair(device, Configured)

    quietly(lambda: train(device, 4, eager, run))
    same(model, eager)
    assert len(recorded) == 1
    assert recorded.replays() == 4


def test_constants_of_the_graph_stay_where_they_are(device: str, recorded: Recorded) -> None:
    class Scaled(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * x.new_tensor([1.0, 2.0, 3.0] * 2) + torch.tensor(0.5)

    eager, model, run = pair(device, Scaled)

    quietly(lambda: train(device, 4, eager, run))
    same(model, eager)
    assert recorded.replays() == 6


def test_gradients_accumulate_and_losses_are_kept(device: str, recorded: Recorded) -> None:
    eager, model, run = pair(device)
    losses = []

    def steps() -> None:
        for _ in range(4):
            x = draw(device)
            for called in (eager, run):
                losses.append(called(x).square().mean())
                losses[-1].backward()

    quietly(steps)
    same(model, eager)
    torch.testing.assert_close(losses[1::2], losses[::2])
    assert recorded.replays() == 6


def test_results_and_gradients_are_the_users_to_keep(device: str, recorded: Recorded) -> None:
    _, model, run = pair(device)
    meet(model, run, device)
    first = run(draw(device))
    first.sum().backward()
    kept = [first.detach(), *(p.grad for p in model.parameters())]
    before = [t.clone() for t in kept]
    model.zero_grad(set_to_none=True)
    run(draw(device)).square().sum().backward()
    torch.testing.assert_close(kept, before, rtol=0, atol=0)
    assert recorded.replays() == 4


def test_forwards_before_a_backward_run_plainly(device: str, recorded: Recorded) -> None:
    eager, model, run = pair(device)
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        xs = [draw(device) for _ in range(3)]
        for called in (eager, run):
            losses = [called(x).square().mean() for x in xs]
            for at in order:
                losses[at].backward()
        same(model, eager)
    assert recorded.replays() == 6


def test_a_first_result_that_is_kept_hinders_no_graph(device: str, recorded: Recorded) -> None:
    eager, model, run = pair(device)
    x = draw(device)
    firsts = [called(x).square().mean() for called in (eager, run)]

    quietly(lambda: train(device, 3, eager, run))
    for first in firsts:
        first.backward()
    same(model, eager)
    assert (len(recorded), recorded.replays()) == (1, 6)


def test_a_checkpointed_layer_records_in_no_backward(device: str, recorded: Recorded) -> None:
    """What is computed again is the second forward where its weights lie."""
    eager, model, _ = pair(
        device, lambda: nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
    )
    layers = [torch.compile(layer, backend=backend, mode="reduce-overhead") for layer in model]
    for step in range(4):
        x = draw(device).requires_grad_()
        for called in (eager, layers):
            y = x
            for layer in called:
                y = checkpoint(layer, y, use_reentrant=False)
            made = len(recorded)
            y.sum().backward()
            assert len(recorded) == made, f"step {step}"
    same(model, eager)
    assert len(recorded) == 3


def test_it_is_said_once_that_a_forward_runs_plainly(device: str, recorded: Recorded) -> None:
    _, model, run = pair(device)
    meet(model, run, device)
    with pytest.warns(UserWarning, match="before the backward of the one before it") as caught:
        losses = [run(draw(device)).sum() for _ in range(3)]
    assert sum("without CUDA graphs" in str(one.message) for one in caught) == 1
    del losses


def test_a_forward_without_a_backward_frees_the_graph(device: str, recorded: Recorded) -> None:
    eager, model, run = pair(device)

    def steps() -> None:
        for x in (draw(device), draw(device), draw(device)):
            for called in (eager, run):
                called(x)
                called(x).sum().backward()

    quietly(steps)
    same(model, eager)
    assert recorded.replays() == 8


def test_a_backward_that_keeps_what_it_read_may_come_again(device: str, recorded: Recorded) -> None:
    eager, model, run = pair(device)
    x = draw(device)
    with torch._functorch.config.patch(donated_buffer=False):
        for called in (eager, run):
            called(x).sum().backward()
        for called in (eager, run):
            loss = called(x).square().mean()
            for keeps in (True, True, False):
                loss.backward(retain_graph=keeps)
    same(model, eager)
    assert recorded.replays() == 2


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_calls_without_gradients_in_between(device: str, recorded: Recorded, without: Callable) -> None:
    eager, model, run = pair(device)

    def steps() -> None:
        for _ in range(3):
            x, other = draw(device), draw(device)
            for called, module in ((eager, eager), (run, model)):
                out = called(x)
                with without():
                    module.eval()
                    outs.append(called(other))
                    module.train()
                out.square().mean().backward()

    outs: list[Tensor] = []
    quietly(steps)
    same(model, eager)
    torch.testing.assert_close(outs[1::2], outs[::2])
    assert recorded.replays() == 6


def test_a_backward_has_the_mask_of_its_forward(device: str, recorded: Recorded) -> None:
    run = torch.compile(lambda x: F.dropout(x, 0.5).tanh(), backend=backend, mode="reduce-overhead")
    masks = []
    for _ in range(4):
        x = torch.rand(64, dtype=torch.float64, device=device).add(1).requires_grad_()
        out = run(x)
        out.sum().backward()
        assert torch.equal(out == 0, x.grad == 0)
        masks.append(out == 0)
    assert recorded.replays() == 6
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])


def test_two_models_of_one_class_have_a_recording_each(device: str, recorded: Recorded) -> None:
    pairs = [pair(device), pair(device)]

    def steps() -> None:
        for _ in range(4):
            x = draw(device)
            for eager, _, run in pairs:
                eager(x).square().mean().backward()
                run(x).square().mean().backward()

    quietly(steps)
    for eager, model, _ in pairs:
        same(model, eager)
    assert len(recorded) == 2
    assert recorded.replays() == 12


def test_layers_that_are_compiled_each_have_a_recording_each(device: str, recorded: Recorded) -> None:
    eager, model, _ = pair(device, lambda: nn.Sequential(*(Net() for _ in range(6))))
    for layer in model:
        layer.compile(backend=backend, mode="reduce-overhead")

    def steps() -> None:
        for _ in range(4):
            x = draw(device)
            eager(x).square().mean().backward()
            model(x).square().mean().backward()

    quietly(steps)
    same(model, eager)
    assert recorded.replays() == 36


def test_a_checkpointed_call_runs_again_before_its_backward(device: str, recorded: Recorded) -> None:
    eager, model, run = pair(device, lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    for _ in range(3):
        x = draw(device).requires_grad_()
        for called in (eager, run):
            checkpoint(called, checkpoint(called, x, use_reentrant=False), use_reentrant=False).sum().backward()
    same(model, eager)
    assert recorded.replays()


@pytest.mark.parametrize("pack", [Tensor.clone, Tensor.detach], ids=["copied", "aliased"])
def test_saved_tensors_that_hooks_handle(device: str, recorded: Recorded, pack: Callable[[Tensor], Tensor]) -> None:
    eager, model, run = pair(device)
    for _ in range(2):
        xs = draw(device), draw(device)
        for called in (eager, run):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                losses = [called(x).square().mean() for x in xs]
            for loss in losses:
                loss.backward()
    same(model, eager)
    assert recorded


def test_weights_that_move_at_each_step_end_it(device: str, recorded: Recorded) -> None:
    eager, model, run = pair(device)
    before = []

    def steps() -> None:
        for _ in range(graphed_halves.IDLE + 2):
            x = draw(device)
            before.append(model.up.weight.data)
            model.up.weight.data = model.up.weight.data.clone()
            eager(x).square().mean().backward()
            run(x).square().mean().backward()

    with pytest.warns(UserWarning, match="lie elsewhere at each step"):
        steps()
    same(model, eager)
    assert not recorded


def test_several_graphs_of_a_model_and_several_sizes(device: str, recorded: Recorded) -> None:
    class Broken(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            torch._dynamo.graph_break()
            return super().forward(x)

    eager, model, _ = pair(device, Broken)
    run = torch.compile(model, backend=backend, mode="reduce-overhead", dynamic=False)

    def steps() -> None:
        for rows in (5, 3, 5, 3):
            x = draw(device, rows)
            eager(x).square().mean().backward()
            run(x).square().mean().backward()

    steps()
    same(model, eager)
    assert recorded.replays() >= 8


def test_what_stays_and_dies_is_not_copied(device: str, recorded: Recorded) -> None:
    eager, model, run = pair(device)
    x = draw(device)

    def steps() -> None:
        for _ in range(7):
            x.copy_(draw(device))
            for called in (eager, run):
                for p in called.parameters():
                    p.grad = None
                called(x).square().mean().backward()

    quietly(steps)
    same(model, eager)
    assert recorded.replays() == 12
    (graphs,) = recorded
    in_place = [t.data_ptr() == x.data_ptr() for t in graphs.inputs.recorded]
    made = {t.data_ptr() for t in graphs.gradients.made}
    own = [p.grad.data_ptr() in made for p in model.parameters()]
    assert (any(in_place), all(own)) == ((sharing.LEAST == 1,) * 2)


def test_results_that_share_memory_do_so_as_copies(device: str, recorded: Recorded) -> None:
    weight = draw(device, 6)

    @torch.compile(backend=backend, options={"cuda_graph": True})
    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ weight
        return y, y[1:]

    if device == "cpu":
        pytest.skip("the stand-in has no memory to share")
    for _ in range(2):
        with torch.no_grad():
            whole, part = two(draw(device))
            whole.fill_(7)
            assert (part == 7).all()


def test_what_no_graph_replays_runs_plainly_and_says_why() -> None:
    torch._dynamo.reset()
    eager, model, run = pair("cpu")
    x = draw("cpu")
    with pytest.warns(UserWarning, match=r"without CUDA graphs: no CUDA graph of this program: .* is on the CPU"):
        run(x).square().mean().backward()
    eager(x).square().mean().backward()
    same(model, eager)
    torch._dynamo.reset()


def test_the_options_names() -> None:
    for given in ({"options": {"cuda_graph": 1}}, {"mode": "max-autotune"}):
        with pytest.raises(Exception, match=r"take True or False|mode='reduce-overhead'"):
            torch.compile(nn.Linear(2, 2), backend=backend, **given)(torch.randn(2, 2))
        torch._dynamo.reset()
