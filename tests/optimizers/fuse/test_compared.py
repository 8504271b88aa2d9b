"""Compared values: what is set beside a result that was made of it is the same number in forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreter import interpreted
from kernels import check_trace
from torch import Tensor

import tracefuse
from tracefuse.build.modules import launcher
from tracefuse.optimizers.fuse.compared import compared_values
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.lowering.expressions import TRANSCENDENTAL
from tracefuse.optimizers.trace import Trace, phase

Function = Callable[[Tensor, Tensor], Tensor]

EXTREMA: dict[str, Function] = {
    "sine": lambda x, a: (x * a.sin()).amax(0),
    "exponential": lambda x, a: x.exp().amax(0),
    "tanh": lambda x, a: (x / 3).tanh().amin(0),
    "reciprocal root": lambda x, a: (x * x).add(1.0).rsqrt().amax(1),
    "division": lambda x, a: (x / a).amax(0),
    "product and sum": lambda x, a: (x * a + 0.1).amax(0),
    "of all": lambda x, a: (x * a).sigmoid().amax(),
    "norm": lambda x, a: torch.linalg.vector_norm(x.sin() * a, float("inf"), 0),
    "by hand": lambda x, a: ((h := x.tanh() * a) == h.amax(0)).to(x.dtype) * x,
}
CLAMPED: dict[str, Function] = {"clamped": lambda x, a: (h := x.sinh() / a) * (h.clamp(-1, 1) == h)}

FUNCTIONS = {*TRANSCENDENTAL, torch.ops.aten.div.Tensor, torch.ops.aten.rsqrt.default}


def captured(function: Function, dtype: torch.dtype = torch.float32) -> tracefuse.Capture:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 40, generator=generator).to(dtype).requires_grad_()
    a = torch.rand(300, 1, generator=generator).add(0.5).to(dtype)

    def step() -> Tensor:
        out = function(x, a)
        out.sum().backward()
        return out

    return tracefuse.capture(step)


@interpreted
@pytest.mark.parametrize("remat", [1.0, 0.0])
@pytest.mark.parametrize("name", EXTREMA | CLAMPED)
def test_what_is_the_largest_in_the_forward_is_so_in_the_backward(name: str, remat: float) -> None:
    """Its gradient is NaN, or 0, where it is rounded another way there."""
    capture = captured((EXTREMA | CLAMPED)[name])
    check_trace(capture.optimize(remat=remat).trace, capture, 1e-5)


@pytest.mark.parametrize("name", [name for name in EXTREMA if name not in ("product and sum", "by hand")])
def test_no_two_kernels_need_round_alike(name: str) -> None:
    """Here the functions in kernels of the backward yield the next number up."""
    capture = captured((EXTREMA | CLAMPED)[name])
    trace = capture.optimize().trace.copy()
    for node in trace.ops:
        if phase(node) == "backward" and isinstance(node.target, Kernel):
            node.target = functools.partial(_run_rounding_up, node.target.body.copy())
    for found, own in zip(tracefuse.replay(trace, capture.example_inputs), capture.replay(), strict=True):
        torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-5)


def _run_rounding_up(body: Trace, *inputs: Tensor) -> Tensor | list[Tensor]:
    for node in body.ops:
        if node.target in FUNCTIONS:
            node.target = functools.partial(_rounded_up, node.target)
    found = tracefuse.replay(body, inputs)
    return found[0] if len(found) == 1 else found


def _rounded_up(function: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    return torch.nextafter(function(*args, **options), torch.tensor(torch.inf))


@interpreted
@pytest.mark.parametrize("remat", [1.0, 0.0])
@pytest.mark.parametrize("name", EXTREMA)
def test_in_halves_something_is_the_largest_in_the_backward_too(name: str, remat: float) -> None:
    """Which of several that eager rounds to one number is another matter: kernels keep more digits."""
    capture = captured(EXTREMA[name], torch.bfloat16)
    launched = capture.optimize(remat=remat).trace.copy()
    for node in launched.ops:
        node.target = launcher(node.target) if isinstance(node.target, Kernel) else node.target
    for found, own in zip(tracefuse.replay(launched, capture.example_inputs), capture.replay(), strict=True):
        assert found.isfinite().all()
        assert abs(found.double().norm() - own.double().norm()) <= 0.05 * own.double().norm()


def compared(function: Function, dtype: torch.dtype = torch.float32) -> list[str]:
    return sorted(node.name for node in compared_values(captured(function, dtype).trace.graph))


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (EXTREMA["sine"], ["sin"]),
        (EXTREMA["product and sum"], ["add"]),
        (EXTREMA["by hand"], ["tanh"]),
        (CLAMPED["clamped"], ["div"]),
        (lambda x, a: (a - (-(x * a))).amax(0), ["sub"]),
        (lambda x, a: (x**2 + a).amax(0), ["add"]),
        (lambda x, a: ((x * a).clone() + a).amax(0), ["add"]),
        (lambda x, a: ((x * a).relu() + a).amax(0), []),
        (lambda x, a: (x + a - 1.0).amax(0), []),
        (lambda x, a: (x @ x.mT + a).amax(0), ["mm"]),
        (lambda x, a: (x * a).relu().amax(0), []),
        (lambda x, a: x.exp().mul(2.0).abs().amax(0), ["exp"]),
        (lambda x, a: torch.maximum(x.exp(), a), []),
        (lambda x, a: x.exp().sum(0), []),
    ],
)
def test_what_is_rounded_once_is_the_same_anywhere(function: Function, kept: list[str]) -> None:
    """So that only what functions and contracted sums yield is kept."""
    assert compared(function) == kept


def test_in_halves_no_arithmetic_is_the_same_anywhere() -> None:
    """A kernel that writes a product rounds it first, and one that computes it again does not."""
    w = torch.eye(40, dtype=torch.bfloat16)
    assert compared(lambda x, a: ((h := x * a) @ w).float() + h.float().amax(0), torch.bfloat16) == ["mul"]


@pytest.mark.parametrize("budget", [None, 0.0])
def test_a_compared_value_is_saved_whatever_the_budget(budget: float | None) -> None:
    variant = captured(EXTREMA["exponential"]).optimize(fuse=False, memory_budget=budget)
    assert sum(node.target is torch.ops.aten.exp.default for node in variant.trace.ops) == 1
