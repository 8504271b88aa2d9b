"""Pools, upsampling and their backwards in kernels, against ATen in float64: under the interpreter, and on a GPU.

`test_numbers_under_the_interpreter` in `test_triton` runs this file with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interpreter import INTERPRETED, interpreted
from kernels import TOLERANCE, kernel_of, run_poisoned, triton_ir
from torch import Tensor

import tracefuse
from tracefuse.config.configuration import Config
from tracefuse.optimizers.formulas.windows import again
from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.kernels.fusible import refusal
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.lowering.gathers import index_bound
from tracefuse.optimizers.lowering.windows import WINDOWS
from tracefuse.optimizers.passes import Decision
from tracefuse.optimizers.trace import Trace

aten = torch.ops.aten
f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16


def pool_2d(
    *shape: int, of: Callable[..., Any] = F.max_pool2d, **options: Any
) -> tuple[Callable[..., Any], tuple[int, ...]]:
    return lambda x: of(x, **options), shape


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "max": pool_2d(2, 3, 8, 10, kernel_size=2),
    "max, overlapping": pool_2d(2, 3, 9, 11, kernel_size=3, stride=2, padding=1),
    "max, every window another": pool_2d(1, 2, 7, 6, kernel_size=3, stride=1, padding=1),
    "max, ceil": pool_2d(2, 3, 8, 9, kernel_size=3, stride=2, ceil_mode=True),
    "max, unequal": pool_2d(2, 3, 8, 9, kernel_size=(2, 3), stride=(3, 1), padding=(1, 0)),
    "max, gaps": pool_2d(2, 3, 9, 11, kernel_size=2, stride=3),
    "max, one column": pool_2d(2, 3, 9, 1, kernel_size=(3, 1), padding=(1, 0)),
    "max, no batch": pool_2d(3, 9, 8, kernel_size=2),
    "max 3d": pool_2d(2, 3, 5, 6, 7, of=F.max_pool3d, kernel_size=2, padding=1, ceil_mode=True),
    "max 1d": pool_2d(2, 3, 11, of=F.max_pool1d, kernel_size=3, stride=2, padding=1),
    "average": pool_2d(2, 3, 8, 10, of=F.avg_pool2d, kernel_size=2),
    "average, overlapping": pool_2d(2, 3, 9, 11, of=F.avg_pool2d, kernel_size=3, stride=2, padding=1),
    "average, ceil": pool_2d(2, 3, 9, 11, of=F.avg_pool2d, kernel_size=3, stride=2, padding=1, ceil_mode=True),
    "average, inside": pool_2d(
        2, 3, 9, 8, of=F.avg_pool2d, kernel_size=3, stride=2, padding=1, ceil_mode=True, count_include_pad=False
    ),
    "average, divisor": pool_2d(2, 3, 9, 11, of=F.avg_pool2d, kernel_size=3, stride=1, padding=1, divisor_override=5),
    "average, unequal": pool_2d(2, 3, 9, 11, of=F.avg_pool2d, kernel_size=(3, 2), stride=(1, 3), padding=(1, 0)),
    "average 3d": pool_2d(1, 3, 6, 7, 5, of=F.avg_pool3d, kernel_size=3, stride=2, padding=1),
    "average 3d, plain": pool_2d(1, 3, 6, 8, 4, of=F.avg_pool3d, kernel_size=2),
    "average 1d": pool_2d(2, 3, 11, of=F.avg_pool1d, kernel_size=3, stride=2, padding=1),
    "adaptive average": pool_2d(2, 3, 9, 12, of=F.adaptive_avg_pool2d, output_size=3),
    "adaptive average 3d": pool_2d(1, 3, 4, 6, 8, of=F.adaptive_avg_pool3d, output_size=(2, 3, 4)),
    "adaptive max": pool_2d(2, 3, 9, 12, of=F.adaptive_max_pool2d, output_size=(3, 2)),
    "adaptive max, to one": pool_2d(2, 3, 4, 5, of=F.adaptive_max_pool2d, output_size=1),
    "nearest 1d": pool_2d(2, 3, 7, of=F.interpolate, scale_factor=3),
    "nearest 2d": pool_2d(2, 3, 5, 7, of=F.interpolate, scale_factor=2),
    "nearest 2d, to a size": pool_2d(2, 3, 5, 7, of=F.interpolate, size=(15, 14)),
    "nearest 3d": pool_2d(1, 3, 2, 5, 3, of=F.interpolate, scale_factor=2),
    "padded and cropped": (lambda x: F.pad(x, (1, -2, -1, 3)), (2, 3, 5, 7)),
    "cropped": (lambda x: F.pad(x, (-1, -1)), (2, 3, 5, 7)),
    "shuffled": (lambda x: F.pixel_shuffle(x, 2), (2, 12, 3, 5)),
    "unshuffled": (lambda x: F.pixel_unshuffle(x, 3), (2, 2, 6, 9)),
}
FORMATS = ("contiguous", "channels last", "strided")


def sample(shape: tuple[int, ...], how: str, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Different numbers, of which many are equal once rounded, so that which of equal ones is the largest is seen."""
    made = (torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=f64) * 4).round() / 4
    made = made.to(device, dtype)
    if how == "channels last" and len(shape) in (4, 5):
        return made.to(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)
    return made.repeat_interleave(2, -1)[..., ::2] if how == "strided" else made


