"""What the host reads within a step on a line that also updates: only what the update is made for is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from whole_step_loops import Loop, captured, check, data_of

from tracefuse.errors import ExportError


class OneLine(Loop):
    """A loop that somebody else owns: to us all of it is one line."""

    def prepare(self) -> None:
        self.log: list[float] = []
        self.total = torch.zeros((), dtype=torch.float64)

    def backward(self, x: Tensor, y: Tensor) -> None:
        self.held = [self.loss(x, y)]
        self.held[0].backward()


class Logged(OneLine):
    def step(self, x: Tensor, y: Tensor) -> None:  # type: ignore[override]
        self.zero(); self.backward(x, y); self.total.add_(self.held[0].detach()); norm = clip_grad_norm_(self.model.parameters(), 0.1); self.opt.step(); self.log += [self.held[0].item(), self.total.item(), norm.item()]  # fmt: skip # noqa: E501, E702


class CountedInPython(OneLine):
    def more(self) -> None:
        self.count = torch.zeros((), dtype=torch.int64)

    def step(self, x: Tensor, y: Tensor) -> None:  # type: ignore[override]
        self.zero(); self.backward(x, y); self.count.add_(1); self.opt.step() if self.count.item() < 100 else None  # fmt: skip # noqa: E702


class ScaledSlowly(OneLine):
    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.01)

    def more(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(self, x: Tensor, y: Tensor) -> None:  # type: ignore[override]
        self.zero()
        self.scaler.scale(self.loss(x, y)).backward()
        self.scaler.step(self.opt)
        self.scaler.update()


def test_a_loss_a_norm_and_an_average_that_are_logged_are_no_part_of_the_update() -> None:
    check(Logged)


@pytest.mark.parametrize(("kind", "value"), [(CountedInPython, "3"), (ScaledSlowly, "0.0")])
def test_a_count_and_whether_gradients_are_finite_are(kind: type[Loop], value: str) -> None:
    with pytest.raises(ExportError, match=rf"^the host reads {value} of a tensor in .*, a count of steps or whether"):
        captured(kind(), data_of(4)).compile()
