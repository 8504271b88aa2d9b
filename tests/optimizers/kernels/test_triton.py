"""What kernels compute: numbers equal to ATen's, under Triton's interpreter.

Triton decides when it is imported whether it interprets, so the numbers are checked in a process of their own:
`test_numbers_under_the_interpreter` runs the rest of this file and those called in `FILES` with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from interpreter import INTERPRETED, interpreted, passed_under_the_interpreter
from kernel_programs import POINTWISE, SHAPED, rand
from kernels import check_kernel, check_trace, kernel_of, kernel_of_op, kernel_of_types, run_poisoned, small_gpu
from programs import PROGRAMS
from torch import Tensor

import tracefuse
from tracefuse.build.modules import launcher
from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.ops import op_name

aten = torch.ops.aten
f32, f64, bf16, f16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


FILES = {
    "kernels": (
        "optimizers/kernels/test_triton.py",
        "optimizers/kernels/test_overwriting.py",
        "optimizers/sizes/test_arguments.py",
        "explorer/dynamo/test_sizes_of_kernels.py",
        "optimizers/lowering/test_expressions.py",
        "optimizers/lowering/test_gathers.py",
        "optimizers/lowering/test_scans.py",
        "optimizers/fuse/test_long_sums.py",
        "optimizers/fuse/test_casts.py",
        "optimizers/fuse/test_dropout.py",
        "optimizers/fuse/test_compared.py",
        "explorer/build/test_tuning.py",
        "explorer/training/test_gradients.py",
    ),
    "formulas": (
        "optimizers/lowering/test_activations.py",
        "optimizers/lowering/test_windows.py",
        "optimizers/kernels/test_what_sums_read.py",
        "optimizers/fuse/test_norms.py",
        "optimizers/fuse/test_convolutions.py",
        "optimizers/channels_last/test_channels_last.py",
    ),
    "operators": (
        "optimizers/linear_cross_entropy/test_kernel.py",
        "explorer/device/test_embedding_gradient.py",
    ),
}
"""By process, so that none takes long."""
LEAST = {"kernels": len(POINTWISE) + len(SHAPED), "formulas": 230, "operators": 60}
"""Tests that pass there."""


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
@pytest.mark.parametrize("group", FILES)
def test_numbers_under_the_interpreter(group: str) -> None:
    files = [Path(__file__).parents[2] / name for name in FILES[group]]
    assert passed_under_the_interpreter(files, "-m", "not gpu", timeout=1200) > LEAST[group]


# --- pointwise --------------------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("dtype", [f32, bf16, f64], ids=["f32", "bf16", "f64"])
@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise(name: str, dtype: torch.dtype) -> None:
    """1037 elements: two programs, the second one mostly masked."""
    x, y = rand(17, 61, dtype=dtype), rand(61, dtype=dtype)
    check_kernel(*kernel_of(POINTWISE[name], x, y.expand(17, 61).clone() if "backward" in name else y))


def steps(x: Tensor) -> Tensor:
    """Euler's: each op reads the one before."""
    for _ in range(400):
        x = x + 0.01 * torch.sin(x)
    return x


def test_a_chain_of_any_length_is_one_kernel() -> None:
    kernel, inputs = kernel_of(steps, rand(61))
    assert kernel.source.count("tl.sin") == 400
    if INTERPRETED:
        check_kernel(kernel, inputs)


PADDED: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "rows": (lambda x: aten.constant_pad_nd(x[:, :61] * 2, [0, 3, 0, 1]), [(15, 64)]),
    "a slice's gradient": (
        lambda x: aten.constant_pad_nd(aten.slice_backward(x, [7, 61], 1, 3, 61, 1), [0, 3]),
        [(7, 58)],
    ),
    "a concatenation of rows": (
        lambda x, y: aten.constant_pad_nd(torch.cat([x * 2, y]), [0, 0, 0, 1]),
        [(8, 31), (7, 31)],
    ),
    "padded in front": (lambda x: aten.constant_pad_nd(aten.constant_pad_nd(x * 2, [3, 0]), [0, 2]), [(15, 58)]),
}


