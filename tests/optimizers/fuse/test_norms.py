"""Norms in kernels: their numbers under Triton's interpreter, the bytes that a block of them moves, and what they take of an
H100, compiled without one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from interpreter import INTERPRETED, interpreted
from kernels import check_trace, kernel_of, kernel_of_types, run_poisoned, small_gpu
from torch import Tensor, nn

import tracefuse
from tracefuse.build.modules import machine_code, resources
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.ops import op_name
from tracefuse.optimizers.trace import phase

f32, f64, bf16, f16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
compiled = pytest.mark.skipif(INTERPRETED, reason="Triton interprets in this process")
Step = Callable[[], Tensor]


# --- statistics -------------------------------------------------------------------------------------------------------


def _columns(x: Tensor) -> tuple[Tensor, ...]:
    return torch.var_mean(x * 1.0, (0, 2, 3), correction=0)


@interpreted
@pytest.mark.parametrize("is_last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("mean", [0.0, 1e2, 1e4])
def test_moments_are_exact_whatever_the_mean(mean: float, is_last: bool) -> None:
    """The variance of numbers of standard deviation 1: E[x²] - E[x]² would lose all of its digits at a mean of 1e4."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(9, 3, 40, 53, generator=generator) + mean
    x[0] = 0.0 if mean == 1e2 else x[0]  # a first image unlike all others
    x = x.to(memory_format=torch.channels_last) if is_last else x
    kernel, inputs = kernel_of(_columns, x)
    exact = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    var, average = run_poisoned(kernel, inputs)
    assert ((var.double() - exact[0]).abs() / exact[0]).max() <= 5e-6
    assert (average.double() - exact[1]).abs().max() <= 3e-7 * (1 + mean)


