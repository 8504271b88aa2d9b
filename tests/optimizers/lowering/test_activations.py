"""Every activation of `torch.nn`, forward and backward: part of a kernel, or left with a reason that is named here.

The numbers are checked under the interpreter, in the process that `test_triton.test_numbers_under_the_interpreter` starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from interpreter import interpreted
from kernels import TOLERANCE, kernel_of, run_poisoned
from torch import Tensor, nn

import tracefuse
from tracefuse.config.configuration import Config
from tracefuse.optimizers.kernels.fusible import is_free
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.ops import op_name
from tracefuse.variant import Variant

f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16
HALVES = (bf16, torch.float16)

ARGUMENTS: dict[str, list[dict[str, object]]] = {
    "Threshold": [{"threshold": 0.1, "value": -0.3}],
    "GELU": [{}, {"approximate": "tanh"}],
    "Hardtanh": [{}, {"min_val": -0.3, "max_val": 0.7}],
    "ELU": [{}, {"alpha": 0.7}],
    "CELU": [{}, {"alpha": 0.7}],
    "PReLU": [{}, {"num_parameters": 6}],
    "Softplus": [{}, {"beta": 2.5, "threshold": 3}],
    "Softmin": [{"dim": -1}],
    "Softmax": [{"dim": -1}],
    "LogSoftmax": [{"dim": -1}],
    "GLU": [{}, {"dim": 1}],
    "Hardshrink": [{}, {"lambd": 0.1}],
    "Softshrink": [{}, {"lambd": 0.1}],
}
LEFT = {
    "MultiheadAttention": "matmuls and attention stay with ATen",
    "Softmax2d": "a softmax along channels: test_reductions",
}
"""Modules that are no pointwise activation, and where they are looked at."""

MODULES = [name for name in torch.nn.modules.activation.__all__ if name not in LEFT]
CASES = [(name, at) for name in MODULES for at in range(len(ARGUMENTS.get(name, [{}])))]


def module(name: str, at: int, dtype: torch.dtype, device: str = "cpu") -> nn.Module:
    return getattr(nn, name)(**ARGUMENTS.get(name, [{}])[at]).to(device, dtype).eval()


def operand(dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Numbers on both sides of every corner, none of them on one, and some large ones."""
    x = torch.randn(5, 6, 34, generator=torch.Generator().manual_seed(3), dtype=f64) * 2
    x[0, 0, :10] = torch.tensor([-30.0, 30.0, -3.25, 3.25, 6.5, -1e-3, 1e-3, 2e-2, -90.0, 21.0], dtype=f64)
    return x.to(device, dtype)


def fused(name: str, at: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Variant, tracefuse.Capture]:
    """The activation between products, since ATen runs an op alone as fast as a kernel would."""
    layer, x = module(name, at, dtype, device), operand(dtype, device).requires_grad_()
    with tracefuse.capture() as capture:
        y = layer(x * 1.5) * 2
        y.backward(torch.cos(torch.arange(y.numel(), dtype=f32, device=device)).to(dtype).view_as(y))
    return capture.variant(Config.off().changed(decompose=True, fuse=True)).check(), capture


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
@pytest.mark.parametrize(("name", "at"), CASES)
def test_forward_and_backward_become_part_of_kernels(name: str, at: int, dtype: torch.dtype) -> None:
    variant, _ = fused(name, at, dtype)
    made = {op_name(n) for n in variant.trace.ops if not (isinstance(n.target, Kernel) or is_free(n))}
    left = [d.reason for record in variant.passes for d in record.decisions if d.action == "leave"]
    alone = {"aten.mul.Tensor"} if name == "GLU" else set()  # its operand has twice its elements, and is saved
    assert made <= {"aten.sum.dim_IntList", "aten.cos.default", "aten.arange.default", *alone}, left
    assert not [reason for reason in left if "no Triton form" in reason]


def test_every_activation_of_torch_is_walked() -> None:
    assert set(LEFT) <= set(torch.nn.modules.activation.__all__)
    assert len(MODULES) >= 27


@interpreted
@pytest.mark.parametrize("dtype", [f32, bf16, f64], ids=str)
@pytest.mark.parametrize(("name", "at"), CASES)
def test_numbers(name: str, at: int, dtype: torch.dtype) -> None:
    """Each kernel's numbers beside those of its ATen ops in float64."""
    check_kernels(*fused(name, at, dtype), TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [f32, bf16, f64], ids=str)
@pytest.mark.parametrize(("name", "at"), CASES)
def test_numbers_on_a_gpu(name: str, at: int, dtype: torch.dtype) -> None:
    check_kernels(*fused(name, at, dtype, "cuda"), TOLERANCE[dtype])


def check_kernels(variant: Variant, capture: tracefuse.Capture, tolerance: float) -> None:
    known = dict(zip(variant.trace.placeholders, capture.example_inputs, strict=True))
    for node in variant.trace.ops:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
        known[node] = node.target(*args, **kwargs)
        if isinstance(node.target, Kernel):
            check(node.target, list(args), tolerance)


