"""What a compiled step calls its data, and in which order: as the call of the model does."""

from __future__ import annotations

import collections
import copy
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import tracefuse
from tracefuse.recording import frames


class Model(nn.Module):
    """Its forward reads the second argument first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, features: Tensor, labels: Tensor | None = None) -> Tensor:
        assert labels is not None
        wanted = 2 * labels
        return ((self.layer(features) - wanted) ** 2).mean()


class Owner:
    """Who owns the loop: its variables are out of sight."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)

    def step(self, *batches: dict[str, Any]) -> float:
        self.opt.zero_grad()
        total = 0.0
        for batch in batches:
            (loss := self.model(batch["features"], labels=batch["labels"])).backward()
            total = loss.detach()
        self.opt.step()
        return total

    def run(self, data: list[list[dict[str, Any]]]) -> None:
        for batches in data:
            self.step(*batches)


def data_of(steps: int, micro: int = 1) -> list[list[dict[str, Any]]]:
    return [[{"features": torch.randn(3, 4), "labels": torch.randn(3, 4)} for _ in range(micro)] for _ in range(steps)]


def test_data_is_called_as_the_forward_calls_it_in_the_order_of_the_call() -> None:
    ours, eager, data = Owner(), Owner(), data_of(10)
    eager.run(data[:4])
    with tracefuse.capture_step(n=3) as c:
        ours.run(data[:4])
    step = c.optimize().compile()
    assert step.inputs == ("features", "labels")
    for at, (batch,) in enumerate(data[4:]):
        loss = step(labels=batch["labels"], features=batch["features"]) if at % 2 else step(*batch.values())
        torch.testing.assert_close(loss.detach(), eager.step(batch))
    torch.testing.assert_close(ours.model.state_dict(), eager.model.state_dict())


def test_micro_batches_are_called_in_turn() -> None:
    ours = Owner()
    with tracefuse.capture_step(n=3) as c:
        ours.run(data_of(4, micro=2))
    assert c.optimize().compile().inputs == ("features", "labels", "features_1", "labels_1")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h, state = self.rnn(x, state)
        return self.out(h), state


@pytest.mark.parametrize("capturing", [lambda: tracefuse.capture_step(n=3), tracefuse.capture], ids=["step", "block"])
def test_a_state_that_a_step_returns_is_carried_on_by_its_caller(capturing: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    data = [(torch.randn(2, 5, 4), torch.randn(2, 5, 3)) for _ in range(7)]

    def trained(
        model: nn.Module, opt: optim.Optimizer, state: Tensor | None, batches: Any, c: Any = None
    ) -> tuple[list[float], Tensor | None]:
        losses = []
        for x, y in batches:
            out, state = model(x, state)
            loss, state = F.mse_loss(out, y), state.detach()
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(float(loss.detach()))
            if c is not None:
                c.returned = loss, state
        return losses, state

    ours = Recurrent()
    optimizer = optim.SGD(ours.parameters(), lr=0.1, fused=True)
    with capturing() as c:
        _, state = trained(ours, optimizer, None, data[:4], c)
    assert not any("beside the step" in text for text in c.unrecorded)
    assert c.returned is None
    eager = copy.deepcopy(ours)
    expected, last = trained(eager, optim.SGD(eager.parameters(), lr=0.1, fused=True), state, data[4:])
    step, losses = c.optimize().compile(), []
    for x, y in data[4:]:
        loss, state = step(x, state, y)
        losses.append(float(loss))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))  # they were computed in float32
    torch.testing.assert_close(state, last)


class OfStates(Recurrent):
    """Its state comes in a tuple, as that of a long short-term memory."""

    def forward(self, x: Tensor, states: tuple[Tensor]) -> tuple[Tensor, tuple[Tensor]]:  # type: ignore[override]
        out, state = super().forward(x, *states)
        return out, (state,)


def detached(states: tuple[Tensor]) -> tuple[Tensor]:
    return tuple(one.detach() for one in states)  # type: ignore[return-value]


