"""Sums down columns whose inputs are smaller than what is summed: one number for many elements, a pool's windows, a bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreter import interpreted
from kernels import check_kernel, kernel_of, kernel_of_types, run_poisoned
from torch import Tensor

from tracefuse.optimizers.kernels.text import kernel_source

f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
aten = torch.ops.aten


def scaled(width: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The gradient of a group norm's weight: one deviation for `width` columns of a row."""

    def fn(x: Tensor, rstd: Tensor) -> Tensor:
        return (x.view(x.shape[0], -1, width) * rstd.unsqueeze(-1)).view(x.shape).sum(0)

    return fn


def pooled(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    spread = aten.avg_pool2d_backward(grad, x, [2, 2], [2, 2], [0, 0], False, True, None)
    return spread, spread.sum((0, 2, 3))


def upsampled(grad: Tensor) -> tuple[Tensor, Tensor]:
    n, c, height, width = grad.shape
    shape = [n, c, height // 2, width // 2]
    total = aten.upsample_nearest2d_backward(grad * 2.0, [height, width], shape)
    return total, total.sum((0, 2, 3))


def of_groups(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    groups = (x + bias[:, None, None]).relu().view(x.shape[0], -1, 4, *x.shape[2:])
    return torch.var_mean(groups, (2, 3, 4), correction=0)


def of_short_columns(x: Tensor) -> Tensor:
    return (x + 1.0).mean(1)


Case = tuple[Callable[..., Any], list[tuple[int, ...]]]
SMALL: dict[str, Case] = {
    "one number for 64 columns": (scaled(64), [(70, 192), (70, 3)]),
    "one number for 32 columns": (scaled(32), [(70, 192), (70, 6)]),
    "one number for 24 columns": (scaled(24), [(70, 192), (70, 8)]),
    "a pool": (pooled, [(3, 5, 7, 9), (3, 5, 14, 18)]),
    "an upsampling": (upsampled, [(3, 5, 14, 18)]),
    "lines of groups": (of_groups, [(1, 8, 140, 150), (8,)]),
    "short columns": (of_short_columns, [(4, 33, 70)]),
}
LARGE: dict[str, Case] = {
    "one number for 512 columns": (scaled(512), [(1024, 8192), (1024, 16)]),
    "one number for 32 columns": (scaled(32), [(1024, 8192), (1024, 256)]),
    "a pool": (pooled, [(32, 24, 61, 53), (32, 24, 122, 106)]),
    "an upsampling": (upsampled, [(32, 24, 122, 106)]),
    "lines of groups": (of_groups, [(16, 32, 370, 377), (32,)]),
    "short columns": (of_short_columns, [(512, 33, 4225)]),
}


def made(case: Case, dtype: torch.dtype, device: str = "cpu") -> tuple[Any, list[Tensor]]:
    generator = torch.Generator(device).manual_seed(5)
    fn, shapes = case
    return kernel_of(fn, *(torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes))


@interpreted
@pytest.mark.parametrize("dtype", [f32, bf16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", SMALL)
def test_numbers(name: str, dtype: torch.dtype) -> None:
    check_kernel(*made(SMALL[name], dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [f32, bf16, f16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("name", LARGE)
def test_large_sums_have_the_numbers_of_float64(name: str, dtype: torch.dtype) -> None:
    kernel, inputs = made(LARGE[name], dtype, "cuda")
    wanted = LARGE[name][0](*(value.double() for value in inputs))
    tolerance = {f32: 2e-5, bf16: 2e-2, f16: 2e-3}[dtype]
    for found, exact in zip(
        run_poisoned(kernel, inputs), wanted if isinstance(wanted, tuple) else (wanted,), strict=True
    ):
        assert (found.double() - exact).abs().max() <= tolerance * max(1.0, exact.abs().max().item())


def source(case: Case) -> str:
    fn, shapes = case
    return kernel_source(kernel_of_types(fn, *((shape, f32) for shape in shapes)))


@pytest.mark.parametrize(("width", "columns"), [(512, 64), (32, 32)])
def test_one_number_for_many_columns_is_read_once_for_a_row_of_a_block(width: int, columns: int) -> None:
    text = source((scaled(width), [(1024, 8192), (1024, 8192 // width)]))
    assert f"first_col // {width}" in text
    assert f"COLS={columns}" in text
    assert "num_stages=3" in text


@pytest.mark.parametrize("name", ["a pool", "an upsampling"])
def test_loads_that_come_word_by_word_are_not_under_way_while_it_adds(name: str) -> None:
    assert "num_stages=1" in source(LARGE[name])


def test_a_group_is_read_line_by_line_so_that_a_bias_is_one_number() -> None:
    text = source(LARGE["lines of groups"])
    assert "line = " in text
    assert "_ptr + ((outer % 8) * 4 + line))" in text


def test_a_column_a_little_longer_than_a_block_is_one_block() -> None:
    assert "for step" not in source(LARGE["short columns"])


def tables(x: Tensor, table: Tensor) -> Tensor:
    """Of each position, as the gradient of a scale behind a position's embedding."""
    return (x * table).view(-1, x.shape[-1]).sum(0)


def gated(x: Tensor, gate: Tensor) -> Tensor:
    return (x * gate).sum((0, 1))


WHOLE: dict[str, Case] = {
    "a table of positions": (tables, [(8, 1024, 3072), (1024, 3072)]),
    "the same for many sequences": (tables, [(32, 512, 1024), (512, 1024)]),
    "gates of channels": (gated, [(128, 49, 2048), (128, 1, 2048)]),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_read_in_whole_lines_is_not_gathered(name: str) -> None:
    text = source(WHOLE[name])
    assert "num_stages=1" not in text
    assert "COLS=64" in text


def test_a_softmax_by_hand_of_few_long_rows_stays_one_kernel() -> None:
    """Its sum does as its maximum: a kernel has one layout for both."""

    def softmax(x: Tensor) -> Tensor:
        power = (x - x.amax(-1, keepdim=True)).exp()
        return power / power.sum(-1, keepdim=True)

    assert "for start" in source((softmax, [(200, 50_257)]))
