"""A batch that the loop makes of data without a name is what a compiled step takes, under the name that the loop gave it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from forks import run_python
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset
from whole_step_loops import NEAR

import tracefuse
from tracefuse.errors import ExportError

Batch = tuple[Tensor, Tensor]
ROWS = np.random.default_rng(5).normal(size=(60, 7))


class Drawn:
    """Batches as programs draw them, from an array or a tensor in memory."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(1)
        self.table = torch.from_numpy(ROWS)

    def at(self) -> int:
        return int(self.random.integers(0, 50))

    def stacked(self) -> Batch:
        rows = [self.at() for _ in range(5)]
        return torch.stack([torch.from_numpy(ROWS[i, :4]) for i in rows]), torch.stack(
            [torch.tensor(ROWS[i, 4:]) for i in rows]
        )

    def normalised(self) -> Batch:
        rows = torch.from_numpy(ROWS[self.at() :][:5])
        return (rows[:, :4] - rows[:, :4].mean()) / rows[:, :4].std(), rows[:, 4:]

    def cropped(self) -> Batch:
        first = self.at()
        return self.table[first : first + 5, :4], self.table[first : first + 5, 4:]

    def picked(self) -> Batch:
        at = torch.randint(0, 50, (5,))
        return torch.stack([self.table[i, :4] for i in at]), self.table[at, 4:].clone()

    def halved(self) -> Batch:
        rows = torch.stack([torch.from_numpy(ROWS[self.at()]) for _ in range(5)])
        return rows[:, :4], rows[:, 4:]