def test_a_state_that_the_step_detaches_before_it_gives_it_to_the_model_is_called_as_the_model_calls_it() -> None:
    """As back-propagation through time is truncated: the step begins with its batch, so that it detaches what it reads."""
    torch.manual_seed(0)
    xs, ys = torch.randn(7, 2, 5, 4), torch.randn(7, 2, 5, 3)

    def trained(
        model: nn.Module, opt: optim.Optimizer, states: tuple[Tensor], first: int, last: int, c: Any = None
    ) -> tuple[float, tuple[Tensor]]:
        for at in range(first, last):
            x, y = xs[at], ys[at]
            opt.zero_grad()
            states = detached(states)
            out, states = model(x, states)
            loss = F.mse_loss(out, y)
            loss.backward()
            opt.step()
            if c is not None:
                c.returned = states
        return loss.item(), states

    ours = OfStates()
    optimizer = optim.SGD(ours.parameters(), lr=0.1, fused=True)
    with tracefuse.capture_step(n=3) as c:
        _, states = trained(ours, optimizer, (torch.zeros(1, 2, 6),), 0, 4, c)
    step, eager, expected = c.optimize().compile(), copy.deepcopy(ours), detached(states)
    theirs, (state,) = optim.SGD(eager.parameters(), lr=0.1, fused=True), expected
    assert step.inputs == ("x", "states", "y")
    for at in range(4, 7):
        state, loss = step(xs[at], state, ys[at])
        said, expected = trained(eager, theirs, expected, at, at + 1)
        assert float(loss) == pytest.approx(said)
        torch.testing.assert_close(state, expected[0].detach())


@pytest.mark.parametrize("capturing", [tracefuse.capture, functools.partial(tracefuse.capture_step, n=3)])
def test_what_a_program_gives_back_and_computes_beside_its_steps_is_no_result(capturing: Any) -> None:
    """Behind the update, of the data alone: nothing tells such operators from those that prepare the next batch."""
    model, data = nn.Linear(4, 1), torch.randn(6, 3, 4)
    optimizer = optim.SGD(model.parameters(), lr=0.1, fused=True)
    with capturing() as c:
        for x in data[:5]:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            c.returned = {"loss": loss, "half": loss.detach() / 2, "mean": x.mean(), "ones": torch.ones(3)}
    step = c.optimize().compile()
    assert step.results == ("loss", "half")
    loss, half = step(data[5])
    assert half == loss / 2


def test_nor_is_what_a_variable_holds_of_it_where_no_backward_runs() -> None:
    """Gradients by hand: a step without a loss gives back what its variables hold."""
    weight, data = nn.Parameter(torch.ones(4)), torch.randn(6, 3, 4)
    optimizer = optim.SGD([weight], lr=0.1, fused=True)
    with tracefuse.capture_step(n=3) as c:
        for x in data[:5]:
            with torch.no_grad():
                error = x @ weight
            weight.grad = (2 / 3 * error) @ x
            optimizer.step()
            mean = x.mean()
    assert not mean.requires_grad
    results = [out.of for out in c.trace.outputs if out.kind == "result"]
    assert "error" in results
    assert "mean" not in results


@pytest.mark.parametrize("is_of_places", [True, False])
def test_what_is_read_of_a_count_is_a_result_too(is_of_places: bool) -> None:
    """Counts behind the update, of the data alone: the places are of the count's making, and so is what reads them."""
    model, data, counts = nn.Linear(4, 1), torch.randn(7, 3, 4), torch.zeros(4)
    optimizer = optim.SGD(model.parameters(), lr=0.1, fused=True)
    with tracefuse.capture_step(n=3) as c:
        for x in data[:5]:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            places = x.argmax(1)
            counts.index_put_((places,), torch.ones(3), accumulate=True)
            c.returned = {"told": places.float().mean() if is_of_places else counts.sum()}
    step = c.optimize().compile()
    for count, x in enumerate(data[5:], 6):
        told = step(x)[step.results.index("told")]
        assert told == (x.argmax(1).float().mean() if is_of_places else 3 * count)
        assert counts.sum() == 3 * count


