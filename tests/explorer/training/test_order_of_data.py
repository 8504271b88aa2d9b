"""A compiled step takes its data in the order in which the program reads it, whether a loader yields it or the loop makes it:
what is given to it by position is what eager would have trained on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset
from whole_step_loops import NEAR

import tracefuse

TOKENS = np.random.default_rng(0).integers(0, 20, 400)
Batch = tuple[Tensor, Tensor]


class Tokens(nn.Module):
    """A model whose inputs and targets have one shape and type."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)).double()

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        wanted = None if y is None else y + 0  # what is given second is read first
        out = self.layers(x).flatten(0, 1)
        return out if wanted is None else F.cross_entropy(out, wanted.flatten())


def drawn() -> Iterator[Batch]:
    random = np.random.default_rng(1)
    while True:
        rows = random.integers(0, 390, 4)
        x, y = ([torch.from_numpy(TOKENS[at + by : at + by + 6]) for at in rows] for by in (0, 1))
        yield torch.stack(x), torch.stack(y)


def loaded() -> Iterator[Batch]:
    batches = drawn()
    pairs = [next(batches) for _ in range(60)]
    x, y = (torch.cat(one) for one in zip(*pairs, strict=True))
    yield from DataLoader(TensorDataset(x, y), 4)  # type: ignore[misc]


LOSSES: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "outside": lambda model, x, y: F.cross_entropy(model(x), y.flatten()),
    "a module": lambda model, x, y: nn.CrossEntropyLoss()(model(x), y.flatten()),
    "inside": lambda model, x, y: model(x, y),
    "keyword arguments": lambda model, x, y: model(x=x, y=y),
}


@pytest.mark.parametrize("batches", [drawn, loaded])
@pytest.mark.parametrize("loss_of", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("is_summed", [False, True], ids=["a backward each", "one backward"])
def test_micro_batches_are_bound_in_turn(loss_of: Any, batches: Any, is_summed: bool) -> None:
    def train(model: nn.Module, opt: optim.Optimizer, data: Iterator[Batch], steps: int) -> None:
        for _ in range(steps):
            opt.zero_grad()
            x, y = next(data)
            loss = loss_of(model, x, y)
            if not is_summed:
                loss.backward()
            x_1, y_1 = next(data)
            more = loss_of(model, x_1, y_1)
            (loss + more if is_summed else more).backward()
            opt.step()

    model, data = Tokens(), batches()
    opt = optim.AdamW(model.parameters(), lr=0.01, fused=True)
    with tracefuse.capture_step(n=3) as c:
        train(model, opt, data, 4)
    eager, step = copy.deepcopy(model), c.optimize().compile()
    theirs = optim.AdamW(eager.parameters(), lr=0.01, fused=True)
    theirs.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert step.inputs == ("x", "y", "x_1", "y_1")
    left = [next(data) for _ in range(6)]
    for first, second in zip(left[::2], left[1::2], strict=True):
        step(*first, *second)
    train(eager, theirs, iter(left), 3)
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    assert max(float((mine - other).detach().abs().max()) for mine, other in pairs) < NEAR


def rows(random: np.random.Generator) -> Tensor:
    return torch.stack([torch.from_numpy(random.normal(size=4)) for _ in range(5)])


def test_what_a_product_outside_modules_reads_comes_before_the_targets_that_a_loss_module_is_given() -> None:
    weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
    opt, random, criterion = optim.AdamW([weight], fused=True), np.random.default_rng(0), nn.MSELoss()
    with tracefuse.capture_step(n=3) as c:
        for _ in range(4):
            opt.zero_grad()
            x, y = rows(random), rows(random)
            criterion(x @ weight, y).backward()
            opt.step()
    step = c.optimize().compile()
    assert step.inputs == ("x", "y")
    x, y = rows(random), rows(random)
    expected = criterion(x @ weight, y).detach()
    torch.testing.assert_close(step(x, y).detach(), expected)


def test_targets_that_are_prepared_before_the_model_runs_come_behind_its_inputs() -> None:
    data = DataLoader(TensorDataset(torch.randn(30, 4), torch.randn(30, 4)), 5)
    model = nn.Linear(4, 4)
    opt = optim.AdamW(model.parameters(), fused=True)
    with tracefuse.capture_step(n=3) as c:
        for _, (x, y) in zip(range(4), data, strict=False):
            scaled = y / 10
            opt.zero_grad()
            F.mse_loss(model(x), scaled).backward()
            opt.step()
    step = c.optimize().compile()
    assert step.inputs == ("x", "y")
    x, y = torch.randn(5, 4), torch.randn(5, 4)
    expected = F.mse_loss(model(x), y / 10).detach()
    torch.testing.assert_close(step(x, y).detach(), expected)


class Timed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).double()

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        return self.layer(x) * t


