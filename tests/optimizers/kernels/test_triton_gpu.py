"""Kernels on a GPU: the numbers of ATen, and time near what the bytes allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels import check_kernel, kernel_of
from programs import apply_rope
from test_triton import POINTWISE, SHAPED, rand

from tracefuse.build.modules import launcher

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


LARGE: dict[str, tuple[Callable[..., Any], list[tuple[tuple[int, ...], torch.dtype]]]] = {
    "gelu backward": (lambda g, x: aten.gelu_backward(g, x) * 2, [((8192, 3072), bf16)] * 2),
    "softmax": (lambda x: torch.softmax(x * 0.125, -1), [((8, 12, 1024, 1024), bf16)]),
    "rope f32": (apply_rope, [((4096, 10, 32, 128), f32), ((4096, 1, 1, 128), f32)]),
    "rope bf16": (apply_rope, [((4096, 10, 32, 128), bf16), ((4096, 1, 1, 128), f32)]),
    "layer norm": (
        lambda x, r, w, b: torch.native_layer_norm(x + r, [768], w, b, 1e-5),
        [*[((65536, 768), bf16)] * 2, *[((768,), bf16)] * 2],
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_time_is_near_that_of_a_copy_of_the_same_bytes(name: str) -> None:
    """Within 1.35 of a device-to-device copy that moves as many bytes. Prints the ratio."""
    fn, types = LARGE[name]
    kernel, inputs = kernel_of(fn, *(torch.randn(shape, device="cuda").to(dtype) for shape, dtype in types))
    source = torch.empty(kernel.nbytes // 2, dtype=torch.uint8, device="cuda")
    target, run = torch.empty_like(source), launcher(kernel)
    copy_ms, kernel_ms = median_ms(lambda: target.copy_(source)), median_ms(lambda: run(*inputs))
    print(f"{name}: {kernel_ms:.4f} ms, copy {copy_ms:.4f} ms, ratio {kernel_ms / copy_ms:.3f}")
    assert kernel_ms / copy_ms < 1.35


def median_ms(fn: Callable[[], object], repeats: int = 30) -> float:
    for _ in range(5):
        fn()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        fn()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)[repeats // 2]
