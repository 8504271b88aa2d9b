"""A compiled step says where a module would run otherwise than when it was captured: another mode, another dropout."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn, optim

import tracefuse


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Dropout(0.1), nn.BatchNorm1d(4), nn.Linear(4, 1))


def compiled(model: nn.Module, opt: optim.Optimizer, is_validated: bool = False) -> Callable[[Tensor], Tensor]:
    with tracefuse.capture_step(n=3) as c:
        for x in torch.randn(5, 8, 4):
            model.train()
            loss = model(x).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            if is_validated:
                model.eval()
                model(x)
    model.train()
    return c.optimize().compile()  # type: ignore[no-any-return]


def told(step: Callable[[Tensor], Tensor], calls: int = 1) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for x in torch.randn(calls, 8, 4):
            step(x)
    return [str(one.message) for one in found]


@pytest.mark.parametrize("is_validated", [False, True])
def test_a_model_in_the_other_mode_is_told_once_and_how_to_set_it_back(is_validated: bool) -> None:
    model = Model()
    step = compiled(model, opt := optim.SGD(model.parameters(), lr=0.1, fused=True), is_validated)
    assert told(step) == []
    model.eval()
    (said,) = told(step, 2)
    assert said.startswith("1 has training=False, and had True when the step was captured")
    assert said.endswith("Call `train(True)` on it, or on the model, or capture the step again")
    assert opt.state_dict()


def test_another_dropout_is_told() -> None:
    model = Model()
    step = compiled(model, opt := optim.SGD(model.parameters(), lr=0.1, fused=True))
    model[1].p = 0.5
    (said,) = told(step)
    assert said.startswith("1 has p=0.5, and had 0.1 when the step was captured")
    assert opt.state_dict()


def test_modules_that_run_the_same_in_either_mode_are_not() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 1))
    step = compiled(model, opt := optim.SGD(model.parameters(), lr=0.1, fused=True))
    model.eval()
    assert told(step) == []
    assert opt.state_dict()


class DropsAlone(Model):
    """Its dropout runs in a validation alone."""

    def forward(self, x: Tensor) -> Tensor:
        return self[3](self[0](x) if self.training else self[1](self[0](x)))


def test_a_module_that_only_a_validation_runs_is_none_of_the_steps() -> None:
    model = DropsAlone()
    opt = optim.SGD([*model[0].parameters(), *model[3].parameters()], lr=0.1, fused=True)
    with tracefuse.capture_step(n=3) as c:
        for x in torch.randn(5, 8, 4):
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
            loss = model(x).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
    assert told(c.optimize().compile()) == []
