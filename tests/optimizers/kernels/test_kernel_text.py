"""The text of kernels: golden for two (UPDATE_GOLDEN=1 rewrites them), and what must or must not stand in it."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels import kernel_of, kernel_of_types
from programs import apply_rope
from torch import Tensor

from tracefuse.optimizers.kernels.functions import lower
from tracefuse.optimizers.kernels.kernel import Kernel, read_bytes
from tracefuse.optimizers.kernels.launch import HEADER
from tracefuse.optimizers.kernels.naming import Names
from tracefuse.optimizers.kernels.text import kernel_source
from tracefuse.optimizers.lowering.lowering import NotFusible

GOLDEN = Path(__file__).parents[2] / "golden"
aten, f32, bf16 = torch.ops.aten, torch.float32, torch.bfloat16


def rope_kernel() -> Kernel:
    return kernel_of_types(apply_rope, ((4096, 10, 32, 128), bf16), ((4096, 1, 1, 128), f32))


def residual_norm_kernel() -> Kernel:
    def residual_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
        total = x + residual
        return total, *torch.native_layer_norm(total, [768], weight, bias, 1e-5)

    return kernel_of_types(residual_norm, *[((8192, 768), bf16)] * 2, *[((768,), bf16)] * 2)


@pytest.mark.parametrize(("name", "make"), [("rope", rope_kernel), ("residual_norm", residual_norm_kernel)])
def test_golden(name: str, make: Callable[[], Kernel]) -> None:
    kernel, path = make(), GOLDEN / f"{name}.py"
    text = f"{HEADER}\n\n{kernel_source(kernel)}"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs; look at the change, then UPDATE_GOLDEN=1"


def norm_backward_kernel(rows: int = 4096, columns: int = 768) -> Kernel:
    """A norm's gradients and a bias' below it: columns summed in two steps."""

    def step(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor) -> Any:
        gradients = aten.native_layer_norm_backward(grad, x, [columns], mean, rstd, weight, bias, [True] * 3)
        return *gradients, gradients[0].sum(0)

    many, per_row, per_column = (rows, columns), (rows, 1), (columns,)
    return kernel_of_types(step, *((shape, f32) for shape in (many, many, per_row, per_row, per_column, per_column)))


def norm_and_variance_kernel() -> Kernel:
    """A `mean` that is a result, and one on the way to a later result."""

    def step(x: Tensor, y: Tensor) -> Any:
        return *torch.native_layer_norm(x, [64], None, None, 0.1), y.var(-1)

    return kernel_of_types(step, *[((8, 64), f32)] * 2)


KERNELS = [
    norm_and_variance_kernel,
    residual_norm_kernel,
    rope_kernel,
    norm_backward_kernel,
    # `x` is read at two places, and `x_1` is another input.
    lambda: kernel_of_types(lambda x, x_1: x[:5] * x[3:] + x_1, ((8,), f32), ((5,), f32)),
    lambda: kernel_of_types(lambda total, mean, row: (total + mean).sum(1) + row, *[((8, 8), f32)] * 2, ((8,), f32)),
]


@pytest.mark.parametrize("make", KERNELS)
def test_what_is_read_from_a_pointer_is_called_like_it(make: Callable[[], Kernel]) -> None:
    """The first load takes the name, also in the second function; further ones have a number that no other pointer has."""
    for text in kernel_source(make()).split("@triton.jit")[1:]:
        loads = re.findall(r"(\w+) = tl.load\((\w+)_ptr", text)
        assert {pointer for _, pointer in loads} <= {name for name, _ in loads} | {"row"}
        pointers = set(re.findall(r"(\w+)_ptr", text))
        assert all(name == pointer or name not in pointers for name, pointer in loads)


def concatenation_kernel() -> Kernel:
    """Of parts too short for programs of their own, which are chosen among by two statements; and its column sum."""

    def concatenate(*parts: Tensor) -> tuple[Tensor, Tensor]:
        whole = torch.cat(parts, -1)
        return whole, whole.sum(0)

    return kernel_of_types(concatenate, *[((24, 32), f32)] * 3)


@pytest.mark.parametrize("make", [residual_norm_kernel, norm_backward_kernel, concatenation_kernel])
def test_what_is_written_to_a_pointer_is_called_like_it(make: Callable[[], Kernel]) -> None:
    """Partial sums are called after the result with `_sums`."""
    stores = re.findall(r"tl.store\((\w+)_ptr[^,]*, (?:tl.sum\()?(\w+)", kernel_source(make()))
    assert len(stores) >= 2
    assert all(pointer == name for pointer, name in stores)


def test_parts_of_a_norm_are_called_what_they_are() -> None:
    signature = kernel_source(norm_backward_kernel()).split("):")[0]
    for name in ("mean", "rstd", "grad_input", "grad_weight_sums", "grad_bias_sums"):
        assert f"{name}_ptr" in signature


def norm_weight_kernel(which: int) -> Kernel:
    """One of the gradients of a norm's weight (1) and bias (2)."""

    def step(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return aten.native_layer_norm_backward(grad, x, [64], mean, rstd, weight, bias, [False, True, True])[which]

    return kernel_of_types(step, *[((96, 64), f32)] * 2, *[((96, 1), f32)] * 2, *[((64,), f32)] * 2)


@pytest.mark.parametrize("make", [*KERNELS, *(lambda which=which: norm_weight_kernel(which) for which in (1, 2))])
def test_inputs_that_no_function_takes_are_not_counted_and_said_to_be(make: Callable[[], Kernel]) -> None:
    kernel = make()
    taken = {b.name for function in lower(kernel).functions for b in function.buffers}
    text = kernel_source(kernel)
    for placeholder in kernel.body.placeholders:
        is_taken = placeholder.name in taken
        (line,) = (line for line in text.splitlines() if line.startswith(f"# {placeholder.name}: "))
        assert (read_bytes(placeholder) > 0) == is_taken
        assert ("only the reference takes it" in line) != is_taken


def test_the_bytes_on_top_are_those_of_the_lines_below() -> None:
    text = kernel_source(norm_weight_kernel(2))
    assert "1 ATen op; reads 24 KiB, writes 256 B, each element counted once.\n" in text
    assert text.count("(only the reference takes it)") == 5
    assert "# x: f32[8, 8], 256 B, of which 128 B are read\n" in kernel_source(
        kernel_of_types(lambda x: x[:4] * 2 + 1, ((8, 8), f32))
    )
    assert "# x: f32[8, 8], 256 B, counted twice: as it is and transposed\n" in kernel_source(
        kernel_of_types(lambda x: x.sin() + x.t(), ((8, 8), f32))
    )


@pytest.mark.parametrize(
    "make",
    [
        *KERNELS,
        lambda: kernel_of_types(lambda x: x.sum() + 1, ((512,), f32)),
        lambda: kernel_of_types(lambda x: x.softmax(-1), ((8, 50257), f32)),
        lambda: kernel_of_types(lambda x: x.sum(0), ((10000, 1), f32)),
        lambda: kernel_of_types(lambda x: x.sum(1), ((3, 10000, 5), f32)),
        lambda: kernel_of_types(lambda x: x[0, 0] * 2 + 1, ((1, 1), f32)),
        lambda: kernel_of_types(lambda x, y: x + y.t(), *[((300, 500), f32), ((500, 300), f32)]),
    ],
)
def test_every_line_is_read(make: Callable[[], Kernel]) -> None:
    """And, but for what is computed again in a second loop, written once."""
    for text in kernel_source(make()).split("@triton.jit")[1:]:
        body = ast.parse(text).body[0]
        names = [node for node in ast.walk(body) if isinstance(node, ast.Name)]
        stored = {name.id for name in names if isinstance(name.ctx, ast.Store)}
        assert stored <= {name.id for name in names if isinstance(name.ctx, ast.Load)} | {"start", "step"}
        targets = [node.targets[0].id for node in ast.walk(body) if isinstance(node, ast.Assign)]  # type: ignore[attr-defined]
        assert len(targets) == len(set(targets)) or text.count("for start in") > 1


def test_a_name_that_begins_with_a_digit_is_one_of_python() -> None:
    """`transformers` calls a mask of LongT5 `_3blocked_attention_mask`."""
    node = torch.fx.Graph().placeholder("_3blocked_attention_mask_1")
    assert Names().of(node) == "_3blocked_attention_mask"


def test_sine_and_cosine_are_computed_on_the_small_table() -> None:
    """One row of `freqs` serves a block of rows of `t`."""
    text = kernel_source(rope_kernel())
    assert "freqs = tl.load(freqs_ptr + (outer * 128 + col))" in text.replace("f = ", "freqs = ").replace(
        "f_ptr", "freqs_ptr"
    )


def test_the_swapped_halves_of_a_head_are_loaded_once() -> None:
    """A concatenation of two parts of one value is that value at a chosen place, not two masked loads."""
    text = kernel_source(rope_kernel())
    assert text.count("tl.load(t_ptr") == 2
    assert "place = tl.where(in_neg, col + 64, (col - 64))" in text


def test_parts_that_read_the_same_are_computed_by_one_program() -> None:
    """The gradients of a gated unit's halves, in one buffer: each input is loaded once, and no lane asks where it is."""

    def backward(grad: Tensor, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return torch.cat([torch.ops.aten.silu_backward(grad * up, gate), grad * torch.nn.functional.silu(gate)], -1)

    text = kernel_source(kernel_of_types(backward, ((64, 512), bf16), ((64, 1024), bf16)))
    assert (text.count("tl.load("), text.count("tl.store(")) == (3, 2)
    assert "mask" not in text


def test_offsets_are_64_bit_only_where_they_must_be() -> None:
    assert "int64" not in kernel_source(kernel_of_types(lambda x: x * 2 + 1, ((2**15, 2**15), bf16)))
    assert "int64" in kernel_source(kernel_of_types(lambda x: x * 2 + 1, ((2**16, 2**16), bf16)))


def test_no_mask_where_blocks_fit() -> None:
    assert "mask" not in kernel_source(kernel_of_types(lambda x: x * 2 + 1, ((4, 1024), f32)))


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x: x.pow(1.7), "this choice of its options"),
        (lambda x: x.softmax(-1) @ x, "no Triton form is known"),
        (lambda x: x.softmax(-1).t() + x, "read at another row"),
        (lambda x: (x.sum(-1), x[:3].exp()), "has 24 elements, where the kernel.s programs share out 64"),
    ],
)
def test_what_has_no_form_says_so(fn: Callable[..., Any], reason: str) -> None:
    kernel, _ = kernel_of(fn, torch.randn(8, 8))
    with pytest.raises(NotFusible, match=reason):
        kernel_source(kernel)


@pytest.mark.parametrize(
    ("fn", "shape"),
    [
        (lambda x: (x * 2).sum(0), (2**15, 2**17)),
        (lambda x: (x.t() * 2).contiguous(), (64, 2**26)),
        (lambda x: (x.t() * 2).contiguous(), (2**26, 64)),
        (lambda x: (x.t() * 2).softmax(1), (64, 2**26)),
        (lambda x: (x.t() * 2).softmax(1), (2**15, 2**17)),
    ],
    ids=["columns", "tile of one row", "tile of one column", "rows", "long rows"],
)
def test_every_position_is_64_bit_where_a_stride_may_need_it(fn: Callable[..., Any], shape: tuple[int, int]) -> None:
    """Not only the program's number: what a program counts itself is multiplied by strides too."""
    text = kernel_source(kernel_of_types(fn, (shape, bf16)))
    assert text.count("tl.arange(0, ") == text.count(").to(tl.int64)") - text.count("tl.program_id(0).to(tl.int64)")
