"""What stands beside a convolution: its bias and the bias's gradient in the kernels there, and pools that keep no operand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from interpreter import INTERPRETED, interpreted
from kernels import check_trace
from torch import Tensor, nn

import tracefuse
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.ops import arguments, aten
from tracefuse.optimizers.trace import phase, val

counted = pytest.mark.skipif(INTERPRETED, reason="counts, and computes nothing")
Case = tuple[Callable[[], nn.Module], tuple[int, ...]]

HEADS: dict[str, Case] = {
    "1d": (lambda: nn.Conv1d(3, 5, 3), (4, 3, 19)),
    "2d": (lambda: nn.Conv2d(3, 5, 3, padding=1), (4, 3, 9, 8)),
    "3d": (lambda: nn.Conv3d(2, 3, 2), (2, 2, 5, 6, 4)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 5, 3, stride=2), (2, 3, 5, 6)),
    "of groups": (lambda: nn.Conv2d(4, 8, 3, groups=4), (3, 4, 7, 9)),
    "without a batch": (lambda: nn.Conv2d(3, 5, 3), (3, 9, 8)),
    "frozen": (lambda: nn.Conv2d(3, 5, 3).requires_grad_(False), (4, 3, 9, 8)),
}
BEHIND: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "relu": lambda x: F.relu(x, inplace=True),
    "norm": lambda x: F.silu(F.group_norm(x, 1)),
    "norm of each channel": lambda x: F.instance_norm(x if x.dim() > 3 else x[None]).tanh(),
    "norm of channels": lambda x: F.layer_norm(x.transpose(1, -1), x.shape[1:2]).transpose(1, -1).tanh(),
    "head and tail": lambda x: x.tanh() + x.sum(),
}


def _stepped(head: nn.Module, behind: Callable[[Tensor], Tensor], x: Tensor) -> tracefuse.Capture:
    def step() -> Tensor:
        loss = behind(head(x)).square().mean()
        loss.backward()
        return loss

    return tracefuse.capture(step)


@interpreted
@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("remat", [1.0, 0.0])
def test_a_training_step_has_eager_numbers(head: str, behind: str, remat: float) -> None:
    torch.manual_seed(0)
    make, shape = HEADS[head]
    capture = _stepped(make().double(), BEHIND[behind], torch.randn(shape, dtype=torch.float64, requires_grad=True))
    variant = capture.optimize(remat=remat).check()
    plain = [n for n in variant.trace.ops if n.target is aten.convolution.default]
    assert all(arguments(n)["bias"] is None for n in plain)
    check_trace(variant.trace, capture, 1e-9)


@interpreted
@pytest.mark.parametrize("is_last", [False, True], ids=["channels first", "channels last"])
def test_a_pool_behind_a_convolution_has_eager_numbers(is_last: bool) -> None:
    torch.manual_seed(0)
    form = torch.channels_last if is_last else torch.contiguous_format
    for pool in (nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 2), nn.AdaptiveAvgPool2d(2), nn.AdaptiveMaxPool2d(2)):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), pool).double().to(memory_format=form)
        x = torch.randn(2, 3, 10, 12, dtype=torch.float64).to(memory_format=form).requires_grad_()
        capture = _stepped(model, lambda y: y * 2, x)
        check_trace(capture.optimize().check().trace, capture, 1e-9)


@counted
def test_no_kernel_only_adds_a_bias_or_only_sums_its_gradient() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.SiLU(), nn.Conv2d(64, 64, 3), nn.SiLU(), nn.Conv2d(64, 64, 3))
    capture = _stepped(model, lambda y: y, torch.randn(2, 3, 40, 40, requires_grad=True))
    kernels = [
        n.target for n in capture.optimize(remat=1.0, channels_last=False).trace.ops if isinstance(n.target, Kernel)
    ]
    # Of the forward: bias and SiLU twice, bias and loss. Of the backward: the loss's or SiLU's gradient and the bias's.
    assert len(kernels) == 6
    backward = [
        n
        for n in capture.optimize(remat=1.0, channels_last=False).trace.ops
        if n.target is aten.convolution_backward.default
    ]
    assert [arguments(n)["output_mask"][2] for n in backward] == [False] * 3


@counted
def test_behind_a_norm_of_channels_as_they_lie_its_kernel_sums_the_bias_s_gradient() -> None:
    """The norm's last dimension is the convolution's second, a permutation away."""
    head, norm = (m.double().to(memory_format=torch.channels_last) for m in (nn.Conv2d(3, 8, 3), nn.LayerNorm(8)))
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64).to(memory_format=torch.channels_last)
    capture = _stepped(head, lambda y: norm(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), x)
    kernels = [n.target for n in capture.optimize().check().trace.ops if isinstance(n.target, Kernel)]
    alone = [k.name for k in kernels if [op.target for op in k.body.ops] == [aten.sum.dim_IntList]]
    assert not alone, [k.name for k in kernels]


@counted
def test_behind_a_norm_of_each_channel_of_each_image_its_kernel_sums_them() -> None:
    """A program that holds rows of an image cannot sum over images: it leaves a sum for each, which are few."""
    head, x = nn.Conv2d(3, 8, 3), torch.randn(4, 3, 40, 40, requires_grad=True)
    ops = _stepped(head, lambda y: F.relu(F.instance_norm(y)), x).optimize().check().trace.ops
    assert not [n for n in ops if n.target is aten.sum.dim_IntList]
    sums = [
        n.target for n in ops if isinstance(n.target, Kernel) and n.target.body.ops[0].target is aten.sum.dim_IntList
    ]
    assert [val(p).shape for kernel in sums for p in kernel.body.placeholders] == [(4, 8)]


@counted
def test_a_convolution_that_no_kernel_reads_keeps_its_bias() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    variant = _stepped(model, lambda y: y, torch.randn(2, 3, 16, 16)).optimize()
    first, second = [n for n in variant.trace.ops if n.target is aten.convolution.default]
    assert arguments(first)["bias"] is not None
    assert arguments(second)["bias"] is None
    record = next(one for one in variant.passes if one.name == "decompose")
    assert {d.reason for d in record.decisions if d.action == "leave"} == {
        "its result is written for other ops than those of a kernel: ATen adds the bias as fast",
        "no kernel computes the gradient that it reads: ATen adds it up as fast",
    }


TWO_READERS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "a small part": lambda last, z: last(z).sum() + z[0, 0, 0, :3].relu().sum(),
    "a skip": lambda last, z: (last(z) + z).tanh().sum(),
    "halves": lambda last, z: last(torch.cat([z[:, :4], z[:, 4:].relu()], 1)).sum(),
    "a slice": lambda last, z: last(z).sum() + z[:, :, 0].relu().sum(),
    "windows with gaps": lambda last, z: F.max_pool2d(z.relu(), 2, 1, 0, 2).square().sum() + z.square().sum(),
    "kept pools": lambda last, z: last(F.adaptive_avg_pool2d(z, 7)).tanh().sum(),
}


WINDOWS = "overlapping windows"
TWO_READERS[WINDOWS] = lambda last, z: F.max_pool2d(z.relu(), 3, 2, 1).square().sum() + z.square().sum()
WRITTEN = pytest.mark.xfail(
    strict=True, reason="the two readers become two kernels, and what both read is added by ATen"
)


@counted
@pytest.mark.parametrize("name", [pytest.param(n, marks=WRITTEN if n == WINDOWS else ()) for n in TWO_READERS])
def test_no_image_is_added_or_filled_outside_of_kernels(name: str) -> None:
    first, last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1)
    capture = _stepped(first, lambda z: TWO_READERS[name](last, z), torch.randn(2, 3, 34, 34, requires_grad=True))

    def added(variant: tracefuse.Variant) -> int:
        large = [n for n in variant.trace.ops if n.target in (aten.add.Tensor, aten.full.default)]
        return sum(n.meta["val"].numel() >= 2 * 8 * 32 * 32 for n in large)

    assert added(capture.optimize(remat=1.0)) <= added(capture.optimize(remat=1.0, decompose=False))


@counted
def test_a_pool_keeps_its_places_and_not_what_it_read() -> None:
    """Autograd saves both, for the shape of what it read."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3))
    capture = _stepped(model, lambda y: y, torch.randn(2, 3, 18, 18))
    variant = capture.optimize(remat=1.0)
    kept = {n for n in variant.trace.ops if phase(n) == "forward" and any(phase(u) == "backward" for u in n.users)}
    assert (2, 8, 16, 16) not in {tuple(n.meta["val"].shape) for n in kept if isinstance(n.meta["val"], Tensor)}


@counted
def test_a_pool_s_search_for_its_maxima_holds_up_no_sums() -> None:
    """The gradient behind the pool is written once, and the sums of the batch norm before it read that."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1)).double()
    capture = _stepped(net, lambda y: y + 1, torch.randn(2, 3, 11, 11, dtype=torch.float64))
    kernels = [n.target for n in capture.optimize().check().trace.ops if isinstance(n.target, Kernel)]
    held = [{op.target for op in kernel.body.ops} for kernel in kernels]
    assert any(aten.sum.dim_IntList in ops for ops in held)
    assert not any({aten.sum.dim_IntList, aten.max_pool2d_with_indices_backward.default} <= ops for ops in held)
