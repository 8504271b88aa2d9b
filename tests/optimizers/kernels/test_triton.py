"""What kernels compute: numbers equal to ATen's, under Triton's interpreter.

Triton decides when it is imported whether it interprets, so the numbers are checked in a process of their own:
`test_numbers_under_the_interpreter` runs the rest of this file and those called in `FILES` with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from kernels import check_kernel, kernel_of, kernel_of_op, run_poisoned
from programs import PROGRAMS, apply_rope
from torch import Tensor

import tracefuse
from tracefuse.build.modules import launcher
from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.ops import op_name
from tracefuse.optimizers.trace import Trace

aten = torch.ops.aten
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_numbers_under_the_interpreter")
f32, f64, bf16, f16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


FILES = (
    "optimizers/lowering/test_expressions.py",
    "optimizers/lowering/test_gathers.py",
    "optimizers/fuse/test_long_sums.py",
    "optimizers/fuse/test_dropout.py",
    "explorer/build/test_tuning.py",
)


def rand(*shape: int, dtype: torch.dtype = f32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=f64).to(dtype)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
def test_numbers_under_the_interpreter() -> None:
    files = [__file__, *(str(Path(__file__).parents[2] / name) for name in FILES)]
    command = [sys.executable, "-m", "pytest", *files, "-q", "-p", "no:cacheprovider", "-m", "not gpu"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[3]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > len(POINTWISE) + len(SHAPED)


# --- pointwise --------------------------------------------------------------------------------------------------------

POINTWISE: dict[str, Callable[..., Any]] = {
    "add alpha": lambda x, y: torch.add(x, y, alpha=3),
    "sub, rsub": lambda x, y: 2 - (x - y),
    "mul, div": lambda x, y: x * y / (y.abs() + 1),
    "neg, abs, sgn": lambda x, y: (-x).abs() + torch.sgn(y),
    "powers": lambda x, y: x**2 + x**3 + (y.abs() + 1) ** 0.5 + (y.abs() + 1) ** -0.5 + 1 / (y.abs() + 1),
    "exp, log": lambda x, y: (x.exp() + 1).log() + torch.exp2(y) + torch.log2(y.abs() + 1),
    "sin, cos, erf": lambda x, y: x.sin() * y.cos() + torch.erf(x),
    "sqrt, rsqrt": lambda x, y: (x * x + 1).sqrt() * (y * y + 1).rsqrt(),
    "floor, ceil": lambda x, y: x.floor() + y.ceil(),
    "sigmoid, tanh": lambda x, y: x.sigmoid() + y.tanh() + (1e-3 * y).tanh() * 1e3,
    "relu, leaky": lambda x, y: x.relu() + torch.nn.functional.leaky_relu(y, 0.1),
    "silu, softplus": lambda x, y: torch.nn.functional.silu(x) + torch.nn.functional.softplus(y),
    "gelu": lambda x, y: torch.nn.functional.gelu(x) + torch.nn.functional.gelu(y, approximate="tanh"),
    "gelu backward": lambda x, y: aten.gelu_backward(x, y) + aten.gelu_backward(y, x, approximate="tanh"),
    "silu, sigmoid, tanh backward": lambda x, y: (
        aten.silu_backward(x, y) + aten.sigmoid_backward(x, y) + aten.tanh_backward(x, y)
    ),
    "threshold, leaky backward": lambda x, y: (
        aten.threshold_backward(x, y, 0) + aten.leaky_relu_backward(x, y, 0.1, False)
    ),
    "clamps": lambda x, y: x.clamp(-0.5, 0.5) + y.clamp(min=0.1) + aten.clamp_max(x, 0.3),
    "maximum, minimum": lambda x, y: torch.maximum(x, y) + torch.minimum(x, 2 * y),
    "comparisons": lambda x, y: torch.where((x > y) & ~(x >= 0.5) | (y == x), x, 2.0 * y),
    "masked_fill": lambda x, y: x.masked_fill(y < 0, float("-inf")),
    "logical": lambda x, y: torch.logical_or(x > 0, torch.logical_not(y > 0)),
    "addcmul, lerp": lambda x, y: torch.addcmul(x, x, y, value=2) + torch.lerp(x, y, 0.25),
    "constants": lambda x, y: x * torch.full((), 3.0) + torch.ones_like(x) + torch.zeros_like(y),
    "arange": lambda x, y: x + torch.arange(2, 2 + 3 * x.shape[-1], 3),
    "to int and back": lambda x, y: (x * 8).to(torch.int32).to(x.dtype) + (y > 0).to(x.dtype),
}


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


@interpreted
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_integers_and_booleans(dtype: torch.dtype) -> None:
    x, y = torch.arange(40).to(dtype).view(5, 8), (torch.arange(40).view(5, 8) % 3).to(dtype)
    check_kernel(*kernel_of(lambda x, y: ((x == y), torch.where(x > y, x, y), x.to(f32) / 2), x, y))
    if dtype in (torch.int64, torch.int32):
        check_kernel(*kernel_of(lambda x, y: (x * 3 + y, (x - y).sum(-1), x & y), x, y))


# --- shapes, views, rows ----------------------------------------------------------------------------------------------

SHAPED: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "one element": (lambda x: x * 2 + 1, [(1, 1)]),
    "scalar": (lambda x: x * 2 + 1, [()]),
    "odd": (lambda x: x * 2 + 1, [(3, 5, 7)]),
    "broadcast": (lambda x, y: x.exp() * y, [(5, 1, 3), (4, 1)]),
    "broadcast costly, by row": (lambda x, y: x * y.exp(), [(6, 5, 33), (6, 1, 1)]),
    "broadcast costly, in the middle": (lambda x, y: x * y.sin(), [(3, 40, 7, 9), (3, 1, 7, 9)]),
    "broadcast costly, leading": (lambda x, y: x * y.cos(), [(5, 6, 3, 20), (3, 20)]),
    "views": (lambda x: x.view(6, 4, 5).transpose(1, 2).reshape(-1, 8).unsqueeze(1) + 1, [(2, 3, 20)]),
    "permute, t": (lambda x, y: x.permute(2, 0, 1) + y.t().unsqueeze(0), [(4, 5, 3), (5, 4)]),
    "slice, select": (lambda x: x[1:4, 2:9:3] * x[0, 2:9:3], [(5, 11)]),
    "split": (lambda x: [a * b for a, b in zip(*(x.split(4, -1) for x in (x, x + 1)), strict=True)], [(3, 8)]),
    "unbind": (lambda x: (x * 2).unbind(1)[1] + x.unbind(1)[0], [(3, 2, 5)]),
    "expand, repeat": (lambda x: (x.expand(4, 3, 5) * 2) + x.repeat(4, 1, 1), [(1, 3, 5)]),
    "cat": (lambda x, y: torch.cat([x * 2, y, x.exp()], 1), [(3, 4, 2), (3, 1, 2)]),
    "cat with an empty part": (lambda x: torch.cat([x[:, :0], x * 2, x[:, 3:]], 1), [(4, 6)]),
    "slice of cat": (lambda x, y: torch.cat([x, y], 0)[2:4] * 2, [(3, 5), (3, 5)]),
    "padded": (lambda x: aten.slice_backward(x * 2, [4, 9], 1, 3, 7, 1) + 1, [(4, 4)]),
    "padded on two sides": (lambda x: aten.constant_pad_nd(x * 2, [1, 2, 0, 3], 0.5) + 1, [(4, 6)]),
    "padded a little": (lambda x, y: aten.constant_pad_nd(x[:, :61] * y, [0, 3, 0, 1]), [(15, 64), (61,)]),
    "padded and cut": (lambda x: aten.constant_pad_nd(x[:7] * 2, [0, 0, 0, 1])[:7].exp(), [(8, 5)]),
    "selected": (lambda x: aten.select_backward(x * 2, [4, 3, 5], 1, 2), [(4, 5)]),
    "clone of a transpose": (lambda x: x.transpose(0, 1).clone(memory_format=torch.contiguous_format) * 2, [(17, 9)]),
    "sum of rows": (lambda x: (x * 2).sum(-1), [(5, 33)]),
    "sum over two dims, kept": (lambda x: x - x.sum((1, 2), keepdim=True), [(5, 3, 7)]),
    "mean, var": (lambda x: ((x * x).mean(-1), x.var(-1, keepdim=True), x.var(-1, correction=0)), [(5, 33)]),
    "amax, amin": (lambda x: ((x * 2).amax(-1), x.amin(-1)), [(5, 33)]),
    "long row": (lambda x: (x * 2).sum(-1) + 1, [(3, 3000)]),
    "everything to one number": (lambda x: x.square().mean(), [(7, 9)]),
    "sum of a broadcast": (lambda x: x.expand(5, 16).sum(-1), [(5, 1)]),
    "softmax": (lambda x: torch.softmax(x * 3, -1), [(2, 3, 17)]),
    "sum of columns": (lambda x: (x * 2).sum(0), [(100, 70)]),
    "sum of columns in steps": (lambda x: (x * 2).sum(0), [(9001, 300)]),
    "sum of columns and what follows": (lambda x, w: (x * 2, (x * 2).sum((0, 1)) * w + 1), [(6, 30, 33), (33,)]),
    "mean of columns": (lambda x: x.exp().mean(0, keepdim=True), [(77, 5)]),
    "sums in the middle": (lambda x: ((x * 2).sum(1), x.square().sum(1, keepdim=True)), [(3, 90, 5)]),
    "sum of everything": (lambda x: ((x * 2).sum(), x.square().mean()), [(150, 170)]),
    "sums of few long rows": (lambda x: (x * 2).sum(-1), [(3, 17000)]),
    "columns of whole rows": (lambda x: (y := torch.softmax(x, -1), (y * x).sum(0)), [(90, 17)]),
    "softmax of long rows": (lambda x: torch.softmax(x * 3, -1), [(2, 40, 17000)]),
    "log_softmax of long, odd rows": (lambda x: (torch.log_softmax(x, -1), x.amax(-1)), [(80, 16501)]),
    "beginnings of long, aligned rows": (lambda x: torch.log_softmax(x[:, :16501] * 2, -1), [(65, 16512)]),
    "layer norm of long rows": (lambda x, w: torch.native_layer_norm(x, [16500], w, w, 1e-5), [(66, 16500), (16500,)]),
    "segments": (lambda x, y, z: torch.cat([x * 2, y, z.exp()], 1), [(3, 4, 20), (3, 5, 20), (3, 11, 20)]),
    "sums of segments": (
        lambda x, y, z: (c := torch.cat([x.t(), y, z.exp()], 1), c.sum(0)),
        [(64, 100), (100, 128), (100, 70)],
    ),
    "read along rows": (lambda x, y: x.t() * 2 + y, [(70, 90), (90, 70)]),
    "read along several": (lambda x, y: x.permute(0, 3, 1, 2) * y, [(2, 7, 6, 40), (2, 40, 7, 6)]),
    "rolled softmax": (lambda x: torch.cat([(y := torch.softmax(x * 3, -1))[:, 4:], y[:, :4]], 1), [(4, 9)]),
    "log_softmax": (lambda x: torch.log_softmax(x * 3, -1), [(4, 100)]),
    "softmax backward": (lambda g, y: aten._softmax_backward_data(g, y, -1, f32) * 2, [(5, 33), (5, 33)]),
    "log_softmax backward": (lambda g, y: aten._log_softmax_backward_data(g, y, 1, f32), [(5, 33), (5, 33)]),
    "layer norm": (lambda x, w, b: torch.native_layer_norm(x * 2, [33], w, b, 1e-5), [(2, 5, 33), (33,), (33,)]),
    "layer norm over two": (lambda x: torch.native_layer_norm(x, [3, 7], None, None, 1e-5), [(5, 3, 7)]),
    "rms norm by hand": (lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w, [(5, 33), (33,)]),
    "rotary": (apply_rope, [(6, 5, 8, 16), (6, 1, 1, 16)]),
    "partly rotary": (apply_rope, [(6, 5, 8, 16), (6, 1, 1, 6)]),
}  # fmt: skip


@interpreted
@pytest.mark.parametrize("name", SHAPED)
def test_shapes(name: str) -> None:
    fn, shapes = SHAPED[name]
    check_kernel(*kernel_of(fn, *(rand(*shape) for shape in shapes)))


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
@pytest.mark.parametrize("name", ["gpt", "rope", "residual_chain", "autocast", "data_dependent_branch", "qkv_backward"])
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


def check_trace(trace: Trace, capture: tracefuse.Capture, tolerance: float) -> None:
    """With its kernels launched, `trace` yields what the captured program did."""
    launched = trace.copy()
    for node in launched.ops:
        node.target = launcher(node.target) if isinstance(node.target, Kernel) else node.target
    found = tracefuse.replay(launched, capture.example_inputs, capture.rng_states)
    for value, expected in zip(found, capture.replay(), strict=True):
        torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


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