def train(program: Callable[..., Any], x: Tensor) -> None:
    """Forward and backward, with a gradient of its own for each element."""
    y = program(x.detach().requires_grad_() * 1.5) * 2
    y.backward(torch.arange(y.numel(), dtype=x.dtype, device=x.device).reshape(y.shape) % 7 - 3)


def check(program: Callable[..., Any], x: Tensor) -> None:
    """Every op over windows alone as a kernel yields what ATen yields on the CPU in float64."""
    checked = 0
    with tracefuse.capture() as capture:
        train(program, x)
    exact = dict(zip(capture.trace.graph.nodes, values(capture.trace, capture.example_inputs), strict=True))
    for node in capture.trace.ops:
        if node.target not in ALL or refusal(node):
            continue
        arguments, call = node.all_input_nodes, node

        def alone(*tensors: Tensor, call: Any = call, arguments: Any = arguments) -> Any:
            given = dict(zip(arguments, tensors, strict=True))
            args, kwargs = torch.fx.node.map_arg((call.args, call.kwargs), given.__getitem__)
            found = call.target(*args, **kwargs)
            return [found[0] * 1, found[1]] if isinstance(found, (tuple, list)) else found * 1

        inputs = [exact[a] for a in arguments]
        kernel, read = kernel_of(alone, *inputs)
        wanted = alone(*(t.cpu().double() if t.is_floating_point() else t.cpu() for t in inputs))
        wanted = wanted if isinstance(wanted, list) else [wanted]
        for found, true in zip(run_poisoned(kernel, read), wanted, strict=True):
            assert found.dtype in (x.dtype, torch.int64)
            close = {"rtol": TOLERANCE[x.dtype], "atol": TOLERANCE[x.dtype]}
            torch.testing.assert_close(found.to("cpu", true.dtype), true, **close)
        checked += 1
    assert checked == 2


ALL = {*WINDOWS, aten.constant_pad_nd.default, aten.pixel_shuffle.default, aten.pixel_unshuffle.default}


def values(trace: Trace, inputs: Any) -> list[Any]:
    """What every node of a trace yields."""
    found: dict[torch.fx.Node, Any] = dict(zip(trace.placeholders, inputs, strict=True))
    for node in trace.ops:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), found.__getitem__)
        found[node] = node.target(*args, **kwargs)
    return [found.get(node) for node in trace.graph.nodes]


