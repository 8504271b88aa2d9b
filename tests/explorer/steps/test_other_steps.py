"""What a later step did otherwise than the captured one is told when that is compiled; sizes by data are refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import tracefuse
from tracefuse.errors import ExportError

Loss = Callable[[nn.Module, int, Tensor, Tensor], Tensor]


def flipped(model: nn.Module, at: int, x: Tensor, y: Tensor) -> Tensor:
    if at == 4:
        x = x.flip(1)
    if at == 5:
        x = x * 0
    return F.mse_loss(model(x), y)


def flipped_in_place(model: nn.Module, at: int, x: Tensor, y: Tensor) -> Tensor:
    if at == 5:
        x.mul_(0.5)
    return F.mse_loss(model(x), y)


def logged(model: nn.Module, at: int, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    if at >= 4:
        LOGGED.append((out.argmax(1) == y.argmax(1)).float().mean().item())
    return F.mse_loss(out, y)


def validated(model: nn.Module, at: int, x: Tensor, y: Tensor) -> Tensor:
    if at == 5:
        with torch.no_grad():
            LOGGED.append(F.mse_loss(model(y), x).item())
    return F.mse_loss(model(x), y)


def the_same(model: nn.Module, at: int, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


LOGGED: list[float] = []


def compiled(model: nn.Module, loss_of: Loss) -> list[str]:
    """What compiling a step of a loop tells."""
    torch.manual_seed(0)
    opt = optim.SGD(model.parameters(), lr=0.1, fused=True)
    with tracefuse.capture_step(n=3) as c:
        for at in range(7):
            x, y = torch.randn(8, 4), torch.randn(8, 4)
            loss = loss_of(model, at, x, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        c.optimize().compile()
    return [str(one.message) for one in told if "ran other ops" in str(one.message)]


@pytest.mark.parametrize(
    ("loss_of", "step", "said"),
    [(flipped, 5, r"aten.flip.default .*x = x.flip\(1\)"), (flipped_in_place, 6, r"aten.mul_.Tensor .*x.mul_\(0.5\)")],
)
def test_a_later_step_that_computes_otherwise_is_told_once_with_its_line(loss_of: Loss, step: int, said: str) -> None:
    (told,) = compiled(nn.Linear(4, 4), loss_of)
    with pytest.warns(UserWarning, match=rf"^step {step} ran other ops than step 3, .*: {said}.* does what step 3 did"):
        warnings.warn(told, stacklevel=1)


@pytest.mark.parametrize("loss_of", [logged, validated, the_same])
def test_what_is_only_logged_or_validated_is_not_told(loss_of: Loss) -> None:
    assert compiled(nn.Linear(4, 4), loss_of) == []


class Routed(nn.Module):
    """A mixture of experts, each of which computes the rows that are routed to it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        chosen, out = weights.argmax(-1), torch.zeros_like(x)
        for at, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == at)
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, at, None])
        return out


def test_sizes_that_depend_on_data_are_refused_with_the_line() -> None:
    with pytest.raises(
        ExportError, match=r"aten.nonzero.default gives .*torch.where\(chosen == at\).* depends on the data"
    ):
        compiled(Routed(), the_same)


def test_a_last_batch_that_is_smaller_is_no_such_size() -> None:
    def smaller(model: nn.Module, at: int, x: Tensor, y: Tensor) -> Tensor:
        count = 5 if at == 4 else 8
        return F.mse_loss(model(x[:count]), y[:count])

    def cut_before(model: nn.Module, at: int, x: Tensor, y: Tensor) -> Tensor:
        del x, y
        data = torch.randn(5 if at == 5 else 8, 4)
        return F.mse_loss(model(data.clone()), data * 2)

    assert compiled(nn.Linear(4, 4), cut_before) == []
    assert compiled(nn.Linear(4, 4), smaller) == []


def test_data_that_are_shuffled_for_each_epoch_are_data() -> None:
    """The shuffling runs in some steps alone, and is no part of any."""
    model, (x_all, y_all) = nn.Linear(4, 4), torch.randn(2, 24, 4)
    opt = optim.SGD(model.parameters(), lr=0.1, fused=True)
    with tracefuse.capture_step(n=3) as c:
        for _ in range(2):
            order = torch.randperm(len(x_all))
            x_all, y_all = x_all[order], y_all[order]
            for at in range(0, 24, 6):
                x, y = x_all[at : at + 6], y_all[at : at + 6]
                loss = F.mse_loss(model(x), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step = c.optimize().compile()
    assert not [one for one in told if "ran other ops" in str(one.message)]
    assert step.inputs == ("x", "y")
