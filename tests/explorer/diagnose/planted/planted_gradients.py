"""Mistakes about gradients: of frozen parameters, of data, dropped, and in a library's own autograd functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from fake_library import CarefulHead, EveryGradient, FusedHead, OfTheInput
from planting import Step, planted, trains
from torch import Tensor, nn

BF16 = torch.bfloat16


@planted("gradient-dropped", "ctx.needs_input_grad")
def frozen_head_of_a_fused_loss(mistake: bool) -> Step:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read, self.head = nn.Linear(512, 512), nn.Linear(512, 8192, bias=False).requires_grad_(False)

        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            head = FusedHead if mistake else CarefulHead
            return head.apply(self.read(x), self.head.weight, targets)  # mistake

    x, targets = torch.empty(8192, 512, dtype=BF16), torch.zeros(8192, dtype=torch.long)
    return trains(Model().to(BF16), x, targets)


@planted("frozen-weight-gradient", "freeze")
def frozen_norm_paid_for(mistake: bool) -> Step:
    """A convolution that asks its operator for every gradient, though its weight is frozen."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Conv2d(128, 128, 3, padding=1, bias=False) for _ in range(2))
            self.second.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            turn = EveryGradient if mistake else OfTheInput
            return turn.apply(F.relu(self.first(x)), self.second.weight)  # mistake

    model = Net().to(BF16).to(memory_format=torch.channels_last)
    return trains(model, torch.empty(64, 128, 28, 28, dtype=BF16).to(memory_format=torch.channels_last))


@planted("gradient-of-data", "without requires_grad")
def pictures_that_require_gradients(mistake: bool) -> Step:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4096, 4096), nn.Linear(4096, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(F.relu(self.first(x)))  # mistake

    x = torch.empty(8192, 4096, dtype=BF16, requires_grad=mistake)
    return trains(Net().to(BF16), x)


@planted("gradient-without-optimizer", "requires_grad_(False)", device="cpu")
def a_backbone_that_no_optimizer_holds(mistake: bool) -> Step:
    backbone, head = nn.Linear(256, 512), nn.Linear(512, 16)
    backbone.requires_grad_(mistake)
    optimizer, x = torch.optim.SGD(head.parameters(), lr=0.1), torch.randn(512, 256)

    def step() -> None:
        h = torch.relu(backbone(x))  # mistake
        head(h).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