@interpreted
@pytest.mark.parametrize("name", PADDED)
def test_what_is_padded_reads_no_memory_but_its_inputs(name: str) -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    program, shapes = PADDED[name]
    kernel, inputs = kernel_of(program, *(rand(*shape) for shape in shapes))
    memory = {address for t in inputs for address in range(t.data_ptr(), t.data_ptr() + t.nbytes, t.element_size())}
    load, read = InterpreterBuilder.create_masked_load, set[int]()

    def noted(self: Any, places: Any, mask: Any, *rest: Any) -> Any:
        read.update(places.data[mask.data].tolist())
        return load(self, places, mask, *rest)

    with mock.patch.object(InterpreterBuilder, "create_masked_load", noted):
        check_kernel(kernel, inputs)
    assert read
    assert read <= memory


@interpreted
def test_nan_goes_where_aten_lets_it_go() -> None:
    x = torch.tensor([float("nan"), 1.0, -2.0, float("inf")])
    y = torch.tensor([1.0, float("nan"), float("nan"), float("-inf")])
    check_kernel(*kernel_of(lambda x, y: (x.relu(), torch.maximum(x, y), x.clamp(0, 1), torch.isnan(x + y)), x, y))
    check_kernel(*kernel_of(lambda x, y: ((x * 1).amax(-1), (y * 1).amin(-1)), x.view(2, 2), y.view(2, 2)))


INF, NAN = float("inf"), float("nan")


@interpreted
@pytest.mark.parametrize("dtype", [f32, f64, bf16], ids=["f32", "f64", "bf16"])
@pytest.mark.parametrize("width", [4, 17_008, 17_009], ids=["held", "in a loop", "in a loop, rows not aligned"])
def test_statistics_of_rows_that_are_not_finite(width: int, dtype: torch.dtype) -> None:
    """NaN beside an infinity, infinities of one sign and of both."""
    rows = [[NAN, INF, 1, 2], [INF, 1, NAN, 2], [NAN, -INF, -INF, -INF], [-INF] * 4, [INF] * 4, [INF, -INF, 0, 1]]
    x = torch.full((7, width), -INF)
    x[:6, :4] = torch.tensor(rows)
    x[6] = 1.0
    x = x.to(dtype)
    check_kernel(*kernel_of(lambda x: (x * 1).logsumexp(-1), x))
    check_kernel(*kernel_of(lambda x: (x * 1).softmax(-1), x))
    check_kernel(*kernel_of(lambda x: (x * 1).log_softmax(-1), x))


@interpreted
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("correction", [3, 4, 5])
def test_a_variance_without_degrees_of_freedom(correction: int, dim: int) -> None:
    """ATen divides by zero: equal elements yield NaN, others infinity."""
    x = rand(4, 4)
    x[:, 1], x[1] = 2.0, 2.0
    check_kernel(*kernel_of(lambda x: torch.var_mean(x * 1, dim, correction=correction, keepdim=True), x))
    check_kernel(*kernel_of(lambda x: torch.var(x * 1, dim, correction=correction), x))


@interpreted
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_integers_and_booleans(dtype: torch.dtype) -> None:
    x, y = torch.arange(40).to(dtype).view(5, 8), (torch.arange(40).view(5, 8) % 3).to(dtype)
    check_kernel(*kernel_of(lambda x, y: ((x == y), torch.where(x > y, x, y), x.to(f32) / 2), x, y))
    if dtype in (torch.int64, torch.int32):
        check_kernel(*kernel_of(lambda x, y: (x * 3 + y, (x - y).sum(-1), x & y), x, y))


# --- shapes, views, rows ----------------------------------------------------------------------------------------------


ON_A_SMALL_GPU: dict[str, list[tuple[int, ...]]] = {
    "sum of columns in steps": [(1126, 300)],
    "places in long rows": [(11, 16501)],
    "softmax of long rows": [(2, 6, 17000)],
    "log_softmax of long, odd rows": [(16, 16501)],
    "beginnings of long, aligned rows": [(9, 16512)],
    "layer norm of long rows": [(9, 16500), (16500,)],
}
"""Shapes by names of `SHAPED`: of fewer rows, which the interpreter reads one by one."""


