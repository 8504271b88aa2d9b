"""Losses that torch has and that people write themselves, over small networks."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from people_programs.made import Made, program


def net(*widths: int) -> nn.Sequential:
    layers = ((nn.Linear(a, b), nn.GELU()) for a, b in itertools.pairwise(widths))
    return nn.Sequential(*itertools.chain.from_iterable(layers))[:-1]


@program("loss")
def ctc() -> Made:
    model, x = net(8, 32, 11), torch.randn(20, 3, 8)
    targets = torch.randint(1, 11, (3, 6))
    lengths = torch.full((3,), 20), torch.tensor([6, 4, 5])

    def run(model: nn.Module) -> Tensor:
        loss = F.ctc_loss(model(x).log_softmax(-1), targets, *lengths, zero_infinity=True)
        loss.backward()
        return loss

    return Made(run, (model,))


@program("loss")
def triplet() -> Made:
    model, (anchor, near, far) = net(8, 32, 16), torch.randn(3, 12, 8).unbind(0)

    def run(model: nn.Module) -> Tensor:
        loss = F.triplet_margin_loss(*(F.normalize(model(x), dim=-1) for x in (anchor, near, far)), margin=0.2)
        loss.backward()
        return loss

    return Made(run, (model,))


@program("loss")
def focal() -> Made:
    model, x, y = net(8, 32, 5), torch.randn(24, 8), torch.randint(5, (24,))

    def run(model: nn.Module) -> Tensor:
        ce = F.cross_entropy(model(x), y, reduction="none")
        p = torch.exp(-ce)
        loss = (0.25 * (1 - p) ** 2 * ce).mean()
        loss.backward()
        return loss

    return Made(run, (model,))
