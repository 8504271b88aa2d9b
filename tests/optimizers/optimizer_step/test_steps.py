"""What people do around an optimizer's step, and which of it becomes part of the same launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreter import interpreted
from kernels import poisoned
from torch import Tensor, nn, optim
from updates import SHAPES, check_exactness, check_overwritten, parameters, tried

f32, f64, bf16, f16 = torch.float32, torch.float64, torch.bfloat16, torch.float16

Run = Callable[[], Any]


def stepped(
    weights: list[Tensor], make: Callable[..., optim.Optimizer] = optim.AdamW, **options: Any
) -> optim.Optimizer:
    """An optimizer that has its state."""
    optimizer = make(weights, **{"lr": 1e-2} | options)
    optimizer.step()
    for one in weights:
        one.grad = torch.randn_like(one)
    return optimizer


def averaged(dtype: torch.dtype) -> Run:
    """An exponential moving average of the weights behind the step."""
    weights = parameters(dtype)
    optimizer, average = stepped(weights), [w.detach().clone() for w in weights]

    def run() -> None:
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(average, weights, 0.1)

    return run


def averaged_one_by_one(dtype: torch.dtype) -> Run:
    weights = parameters(dtype)
    optimizer, average = stepped(weights, fused=True), [w.detach().clone() for w in weights]

    def run() -> None:
        optimizer.step()
        with torch.no_grad():
            for mean, weight in zip(average, weights, strict=True):
                mean.mul_(0.9).add_(weight, alpha=0.1)

    return run


def copied(dtype: torch.dtype) -> Run:
    """Copies of the weights in bfloat16."""
    weights = parameters(dtype)
    optimizer, copies = stepped(weights, optim.SGD, momentum=0.9), [w.detach().to(bf16) for w in weights]

    def run() -> None:
        optimizer.step()
        with torch.no_grad():
            for copy, weight in zip(copies, weights, strict=True):
                copy.copy_(weight)

    return run


def zeroed(dtype: torch.dtype) -> Run:
    weights = parameters(dtype)
    optimizer = stepped(weights, fused=True)

    def run() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return run


def clipped_by_value(dtype: torch.dtype) -> Run:
    weights = parameters(dtype)
    optimizer = stepped(weights)

    def run() -> None:
        nn.utils.clip_grad_value_(weights, 0.5)
        optimizer.step()

    return run


def clipped_and_told(dtype: torch.dtype) -> Run:
    """The norm is a result as well."""
    weights = parameters(dtype)
    optimizer = stepped(weights, fused=True)

    def run() -> Tensor:
        norm = nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        return norm

    return run


def scaled(dtype: torch.dtype) -> Run:
    """A scaler's step, without clipping: the fused optimizer divides by the scale."""
    weights = parameters(dtype)
    optimizer = stepped(weights, fused=True)
    scale, found_inf = torch.tensor(8.0), torch.tensor(0.0)

    def run() -> None:
        torch._amp_foreach_non_finite_check_and_unscale_([w.grad for w in weights], found_inf, scale.reciprocal())
        optimizer.grad_scale, optimizer.found_inf = None, found_inf
        optimizer.step()

    return run


def scaled_and_clipped(dtype: torch.dtype) -> Run:
    weights = parameters(dtype)
    optimizer = stepped(weights, fused=True)
    scale, found_inf = torch.tensor(8.0), torch.tensor(0.0)

    def run() -> None:
        torch._amp_foreach_non_finite_check_and_unscale_([w.grad for w in weights], found_inf, scale.reciprocal())
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.found_inf = found_inf
        optimizer.step()

    return run


def rate_in_a_tensor(dtype: torch.dtype) -> Run:
    return stepped(parameters(dtype), lr=torch.tensor(1e-2), fused=True).step