@interpreted
@pytest.mark.parametrize("shape", [(12, 4, 23, 22), (150, 3, 30, 33)], ids=["a step", "several steps"])
def test_moments_of_lines_are_exact(shape: tuple[int, ...]) -> None:
    """The channels of an image lie in many lines, of which a program reads some, block by block, and each ends in a mask."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)) + 1e3
    with small_gpu():
        kernel, inputs = kernel_of(_columns, x)
        assert "line = " in kernel.source
        assert ("for step" in kernel.source) is (shape[0] > 100)
        var, average = run_poisoned(kernel, inputs)
    exact = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    assert ((var.double() - exact[0]).abs() / exact[0]).max() <= 5e-6
    assert (average.double() - exact[1]).abs().max() <= 3e-4


@interpreted
@pytest.mark.parametrize("mean", [0.0, 1e2, 1e4])
def test_moments_of_long_rows_are_exact_whatever_the_mean(mean: float) -> None:
    x = torch.randn(11, 17001, generator=torch.Generator().manual_seed(3)) + mean
    x[5] = 7.0
    x[6, 0], x[7, 0] = 1e4, float("inf")
    with small_gpu():
        kernel, inputs = kernel_of(lambda x: torch.var_mean(x * 1.0, 1, correction=0), x)
        assert kernel.source.count("for start in") == 1
        var, average = run_poisoned(kernel, inputs)
    exact = torch.var_mean(x.double(), 1, correction=0)
    assert var[5] == 0
    assert torch.isnan(var[7])
    assert torch.isinf(average[7])
    finite = torch.arange(11) != 7
    assert ((var.double() - exact[0]).abs() / exact[0].clamp_min(0.5))[finite].max() <= 5e-6
    assert (average.double() - exact[1]).abs()[finite].max() <= 3e-7 * (1 + mean)


@interpreted
def test_equal_elements_have_no_variance_and_nan_stays() -> None:
    x = torch.full((9, 3, 40, 53), 1e3 / 3)
    x[:, 1, 3, 4] = float("nan")
    var, mean = run_poisoned(*kernel_of(_columns, x))
    assert var[0] == var[2] == 0
    assert torch.isnan(var[1])
    assert torch.isnan(mean[1])


# --- training steps ---------------------------------------------------------------------------------------------------


def _normed(norm: nn.Module, x: Tensor, side: Tensor) -> Step:
    def step() -> Tensor:
        loss = (torch.tanh(norm(x * 2) + side) * side).sum()
        loss.backward()
        return loss

    return step


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch norm": (lambda: nn.BatchNorm2d(5), (4, 5, 7, 6)),
    "batch norm, in steps": (lambda: nn.BatchNorm2d(3), (9, 3, 30, 31)),
    "batch norm of lines": (lambda: nn.BatchNorm2d(4), (9, 4, 23, 22)),
    "batch norm of features": (lambda: nn.BatchNorm1d(21), (30, 21)),
    "batch norm of a sequence": (lambda: nn.BatchNorm1d(6), (5, 6, 19)),
    "batch norm of volumes": (lambda: nn.BatchNorm3d(4), (3, 4, 5, 3, 6)),
    "without weight": (lambda: nn.BatchNorm2d(5, affine=False), (4, 5, 7, 6)),
    "without averages": (lambda: nn.BatchNorm2d(5, track_running_stats=False), (4, 5, 7, 6)),
    "in eval mode": (lambda: nn.BatchNorm2d(5).eval(), (4, 5, 7, 6)),
    "instance norm": (lambda: nn.InstanceNorm2d(5, affine=True), (4, 5, 7, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 6), (4, 6, 7, 5)),
    "group norm of lines": (lambda: nn.GroupNorm(2, 4), (9, 4, 23, 22)),
    "group norm of long rows": (lambda: nn.GroupNorm(2, 6), (3, 6, 81, 83)),
    "group norm of features": (lambda: nn.GroupNorm(3, 12), (10, 12)),
    "group norm of one group": (lambda: nn.GroupNorm(1, 4), (3, 4, 9)),
    "group norm without weight": (lambda: nn.GroupNorm(2, 6, affine=False), (4, 6, 7, 5)),
}


@interpreted
@pytest.mark.parametrize(("dtype", "tolerance"), [(f64, 1e-9), (f32, 3e-5), (bf16, 6e-2), (f16, 1e-2)], ids=str)
@pytest.mark.parametrize("is_last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("name", NORMS)
def test_a_training_step_has_eager_numbers(name: str, is_last: bool, dtype: torch.dtype, tolerance: float) -> None:
    make, shape = NORMS[name]
    if is_last and len(shape) != 4:
        pytest.skip("only images are laid out so")
    if dtype in (bf16, f16) and name in ("group norm of long rows", "group norm of lines", "batch norm of lines"):
        pytest.skip("the same kernels as of shorter ones, and slow to interpret")
    torch.manual_seed(0)
    form = torch.channels_last if is_last else torch.contiguous_format
    norm, x, side = make().to(dtype), torch.randn(shape, dtype=f64), torch.randn(shape, dtype=f64)
    x, side = (value.to(dtype).to(memory_format=form) for value in (x, side))
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    capture = tracefuse.capture(_normed(norm, x.requires_grad_(), side))
    with small_gpu() if "lines" in name else nullcontext():
        variant = capture.optimize(remat=0.5).check()
        names = {op_name(node) for node in variant.trace.ops}
        assert not any("norm" in one for one in names), names
        if name == "batch norm of lines" and not is_last:
            assert any("line = " in kernel.source for kernel in variant.kernels)
        check_trace(variant.trace, capture, tolerance)


LARGE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch norm": (lambda: nn.BatchNorm2d(32), (64, 32, 126, 126)),
    "batch norm of 56 x 56": (lambda: nn.BatchNorm2d(64), (128, 64, 56, 56)),
    "batch norm of 28 x 28": (lambda: nn.BatchNorm2d(128), (256, 128, 28, 28)),
    "batch norm of 7 x 7": (lambda: nn.BatchNorm2d(512), (64, 512, 7, 7)),
    "instance norm": (lambda: nn.InstanceNorm2d(16, affine=True), (16, 16, 190, 191)),
    "group norm": (lambda: nn.GroupNorm(8, 64), (16, 64, 126, 125)),
}


@pytest.fixture
def no_tf32() -> Iterator[None]:
    """In a context of torch's own: tests of torch forbid to set the flag by itself, in the processes that run them."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.mark.gpu
@pytest.mark.usefixtures("no_tf32")
@pytest.mark.parametrize(("dtype", "tolerance"), [(f64, 1e-10), (f32, 1e-4)], ids=["f64", "f32"])
@pytest.mark.parametrize("is_last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("name", LARGE)
def test_large_images_have_the_numbers_of_float64(
    name: str, is_last: bool, dtype: torch.dtype, tolerance: float
) -> None:
    """Behind a convolution of one element, so that its bias and the bias's gradient are in the kernels. cuDNN may compute it
    in TF32, which has three digits."""
    torch.manual_seed(0)
    make, shape = LARGE[name]
    model = nn.Sequential(nn.Conv2d(shape[1], shape[1], 1, groups=shape[1]), make()).to("cuda", dtype)
    x, side = (torch.randn(shape, dtype=dtype, device="cuda") for _ in range(2))
    if is_last:
        model, x, side = (value.to(memory_format=torch.channels_last) for value in (model, x, side))
    exact = copy.deepcopy(model).double()

    def gradients(of: nn.Module, x: Tensor, step: Step) -> list[Tensor]:
        step()
        return [x.grad, *(p.grad for p in of.parameters())]  # type: ignore[list-item]

    ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    capture = tracefuse.capture(_normed(model, ours, side))
    program = capture.optimize().check().compile()
    wanted = gradients(exact, theirs, _normed(exact, theirs, side.double()))
    ours.grad = None
    model.zero_grad()
    found = gradients(model, ours, lambda: program().backward())
    # The gradient of a bias before a norm is 0 but for rounding: sums over all images are held against the largest of them.
    sums = max(true.abs().max().item() for true in wanted[1:])
    for at, (value, true) in enumerate(zip(found, wanted, strict=True)):
        assert (value.double() - true).abs().max() <= tolerance * (sums if at else true.abs().max().item())


POOLED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "behind a group norm": (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(3, 2, 1)), (2, 4, 9, 7)),
    "behind an instance norm": (lambda: nn.Sequential(nn.InstanceNorm2d(4), nn.MaxPool2d(3, 2, 1)), (2, 4, 9, 7)),
    "behind a softmax": (lambda: nn.Sequential(nn.Softmax(-1), nn.MaxPool2d(3, 2, 1)), (2, 4, 9, 8)),
    "of a view": (lambda: nn.Sequential(nn.GELU(), nn.Unflatten(1, (2, 3)), nn.MaxPool2d(3, 1, 1)), (2, 6, 8)),
}


