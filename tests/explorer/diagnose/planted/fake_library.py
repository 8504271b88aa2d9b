"""What stands for an installed library in these tests: autograd functions that ask for every gradient, and careful ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class FusedHead(torch.autograd.Function):
    """A linear layer and its loss in one, as libraries have it: gradients are computed with the loss, wanted or not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = x @ weight.t()
        ctx.save_for_backward(x, weight, F.softmax(logits, dim=-1))
        return F.cross_entropy(logits, targets)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, of_logits = ctx.saved_tensors
        to_x = of_logits @ weight * gradient
        to_weight = of_logits.t() @ x
        return to_x, to_weight, None


class CarefulHead(FusedHead):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, of_logits = ctx.saved_tensors
        return of_logits @ weight * gradient, of_logits.t() @ x if ctx.needs_input_grad[1] else None, None


class EveryGradient(torch.autograd.Function):
    """A convolution that asks its operator for every gradient, though its weight may be frozen."""

    wanted = (True, True, False)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.conv2d(x, weight, padding=1)

    @classmethod
    def gradient(cls, ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        zeros, ones = [0, 0], [1, 1]
        found = torch.ops.aten.convolution_backward(
            gradient, *ctx.saved_tensors, None, ones, ones, ones, False, zeros, 1, list(cls.wanted)
        )
        return found[0], None

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return EveryGradient.gradient(ctx, gradient)


class OfTheInput(EveryGradient):
    wanted = (True, False, False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return OfTheInput.gradient(ctx, gradient)


def masked(scores: Tensor, attention_mask: Tensor) -> Tensor:
    """A library's look at a mask, which the caller cannot edit."""
    if attention_mask.all():
        return scores
    return scores.masked_fill(~attention_mask, float("-inf"))


def scaled(scores: Tensor, scale: Tensor) -> Tensor:
    return scores * scale.item()


def shifted(x: Tensor) -> Tensor:
    """Two lines that make a tensor of Python's numbers each."""
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
    shift = torch.tensor([4.0, 3.0, 2.0, 1.0])
    return x * scale + shift
