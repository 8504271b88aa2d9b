"""Cumulative sums in kernels, also from the end: numbers, order, what stays with ATen, and what an H100's code takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from interpreter import INTERPRETED, interpreted
from kernel_programs import rand
from kernels import kernel_of, kernel_of_types, run_poisoned
from torch import Tensor

import tracefuse
from tracefuse.build.modules import resources
from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.kernels.fusible import refusal
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.kernels.text import kernel_source
from tracefuse.optimizers.lowering.lowering import NotFusible
from tracefuse.optimizers.ops import aten, op_name

f32, f64, bf16, f16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
ROUNDING = {f32: 5e-6, bf16: 2**-7, f16: 2**-9}
"""A kernel adds in float32 and rounds what it writes."""


def summed(x: Tensor, w: Tensor, g: Tensor, dim: int) -> tuple[Tensor, ...]:
    """Cumulative sums between neighbours, and their gradients by `g`. Where padding is read as 0, the sigmoid is 1/2."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = torch.tanh((x * w).sigmoid().cumsum(dim) * w / x.shape[dim])
    return y.detach(), *torch.autograd.grad(y, (x, w), g)


def check(fn: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> Kernel:
    """One kernel of all of `fn`, against float64."""
    kernel, read = kernel_of(fn, *inputs)
    exact = fn(*(x.double() if x.is_floating_point() else x for x in inputs))
    for found, expected in zip(run_poisoned(kernel, read), exact, strict=True):
        bound = ROUNDING[found.dtype]
        torch.testing.assert_close(found.double(), expected.double(), rtol=bound, atol=bound)
    return kernel


# --- numbers ----------------------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("dtype", [f32, bf16, f16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("inner", [1, 7, 64])
@pytest.mark.parametrize("size", [5, 32, 33])
def test_sums_and_gradients_of_a_middle_dimension(size: int, inner: int, dtype: torch.dtype) -> None:
    x, w, g = (rand(3, size, inner, dtype=dtype) for _ in range(3))
    kernel = check(lambda x, w, g: summed(x, w, g, 1), x, w, g)
    assert kernel_source(kernel).count("reverse=True") == 1


@interpreted
@pytest.mark.parametrize("dtype", [f32, bf16], ids=["f32", "bf16"])
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 33), (70, 64), (1, 1000), (37,)])
def test_sums_and_gradients_of_the_last_dimension(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(lambda x, w, g: summed(x, w, g, -1), *(rand(*shape, dtype=dtype) for _ in range(3)))


@interpreted
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_sums_and_gradients_of_what_lies_otherwise(dim: int) -> None:
    x, w = rand(6, 40, 5).permute(2, 0, 1)[:, :, 3:36], rand(5, 6, 66)[:, :, ::2]
    check(lambda x, w, g: summed(x, w, g, dim), x, w, rand(33, 6, 5).permute(2, 1, 0))


@interpreted
def test_sums_of_sums_in_both_orders() -> None:
    x = rand(4, 33, 7)
    check(lambda x: (y := x.cumsum(1), y.flip(1), y.exp().flip(1).cumsum(1).flip(1) * y), x / 8)
    check(lambda x: (x.flip(1).cumsum(1), x.flip(0, 1).cumsum(1).flip(1)), x)


@interpreted
def test_sums_beside_reductions_of_the_same_rows_and_of_views() -> None:
    x = rand(4, 6, 32)
    check(lambda x: (y := (x * 2).cumsum(1), y.softmax(1), y.amax(1, keepdim=True)), x)
    check(lambda x: ((x * 2).view(4, 3, 2, 32).cumsum(3).view(24, 32) + 1, (x * 3).flip(2)), x)


FLIPS: dict[str, Callable[[Tensor], Tensor]] = {
    "of a concatenation": lambda x: torch.cat([x.flip(1) * 2, x[:, :3].exp()], 1).flip(1),
    "concatenated": lambda x: torch.cat([x.flip(1)[:, 2:], x], 1).cumsum(1).flip(1) * 2,
    "padded": lambda x: aten.constant_pad_nd(x.flip(2) * 2, [3, 1, 2, 0]).flip(1),
    "sliced": lambda x: x.flip(1, 2)[:, 1::3, 2:].flip(0) * 2,
    "of a slice's gradient": lambda x: aten.slice_backward(x * 2, [4, 50, 7], 1, 9, 42, 1).flip(1),
    "seen in other shapes": lambda x: x.flip(1).reshape(2, 66, 7).flip(1).reshape(4, 231).flip(1) * 2,
    "of places": lambda x: x * torch.arange(33).flip(0).view(33, 1),
}


@interpreted
@pytest.mark.parametrize("name", FLIPS)
def test_flips_are_places_of_other_elements(name: str) -> None:
    check(lambda x: (FLIPS[name](x),), rand(4, 33, 7))


@interpreted
def test_what_is_added_has_the_type_of_the_result() -> None:
    x = rand(4, 33, 7)
    whole = torch.arange(21).view(7, 3)
    check(lambda x: ((x * 1).cumsum(1, dtype=f32),), x.to(bf16))
    check(lambda x: (x.cumsum(0, dtype=f32) * 2,), whole)
    # Triton's interpreter cuts bfloat16 off, and what is added would be off by that.
    kernel, read = kernel_of(lambda x: (x * 1).cumsum(1, dtype=f16), x)
    exact = x.to(f16).double().cumsum(1)
    torch.testing.assert_close(run_poisoned(kernel, read)[0].double(), exact, rtol=2**-11, atol=0)


# --- kernels ----------------------------------------------------------------------------------------------------------


def chunked(x: Tensor, gate: Tensor) -> Tensor:
    inside = (-torch.nn.functional.softplus(gate)).view(2, 4, 8, 16).cumsum(2)
    terms = x.view(2, 4, 8, 16) * torch.exp(-inside)
    return (torch.exp(inside) * terms.cumsum(2)).view(2, 32, 16) * gate


def test_a_recurrence_in_chunks_is_one_kernel_forward_and_one_backward() -> None:
    x, gate = (torch.randn(2, 32, 16, requires_grad=True) for _ in range(2))

    def step() -> None:
        chunked(x, gate).backward(torch.ones(2, 32, 16))

    trace = tracefuse.capture(step).optimize().trace
    assert sum(isinstance(n.target, Kernel) for n in trace.ops) == 2
    assert not {"aten.cumsum.default", "aten.flip.default"} & set(map(op_name, trace.ops))


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x: (x * 2).int().cumsum(1), "it is a cumulative sum of integers"),
        (lambda x: (x * 2).cumsum(1), None),
        (lambda x: (x * 2).cumsum(0), "its cumulative sums are of more than 1024 elements that do not lie together"),
        (
            lambda x: (x * 2).t().cumsum(-1),
            "its cumulative sums are of more than 1024 elements that do not lie together",
        ),
        (lambda x: x.view(-1).cumsum(0), "its cumulative sums are of more than 16384 elements, which no program holds"),
        (lambda x: x.view(-1, 1).cumsum(1), "it reduces rows of one element"),
    ],
)
def test_what_no_program_holds_stays_with_aten(fn: Callable[[Tensor], Tensor], reason: str | None) -> None:
    trace = tracefuse.capture(fn, torch.randn(1100, 16)).trace
    assert [refusal(n) for n in trace.ops if n.target is aten.cumsum.default] == [reason]