@interpreted
@pytest.mark.parametrize("name", POOLED)
def test_a_pool_has_eager_numbers(name: str) -> None:
    torch.manual_seed(0)
    make, shape = POOLED[name]
    model, x = make().double(), torch.randn(shape, dtype=f64, requires_grad=True)

    def step() -> Tensor:
        loss = model(x * 2).square().sum()
        loss.backward()
        return loss

    capture = tracefuse.capture(step)
    check_trace(capture.optimize(remat=0.5).check().trace, capture, 1e-9)


ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: torch.softmax(x * 2, 1),
    "layer norm": lambda x: F.layer_norm(x * 2, (9,)),
}


@interpreted
@pytest.mark.parametrize("name", ROWS)
def test_moments_down_columns_of_normalised_rows(name: str) -> None:
    def moments(x: Tensor) -> tuple[Tensor, ...]:
        return torch.var_mean(ROWS[name](x), 0, correction=0)

    x = torch.randn(70, 9)
    for found, exact in zip(run_poisoned(*kernel_of(moments, x)), moments(x.double()), strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-6)


# --- what is left, and why --------------------------------------------------------------------------------------------


def _convolved(shape: tuple[int, ...], *layers: nn.Module) -> tracefuse.Capture:
    torch.manual_seed(0)
    first, last = nn.Conv2d(shape[1], 8, 3, padding=1), nn.Conv2d(8, 4, 3)
    x = torch.randn(shape, requires_grad=True)

    def step() -> Tensor:
        y = first(x)
        for layer in layers:
            y = layer(y)
        loss = last(y).square().mean()
        loss.backward()
        return loss

    return tracefuse.capture(step)


def test_a_norm_between_convolutions_stays_with_aten() -> None:
    (record,) = [r for r in _convolved((2, 3, 9, 8), nn.BatchNorm2d(8)).optimize().passes if r.name == "decompose"]
    norms = [d for d in record.decisions if "norm" in d.value]
    assert {d.action for d in norms} == {"leave"}
    assert all("no op beside it could join it" in d.reason for d in norms)


# --- bytes ------------------------------------------------------------------------------------------------------------


def _kernel_bytes(variant: tracefuse.Variant, of: str) -> int:
    return sum(n.target.nbytes for n in variant.trace.ops if isinstance(n.target, Kernel) and phase(n) == of)


@pytest.mark.skipif(INTERPRETED, reason="counts, and computes nothing")
@pytest.mark.parametrize("dtype", [f32, bf16], ids=["f32", "bf16"])
@pytest.mark.parametrize("is_last", [False, True], ids=["channels first", "channels last"])
def test_the_bytes_of_batch_norm_relu_and_residual(is_last: bool, dtype: torch.dtype) -> None:
    """With n the bytes of an image: the forward reads the convolution's result for the statistics, and again with the
    residual for what it writes; the backward reads the gradient, the result's sign and the convolution's result for two
    sums and writes the residual's gradient, then reads that and the convolution's result, and writes its gradient."""
    torch.manual_seed(0)
    conv, norm, last = (
        nn.Conv2d(8, 8, 3, padding=1).to(dtype),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 4, 3, bias=False).to(dtype),
    )
    x = torch.randn(4, 8, 32, 32).to(dtype).requires_grad_()
    if is_last:
        conv, last, x = (v.to(memory_format=torch.channels_last) for v in (conv, last, x.detach()))
        x.requires_grad_()

    def step() -> Tensor:
        y = F.relu(norm(conv(x)) + x)
        loss = last(y).sum()
        loss.backward()
        return loss

    variant = tracefuse.capture(step).optimize(channels_last=False)
    n, few = x.nbytes, 0.01 * x.nbytes
    assert 4 * n <= _kernel_bytes(variant, "forward") <= 4 * n + few
    assert 7 * n <= _kernel_bytes(variant, "backward") - _added(variant) <= 7 * n + few


