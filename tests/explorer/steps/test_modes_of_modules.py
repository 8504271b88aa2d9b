"""A compiled step says where a module would run otherwise than when it was captured: another mode, another dropout."""

from __future__ import annotations

import runpy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import tracefuse


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Dropout(0.1), nn.BatchNorm1d(4), nn.Linear(4, 1))


def captured(model: nn.Module, opt: optim.Optimizer, is_validated: bool = False) -> Any:
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
    return c.optimize()


def compiled(model: nn.Module, opt: optim.Optimizer, is_validated: bool = False) -> Callable[[Tensor], Tensor]:
    return captured(model, opt, is_validated).compile()  # type: ignore[no-any-return]


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


@pytest.mark.parametrize(("at", "option", "value"), [(2, "momentum", 0.7), (2, "eps", 0.5), (4, "negative_slope", 0.9)])
def test_another_number_of_a_layer_is_told(at: int, option: str, value: float) -> None:
    model = Model().append(nn.LeakyReLU(0.1))
    step = compiled(model, opt := optim.SGD(model.parameters(), lr=0.1, fused=True))
    before = getattr(model[at], option)
    model.eval().train()
    setattr(model[at], option, value)
    (said,) = told(step, 2)
    assert said.startswith(f"{at} has {option}={value}, and had {before} when the step was captured")
    assert said.endswith(f"Set `{option}` to {before} again, or capture the step again")
    model.eval()
    (said,) = told(step, 2)
    assert said.startswith("1 has training=False")
    assert opt.state_dict()


CHANGES = {
    "1 has training=False, and had True": lambda model: model.eval(),
    "1 has p=0.5, and had 0.1": lambda model: setattr(model[1], "p", 0.5),
    "2 has momentum=0.7, and had 0.1": lambda model: setattr(model[2], "momentum", 0.7),
    "2 has eps=0.5, and had 1e-05": lambda model: setattr(model[2], "eps", 0.5),
    "4 has negative_slope=0.9, and had 0.01": lambda model: setattr(model[4], "negative_slope", 0.9),
}


@pytest.mark.parametrize("said", CHANGES)
def test_an_exported_step_tells_it_when_it_is_bound_and_when_it_is_called(said: str, tmp_path: Path) -> None:
    model = Model().append(nn.LeakyReLU())
    opt = optim.SGD(model.parameters(), lr=0.1, fused=True)
    path = captured(model, opt).export(tmp_path / "step.py")
    bind = runpy.run_path(str(path))["bind"]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        step = bind(model, opt)
    assert found == []
    assert told(step) == []
    CHANGES[said](model)
    (called,) = told(step, 2)
    assert called.startswith(f"{said} when the step was captured: a compiled step runs as the captured one did. ")
    with pytest.warns(UserWarning, match="when the step was captured") as bound:
        step = bind(model, opt)
    assert [str(one.message) for one in bound] == [called]
    assert {one.filename for one in bound} == {__file__}
    assert told(step) == []


def test_an_exported_step_of_a_root_with_a_name_finds_its_modules(tmp_path: Path) -> None:
    first, second = Model(), Model()
    opt = optim.SGD([*first.parameters(), *second.parameters()], lr=0.1, fused=True)
    with tracefuse.capture_step(n=3) as c:
        for x in torch.randn(5, 8, 4):
            opt.zero_grad()
            (first(x) + second(x)).square().mean().backward()
            opt.step()
    bind = runpy.run_path(str(c.optimize().export(tmp_path / "step.py")))["bind"]
    second[1].eval()
    with pytest.warns(UserWarning, match=r"second\.1 has training=False, and had True"):
        bind([first, second], opt)


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