def times_one(program: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: program(x) * 1


def check(kernel: Kernel, inputs: list[Tensor], tolerance: float) -> None:
    """Against ATen on the CPU in float64: that on a GPU takes no float64 beside other dtypes, and rounds constants to f32."""
    exact = kernel(*(t.cpu().double() if t.is_floating_point() else t.cpu() for t in inputs))
    exact = exact if isinstance(exact, tuple) else (exact,)
    for found, true in zip(run_poisoned(kernel, inputs), exact, strict=True):
        scale = max(1.0, true.abs().max().item()) if true.is_floating_point() else 1.0
        torch.testing.assert_close(found.cpu().double(), true.double(), rtol=tolerance, atol=tolerance * scale)


OF_SEVERAL_OPS = {
    "GLU", "PReLU", "RReLU", "LogSigmoid", "Softmax", "Softmin", "LogSoftmax", "Softsign", "Tanhshrink",
}  # fmt: skip


@interpreted
@pytest.mark.parametrize("dtype", [f32, f64, bf16], ids=str)
def test_corners_and_what_is_no_number(dtype: torch.dtype) -> None:
    x = torch.tensor([-3.0, 3.0, 0.0, -0.5, 0.5, 1.0, -1.0, torch.nan, torch.inf, -torch.inf]).to(dtype)
    for name, at in CASES:
        if name in OF_SEVERAL_OPS or name == "GELU":  # ATen's CPU kernels do not agree about GELU of infinity
            continue
        layer = module(name, at, dtype)
        kernel, inputs = kernel_of(times_one(layer), x)
        (found,) = run_poisoned(kernel, inputs)
        torch.testing.assert_close(
            found, layer(x), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True, msg=name
        )


@interpreted
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gelu_of_every_number_of_a_half(dtype: torch.dtype) -> None:
    x = every_number(dtype)
    # The interpreter takes subnormal numbers of bf16 for 0.
    check_gelu(x if dtype is not bf16 else x[(x == 0) | (x.abs() >= torch.finfo(dtype).tiny) | x.isnan()])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gelu_of_every_number_of_a_half_on_a_gpu(dtype: torch.dtype) -> None:
    check_gelu(every_number(dtype).cuda())


def every_number(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


def check_gelu(x: Tensor) -> None:
    """Both directions yield the exact number rounded, or else one next to it, and that not more often than ATen's do; of a
    zero they yield the zero of its sign. What is stored is wider, as the interpreter does not round to even."""
    wide, ones = x.cpu().double(), torch.ones_like(x)
    cdf = 0.5 * torch.special.erfc(-wide / math.sqrt(2))
    density = torch.exp(-0.5 * wide * wide) / math.sqrt(2 * math.pi)
    for program, operands, exact in (
        (lambda x: nn.functional.gelu(x).float(), (x,), wide * cdf),
        (lambda grad, x: torch.ops.aten.gelu_backward(grad, x).float(), (ones, x), cdf + wide * density),
    ):
        kernel, inputs = kernel_of(program, *operands)
        (found,), rounded = run_poisoned(kernel, inputs), exact.to(x.dtype)
        ours, theirs = (distance(one.cpu().to(x.dtype), rounded) for one in (found, kernel(*inputs)))
        assert ours.max() <= 1
        assert ours.count_nonzero() <= theirs.count_nonzero()
        assert torch.equal(found.cpu()[wide == 0].signbit(), rounded[wide == 0].signbit())


def distance(found: Tensor, wanted: Tensor) -> Tensor:
    """How many numbers of a half apart two tensors are, element by element; a NaN is far from all but a NaN."""
    bits = [one.view(torch.int16).int() for one in (found, wanted)]
    places = [torch.where(one < 0, -(one & 0x7FFF), one) for one in bits]
    apart = torch.where(found.isnan() == wanted.isnan(), (places[0] - places[1]).abs(), 2**16)
    return torch.where(found.isnan() & wanted.isnan(), 0, apart)


@interpreted
@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
def test_what_cancels_keeps_its_digits(dtype: torch.dtype) -> None:
    x = torch.tensor([1e-12, -1e-12, 1e-6, -1e-6, 1e-3, -1e-3, 0.019, 0.021, 0.29, 0.31, -0.5, 3.0, 40.0]).to(dtype)
    for program in (torch.expm1, torch.log1p, nn.functional.elu, nn.functional.celu):
        kernel, inputs = kernel_of(times_one(program), x)
        (found,) = run_poisoned(kernel, inputs)
        torch.testing.assert_close(found.double(), program(x.double()), rtol=40 * torch.finfo(dtype).eps, atol=0)


@interpreted
def test_a_clamp_by_tensors() -> None:
    x = torch.tensor([torch.nan, 1.0, -2.0, 3.0, 0.0])
    low, high = torch.tensor([0.0, torch.nan, -1.0, 4.0, -1.0]), torch.tensor([1.0, 2.0, torch.nan, 2.0, 1.0])
    for program in (
        lambda x, a, b: torch.clamp(x, a, b) * 1,
        lambda x, a, b: torch.clamp(x, min=a) * 1 + torch.clamp(x, max=b),
        lambda x, a, b: torch.clamp_min(x, a) * torch.trunc(x * 1.7) + torch.clamp_max(x, b),
    ):
        kernel, inputs = kernel_of(program, x, low, high)
        (found,) = run_poisoned(kernel, inputs)
        torch.testing.assert_close(found, program(x, low, high), equal_nan=True)
