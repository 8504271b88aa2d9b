"""A batch that is cut out of the data in the line that calls the model is an input of the step; a part that the step itself
takes or writes at another place each time is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import tracefuse
from tracefuse.errors import ExportError

XS, YS, KEPT = torch.randn(60, 4), torch.randn(60, 3), torch.zeros(60, 3)


class Layer(nn.Module):
    """Its forward is a line of its own; that of torch's modules is the line that calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def optimizer(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), 0.1, fused=True)


def compiled(
    model: nn.Module, opt: optim.Optimizer, loss_of: Callable[[nn.Module, int], Tensor]
) -> Callable[..., Tensor]:
    with tracefuse.capture_step(n=3) as c:
        for at in range(0, 32, 8):
            opt.zero_grad()
            loss_of(model, at).backward()
            opt.step()
    return c.optimize().compile()


def of_one_line(model: nn.Module, at: int) -> Tensor:
    return F.mse_loss(model(XS[at : at + 8]), YS[at : at + 8])


def of_two_lines(model: nn.Module, at: int) -> Tensor:
    out = model(XS[at : at + 8])
    return F.mse_loss(out, YS[at : at + 8])


def of_parts(model: nn.Module, at: int) -> Tensor:
    """The line takes another part too, always the same."""
    return F.mse_loss(model(XS[at : at + 8])[:, 1:], YS[at : at + 8, 1:])


def of_one_row(model: nn.Module, at: int) -> Tensor:
    return F.mse_loss(model(XS[at]), YS[at])


@pytest.mark.parametrize("kind", [Layer, lambda: nn.Linear(4, 3)], ids=["own line", "one line"])
@pytest.mark.parametrize("loss_of", [of_one_line, of_two_lines, of_parts, of_one_row])
def test_a_slice_in_the_line_of_the_model_is_an_input(
    kind: Callable[[], nn.Module], loss_of: Callable[[nn.Module, int], Tensor]
) -> None:
    model = kind()
    step = compiled(model, opt := optimizer(model), loss_of)
    assert opt.param_groups
    for at in (40, 16):
        cut = at if loss_of is of_one_row else slice(at, at + 8)
        targets = YS[cut, 1:] if loss_of is of_parts else YS[cut]
        expected = loss_of(model, at).detach()
        torch.testing.assert_close(step(XS[cut], targets).detach(), expected)


def of_a_part_of_what_the_model_gives(model: nn.Module, at: int) -> Tensor:
    return F.mse_loss(model(XS)[at : at + 8], YS[at : at + 8])


def of_a_write(model: nn.Module, at: int) -> Tensor:
    KEPT[at : at + 8] = (out := model(XS[at : at + 8])).detach()
    return F.mse_loss(out, YS[at : at + 8])


@pytest.mark.parametrize("loss_of", [of_a_part_of_what_the_model_gives, of_a_write])
def test_a_part_that_the_step_itself_takes_or_writes_is_refused(loss_of: Callable[[nn.Module, int], Tensor]) -> None:
    with pytest.raises(ExportError, match=r"^start of aten.slice.Tensor .*: 16, then 24"):
        compiled(model := Layer(), optimizer(model), loss_of)


class Rollout:
    """PPO: rows of what was rolled out, picked in the lines that read them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.random = Layer(), np.random.default_rng(1)
        self.opt = optimizer(self.model)
        self.data = torch.randn(60, 4), torch.randint(0, 3, (60,)), torch.randn(60), torch.randn(60)

    def loss(self, rows: Any) -> Tensor:
        obs, actions, logprobs, advantages = self.data
        new = torch.log_softmax(self.model(obs[rows]), -1).gather(1, actions[rows, None]).squeeze(1)
        ratio = (new - logprobs[rows]).exp()
        scaled = advantages[rows]
        return -(ratio * (scaled - scaled.mean())).mean()

    def train(self) -> None:
        obs, actions, logprobs, advantages = self.data
        for _ in range(4):
            rows = self.random.integers(0, 60, 16)
            new = torch.log_softmax(self.model(obs[rows]), -1).gather(1, actions[rows, None]).squeeze(1)
            ratio = (new - logprobs[rows]).exp()
            scaled = advantages[rows]
            loss = -(ratio * (scaled - scaled.mean())).mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()


def test_rows_are_called_as_what_they_are_taken_from() -> None:
    rollout = Rollout()
    with tracefuse.capture_step(n=3) as c:
        rollout.train()
    step = c.optimize().compile()
    assert step.inputs == ("obs", "actions", "logprobs", "scaled")
    rows = np.arange(5, 21)
    expected = rollout.loss(rows).detach()
    obs, actions, logprobs, advantages = (one[rows] for one in rollout.data)
    given = {"actions": actions[:, None], "logprobs": logprobs, "scaled": advantages}
    torch.testing.assert_close(step(obs, **given).detach(), expected)


def test_a_part_is_not_called_as_a_whole_that_is_read_too() -> None:
    def of_both(model: nn.Module, at: int, xs: Tensor = XS) -> Tensor:
        return F.mse_loss(model(xs[at : at + 8]), YS[at : at + 8]) + model(xs).square().mean()

    model = Layer()
    step = compiled(model, opt := optimizer(model), of_both)
    assert opt.param_groups
    assert step.inputs == ("XS_1", "YS", "XS")  # type: ignore[attr-defined]
    expected = of_both(model, 40).detach()
    torch.testing.assert_close(step(XS[40:48], YS[40:48], XS).detach(), expected)