@pytest.mark.parametrize("is_drawn", [False, True])
def test_a_number_that_a_module_is_given_stands_where_it_is_given(is_drawn: bool) -> None:
    model, random = Timed(), np.random.default_rng(0)
    opt = optim.AdamW(model.parameters(), fused=True)
    times = torch.rand(9, dtype=torch.float64)
    with tracefuse.capture_step(n=3) as c:
        for at in range(4):
            t, x = times[at] if is_drawn else torch.tensor(float(at), dtype=torch.float64), rows(random)
            opt.zero_grad()
            model(t, x).square().mean().backward()
            opt.step()
    step = c.optimize().compile()
    assert step.inputs == ("t", "x")
    expected = model(t := times[7], x := rows(random)).square().mean().detach()
    torch.testing.assert_close(step(t, x).detach(), expected)


class Averaged(Tokens):
    """It divides its loss by a count that it is given, as models of transformers do."""

    def forward(self, x: Tensor, y: Tensor | None = None, count: Tensor | None = None) -> Tensor:
        assert y is not None
        assert count is not None
        return F.cross_entropy(self.layers(x).flatten(0, 1), y.flatten(), reduction="sum") / count


def test_targets_that_are_counted_before_all_micro_batches_stay_beside_their_inputs() -> None:
    """As a Trainer counts them: the order is that of the batches, and not inputs, targets, targets, inputs."""
    model, data = Averaged(), loaded()
    opt = optim.AdamW(model.parameters(), lr=0.01, fused=True)
    with tracefuse.capture_step(n=3) as c:
        for _ in range(4):
            batches = [next(data), next(data)]
            count = sum((y[..., 1:] != -100).sum() for _, y in batches)
            for x, y in batches:
                model(x, y, count).backward()
            opt.step()
            opt.zero_grad()
    step = c.optimize().compile()
    (x, y), (x_1, y_1) = batches = [next(data), next(data)]
    expected = [model(*one, count).detach() for one in batches]
    torch.testing.assert_close([one.detach() for one in step(x, y, x_1, y_1)], expected)


Loop = Callable[[nn.Module, optim.Optimizer, Any], None]


def loop_that_reads_the_second_first(model: nn.Module, opt: optim.Optimizer, batches: Any) -> None:
    noisy = clean = None  # in another order than in the loop
    for clean, noisy in batches:
        loss = F.mse_loss(model(noisy), clean)
        opt.zero_grad()
        loss.backward()
        opt.step()


def loop_that_assigns_both_in_a_line(model: nn.Module, opt: optim.Optimizer, batches: Any) -> None:
    for batch in batches:
        clean, noisy = batch[0], batch[1]
        loss = F.mse_loss(model(noisy), clean)
        opt.zero_grad()
        loss.backward()
        opt.step()


def loop_over_a_function(model: nn.Module, opt: optim.Optimizer, batches: Any) -> None:
    def step(clean: Tensor, noisy: Tensor) -> None:
        loss = F.mse_loss(model(noisy), clean)
        opt.zero_grad()
        loss.backward()
        opt.step()

    for batch in batches:
        step(*batch)


