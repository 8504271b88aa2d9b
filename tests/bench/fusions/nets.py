"""Ten whole nets that nobody tuned for, each with an input and what its results are differentiated with.

Convolutional ones in both memory formats, a UNet, a detector's backbone, a state-space model, a speech encoder, and small nets
that are bound by the host. They are written here from their published structure, in plain `torch.nn`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Net:
    """A net as it is timed: what makes it, its input's shape in full and small, and whether it runs under bf16 autocast. A
    net of tokens has the size of its `vocabulary`, in full and small."""

    made: Callable[[bool], nn.Module]
    shape: tuple[int, ...]
    small: tuple[int, ...]
    channels_last: bool = False
    autocast: bool = False
    dtype: torch.dtype = torch.float32
    vocabulary: tuple[int, int] | None = None


def conv(
    a: int, b: int, size: int = 3, step: int = 1, groups: int = 1, act: type[nn.Module] = nn.ReLU
) -> nn.Sequential:
    layer = nn.Conv2d(a, b, size, step, size // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(b), act())


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3, 1 x 1, added to what came in. Source: He et al., "Deep residual learning", 2015."""

    def __init__(self, a: int, b: int, step: int) -> None:
        super().__init__()
        middle = nn.Sequential(conv(a, b // 4, 1), conv(b // 4, b // 4, 3, step), nn.Conv2d(b // 4, b, 1, bias=False))
        self.body = nn.Sequential(middle, nn.BatchNorm2d(b))
        is_same = a == b and step == 1
        self.short = nn.Identity() if is_same else nn.Sequential(nn.Conv2d(a, b, 1, step), nn.BatchNorm2d(b))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))


def stages(widths: tuple[int, ...], depth: int) -> nn.ModuleList:
    found = nn.ModuleList()
    for at, (a, b) in enumerate(itertools.pairwise(widths)):
        blocks = [Bottleneck(a if n == 0 else b, b, 1 + (n == 0 and at > 0)) for n in range(depth)]
        found.append(nn.Sequential(*blocks))
    return found


class ResidualNet(nn.Module):
    def __init__(self, small: bool) -> None:
        super().__init__()
        widths = (8, 16, 32) if small else (64, 256, 512, 1024)
        self.stem = nn.Sequential(conv(3, widths[0], 7, 2), nn.MaxPool2d(3, 2, 1))
        self.stages = stages(widths, 1 if small else 3)
        self.head = nn.Linear(widths[-1], 10 if small else 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


class Gate(nn.Module):
    """Squeeze and excitation. Source: Hu et al., 2017."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, max(4, width // 4), 1), nn.Conv2d(max(4, width // 4), width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))))


class Separable(nn.Module):
    """Wide, by channel, gated, narrow again. Source: Howard et al., "Searching for MobileNetV3", 2019."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 4 * width
        by_channel = conv(wide, wide, 5, groups=wide, act=nn.Hardswish)
        narrow = nn.Sequential(nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width))
        self.body = nn.Sequential(conv(width, wide, 1, act=nn.Hardswish), by_channel, Gate(wide), narrow)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def mobile(small: bool) -> nn.Module:
    width = 8 if small else 48
    return nn.Sequential(conv(3, width, 3, 2, act=nn.Hardswish), *(Separable(width) for _ in range(1 if small else 8)))


