"""Batches of a `DataLoader` are a compiled step's data, whenever the loop fetches them."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, Dataset
from whole_step_loops import NEAR, network

import tracefuse

SEEN, MORE = 4, 6


class Rows(Dataset):
    """Rows that the dataset computes, and that the loader stacks."""

    def __init__(self, rows: int) -> None:
        made = torch.Generator().manual_seed(7)
        self.x = torch.randn(rows, 4, dtype=torch.float64, generator=made)
        self.y = torch.randn(rows, 3, dtype=torch.float64, generator=made)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return 2 * self.x[index], self.y[index].tanh()


class Trained:
    """A model that `run` trains on the batches from number `first` on, so many to each step, fetched `ahead` or one by one."""

    def __init__(self, micro: int, ahead: bool) -> None:
        torch.manual_seed(0)
        self.model, self.micro, self.ahead = network(4, 6, 3), micro, ahead
        self.opt = optim.AdamW(self.model.parameters(), lr=0.01, fused=True)

    def run(self, loader: DataLoader[Any], steps: int) -> None:
        batches = iter(loader)
        for _ in range(steps):
            fetched = iter([next(batches) for _ in range(self.micro)]) if self.ahead else batches
            for _ in range(self.micro):
                x, y = next(fetched)
                (F.mse_loss(self.model(x), y) / self.micro).backward()
            self.opt.step()
            self.opt.zero_grad()


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
@pytest.mark.parametrize("micro", [1, 3])
def test_a_compiled_step_is_given_the_batches_that_the_loop_would_fetch(micro: int, ahead: bool) -> None:
    loader: DataLoader[Any] = DataLoader(Rows(5 * micro * (SEEN + MORE)), batch_size=5)
    eager, ours = Trained(micro, ahead), Trained(micro, ahead)
    with tracefuse.capture_step(n=3) as c:
        ours.run(loader, SEEN)
    step = c.optimize().compile()
    eager.run(loader, SEEN + MORE)
    left = [tensor for batch in loader for tensor in batch][2 * micro * SEEN :]
    for at in range(0, len(left), 2 * micro):
        step(*left[at : at + 2 * micro])
    theirs = eager.model.state_dict()
    assert max(float((mine - theirs[name]).abs().max()) for name, mine in ours.model.state_dict().items()) < NEAR


class Named(Dataset):
    """What a Trainer wants: rows by the names of the model's parameters."""

    def __len__(self) -> int:
        return 4 * (SEEN + MORE)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        made = torch.Generator().manual_seed(index)
        return {name: torch.randn(4, dtype=torch.float64, generator=made) for name in ("features", "labels")}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()

    def forward(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.layers(features)
        return {"loss": F.mse_loss(out, labels), "out": out}


def test_a_trainers_accumulated_batches_are_data() -> None:
    """transformers' Trainer fetches all batches of a step before the first of them is trained on."""
    transformers: Any = pytest.importorskip("transformers")

    def trained(model: Model, opt: optim.Optimizer, steps: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            options = {"max_steps": steps, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
            plain = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
            settings = transformers.TrainingArguments(folder, use_cpu=True, max_grad_norm=0.1, **options, **plain)
            rate = optim.lr_scheduler.ConstantLR(opt, 1.0)
            made = transformers.Trainer(model, settings, train_dataset=Named(), optimizers=(opt, rate))
            made.train()

    ours, eager = Model(), Model()
    opt = optim.AdamW(ours.parameters(), lr=0.01, fused=True)
    used: list[dict[str, Tensor]] = []
    kept = eager.register_forward_pre_hook(lambda _, __, named: used.append(copy.copy(named)), with_kwargs=True)
    with tracefuse.capture_step(n=3) as c:
        trained(ours, opt, SEEN + 1)
    trained(eager, optim.AdamW(eager.parameters(), lr=0.01, fused=True), SEEN + 1 + MORE - 1)
    kept.remove()
    step = c.optimize().compile()
    for at in range(2 * (SEEN + 1), len(used), 2):
        step(*(tensor for batch in used[at : at + 2] for tensor in batch.values()))
    theirs = eager.state_dict()
    assert max(float((mine - theirs[name]).abs().max()) for name, mine in ours.state_dict().items()) < NEAR


def test_lightnings_fit_is_followed_by_a_compiled_step() -> None:
    """Lightning's optimizer is given the last micro-batch's forward and backward as a closure."""
    package: Any = pytest.importorskip("lightning")

    class Fitted(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = network(4, 6, 3)

        def training_step(self, given: tuple[Tensor, Tensor], index: int) -> Tensor:
            return F.mse_loss(self.net(given[0]), given[1])

        def configure_optimizers(self) -> optim.Optimizer:
            self.opt = optim.AdamW(self.parameters(), lr=0.01, fused=True)
            return self.opt

    loader: DataLoader[Any] = DataLoader(Rows(10 * (SEEN + MORE)), batch_size=5)

    def fit(model: Fitted, steps: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
            package.Trainer(
                max_steps=steps,
                accelerator="cpu",
                devices=1,
                default_root_dir=folder,
                enable_model_summary=False,
                accumulate_grad_batches=2,
                **quiet,
            ).fit(model, loader)

    ours, eager = Fitted(), Fitted()
    with tracefuse.capture_step(n=3) as c:
        fit(ours, SEEN + 1)
    fit(eager, SEEN + MORE)
    step = c.optimize().compile()
    left = [tensor for batch in loader for tensor in batch][4 * (SEEN + 1) :]
    for at in range(0, len(left), 4):
        step(*left[at : at + 4])
    theirs = eager.state_dict()
    assert max(float((mine - theirs[name]).abs().max()) for name, mine in ours.state_dict().items()) < NEAR
