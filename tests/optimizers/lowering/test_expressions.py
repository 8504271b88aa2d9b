"""Every row of the pointwise table: what `fusible` lets in has a form that Triton takes, and one that keeps ATen's numbers.

The interpreter hides what Triton does to types, so the text is compiled here, to Triton's IR, which needs no GPU; the numbers
are checked in the process that `test_triton.test_numbers_under_the_interpreter` starts for this file too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreter import INTERPRETED, interpreted
from kernels import check_kernel, kernel_of, run_poisoned, triton_ir
from torch import Tensor

from tracefuse.optimizers.kernels.fusible import refusal
from tracefuse.optimizers.kernels.text import kernel_source
from tracefuse.optimizers.lowering.expressions import POINTWISE

aten = torch.ops.aten
f32, f64, bf16, f16, i64, i32, u8 = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8
)  # fmt: skip
DTYPES = (f32, bf16, f64, i64, i32, u8, torch.bool)
NAN = float("nan")
compiled = pytest.mark.skipif(INTERPRETED, reason="Triton interprets in this process")

NUMBERS = {"exponent": 2, "threshold": 1, "min": 0, "max": 3, "weight": 0.5, "scale": 2.0, "self_is_result": False}


def sample(op: Any, dtype: torch.dtype) -> list[Any]:
    """The arguments that the schema requires: tensors of `dtype`, masks, and numbers that suit their names."""
    given = [a for a in op._schema.arguments if not a.has_default_value() or a.name in ("min", "max")]
    return [_argument(a, dtype) for a in given]


def _argument(argument: Any, dtype: torch.dtype) -> Any:
    if str(argument.type) not in ("Tensor", "Optional[Tensor]"):
        return NUMBERS.get(argument.name, 2)
    values = torch.arange(64) % 5
    return values > 1 if argument.name in ("condition", "mask") else values.to(dtype)


def runs(op: Any, arguments: list[Any]) -> bool:
    try:
        op(*arguments)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def kernel_of_row(op: Any, arguments: list[Any]) -> Any:
    places = [at for at, a in enumerate(arguments) if isinstance(a, Tensor)]

    def call(*tensors: Tensor) -> Tensor:
        given = dict(zip(places, tensors, strict=True))
        return op(*(given.get(at, a) for at, a in enumerate(arguments)))

    return kernel_of(call, *(arguments[at] for at in places))[0]


@compiled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_row_that_is_let_in_compiles(dtype: torch.dtype) -> None:
    checked = 0
    for op in POINTWISE:
        arguments = sample(op, dtype)
        if not runs(op, arguments):
            continue
        kernel = kernel_of_row(op, arguments)
        if any(refusal(node) for node in kernel.body.ops):
            continue
        triton_ir(kernel)
        checked += 1
    assert checked > 25


@compiled
@pytest.mark.parametrize(
    ("fn", "instruction"),
    [(lambda x, y: x + y, "arith.ori"), (lambda x, y: x * y, "arith.andi"), (torch.maximum, "arith.ori")],
    ids=["add", "mul", "maximum"],
)
def test_booleans_are_joined_bit_by_bit(fn: Callable[..., Any], instruction: str) -> None:
    """One-bit integers have no carry: True + True would be False."""
    x, y = torch.tensor([True, True, False]), torch.tensor([True, False, False])
    text = triton_ir(kernel_of(fn, x, y)[0])
    assert instruction in text
    assert not any(
        f"arith.{name} %" in line and " : tensor<32xi1>" in line
        for line in text.splitlines()
        for name in ("addi", "muli")
    )


@interpreted
@pytest.mark.parametrize("dtype", [bf16, f16, f32, f64], ids=str)
def test_numbers_are_compared_as_the_operands_type_holds_them(dtype: torch.dtype) -> None:
    x = torch.tensor([0.1, 0.3, 0.7, -0.1]).to(dtype)
    check_kernel(*kernel_of(lambda x: (x > 0.1, x >= 0.3, x == 0.7, x != -0.1, torch.where(x > 0.1, x, -x)), x))
    check_kernel(*kernel_of(lambda x: x.masked_fill(x > 0.5, 0.1) == 0.1, x))


@interpreted
def test_numbers_are_compared_as_unsigned_bytes_hold_them() -> None:
    x = torch.tensor([0, 1, 44, 200, 255], dtype=u8)
    check_kernel(*kernel_of(lambda x: (x > -1, x == -1, x < 300, x > 1.5), x))


@interpreted
def test_numbers_wrap_in_the_type_of_the_operands() -> None:
    x = torch.tensor([0, 1, 44, 127], dtype=torch.int8)
    check_kernel(*kernel_of(lambda x: (x + 300, x * -300, x - 1), x))
    check_kernel(*kernel_of(lambda x: (x * -1, x - 300), x.to(u8)))


@interpreted
def test_numbers_are_compared_in_double_precision() -> None:
    """0.1 is less than the f32 nearest to it."""
    x = torch.tensor([0.1, 0.7, -0.1], dtype=f32).to(f64)
    y = torch.tensor([0.1, 0.7, -0.1], dtype=f64)
    check_kernel(*kernel_of(lambda x, y: (x > 0.1, y == 0.1, y <= 0.7, x.clamp(0.1, 0.7), y.clamp(-0.1, 0.7)), x, y))


@interpreted
@pytest.mark.parametrize("beta", [0.9, 0.99, 0.999, 0.9999])
@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
def test_a_power_of_a_number_is_that_of_the_number_in_the_type_of_the_exponent(dtype: torch.dtype, beta: float) -> None:
    """`1 - beta ** step`, Adam's correction, holds the rounding of `beta` and of the power many times larger: of `beta` it is
    the same as ATen's, and of the power one unit in the last place."""
    steps = torch.tensor([1, 2, 5, 14, 100, 1000, 10_000], dtype=dtype)
    kernel, inputs = kernel_of(lambda x: torch.pow(beta, x), steps)
    (found,) = run_poisoned(kernel, inputs)
    exact = float(torch.tensor(beta, dtype=dtype)) ** steps.double()
    units = 1 if dtype is f32 else 500  # the product of the logarithm and the step is rounded
    torch.testing.assert_close(found.double(), exact, rtol=units * torch.finfo(dtype).eps, atol=torch.finfo(dtype).tiny)
    torch.testing.assert_close(1 - found, 1 - torch.pow(beta, steps), rtol=0, atol=units * torch.finfo(dtype).eps)