def loop_over_micro_batches(model: nn.Module, opt: optim.Optimizer, batches: Any) -> None:
    for batch in batches:
        opt.zero_grad()
        for clean, noisy in zip(*(one.chunk(2) for one in batch), strict=True):
            F.mse_loss(model(noisy), clean).backward()
        opt.step()


def loop_over_batches_without_names(model: nn.Module, opt: optim.Optimizer, batches: Any) -> None:
    for batch in batches:
        loss = F.mse_loss(model(batch[1]), batch[0])
        opt.zero_grad()
        loss.backward()
        opt.step()


@pytest.mark.parametrize(
    "loop",
    [
        loop_that_reads_the_second_first,
        loop_that_assigns_both_in_a_line,
        loop_over_a_function,
        loop_over_micro_batches,
        loop_over_batches_without_names,
    ],
)
def test_inputs_come_in_the_order_in_which_the_loop_binds_them(loop: Loop) -> None:
    torch.manual_seed(0)
    model, data = nn.Linear(4, 4), [(torch.randn(6, 4), 3 * torch.randn(6, 4)) for _ in range(6)]
    opt = optim.SGD(model.parameters(), lr=0.1, fused=True)
    with tracefuse.capture_step(n=3) as c:
        loop(model, opt, data[:5])
    eager, step = copy.deepcopy(model), c.optimize().compile()
    batch = data[5]
    is_in_parts = loop is loop_over_micro_batches
    step(
        *(one for pair in zip(*(both.chunk(2) for both in batch), strict=True) for one in pair)
        if is_in_parts
        else batch
    )
    loop(eager, optim.SGD(eager.parameters(), lr=0.1, fused=True), [batch])
    torch.testing.assert_close(model.state_dict(), eager.state_dict())


def test_a_saved_session_takes_them_in_the_same_order(tmp_path: Any) -> None:
    model, data = nn.Linear(4, 4), [(torch.randn(6, 4), torch.randn(6, 4)) for _ in range(5)]
    with tracefuse.capture_step(n=3) as c:
        loop_that_reads_the_second_first(model, opt := optim.SGD(model.parameters(), lr=0.1, fused=True), data)
    c.save(tmp_path / "run.tfz", inputs=True)
    found = [tracefuse.load(tmp_path / "run.tfz").followed.program.trace, c.followed.program.trace]
    inputs = [[(i.name, i.bound) for i in trace.inputs] for trace in found]
    assert inputs[0] == inputs[1]
    assert opt.state_dict()
    assert c.optimize().compile().inputs == ("clean", "noisy")


def test_a_dict_gives_its_keys_in_order() -> None:
    model, data = nn.Linear(4, 4), [{"clean": torch.randn(6, 4), "noisy": torch.randn(6, 4)} for _ in range(5)]
    opt = optim.SGD(model.parameters(), lr=0.1, fused=True)
    with tracefuse.capture_step(n=3) as c:
        for batch in data:
            loss = F.mse_loss(model(batch["noisy"]), batch["clean"])
            opt.zero_grad()
            loss.backward()
            opt.step()
    assert c.optimize().compile().inputs == ("clean", "noisy")


def test_batches_that_are_fetched_ahead_and_what_is_bound_before_the_loop_come_as_they_are_bound() -> None:
    model, batches = nn.Linear(4, 4), iter([(torch.randn(6, 4), torch.randn(6, 4)) for _ in range(6)])
    opt, shift, scale = optim.SGD(model.parameters(), lr=0.1, fused=True), torch.randn(4), torch.randn(4)
    with tracefuse.capture_step(n=3) as c:
        clean, noisy = next(batches)
        for _ in range(5):
            loss = F.mse_loss(model(noisy) * scale + shift, clean)
            opt.zero_grad()
            loss.backward()
            opt.step()
            clean, noisy = next(batches)
    step = c.optimize().compile()
    assert [name for name in step.inputs if name in ("clean", "noisy")] == ["clean", "noisy"]
    assert [name for name in step.inputs if name not in ("clean", "noisy")] == ["shift", "scale"]
