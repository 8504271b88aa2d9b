"""Whole convolutional nets, forward and backward in float64: all passes keep their numbers, and no norm of an image is left to
ATen beside an op that could join it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from fake_clock import decide_all
from torch import Tensor, nn
from traces import assert_same_numbers, assert_types_are_true

import tracefuse
from tracefuse.optimizers.liveness import saved_bytes
from tracefuse.optimizers.ops import op_name

f64 = torch.float64


class Residual(nn.Module):
    """A basic block of ResNet-18."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.second, self.other_norm = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        shortcut = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.shortcut = shortcut if stride > 1 or width != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.first(x)), inplace=True)
        return F.relu(self.other_norm(self.second(y)) + self.shortcut(x), inplace=True)


def resnet() -> nn.Module:
    """ResNet-18 at an eighth of its widths."""
    widths = (8, 8, 16, 32, 64)
    stem = [nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    blocks = [
        Residual(widths[stage] if at == 0 else widths[stage + 1], widths[stage + 1], 2 if stage and not at else 1)
        for stage in range(4)
        for at in range(2)
    ]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Level(nn.Module):
    """Group norm, SiLU and a convolution, twice, around a residual, as in the UNets of diffusion models."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList((nn.GroupNorm(4, width), nn.GroupNorm(4, out)))
        self.convs = nn.ModuleList((nn.Conv2d(width, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)))
        self.skip = nn.Conv2d(width, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for norm, conv in zip(self.norms, self.convs, strict=True):
            y = conv(F.silu(norm(y)))
        return y + self.skip(x)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.down = nn.ModuleList((Level(8, 8), Level(8, 16)))
        self.shrink, self.middle = nn.Conv2d(16, 16, 3, 2, 1), Level(16, 16)
        self.up = nn.Upsample(scale_factor=2)
        self.rise = Level(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down[1](self.down[0](self.first(x)))
        return self.last(self.rise(torch.cat([y, self.up(self.middle(self.shrink(y)))], 1)))


class ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.narrow(F.gelu(self.wide(y))) * self.scale
        return x + y.permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 4, 4), ConvNextBlock(8), ConvNextBlock(8), nn.Conv2d(8, 4, 1))


NETS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet": (resnet, 40),
    "unet": (UNet, 12),
    "convnext": (convnext, 24),
}


@pytest.mark.parametrize("is_last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("name", NETS)
def test_a_net_keeps_its_numbers(name: str, is_last: bool) -> None:
    make, size = NETS[name]
    torch.manual_seed(0)
    form = torch.channels_last if is_last else torch.contiguous_format
    model = make().to(f64).to(memory_format=form)
    x = torch.randn(3, 3, size, size, dtype=f64).to(memory_format=form)

    def step() -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    capture = tracefuse.capture(step)
    variant = capture.optimize(remat=0.5).check()
    assert_same_numbers(variant.trace, capture)
    assert_types_are_true(variant.trace, capture)
    names = [op_name(node) for node in variant.trace.ops]
    assert not any(norm in one for one in names for norm in ("batch_norm", "group_norm"))


@pytest.mark.parametrize("name", NETS)
def test_a_net_keeps_its_numbers_whatever_kernels_lose(name: str) -> None:
    """Half of them, of those that are made in their place again half, and so on."""
    make, size = NETS[name]
    torch.manual_seed(0)
    model, x = make().to(f64), torch.randn(3, 3, size, size, dtype=f64)
    capture = tracefuse.capture(lambda: model(x).square().mean().backward())
    variant = capture.optimize(remat=0.5)
    whole = {kernel.key for kernel in variant.kernels}
    known = decide_all(variant, 2)
    assert known - whole
    assert_same_numbers(variant.check().trace, capture)
    assert_types_are_true(variant.trace, capture)


@pytest.mark.parametrize("make", [resnet, UNet], ids=["resnet", "unet"])
def test_the_statistics_are_saved_and_not_what_they_normalise(make: Callable[[], nn.Module]) -> None:
    """What a norm yields is computed again from its input, which its own backward keeps, unless a convolution reads it."""
    torch.manual_seed(0)
    model, x = make(), torch.randn(2, 3, 40, 40)
    capture = tracefuse.capture(lambda: model(x).square().mean().backward())
    variant = capture.optimize(remat=0.5, channels_last=False)
    assert saved_bytes(variant.trace) <= saved_bytes(capture.trace)
    last = capture.optimize(remat=0.5)  # the net's input is no value of the step's, and its copy is one
    assert saved_bytes(last.trace) <= saved_bytes(variant.trace) + x.nbytes
