"""Remedies for reads and constants of the host begin with what is likely meant at their line."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import tracefuse


def fix_of(id: str, fn: Callable[[], Tensor]) -> str:
    (found,) = [one for one in tracefuse.capture(fn).findings() if one.id == id]
    return found.fix


def weight() -> Tensor:
    return torch.ones(64, 64, requires_grad=True)


def test_a_number_that_is_read_for_a_log_is_read_less_often_and_one_of_a_branch_stays_a_tensor() -> None:
    w, logged = weight(), []

    def logs() -> Tensor:
        loss = (w @ w).sum()
        logged.append(loss.item())
        loss.backward()
        return loss

    def branches() -> Tensor:
        loss = (w @ w).sum()
        if loss > 0:
            loss = loss * 2
        loss.backward()
        return loss

    def says() -> Tensor:
        loss = (w @ w).sum()
        logged.append(f"while {loss.item()}")  # if it is asked for
        loss.backward()
        return loss

    assert fix_of("host-sync", logs).startswith("read it once every many steps, or keep it a tensor")
    assert fix_of("host-sync", says) == fix_of("host-sync", logs)
    assert fix_of("host-sync", branches).startswith("keep it a tensor (torch.where instead of if)")


def test_a_constant_is_made_in_init_only_beside_a_forward() -> None:
    class Scales(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.tensor([0.5] * 64)

    w, model = weight(), Scales()

    def in_a_function() -> Tensor:
        loss = ((w @ w) * torch.tensor([0.5] * 64)).sum()
        loss.backward()
        return loss

    def in_a_module() -> Tensor:
        loss = model(w @ w).sum()
        loss.backward()
        return loss

    assert fix_of("constant-from-host", in_a_module).startswith("make it once, in `__init__`")
    assert fix_of("constant-from-host", in_a_function).startswith("make it once, before the steps")
    assert "__init__" not in fix_of("constant-from-host", in_a_function)


def test_a_convolution_that_runs_twice_is_one() -> None:
    conv, norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
    x = torch.randn(4, 8, 16, 16)

    def step() -> Tensor:
        loss = sum(norm(conv(one)).square().mean() for one in (x, x * 2))
        loss.backward()
        return loss

    (found,) = [one for one in tracefuse.capture(step).findings() if one.id == "bias-before-batch-norm"]
    assert found.title.startswith("the bias of 1 convolution (2 calls) is subtracted")