@interpreted
@pytest.mark.parametrize("how", FORMATS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers(name: str, how: str) -> None:
    program, shape = PROGRAMS[name]
    check(program, sample(shape, how, f64 if how == "strided" else f32))


@interpreted
@pytest.mark.parametrize("name", ["max, overlapping", "average, inside", "adaptive average", "nearest 2d"])
def test_numbers_in_halves(name: str) -> None:
    program, shape = PROGRAMS[name]
    check(program, sample(shape, "contiguous", bf16))


@pytest.mark.gpu
@pytest.mark.parametrize("how", FORMATS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_on_a_gpu(name: str, how: str) -> None:
    program, shape = PROGRAMS[name]
    check(program, sample(shape, how, f64 if how == "strided" else f32, "cuda"))


@interpreted
def test_nan_and_infinity_go_where_aten_lets_them_go() -> None:
    x = sample((1, 1, 6, 7), "contiguous", f32)
    x[0, 0, 1, 1], x[0, 0, 3, 3], x[0, 0, 3, 4], x[0, 0, 5, 0] = torch.nan, torch.nan, torch.nan, torch.inf
    check_nan(lambda x: list(aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])), x)
    check_nan(lambda x: list(aten.max_pool2d_with_indices(x, [2, 2])), torch.full((1, 1, 4, 4), -torch.inf))
    check_nan(lambda x: aten.avg_pool2d(x, [3, 3], [2, 2], [1, 1]), x)


def check_nan(program: Callable[..., Any], x: Tensor) -> None:
    kernel, inputs = kernel_of(program, x)
    wanted = program(x)
    for found, true in zip(run_poisoned(kernel, inputs), wanted if isinstance(wanted, list) else [wanted], strict=True):
        torch.testing.assert_close(found, true, equal_nan=True)


@pytest.mark.skipif(INTERPRETED, reason="Triton interprets in this process")
@pytest.mark.parametrize("name", PROGRAMS)
def test_triton_takes_the_text(name: str) -> None:
    program, shape = PROGRAMS[name]
    kernel, _ = kernel_of(lambda x: program(x * 1.5) * 2, sample(shape, "contiguous", bf16))
    assert "tt.load" in triton_ir(kernel)


# --- what fuses, and what it costs ------------------------------------------------------------------------------------


def fused(fn: Callable[..., Any], *inputs: Tensor) -> tuple[list[Kernel], list[Decision]]:
    decisions: list[Decision] = []
    trace = Fuse().run(tracefuse.capture(fn, *inputs).trace, decisions.append)
    return [n.target for n in trace.ops if isinstance(n.target, Kernel)], decisions


def test_a_pool_of_apart_windows_shares_a_kernel_with_what_it_reads() -> None:
    (kernel,), _ = fused(lambda x: F.avg_pool2d(torch.tanh(x * 2), 2) + 1, torch.randn(2, 3, 16, 16))
    assert kernel.name.startswith("fused_mul_tanh_avg_pool2d_add")
    assert kernel.nbytes_read == 2 * 3 * 16 * 16 * 4
    assert kernel.nbytes_written == kernel.nbytes_read // 4


def test_what_overlapping_windows_read_is_computed_once_where_that_takes_less_time() -> None:
    kernels, decisions = fused(
        lambda x: F.max_pool2d(torch.tanh(torch.sigmoid(x) * 2).erf(), 5, 1, 2) + 1, torch.randn(2, 3, 32, 32)
    )
    assert [[n.target for n in k.body.ops if n.target in WINDOWS] != [] for k in kernels] == [False, True]
    (split,) = [d for d in decisions if d.action == "split"]
    assert "reads each element of erf 25 times" in split.reason
    assert "as long as moving" in split.reason


def test_a_sum_or_product_is_computed_again_rather_than_stored() -> None:
    (kernel,), _ = fused(lambda x: F.max_pool2d(x * 2, 3, 2, 1) + 1, torch.randn(2, 3, 32, 32))
    assert kernel.name.startswith("fused_mul_max_pool2d_with_indices_add")