class ByColumn(nn.Module):
    """7 x 7 by channel, layer norm along channels, a wide GELU. Source: Liu et al., "A ConvNet for the 2020s", 2022."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.mix(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.narrow(F.gelu(self.wide(y)))).permute(0, 3, 1, 2)


def by_column(small: bool) -> nn.Module:
    width = 8 if small else 128
    return nn.Sequential(nn.Conv2d(3, width, 4, 4), *(ByColumn(width) for _ in range(1 if small else 6)))


class UNet(nn.Module):
    """Down by max pools, up by nearest neighbours, with what was at each size beside it. Source: Ronneberger et al., 2015."""

    def __init__(self, small: bool) -> None:
        super().__init__()
        widths = (4, 8) if small else (32, 64, 128, 256)

        def block(a: int, b: int) -> nn.Sequential:
            layers = [nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.SiLU()]
            return nn.Sequential(*layers, nn.Conv2d(b, b, 3, padding=1), nn.GroupNorm(4, b), nn.SiLU())

        self.down = nn.ModuleList(block(a, b) for a, b in zip((3, *widths), widths, strict=False))
        self.up = nn.ModuleList(block(a + b, a) for a, b in itertools.pairwise(widths))
        self.last = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for at, block in enumerate(self.down):
            x = block(x if at == 0 else F.max_pool2d(x, 2))
            kept.append(x)
        for block, beside in zip(reversed(self.up), reversed(kept[:-1]), strict=True):
            x = block(torch.cat([beside, F.interpolate(x, scale_factor=2.0)], 1))
        return self.last(x)


class Detector(nn.Module):
    """A backbone and a pyramid of features, of which all levels are used. Source: Lin et al., 2016."""

    def __init__(self, small: bool) -> None:
        super().__init__()
        widths = (8, 16, 32) if small else (64, 256, 512, 1024)
        out = 8 if small else 256
        self.stem, self.stages = nn.Sequential(conv(3, widths[0], 7, 2), nn.MaxPool2d(3, 2, 1)), stages(widths, 1)
        self.sides = nn.ModuleList(nn.Conv2d(width, out, 1) for width in widths[1:])
        self.heads = nn.ModuleList(nn.Conv2d(out, out, 3, padding=1) for _ in widths[1:])

    def forward(self, x: Tensor) -> Tensor:
        x, levels = self.stem(x), []
        for stage, side in zip(self.stages, self.sides, strict=True):
            x = stage(x)
            levels.append(side(x))
        for at in range(len(levels) - 2, -1, -1):
            levels[at] = levels[at] + F.interpolate(levels[at + 1], scale_factor=2.0)
        return sum(head(level).square().mean((2, 3)) for head, level in zip(self.heads, levels, strict=True))


class StateSpace(nn.Module):
    """Gated diagonal recurrences, h = a * h + b * x, by sums of logarithms in chunks of time. Source: Gu and Dao, 2023."""

    def __init__(self, width: int, chunk: int) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(width, width)
        self.chunk = chunk

    def forward(self, x: Tensor) -> Tensor:
        value, gate, decay, drive = self.into(self.norm(x)).chunk(4, -1)
        shape = (x.shape[0], -1, self.chunk, x.shape[2])
        log_a = -F.softplus(decay).reshape(shape) / self.chunk
        inside = log_a.cumsum(2)
        terms = (value * torch.sigmoid(drive)).reshape(shape) * torch.exp(-inside)
        sums = torch.exp(inside) * terms.cumsum(2)
        return x + self.out(sums.reshape(x.shape) * F.silu(gate))


def state_space(small: bool) -> nn.Module:
    width = 8 if small else 768
    return nn.Sequential(*(StateSpace(width, 4 if small else 32) for _ in range(1 if small else 8)))


class SpeechBlock(nn.Module):
    """Feed forward, attention, a gated convolution along time, each added. Source: Gulati et al., "Conformer", 2020."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.merge = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gated, self.mix = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 15, padding=7, groups=width)
        self.batch, self.last = nn.BatchNorm1d(width), nn.Conv1d(width, width, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.narrow(F.silu(self.wide(self.norms[0](x))))
        q, k, v = self.qkv(self.norms[1](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.merge(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y = F.glu(self.gated(self.norms[2](x).transpose(1, 2)), 1)
        x = x + self.last(F.silu(self.batch(self.mix(y)))).transpose(1, 2)
        return self.norms[3](x)


def speech(small: bool) -> nn.Module:
    width, heads = (8, 2) if small else (512, 8)
    return nn.Sequential(*(SpeechBlock(width, heads) for _ in range(1 if small else 8)))


class TinyTransformer(nn.Module):
    """Two layers, 256 wide: its kernels are shorter than the launches of them."""

    def __init__(self, small: bool) -> None:
        super().__init__()
        width = 8 if small else 256
        layer = nn.TransformerEncoderLayer(width, 2 if small else 4, 4 * width, 0.0, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class TinyMixer(nn.Module):
    """Small linear layers and norms, one after the other."""

    def __init__(self, small: bool) -> None:
        super().__init__()
        width = 8 if small else 128
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2 if small else 16))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in self.layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.gelu(layer(norm(x)))
        return x


NETS = {
    "residual net": Net(ResidualNet, (128, 3, 224, 224), (2, 3, 32, 32), autocast=True),
    "residual net, channels last": Net(
        ResidualNet, (128, 3, 224, 224), (2, 3, 32, 32), channels_last=True, autocast=True
    ),
    "mobile net, channels last": Net(mobile, (64, 3, 224, 224), (2, 3, 16, 16), channels_last=True, autocast=True),
    "column net, channels last": Net(by_column, (64, 3, 224, 224), (2, 3, 16, 16), channels_last=True, autocast=True),
    "UNet": Net(UNet, (16, 3, 256, 256), (2, 3, 8, 8), autocast=True),
    "detector's backbone": Net(Detector, (16, 3, 512, 512), (2, 3, 32, 32), channels_last=True, autocast=True),
    "state-space model": Net(state_space, (8, 2048, 768), (2, 8, 8), autocast=True),
    "speech encoder": Net(speech, (16, 1024, 512), (2, 8, 8), autocast=True),
    "tiny transformer": Net(TinyTransformer, (8, 128, 256), (2, 4, 8)),
    "tiny mixer": Net(TinyMixer, (64, 128), (4, 8)),
}
"""By name, as they are shown."""