class Trained:
    """A model, and a loop in a method: its variables are out of the block's sight."""

    def __init__(self, draw: Callable[[], Batch]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), nn.Tanh(), nn.Linear(6, 3)).double()
        self.opt = optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        self.draw = draw

    def train(self, steps: int) -> None:
        for _ in range(steps):
            x, y = self.draw()
            loss = F.mse_loss(self.model(x), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()

    def distance(self, other: Trained) -> float:
        theirs = other.model.state_dict()
        return max(float((mine - theirs[name]).abs().max()) for name, mine in self.model.state_dict().items())


@pytest.mark.parametrize("how", ["stacked", "normalised", "cropped", "picked", "halved"])
def test_a_compiled_step_takes_the_batch_that_the_loop_made(how: str, tmp_path: Path) -> None:
    eager, ours = Trained(getattr(Drawn(), how)), Trained(getattr(Drawn(), how))
    torch.manual_seed(3)
    with tracefuse.capture_step(n=3) as c:
        ours.train(4)
    step = c.optimize().compile()
    assert step.inputs == ("x", "y")
    state = torch.get_rng_state()
    for _ in range(6):
        step(*ours.draw())
    drawn = torch.get_rng_state()
    torch.manual_seed(3)
    eager.train(4)
    assert torch.equal(torch.get_rng_state(), state)
    eager.train(6)
    assert torch.equal(torch.get_rng_state(), drawn)  # the compiled step draws its masks, and no batch of its own
    assert ours.distance(eager) < NEAR
    path = c.optimize().export(tmp_path / "step.py")
    found = run_python([str(path)])
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("how", ["stacked", "cropped"])
def test_a_batch_that_is_pinned_in_the_step_goes_to_the_gpu(how: str, cuda_graph: bool) -> None:
    """nanoGPT's loop: it pins what it has stacked, and moves that.

    On a GPU a compiled step reads the learning rate as float32; this one is the same number in float64.
    """

    class OnGpu(Trained):
        def __init__(self) -> None:
            super().__init__(getattr(Drawn(), how))
            self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double().cuda()
            self.opt = optim.AdamW(self.model.parameters(), lr=2**-7, fused=True)

        def batch(self) -> Batch:
            x, y = self.draw()
            return x.pin_memory().to("cuda", non_blocking=True), y.pin_memory().to("cuda", non_blocking=True)

        def train(self, steps: int) -> None:
            for _ in range(steps):
                x, y = self.batch()
                loss = F.mse_loss(self.model(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()

    torch.manual_seed(0)
    eager = OnGpu()
    torch.manual_seed(0)
    ours = OnGpu()
    ours.model.load_state_dict(eager.model.state_dict())
    with tracefuse.capture_step(n=3) as c:
        ours.train(4)
    assert "bit for bit" in str(c.check())
    step = c.optimize().compile(cuda_graph=cuda_graph)
    assert step.inputs == ("x", "y")
    eager.train(10)
    for _ in range(6):
        step(*ours.batch())
    assert ours.distance(eager) < NEAR


def test_without_a_batch_it_takes_the_captured_one() -> None:
    ours = Trained(Drawn().stacked)
    made: list[Batch] = []
    draw, ours.draw = ours.draw, lambda: made.append(draw()) or made[-1]  # type: ignore[func-returns-value]
    with tracefuse.capture_step(n=3) as c:
        ours.train(4)
    step = c.optimize().compile()
    state, loss = copy.deepcopy(ours.model.state_dict()), []
    for given in ((), made[2], made[3]):
        ours.model.load_state_dict(state)
        torch.manual_seed(1)
        loss.append(step(*given))
    assert loss[0] == loss[1] != loss[2]


def test_what_a_loader_yields_is_taken_as_it_came() -> None:
    """The loop prepares it, and so does the step."""

    def trained(model: nn.Module, opt: optim.Optimizer, steps: int) -> None:
        for _, (x, y) in zip(range(steps), loader, strict=False):
            x = (x - 3) / 2
            opt.zero_grad()
            F.mse_loss(model(x), y).backward()
            opt.step()

    loader: DataLoader[Batch] = DataLoader(TensorDataset(*torch.from_numpy(ROWS).split([4, 3], 1)), 5)
    ours, eager = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()
    eager.load_state_dict(ours.state_dict())
    opt = optim.SGD(ours.parameters(), 0.1, fused=True)
    with tracefuse.capture_step(n=3) as c:
        trained(ours, opt, 4)
    trained(eager, optim.SGD(eager.parameters(), 0.1, fused=True), 8)
    step = c.optimize().compile()
    assert step.inputs == ("x", "y")
    for batch in list(loader)[4:8]:
        step(*batch)
    assert (ours.weight - eager.weight).abs().max() < NEAR


def test_a_batch_of_another_type_is_refused_with_the_line_that_reads_it() -> None:
    ours = Trained(lambda: (torch.from_numpy(ROWS[:5, :4].astype("f4")).double(), torch.from_numpy(ROWS[:5, 4:])))
    with tracefuse.capture_step(n=3) as c:
        ours.train(4)
    step = c.optimize().compile()
    x, y = ours.draw()
    with pytest.raises(
        ValueError, match=r"takes torch\.float32\[5, 4\] on cpu, as it is read in .*astype.*: pass that"
    ):
        step(x, y)
    step(x.float(), y)


def test_a_step_that_draws_its_batch_says_so_where_it_is_given_one() -> None:
    drawing = Trained(lambda: (torch.randn(5, 4).double(), torch.randn(5, 3).double()))
    with tracefuse.capture_step(n=3) as c:
        drawing.train(4)
    step = c.optimize().compile()
    with pytest.raises(
        ValueError, match=r"the step takes no data, got 2 .* draws by itself in .*let a `DataLoader` yield"
    ):
        step(*drawing.draw())
    loader: DataLoader[Batch] = DataLoader(TensorDataset(torch.randn(40, 4).double(), torch.randn(40, 3).double()), 5)
    batches = iter(loader)
    drawing.draw = lambda: tuple(next(batches))  # type: ignore[assignment]
    with tracefuse.capture_step(n=3) as c:
        drawing.train(4)
    c.optimize().compile()(*drawing.draw())


@pytest.mark.parametrize("is_tensor", [False, True])
def test_a_number_that_is_drawn_for_each_batch_is_taken_once_it_is_a_tensor(is_tensor: bool) -> None:
    """Mixup: the number mixes the batch and weighs the losses."""

    def number(drawn: Drawn) -> Any:
        share = drawn.random.beta(0.2, 0.2)
        return torch.tensor(share) if is_tensor else share

    class Mixed(Trained):
        def train(self, steps: int) -> None:
            for _ in range(steps):
                x, y = self.draw()
                share = number(drawn[self])
                mixed = share * x + (1 - share) * x.flip(0)
                out = self.model(mixed)
                loss = share * F.mse_loss(out, y) + (1 - share) * F.mse_loss(out, y.flip(0))
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()

    ours, eager = Mixed(Drawn().cropped), Mixed(Drawn().cropped)
    drawn = {ours: Drawn(), eager: Drawn()}
    for one in drawn:
        one.model[1].p = 0.0  # type: ignore[assignment]
    with tracefuse.capture_step(n=3) as c:
        ours.train(4)
    if not is_tensor:
        with pytest.raises(ExportError, match=r"with tensors.*make a tensor of it in a line of its own \(`x = torch"):
            c.optimize().compile()
        return
    step = c.optimize().compile()
    assert step.inputs == ("x", "y", "share")
    for _ in range(5):
        step(*ours.draw(), number(drawn[ours]))
    eager.train(9)
    assert ours.distance(eager) < NEAR


def test_a_batch_that_a_call_hands_to_the_model_is_told_with_its_line(recwarn: pytest.WarningsRecorder) -> None:
    """Nothing but its numbers tells what was prepared from the data."""

    class Inline(Trained):
        def ready(self, x: Tensor) -> Tensor:
            return (x - x.mean(0)) / x.std(0)

        def given(self) -> Tensor:
            return torch.stack([torch.from_numpy(ROWS[i, :4]) for i in range(5)])

        def train(self, steps: int) -> None:
            for _ in range(steps):
                y = torch.from_numpy(ROWS[:5, 4:])
                self.opt.zero_grad()
                F.mse_loss(self.model(self.ready(self.given())), y).backward()
                self.opt.step()

    class Held(Inline):
        def train(self, steps: int) -> None:
            for _ in range(steps):
                x, y = self.ready(self.given()), torch.from_numpy(ROWS[:5, 4:])
                self.opt.zero_grad()
                F.mse_loss(self.model(x), y).backward()
                self.opt.step()

    said = {}
    for kind in (Held, Inline):
        ours = kind(Drawn().cropped)
        with tracefuse.capture_step(n=3) as c:
            ours.train(4)
        recwarn.clear()
        step = c.optimize().compile()
        said[step.inputs] = [str(one.message) for one in recwarn]
    assert said["x", "y"] == []
    (told,) = said["div", "y"]
    assert re.match(
        r"the step takes div as test_prepared_batches\.py:\d+  return \(x - x\.mean\(0\)\) / .* makes it", told
    )


def test_variables_of_a_method_that_has_returned_name_the_batch() -> None:
    """As in a loop over a replay buffer, whose step is a method: its batch is gone where the step ends."""

    class Replayed(Trained):
        def one(self) -> None:
            rows = [self.random.integers(0, 50) for _ in range(5)]
            state = torch.tensor(np.array([ROWS[i, :4] for i in rows]), dtype=torch.float64)
            wanted = torch.tensor([float(ROWS[i, 4]) for i in rows], dtype=torch.float64).unsqueeze(1)
            self.opt.zero_grad()
            F.mse_loss(self.model(state)[:, :1], wanted).backward()
            self.opt.step()

        def train(self, steps: int) -> None:
            self.random = np.random.default_rng(2)
            for _ in range(steps):
                self.one()

    ours = Replayed(Drawn().cropped)
    with tracefuse.capture_step(n=3) as c:
        ours.train(4)
    assert c.optimize().compile().inputs == ("state", "wanted")


def test_a_slice_of_what_a_variable_holds_is_taken_from_it() -> None:
    """The loop's own first variable is what a step takes: inputs and targets are slices of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 6), nn.Linear(6, 20)).double()
    opt = optim.SGD(model.parameters(), 0.1, fused=True)
    with tracefuse.capture_step(n=3) as c:
        for at in range(4):
            tokens = torch.stack([torch.from_numpy(np.arange(at + row, at + row + 9) % 20) for row in range(3)])
            loss = F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])
            opt.zero_grad()
            loss.backward()
            opt.step()
    step = c.optimize().compile()
    assert step.inputs == ("tokens",)
    with torch.no_grad():
        expected = F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])
    torch.testing.assert_close(step(tokens), expected)


def test_a_variable_whose_name_begins_as_those_without_one_do_has_a_name() -> None:
    model, constants, x = nn.Linear(4, 3).double(), torch.from_numpy(ROWS[0, :4]), torch.from_numpy(ROWS[:5, :4])
    opt = optim.SGD(model.parameters(), 0.1, fused=True)
    with tracefuse.capture_step(n=3) as c:
        for _ in range(4):
            scaled = constants * x
            opt.zero_grad()
            model(scaled).square().mean().backward()
            opt.step()
    assert c.optimize().compile().inputs == ("constants", "x")


class Targets(Drawn):
    """Targets are made before the inputs, with the same shape and type."""

    def stacked(self) -> Batch:
        rows = [self.at() for _ in range(5)]
        y = torch.stack([torch.from_numpy(ROWS[i, 1:5]) for i in rows])
        return torch.stack([torch.from_numpy(ROWS[i, :4]) for i in rows]), y

    def masked(self) -> Batch:
        y = torch.stack([torch.from_numpy(ROWS[self.at(), :4]) for _ in range(5)])
        return y.masked_fill(torch.from_numpy(self.random.random((5, 4)) < 0.3), 0.0), y


@pytest.mark.parametrize("how", ["stacked", "masked"])
def test_batches_are_taken_as_the_model_reads_them_and_not_as_they_were_made(how: str) -> None:
    draw, model = getattr(Targets(), how), nn.Linear(4, 4).double()
    opt = optim.AdamW(model.parameters(), fused=True)
    with tracefuse.capture_step(n=3) as c:
        for _ in range(4):
            x, y = draw()
            weights = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64) / 10
            loss = (F.mse_loss(model(x), y, reduction="none") * weights).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
    step = c.optimize().compile()
    assert step.inputs == ("x", "y", "weights")
    x, y = draw()
    expected = (F.mse_loss(model(x), y, reduction="none") * weights).mean()
    torch.testing.assert_close(step(x, y, weights), expected)


class OwnLoss(nn.Module):
    """A model that is given its targets too, as those of transformers are, and reads them first."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4).double()

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        wanted = labels * 2.0
        return (self.net(features) - wanted).square().mean()


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("how", ["stacked", "masked"])
def test_batches_are_taken_as_the_model_is_given_them_whatever_it_reads_first(how: str, is_named: bool) -> None:
    draw, model = getattr(Targets(), how), OwnLoss()
    opt = optim.AdamW(model.parameters(), fused=True)

    def loss_of() -> Tensor:
        if not is_named:
            return model(*draw())
        x, y = draw()
        return model(x, y)

    with tracefuse.capture_step(n=3) as c:
        for _ in range(4):
            opt.zero_grad()
            loss_of().backward()
            opt.step()
    step = c.optimize().compile()
    x, y = draw()
    expected = model(x, y)
    torch.testing.assert_close(step(x, y), expected)


def test_data_that_has_a_name_and_batches_stand_as_the_model_is_given_them() -> None:
    draw, model = Targets().stacked, OwnLoss()
    features = torch.randn(5, 4, dtype=torch.float64)
    opt = optim.AdamW(model.parameters(), fused=True)
    with tracefuse.capture_step(n=3) as c:
        for _ in range(4):
            opt.zero_grad()
            _, labels = draw()
            model(features, labels).backward()
            opt.step()
    step = c.optimize().compile()
    assert step.inputs == ("features", "labels")
    _, labels = draw()
    expected = model(2 * features, labels)
    torch.testing.assert_close(step(2 * features, labels), expected)


def classified(model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
    """The loss of a function whose variables are gone when the step ends: its data has no name. Class -100 is ignored."""
    x, y = batch
    return F.cross_entropy(model(x), y, label_smoothing=smoothing)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_what_a_loss_computes_of_targets_without_a_name_is_computed_of_those_that_are_passed(smoothing: float) -> None:
    torch.manual_seed(0)
    data = [(torch.randn(6, 4), torch.randint(0, 3, (6,)).index_fill(0, torch.tensor([at]), -100)) for at in range(6)]
    ours = nn.Linear(4, 3)
    optimizer = optim.SGD(ours.parameters(), lr=0.1, fused=True)

    def trained(model: nn.Module, opt: optim.Optimizer, batches: list[Batch]) -> list[float]:
        losses = []
        for batch in batches:
            opt.zero_grad()
            loss = classified(model, batch, smoothing)
            loss.backward()
            opt.step()
            losses.append(float(loss.detach()))
        return losses

    with tracefuse.capture_step(n=3) as c:
        trained(ours, optimizer, data[:4])
    eager = copy.deepcopy(ours)
    step = c.optimize().compile()
    assert len(step.inputs) == 2
    expected = trained(eager, optim.SGD(eager.parameters(), lr=0.1, fused=True), data[4:])
    losses = [float(step(*batch)) for batch in data[4:]]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))  # they were computed in float32
    torch.testing.assert_close(ours.state_dict(), eager.state_dict())


def test_a_batch_that_is_its_own_target_is_passed_once() -> None:
    model = nn.Linear(4, 4)
    optimizer = optim.SGD(model.parameters(), lr=0.1, fused=True)

    def loss_of(batch: tuple[Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0] / 255), batch[0])

    batches = [(torch.randn(2, 4),) for _ in range(4)]
    with tracefuse.capture_step(n=3) as c:
        for batch in batches:
            loss_of(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    step = c.optimize().compile()
    assert len(step.inputs) == 1
    x = torch.randn(2, 4)
    expected = loss_of((x,)).detach()
    torch.testing.assert_close(step(x), expected)


def normalised_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = (x - x.mean(0)) / x.std(0)
    return F.mse_loss(model(x), y)


def target_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y.tanh())


@pytest.mark.parametrize("loss_of", [normalised_loss, target_loss])
def test_what_a_function_that_calls_the_model_prepares_the_step_prepares_by_itself(
    loss_of: Callable[..., Tensor],
) -> None:
    torch.manual_seed(0)
    data = [(torch.randn(6, 4), torch.randn(6, 3)) for _ in range(7)]

    def trained(model: nn.Module, opt: optim.Optimizer, batches: list[Batch]) -> list[float]:
        losses = []
        for batch in batches:
            opt.zero_grad()
            loss = loss_of(model, *batch)
            loss.backward()
            opt.step()
            losses.append(float(loss.detach()))
        return losses

    ours = nn.Linear(4, 3)
    optimizer = optim.SGD(ours.parameters(), lr=0.1, fused=True)
    with tracefuse.capture_step(n=3) as c:
        trained(ours, optimizer, data[:4])
    eager, step = copy.deepcopy(ours), c.optimize().compile()
    expected = trained(eager, optim.SGD(eager.parameters(), lr=0.1, fused=True), data[4:])
    assert step.inputs == ("x", "y")
    losses = [float(step(*batch)) for batch in data[4:]]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))  # they were computed in float32
    torch.testing.assert_close(ours.state_dict(), eager.state_dict())