@pytest.mark.parametrize("factor", [8.0, 0.25])
def test_a_loss_that_is_scaled_is_returned_by_a_name_that_says_so_and_itself_where_that_is_asked_for(
    factor: float,
) -> None:
    model, x = nn.Linear(4, 1), torch.randn(3, 4)
    optimizer, scaler = optim.SGD(model.parameters(), lr=0.1, fused=True), torch.amp.GradScaler("cpu", init_scale=8.0)

    def steps(count: int, c: Any = None) -> float:
        for _ in range(count):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            if c is not None:
                c.returned = loss
            if factor == 8.0:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                (loss / 4).backward()
                optimizer.step()
        return loss.item()

    with tracefuse.capture_step(n=3) as c:
        steps(4)
    with tracefuse.capture_step(n=3) as both:
        steps(4, both)
    assert c.optimize().compile().results == ("scaled_loss",)
    step = both.optimize().compile()
    assert step.results == ("loss", "scaled_loss")
    before = copy.deepcopy(model.state_dict())
    found = step(x)
    model.load_state_dict(before)
    loss = steps(1)
    assert [float(one) for one in found] == pytest.approx([loss, factor * loss])


class Cached(nn.Module):
    """It appends to an empty tensor, as a library's cache of keys does, which it makes anew at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.tensor([]), self.layer(x)])


def test_an_empty_tensor_without_a_name_is_no_data(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = Cached(), [torch.randn(2, 4) for _ in range(5)]
    opt = optim.AdamW(model.parameters(), lr=0.01, fused=True)

    def train(x: Tensor) -> Tensor:
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        return loss.detach()

    with tracefuse.capture_step(n=3) as c:
        for x in data:
            train(x)
    v = c.optimize(simplify=False)
    step = v.compile()
    assert step.inputs == ("x",)
    spec = importlib.util.spec_from_file_location("cached_step", v.export(tmp_path / "cached_step.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    exported = module.bind(model, opt)
    for one in (step, exported):
        before = copy.deepcopy((model.state_dict(), opt.state_dict()))
        wanted = [train(x) for x in data]
        model.load_state_dict(before[0])
        opt.load_state_dict(before[1])
        torch.testing.assert_close([one(x) for x in data], wanted)


def smoothed(model: nn.Module, inputs: Any) -> Tensor:
    """As a Trainer smooths labels: what it takes out of its batch is in no variable when the backward starts."""
    labels = inputs.pop("labels")
    out = model(inputs["features"])
    return (F.mse_loss(out, labels.clamp(min=0), reduction="none") * labels.ne(-100)).mean()


@pytest.mark.parametrize("kind", [dict, collections.UserDict])
def test_what_a_function_takes_out_of_its_batch_is_called_as_it_is_there(kind: Any) -> None:
    model = nn.Linear(4, 4)
    opt = optim.SGD(model.parameters(), lr=0.1, fused=True)
    batches = [{"features": torch.randn(3, 4), "labels": torch.randn(3, 4)} for _ in range(6)]
    with tracefuse.capture_step(n=3) as c:
        for batch in map(kind, batches[:5]):
            opt.zero_grad()
            loss = smoothed(model, batch)
            loss.backward()
            opt.step()
    step = c.optimize().compile()
    assert step.inputs == ("features", "labels")
    expected = smoothed(model, dict(batches[5])).detach()
    torch.testing.assert_close(step(**batches[5]).detach(), expected)


@pytest.mark.parametrize("is_in_a_line", [True, False])
def test_data_that_numpy_makes_of_what_its_variable_held_is_told_with_its_line(is_in_a_line: bool) -> None:
    model = nn.Linear(4, 4)
    opt = optim.SGD(model.parameters(), lr=0.1, fused=True)
    with tracefuse.capture_step(n=3) as c:
        for x in torch.randn(5, 3, 4):
            if is_in_a_line:
                x = torch.from_numpy(x.numpy()[:, ::-1].copy())
            else:
                turned = x.numpy()[:, ::-1]
                turned = turned.copy()
                x = torch.from_numpy(turned)
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()
    with pytest.warns(UserWarning, match=r"takes x as .*x = torch.from_numpy\(.* makes it, and nothing tells the data"):
        step = c.optimize().compile()
    assert step.inputs == ("x",)


def test_data_that_is_taken_out_of_an_array_is_not(recwarn: pytest.WarningsRecorder) -> None:
    model, data = nn.Linear(4, 4), torch.randn(5, 3, 4).numpy()
    opt = optim.SGD(model.parameters(), lr=0.1, fused=True)
    with tracefuse.capture_step(n=3) as c:
        for rows in data:
            x = torch.from_numpy(rows)
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()
    assert c.optimize().compile().inputs == ("x",)
    assert not [one for one in recwarn if "makes it" in str(one.message)]


def test_the_keys_of_the_loops_own_batch_tell_the_order_where_a_function_takes_one_out_of_a_copy() -> None:
    model = nn.Linear(4, 4)
    opt = optim.SGD(model.parameters(), lr=0.1, fused=True)

    def step_of(inputs: dict[str, Tensor]) -> None:
        inputs = {key: one.to("cpu") for key, one in inputs.items()}
        smoothed(model, inputs).backward()
        opt.step()
        opt.zero_grad()

    batches = [{"labels": torch.randn(3, 4), "features": torch.randn(3, 4)} for _ in range(5)]
    with tracefuse.capture_step(n=3) as c:
        for batch in batches:
            step_of(batch)
    assert c.optimize().compile().inputs == ("labels", "features")


TRAINER = """
import torch.nn.functional as F


