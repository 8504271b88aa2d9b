"""What pointwise kernels take by how their operands lie, beside what an H200 took."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tracefuse.optimizers.costs.strided import is_by_element, kernel_bytes

ROWS, WIDTH = 32_768, 2048
BF16, F32 = torch.bfloat16, torch.float32


def tensor(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(*(shape or (ROWS, WIDTH)), dtype=dtype, device="meta")


def half(dtype: torch.dtype) -> Tensor:
    return tensor(dtype, ROWS, 2 * WIDTH).chunk(2, -1)[1]


def expanded(dtype: torch.dtype) -> Tensor:
    return tensor(dtype, 1, ROWS // 16, WIDTH).expand(16, -1, -1)


def across(dtype: torch.dtype) -> Tensor:
    return tensor(dtype, WIDTH, ROWS).t()


MEASURED = {
    "half of a chunk, bfloat16, copy": ([half(BF16)], 157.66 / 66.69),
    "half of a chunk, bfloat16, sigmoid": ([half(BF16)], 185.5 / 72.35),
    "halves of a chunk, bfloat16, add": ([half(BF16), half(BF16)], 183.23 / 93.89),
    "one half of a chunk, bfloat16, mul": ([half(BF16), tensor(BF16)], 181.06 / 93.02),
    "half of a chunk, float32, copy": ([half(F32)], 98.85 / 66.21),
    "half of a chunk, float32, sigmoid": ([half(F32)], 109.38 / 67.46),
    "halves of a chunk, float32, add": ([half(F32), half(F32)], 118.62 / 95.26),
    "across, bfloat16, copy": ([across(BF16)], 459.07 / 66.69),
    "across, bfloat16, add": ([across(BF16), tensor(BF16)], 474.21 / 93.89),
    "across, float32, copy": ([across(F32)], 249.82 / 66.21),
    "across, float32, add": ([across(F32), tensor(F32)], 258.18 / 95.26),
}
"""Operands, and how many times as long as over contiguous ones ATen's kernel took: an H200, torch 2.11, 134 MB an operand."""


@pytest.mark.parametrize("name", MEASURED)
def test_what_lies_otherwise_takes_about_as_much_longer_as_was_measured(name: str) -> None:
    operands, longer = MEASURED[name]
    result = tensor(operands[0].dtype)
    alike = kernel_bytes([result for _ in operands], result)
    assert alike == (len(operands) + 1) * result.nbytes
    assert kernel_bytes(operands, result) / alike == pytest.approx(longer, rel=0.15)


@pytest.mark.parametrize(("dtype", "longer"), [(BF16, 167.87 / 93.89), (F32, 102.05 / 95.26)])
def test_what_is_broadcast_is_loaded_once_and_one_by_one(dtype: torch.dtype, longer: float) -> None:
    x, result = tensor(dtype, 16, ROWS // 16, WIDTH), tensor(dtype, 16, ROWS // 16, WIDTH)
    found = kernel_bytes([x, expanded(dtype)], result) / kernel_bytes([x, x], result)
    assert found == pytest.approx(longer, rel=0.15)
    assert kernel_bytes([x, expanded(dtype)[:1]], result) == kernel_bytes([x, expanded(dtype)], result)


@pytest.mark.parametrize(
    "lie",
    [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x.unflatten(0, (8, -1)).permute(2, 0, 1),
        lambda x: x[:, None],
    ],
    ids=["in rows", "in columns", "permuted", "of one"],
)
def test_operands_that_lie_alike_are_loaded_as_vectors(lie) -> None:
    x = tensor(BF16, 64, 32)
    assert kernel_bytes([lie(x), lie(x)], lie(x)) == 3 * x.nbytes


def test_a_dimension_of_one_lies_anywhere() -> None:
    one = torch.empty_strided((64, 1), (1, 7), device="meta")
    assert kernel_bytes([one], tensor(F32, 64, 1)) == 2 * 64 * 4


def test_doubles_are_as_fast_one_by_one() -> None:
    x, wide = tensor(torch.float64), half(torch.float64)
    assert kernel_bytes([wide, wide], x) == kernel_bytes([x, x], x) == 3 * x.nbytes


BY_ELEMENT = {
    "the same": ([tensor(BF16)], tensor(BF16), False),
    "rows that end before the next begins": ([half(BF16)], tensor(BF16), True),
    "the same in float32": ([half(F32)], tensor(F32), True),
    "keys that heads share": ([expanded(BF16)], tensor(BF16, 16, ROWS // 16, WIDTH), True),
    "by a number in memory": ([tensor(BF16), torch.empty((), dtype=BF16, device="meta")], tensor(BF16), True),
    "across": ([across(BF16)], tensor(BF16), False),
    "three in float32": ([half(F32), tensor(F32)], tensor(F32), False),
}


@pytest.mark.parametrize("name", BY_ELEMENT)
def test_a_kernel_of_these_strides_is_worth_it_where_only_offsets_take_long(name: str) -> None:
    operands, result, expected = BY_ELEMENT[name]
    assert is_by_element(operands, result) == expected