def test_a_batch_that_the_loop_copies_out_of_a_list_is_taken_as_it_came() -> None:
    """Nothing but the copy has a name, and the step cuts its targets out of that."""
    torch.manual_seed(0)
    batches = [{"tokens": torch.randint(20, (3, 9)), "wanted": torch.randint(20, (3, 9))} for _ in range(9)]

    def train(model: nn.Module, opt: optim.Optimizer, steps: range) -> None:
        for at in steps:
            tokens, wanted = batches[at]["tokens"].clone(), batches[at]["wanted"].clone()
            loss = F.cross_entropy(model(tokens)[:, :-1].reshape(-1, 20), wanted[:, 1:].reshape(-1))
            opt.zero_grad()
            loss.backward()
            opt.step()

    ours = nn.Sequential(nn.Embedding(20, 6), nn.Linear(6, 20)).double()
    eager, opt = copy.deepcopy(ours), optim.SGD(ours.parameters(), 0.1, fused=True)
    with tracefuse.capture_step(n=3) as c:
        train(ours, opt, range(4))
    step = c.optimize().compile()
    assert step.inputs == ("tokens", "wanted")
    for batch in batches[4:]:
        step(**batch)
    train(eager, optim.SGD(eager.parameters(), 0.1, fused=True), range(9))
    theirs = eager.state_dict()
    assert max(float((mine - theirs[name]).abs().max()) for name, mine in ours.state_dict().items()) < NEAR


def test_a_copy_that_the_loop_writes_to_gives_its_name_to_no_data() -> None:
    """Whoever passed the loop's own variable would have it written to twice."""
    torch.manual_seed(0)
    batches = [{"x": torch.randn(3, 6).double()} for _ in range(8)]

    def train(model: nn.Module, opt: optim.Optimizer, steps: range) -> None:
        for at in steps:
            doubled = batches[at]["x"].clone()
            doubled.mul_(2)
            loss = model(doubled).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    ours = nn.Linear(6, 4).double()
    eager, opt = copy.deepcopy(ours), optim.SGD(ours.parameters(), 0.1, fused=True)
    with tracefuse.capture_step(n=3) as c:
        train(ours, opt, range(4))
    step = c.optimize().compile()
    assert "doubled" not in step.inputs
    for batch in batches[4:]:
        step(batch["x"])
    train(eager, optim.SGD(eager.parameters(), 0.1, fused=True), range(8))
    torch.testing.assert_close(ours.state_dict(), eager.state_dict())