def decayed_by_shape(dtype: torch.dtype) -> Run:
    """Matrices decay, vectors do not: two groups of parameters."""
    weights = parameters(dtype)
    optimizer = optim.AdamW([
        {"params": [w for w in weights if w.dim() > 1], "weight_decay": 0.1},
        {"params": [w for w in weights if w.dim() == 1], "weight_decay": 0.0},
    ], fused=True)  # fmt: skip
    optimizer.step()
    return optimizer.step


def moved(dtype: torch.dtype) -> Run:
    """How far the step went, which needs the old weights."""
    weights = parameters(dtype)
    optimizer = stepped(weights)

    def run() -> Tensor:
        before = [w.detach().clone() for w in weights]
        optimizer.step()
        return torch.stack([(w - b).square().sum() for w, b in zip(weights, before, strict=True)]).detach()

    return run


def by_hand(dtype: torch.dtype) -> Run:
    """An optimizer of one's own, in plain ops."""
    weights = parameters(dtype)
    means = [torch.zeros_like(w) for w in weights]

    def run() -> None:
        with torch.no_grad():
            for weight, mean in zip(weights, means, strict=True):
                mean.mul_(0.9).add_(weight.grad.sign(), alpha=0.1)
                weight.sub_(torch.where(mean.abs() > 0.05, mean, torch.zeros_like(mean)) * 0.01)

    return run


def empty(dtype: torch.dtype) -> Run:
    return stepped(parameters(dtype, (*SHAPES, (0, 4))), optim.SGD, momentum=0.9).step


def partly_turned(dtype: torch.dtype) -> Run:
    """One weight lies in another order than its gradient: it stays with torch's op."""
    weights = parameters(dtype)
    turned = torch.randn(5, 7, dtype=dtype).mT.detach().requires_grad_()
    turned.grad = torch.randn(7, 5, dtype=dtype)
    optimizer = optim.AdamW([*weights, turned], lr=1e-2, fused=True)
    optimizer.step()
    return optimizer.step


KERNELS: dict[str, tuple[Callable[[torch.dtype], Run], int]] = {
    "averaged": (averaged, 2),
    "averaged one by one": (averaged_one_by_one, 2),
    "copied": (copied, 1),
    "zeroed": (zeroed, 2),
    "clipped by value": (clipped_by_value, 2),
    "clipped and told": (clipped_and_told, 3),
    "scaled": (scaled, 3),
    "scaled and clipped": (scaled_and_clipped, 4),
    "rate in a tensor": (rate_in_a_tensor, 2),
    "decayed by shape": (decayed_by_shape, 3),
    "moved": (moved, 2),
    "by hand": (by_hand, 1),
    "empty": (empty, 1),
    "partly turned": (partly_turned, 2),
}
"""Programs, and how many launches of kernels over lists they become; steps that are counted on tensors are one of them."""


@pytest.mark.parametrize("name", KERNELS)
def test_what_is_done_around_the_step_is_part_of_it(name: str) -> None:
    make, launches = KERNELS[name]
    update = tried(make(f64))
    torch.testing.assert_close(update.found(), update.expected(), rtol=1e-11, atol=1e-12)
    assert len(update.kernels) == launches


@interpreted
@pytest.mark.parametrize("dtype", [f64, f32], ids=["f64", "f32"])
@pytest.mark.parametrize("name", KERNELS)
def test_its_kernels_compute_that(name: str, dtype: torch.dtype) -> None:
    update = tried(KERNELS[name][0](dtype))
    with poisoned():
        found, inputs = update.launched()
    check_exactness(update, found, dtype)
    check_overwritten(update, found, inputs)


def test_what_a_kernel_cannot_hold_stays_one_op_on_a_shorter_list() -> None:
    update = tried(partly_turned(f64))
    (rest,) = (n for n in update.after.ops if n.target is torch.ops.aten._fused_adamw.default)
    assert len(rest.args[0]) == 1
    (call,) = (n for n in update.after.ops if n.target is update.kernels[-1])
    assert len(call.args[0]) == len(SHAPES)
