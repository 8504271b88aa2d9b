"""The text of kernels: golden for two (UPDATE_GOLDEN=1 rewrites them), and what must or must not stand in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels import kernel_of, kernel_of_types
from programs import apply_rope
from torch import Tensor

from tracefuse.optimizers.kernel import Kernel
from tracefuse.optimizers.launch import HEADER
from tracefuse.optimizers.lowering import NotFusible
from tracefuse.optimizers.triton import kernel_source

GOLDEN = Path(__file__).parent / "golden"
f32, bf16 = torch.float32, torch.bfloat16


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
        (lambda x: (x.sum(-1), x[:3].exp()), "are not the"),
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