@interpreted
@pytest.mark.parametrize("name", SHAPED)
def test_shapes(name: str) -> None:
    fn, shapes = SHAPED[name]
    with small_gpu() if name in ON_A_SMALL_GPU else nullcontext():
        check_kernel(*kernel_of(fn, *(rand(*shape) for shape in ON_A_SMALL_GPU.get(name, shapes))))


@pytest.mark.parametrize("name", ON_A_SMALL_GPU)
def test_on_a_small_gpu_fewer_rows_have_the_same_kernel(name: str) -> None:
    fn, shapes = SHAPED[name]
    large = kernel_of_types(fn, *((shape, f32) for shape in shapes))
    with small_gpu():
        small = kernel_of_types(fn, *((shape, f32) for shape in ON_A_SMALL_GPU[name]))
        assert without_numbers(small) == without_numbers(large)


def without_numbers(kernel: Kernel) -> list[str]:
    lines = kernel.source.replace(kernel.name, "name").splitlines()
    return [re.sub(r"\d+", "0", line) for line in lines if not line.startswith("#")]


@interpreted
@pytest.mark.parametrize("dtype", [bf16, f16], ids=["bf16", "f16"])
@pytest.mark.parametrize("name", ["softmax", "layer norm", "rms norm by hand", "rotary", "cat", "mean, var"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    fn, shapes = SHAPED[name]
    check_kernel(*kernel_of(fn, *(rand(*shape, dtype=dtype) for shape in shapes)))


@interpreted
def test_layer_norm_backward() -> None:
    g, x, w = rand(6, 33), rand(6, 33), rand(33)
    mean, rstd = torch.native_layer_norm(x, [33], w, None, 1e-5)[1:]

    def of_input(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor) -> Tensor:
        return aten.native_layer_norm_backward(g, x, [33], mean, rstd, w, None, [True, False, False])[0] + g

    def of_all(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return aten.native_layer_norm_backward(g * 2, x, [33], mean, rstd, w, w, [True, True, True])

    check_kernel(*kernel_of(of_input, g, x, mean, rstd, w))
    check_kernel(*kernel_of(of_all, g, x, mean, rstd, w))


@interpreted
def test_fused_rms_norm_and_its_backward() -> None:
    x, w, grad = rand(5, 33).requires_grad_(), rand(33), rand(5, 33)
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    y = x * rstd * w
    (expected,) = torch.autograd.grad(y, x, grad)
    x, y, rstd = x.detach(), y.detach(), rstd.detach()
    forward = kernel_of_op(aten._fused_rms_norm.default, [x, [33], w, 1e-6], (y, rstd))
    for found, wanted in zip(run_poisoned(*forward), (y, rstd), strict=True):
        torch.testing.assert_close(found, wanted)
    arguments = [grad, x, [33], rstd, w, [True, False]]
    (found,) = run_poisoned(*kernel_of_op(aten._fused_rms_norm_backward.default, arguments, (x, None)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@interpreted
@pytest.mark.parametrize(
    "x", [rand(9, 6).t(), rand(6, 18)[:, ::2], rand(6, 1).expand(6, 9), rand(3, 9, 2).permute(0, 2, 1).reshape(6, 9)]
)
def test_inputs_in_any_memory_order(x: Tensor) -> None:
    check_kernel(*kernel_of(lambda x, y: (x * 2 + y, x.sum(-1)), x, rand(6, 9)))


@interpreted
def test_an_input_in_another_memory_order_than_captured_is_copied() -> None:
    kernel, (x,) = kernel_of(lambda x: x * 2 + 1, rand(6, 9))
    (result,) = run_poisoned(kernel, [x.t().contiguous().t()])
    torch.testing.assert_close(result, x * 2 + 1)
    assert result.is_contiguous()


@interpreted
def test_results_keep_the_strides_that_aten_gives_them() -> None:
    x = rand(2, 5, 6, 7).to(memory_format=torch.channels_last)
    kernel, inputs = kernel_of(lambda x: x * 2 + 1, x)
    assert launcher(kernel)(*inputs).stride() == x.stride()
    check_kernel(kernel, inputs)


@interpreted
@pytest.mark.parametrize("seed", range(24))
def test_random_programs(seed: int) -> None:
    """Whatever `fuse` makes of a random program of pointwise ops, views, concatenations and row reductions, it computes it."""
    program, inputs = random_program(random.Random(seed))
    capture = tracefuse.capture(program, *inputs)
    check_trace(Fuse().run(capture.trace, lambda decision: None), capture, 1e-9)


@interpreted
@pytest.mark.parametrize(
    "name",
    [
        "gpt",
        "rope",
        "residual_chain",
        "autocast",
        "data_dependent_branch",
        "qkv_backward",
        "residual_block",
        "unet",
        "channels",
    ],
)
def test_programs_after_all_passes(name: str) -> None:
    capture = tracefuse.capture(PROGRAMS[name](f64).run)
    check_trace(capture.optimize(remat=0.5).trace, capture, 3e-2 if name == "autocast" else 1e-8)


@interpreted
@pytest.mark.parametrize(("dtype", "tolerance"), [(f64, 1e-9), (f32, 1e-5), (bf16, 4e-2)], ids=["f64", "f32", "bf16"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_with_ignored_rows(smoothing: float, dtype: torch.dtype, tolerance: float) -> None:
    """Forward and backward: 41 rows are more than one program holds, 300 classes no power of 2."""
    x, target = rand(41, 300, dtype=dtype).requires_grad_(), torch.arange(41) * 7 % 300
    target[::5] = -100

    def step() -> Tensor:
        loss = torch.nn.functional.cross_entropy(x * 2, target, label_smoothing=smoothing)
        loss.backward()
        return loss

    capture = tracefuse.capture(step)
    variant = capture.optimize().check()
    inside = {op_name(n) for kernel in variant.kernels for n in kernel.body.ops}
    assert {"aten.logsumexp.default", "aten.gather.default"} <= inside
    check_trace(variant.trace, capture, tolerance)


def random_program(choose: random.Random) -> tuple[Callable[..., Any], list[Tensor]]:
    """A function of two f64 tensors that applies ten random steps, and those tensors. Two of its values are returned."""
    rows, cols = choose.choice([(3, 4), (6, 8), (5, 33), (4, 64)])
    plan = [(choose.choice(list(STEPS)), choose.random(), choose.random()) for _ in range(10)]

    def program(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        values = [x, y]
        for name, one, other in plan:
            a, b = (values[int(which * len(values))] for which in (one, other))
            values.append(STEPS[name](a, b))
        return values[-1], values[len(values) // 2]

    return program, [rand(rows, cols, dtype=f64), rand(rows, cols, dtype=f64) + 0.1]


def _like(b: Tensor, a: Tensor) -> Tensor:
    """`b` in `a`'s shape if it has as many elements, else its first one, for every step to fit every pair."""
    return b.reshape(a.shape) if b.numel() == a.numel() else b.flatten()[0]


STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + _like(b, a),
    "mul": lambda a, b: a.tanh() * _like(b, a),
    "where": lambda a, b: torch.where(a > 0, a, _like(b, a)),
    "sin": lambda a, b: a.sin() * 2,
    "transpose": lambda a, b: a.transpose(0, -1),
    "contiguous": lambda a, b: a.transpose(0, -1).contiguous(),
    "halve": lambda a, b: a[..., : max(1, a.shape[-1] // 2)],
    "rotate": lambda a, b: torch.cat([-a[..., a.shape[-1] // 2 :], a[..., : a.shape[-1] // 2]], -1),
    "cat": lambda a, b: torch.cat([a, a.cos()], 0),
    "reverse": lambda a, b: a[..., torch.arange(a.shape[-1] - 1, -1, -1)],
    "pick": lambda a, b: a.index_select(0, (a.flatten()[:5] > 0).long() * (a.shape[0] - 1)),
    "logsumexp": lambda a, b: a - a.logsumexp(-1, keepdim=True),
    "flatten": lambda a, b: a.reshape(a.shape[0], -1),
    "softmax": lambda a, b: torch.softmax(a, -1),
    "centre": lambda a, b: a - a.mean(-1, keepdim=True),
    "pad": lambda a, b: aten.slice_backward(a, [a.shape[0] + 2, *a.shape[1:]], 0, 1, a.shape[0] + 1, 1),
}