@pytest.mark.skipif(INTERPRETED, reason="counts, and computes nothing")
@pytest.mark.parametrize(
    ("norm", "backward"), [(nn.GroupNorm(4, 8), 6), (nn.InstanceNorm2d(8, affine=True), 3)], ids=["group", "instance"]
)
def test_the_bytes_of_a_norm_whose_rows_a_program_holds(norm: nn.Module, backward: int) -> None:
    """The forward reads once and writes; so does the backward where it sums over the same rows. Of a group norm its sums are
    over the channels of an image: it writes the gradient of the activation, and reads that and the input again."""
    torch.manual_seed(0)
    conv, last, x = (
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Conv2d(8, 4, 3, bias=False),
        torch.randn(4, 8, 32, 32, requires_grad=True),
    )

    def step() -> Tensor:
        loss = last(F.silu(norm(conv(x)))).sum()
        loss.backward()
        return loss

    variant = tracefuse.capture(step).optimize(channels_last=False)
    n, few = x.nbytes, 0.02 * x.nbytes
    assert 2 * n <= _kernel_bytes(variant, "forward") <= 2 * n + few
    assert backward * n <= _kernel_bytes(variant, "backward") <= backward * n + few


def _added(variant: tracefuse.Variant) -> int:
    """Bytes of the kernels that add up the gradients of `x`, which no norm has a part in."""
    calls = [n for n in variant.trace.ops if isinstance(n.target, Kernel) and phase(n) == "backward"]
    plain = [n.target for n in calls if {op_name(op).split(".")[1] for op in n.target.body.ops} == {"add"}]
    return sum(kernel.nbytes for kernel in plain)


@compiled
@pytest.mark.parametrize("shape", [[20_000], [3, 60, 50]], ids=str)
def test_the_backward_of_a_norm_of_long_rows_stays_with_aten(shape: list[int]) -> None:
    """A kernel would have to hold a row beside the sums of its columns."""
    norm, x = nn.LayerNorm(shape), torch.randn(4, *shape, requires_grad=True)
    variant = tracefuse.capture(lambda: norm(x * 2.0).square().mean().backward()).optimize().check()
    assert [n for n in variant.trace.ops if n.target is torch.ops.aten.native_layer_norm_backward.default]


# --- the compiler -----------------------------------------------------------------------------------------------------

IMAGE, CHANNEL = (64, 64, 56, 56), (64, 1, 1)


def _gradient_sums(g: Tensor, y: Tensor, x: Tensor, mean: Tensor) -> tuple[Tensor, ...]:
    own = torch.ops.aten.threshold_backward(g, y, 0)
    return own, own.float().sum((0, 2, 3)), (own.float() * (x.float() - mean)).sum((0, 2, 3))


KERNELS: dict[str, Callable[[], Kernel]] = {
    "statistics": lambda: kernel_of_types(lambda x: torch.var_mean(x.float(), (0, 2, 3)), (IMAGE, bf16)),
    "statistics of small images": lambda: kernel_of_types(
        lambda x: torch.var_mean(x.float(), (0, 2, 3)), ((64, 512, 7, 7), bf16)
    ),
    "statistics of lines": lambda: kernel_of_types(
        lambda x: torch.var_mean(x.float(), (0, 2, 3)), ((256, 128, 28, 28), bf16)
    ),
    "normalised": lambda: kernel_of_types(
        lambda x, mean, scale, bias: ((x.float() - mean) * scale + bias).bfloat16().relu(),
        (IMAGE, bf16), *[(CHANNEL, f32)] * 3,
    ),
    "sums of gradients": lambda: kernel_of_types(_gradient_sums, *[(IMAGE, bf16)] * 3, (CHANNEL, f32)),
    "softmax along channels": lambda: kernel_of_types(lambda x: torch.softmax(x * 2, 1), ((8, 1024, 56, 56), bf16)),
}  # fmt: skip


@compiled
@pytest.mark.parametrize("name", KERNELS)
def test_they_compile_for_hopper_without_spills(name: str) -> None:
    found = resources(KERNELS[name]())
    assert found.spills == 0
    assert 8 <= found.registers <= 96
    assert found.programs > 132


@compiled
@pytest.mark.parametrize("name", ["normalised", "softmax along channels"])
def test_lines_of_an_image_are_read_16_bytes_at_a_time(name: str) -> None:
    assert "ld.global.v4.b32" in machine_code(KERNELS[name]())[0].asm["ptx"]