class Trainer:
    def __init__(self, model, opt, batches):
        self.model, self.opt, self.batches = model, opt, batches

    def train(self):
        for inputs in self.batches:
            self.training_step(inputs)

    def training_step(self, inputs):
        inputs = {key: one.to("cpu") for key, one in inputs.items()}
        self.opt.zero_grad()
        self.loss_of(inputs).backward()
        self.opt.step()

    def loss_of(self, inputs):
        wanted = inputs.pop("labels")
        out = self.model(**inputs)
        return F.mse_loss(out, 0.9 * wanted + 0.1)
"""


def test_batches_of_a_library_that_owns_the_loop_have_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of transformers' Trainer with label smoothing."""
    file = tmp_path / "trainer.py"
    file.write_text(TRAINER)
    for name in ("_OWN_LOOPS", "_LIBRARIES"):
        monkeypatch.setattr(frames, name, (*getattr(frames, name), str(file)))
    for cached in (frames.owns_a_loop, frames.is_torchs_or_ours):
        cached.cache_clear()
    spec = importlib.util.spec_from_file_location("trainer_of_a_library", file)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(library := importlib.util.module_from_spec(spec))
    model = Named()
    opt = optim.SGD(model.parameters(), lr=0.1, fused=True)
    batches = [{"features": torch.randn(3, 4), "labels": torch.randn(3, 4)} for _ in range(6)]
    with tracefuse.capture_step(n=3) as c:
        library.Trainer(model, opt, batches[:5]).train()
    step = c.optimize().compile()
    assert step.inputs == ("features", "labels")
    expected = F.mse_loss(model(batches[5]["features"]), 0.9 * batches[5]["labels"] + 0.1).detach()
    torch.testing.assert_close(step(**batches[5]).detach(), expected)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, features: Tensor) -> Tensor:
        return self.layer(features)


def test_data_of_a_loops_function_is_called_as_its_variable_and_not_as_the_models_parameter() -> None:
    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    model = Critic()
    optimizer = optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, Tensor]) -> None:
        obs, ret = batch["obs"], batch["ret"]
        optimizer.zero_grad()
        F.mse_loss(model(obs), ret).backward()
        optimizer.step()

    data = [{"obs": torch.randn(5, 4), "ret": torch.randn(5, 2)} for _ in range(4)]
    with tracefuse.capture_step(n=3) as c:
        for batch in data:
            step(batch)
    assert c.optimize().compile().inputs == ("obs", "ret")