def rolled(x: Tensor) -> Tensor:
    y = x.exp().cumsum(1)
    return torch.cat([y[:, 4:], y[:, :4]], 1) * 2


@pytest.mark.parametrize("fn", [rolled, lambda x: x.exp().cumsum(1)[:, -1] * 2])
def test_sums_that_are_read_in_another_order_are_stored(fn: Callable[[Tensor], Tensor]) -> None:
    """As the last one of each row alone."""
    with pytest.raises(NotFusible, match="in another order"):
        kernel_source(kernel_of(fn, rand(8, 33))[0])
    x = torch.randn(8, 33)
    capture = tracefuse.capture(fn, x)
    (found,) = tracefuse.replay(Fuse().run(capture.trace, lambda _: None), capture.example_inputs, capture.rng_states)
    torch.testing.assert_close(found, fn(x))


@pytest.mark.skipif(INTERPRETED, reason="Triton interprets in this process")
@pytest.mark.parametrize("dtype", [f32, bf16], ids=["f32", "bf16"])
def test_they_compile_for_hopper_without_spills(dtype: torch.dtype) -> None:
    shape = (8, 64, 32, 768)
    found = resources(kernel_of_types(lambda x, w, g: summed(x, w, g, 2), *[(shape, dtype)] * 3))
    assert found.spills == 0
    assert found.registers <= 168
    assert found.programs > 132


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [f32, bf16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("shape", "dim"), [((8, 64, 32, 768), 2), ((3, 33, 7), 1), ((70, 1000), 1), ((9, 5, 64), 1)])
def test_sums_and_gradients_on_a_gpu(shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    check(lambda x, w, g: summed(x, w, g, dim), *(rand(*shape, dtype=dtype).cuda() for _ in range(3)))