def test_a_wider_scalar_is_rounded_before_it_is_compared() -> None:
    kernel, _ = kernel_of(lambda x, y: x > y, torch.ones(4, dtype=bf16), torch.tensor(0.1))
    assert "> y.to(tl.bfloat16).to(tl.float32)" in kernel_source(kernel)


@interpreted
@pytest.mark.parametrize("beta", [1, 2.5])
@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
def test_softplus_keeps_small_and_large_results(dtype: torch.dtype, beta: float) -> None:
    x = torch.tensor([-80.0, -30.0, -17.0, -5.0, -0.3, 0.0, 1e-3, 3.0, 19.0, 21.0, 1e4, NAN, math.inf, -math.inf])
    kernel, inputs = kernel_of(lambda x: torch.nn.functional.softplus(x, beta, 30), x.to(dtype))
    check_kernel(kernel, inputs, absolute=0.0)


@interpreted
@pytest.mark.parametrize("dtype", [f32, bf16, f64], ids=str)
def test_the_sign_of_nan_and_of_minus_zero_is_zero(dtype: torch.dtype) -> None:
    x = torch.tensor([NAN, -0.0, 0.0, 2.5, -2.5, math.inf, -math.inf]).to(dtype)
    check_kernel(*kernel_of(lambda x: (x.sign(), x.sgn(), 1 / x.sgn(), x.sgn() * 0.1), x))


@interpreted
@pytest.mark.parametrize("dtype", [f32, bf16, f64], ids=str)
def test_a_clamp_to_nan_is_nan(dtype: torch.dtype) -> None:
    x = torch.tensor([NAN, 0.0, math.inf, -2.0]).to(dtype)
    check_kernel(*kernel_of(lambda x: (x.clamp(min=NAN), x.clamp(0, NAN), aten.clamp_max(x, NAN), x.clamp(0, 1)), x))


@interpreted
@pytest.mark.parametrize("dtype", [i64, i32, u8], ids=str)
def test_integers_are_their_own_floor(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 2, 200]).to(dtype)
    check_kernel(*kernel_of(lambda x: (x.floor(), x.ceil() + 1, x.sign()), x))


@interpreted
def test_booleans_compute_what_aten_does() -> None:
    x, y = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    check_kernel(*kernel_of(lambda x, y: (x + y, x * y, torch.maximum(x, y), torch.minimum(x, y), x.sgn()), x, y))
    check_kernel(*kernel_of(lambda x, y: (torch.add(x, y, alpha=0), torch.add(x, y, alpha=2)), x, y))