def test_the_backward_of_a_pool_reads_where_the_largest_was() -> None:
    """Each element of the gradient would look through its windows again: softplus four times, four times."""
    with tracefuse.capture() as capture:
        train(lambda x: F.max_pool2d(F.softplus(x), 2), torch.randn(2, 3, 8, 8))
    variant = capture.optimize()
    (backward,) = [k for k in variant.kernels if "backward" in k.name]
    assert aten.max_pool2d_with_indices.default not in {node.target for node in backward.body.ops}
    said = [d.reason for p in variant.passes if p.name == "remat" for d in p.decisions]
    assert any("look through its windows" in reason for reason in said)


def test_what_every_channel_reads_is_computed_once_where_that_takes_less_time() -> None:
    """Programs that sum down the images of a channel each would compute what is broadcast over the channels."""

    def bias_below(y: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        wide = grad * torch.tanh(torch.tanh(y)).expand_as(grad)
        return wide, wide.sum((0, 2, 3))

    kernels, decisions = fused(bias_below, torch.randn(8, 1, 32, 32), torch.randn(8, 64, 32, 32))
    assert [aten.tanh.default in {n.target for n in k.body.ops} for k in kernels] == [True, False]
    (split,) = [d for d in decisions if d.action == "split"]
    assert "reads each element of tanh_1 64 times" in split.reason
    of_two, _ = fused(bias_below, torch.randn(8, 1, 32, 32), torch.randn(8, 2, 32, 32))
    assert len(of_two) == 1, "it is computed while the memory is waited for"


def test_the_backward_of_a_pool_does_not_read_the_pools_operand() -> None:
    (kernel,) = [k for k in trained_kernels(lambda x: F.max_pool2d(x, 2)) if "backward" in k.name]
    grad, indices = 2 * 3 * 4 * 4 * 4, 2 * 3 * 4 * 4 * 8
    assert kernel.nbytes_read == grad + indices


def test_trials_of_a_maximums_backward_take_indices_of_its_planes() -> None:
    """ATen's kernels for channels-last tensors write where the index says."""
    (kernel,) = [k for k in trained_kernels(lambda x: F.max_pool2d(x, 2)) if "backward" in k.name]
    assert index_bound(kernel.body) == 8 * 8


def trained_kernels(program: Callable[..., Any]) -> tuple[Kernel, ...]:
    with tracefuse.capture() as capture:
        train(program, torch.randn(2, 3, 8, 8))
    return capture.variant(Config.off().changed(decompose=True, fuse=True)).check().kernels


REFUSED: dict[str, tuple[Callable[..., Any], tuple[int, ...], str]] = {
    "too many taps": (lambda x: F.max_pool2d(x, 9), (1, 1, 18, 18), "made up of 81 others"),
    "unequal windows": (lambda x: F.adaptive_avg_pool2d(x, 3), (1, 1, 8, 8), "do not divide"),
    "an odd factor": (lambda x: F.interpolate(x, size=(7, 7)), (1, 1, 4, 4), "do not repeat"),
    "between pixels": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (1, 1, 4, 4), "no Triton form"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_others_stay_with_aten(name: str) -> None:
    program, shape, reason = REFUSED[name]
    reasons = [found for n in tracefuse.capture(program, torch.randn(shape)).trace.ops if (found := refusal(n))]
    assert reason in reasons[0]


def test_how_often_an_element_is_read() -> None:
    def reads(program: Callable[..., Any], *shape: int) -> float:
        (node,) = [n for n in tracefuse.capture(program, torch.randn(shape)).trace.ops if n.target in WINDOWS]
        return again(node)

    assert reads(lambda x: F.avg_pool2d(x, 2), 1, 1, 8, 8) == 1
    assert reads(lambda x: F.avg_pool2d(x, 3, 1, 1), 1, 1, 8, 8) == 9
    assert reads(lambda x: F.interpolate(x, scale_factor=2), 1, 1, 8, 8) == 4
