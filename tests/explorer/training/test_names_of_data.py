"""What a compiled step calls its data, and in which order: as the call of the model does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import tracefuse


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
