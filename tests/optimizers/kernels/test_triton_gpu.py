"""Kernels on a GPU have the numbers of ATen; `tests/bench/kernels.py` sets their times beside what the bytes allow."""

from __future__ import annotations

import pytest
import torch
from kernels import check_kernel, kernel_of
from shaped import POINTWISE, SHAPED, rand

pytestmark = pytest.mark.gpu
aten = torch.ops.aten
f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize("dtype", [f32, bf16, torch.float64], ids=str)
@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise(name: str, dtype: torch.dtype) -> None:
    x, y = rand(17, 61, dtype=dtype).cuda(), rand(61, dtype=dtype).cuda()
    fn = POINTWISE[name]
    if name == "arange":
        pytest.skip("it makes its constants on the CPU")
    check_kernel(*kernel_of(fn, x, y.expand(17, 61).clone() if "backward" in name else y))


@pytest.mark.parametrize("dtype", [f32, bf16, f16], ids=str)
@pytest.mark.parametrize("name", SHAPED)
def test_shapes(name: str, dtype: torch.dtype) -> None:
    fn, shapes = SHAPED[name]
    if "softmax backward" in name and dtype is not f32:
        pytest.skip("its input_dtype is f32")
    check_kernel(*kernel_of(fn, *(rand(*shape, dtype=dtype).cuda() for shape in shapes)))
