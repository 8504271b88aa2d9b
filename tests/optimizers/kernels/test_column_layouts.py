"""Kernels that sum down columns fit an H100 whatever they read: compiled for it, without one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels import kernel_of_types
from torch import Tensor

from tracefuse.build.modules import machine_code
from tracefuse.optimizers.kernels.reduction_layouts import BESIDE, SUMS
from tracefuse.optimizers.kernels.text import kernel_source, launches

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets in this process")
aten = torch.ops.aten
f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16

H100_SHARED_NBYTES = 232_448


def norm_backward(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor) -> Any:
    return aten.native_layer_norm_backward(g, x, [w.shape[0]], mean, rstd, w, w, [True, True, True])


def norm_types(columns: int, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [((65536, columns), dtype)] * 2 + [((65536, 1), f32)] * 2 + [((columns,), dtype)]


def summed(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    total = sum(inputs[1:], inputs[0])
    return total, total.sum(0)


@pytest.mark.parametrize(
    ("fn", "types"),
    [
        (norm_backward, norm_types(8192, f32)),
        (norm_backward, norm_types(8192, bf16)),
        (summed, [((65536, 3072), f32)] * 8),
        (summed, [((65536, 3072), f64)] * 4),
    ],
    ids=["norm f32", "norm bf16", "eight inputs", "four f64 inputs"],
)
def test_loads_under_way_fit_shared_memory(fn: Callable[..., Any], types: list[Any]) -> None:
    for made in machine_code(kernel_of_types(fn, *types)):
        assert made.metadata.shared <= H100_SHARED_NBYTES


@pytest.mark.parametrize(
    ("rows", "block", "warps"),
    [(2, (2, 2048), 8), (4, (4, 1024), 4), (8, (8, 512), 4), (16, (16, 64), 4), (64, (64, 64), 8)],
)
def test_a_block_of_few_rows_has_all_of_them_and_many_columns(rows: int, block: tuple[int, int], warps: int) -> None:
    """Such as the gradient of keys that heads share."""
    (launch,) = launches(kernel_of_types(lambda x: x.sum(1), ((16, rows, 1 << 17), bf16)))
    assert ((launch.blocks["ROWS"], launch.blocks["COLS"]), launch.num_warps) == (block, warps)


@pytest.mark.parametrize("width", [1536, 2048])
def test_one_row_in_a_block_has_the_warps_of_its_elements(width: int) -> None:
    first, _ = launches(kernel_of_types(norm_backward, *norm_types(width, bf16)))
    assert (first.blocks["ROWS"], first.blocks["COLS"], first.num_warps) == (1, 2048, 4)


def test_few_columns_of_few_rows_are_shared_out_as_others() -> None:
    (launch,) = launches(kernel_of_types(lambda x: x.sum(1), ((2, 4, 4096), bf16)))
    assert launch.blocks["COLS"] == SUMS.cols


@pytest.mark.parametrize("rows", [2048, 16384, 65536])
def test_sums_alone_are_read_in_steps_by_what_runs_at_a_time(rows: int) -> None:
    kernel = kernel_of_types(lambda x: x.sum(0), ((rows, 2304), bf16))
    first, finish = launches(kernel)
    assert 264 <= first.programs <= 2 * SUMS.programs
    assert finish.programs < first.programs
    assert (first.blocks["COLS"], "num_stages" in kernel_source(kernel)) == (SUMS.cols, True)


def test_what_is_summed_and_written_too_keeps_whole_lines() -> None:
    first, _ = launches(kernel_of_types(summed, ((65536, 3072), bf16), ((65536, 3072), bf16)))
    assert first.blocks["COLS"] == BESIDE.cols
