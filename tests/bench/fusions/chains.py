"""A fusion program in a line: a convolution or a matmul, and what follows it. `PROGRAMS` are those that are timed.

    conv2d 64x32x128x128 > 64 k3 | batch_norm | mish | max_pool 2

is a batch of 64 images of 32 channels, a convolution of 3 x 3 to 64 channels, then three layers. Words before the first bar
are the head's: `kN` its kernel, `sN` its stride. A number behind a layer is its size, its groups or its factor. `keep` notes
the value, `residual` adds it again, `dim` layers (`min`, `max`, `sum`, `mean`, `logsumexp`, `softmax`) work along channels,
of a matmul along features, and keep the dimension; with `space` they work over all behind it, with
`depth` over the first of those.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ALONG: dict[str, Callable[[Tensor, tuple[int, ...]], Tensor]] = {
    "min": lambda x, dims: x.amin(dims, keepdim=True) if len(dims) > 1 else x.min(dims[0], keepdim=True).values,
    "max": lambda x, dims: x.amax(dims, keepdim=True) if len(dims) > 1 else x.max(dims[0], keepdim=True).values,
    "sum": lambda x, dims: x.sum(dims, keepdim=True),
    "mean": lambda x, dims: x.mean(dims, keepdim=True),
    "logsumexp": lambda x, dims: x.logsumexp(dims, keepdim=True),
    "softmax": lambda x, dims: x.softmax(dims[0]),
}
ACTIVATIONS = {
    "relu": nn.ReLU, "leaky_relu": nn.LeakyReLU, "gelu": nn.GELU, "silu": nn.SiLU, "mish": nn.Mish, "elu": nn.ELU,
    "hardswish": nn.Hardswish, "hardsigmoid": nn.Hardsigmoid, "hardtanh": nn.Hardtanh, "tanh": nn.Tanh, "celu": nn.CELU,
    "sigmoid": nn.Sigmoid, "softplus": nn.Softplus, "selu": nn.SELU, "relu6": nn.ReLU6, "softsign": nn.Softsign,
    "logsigmoid": nn.LogSigmoid, "tanhshrink": nn.Tanhshrink, "softshrink": nn.Softshrink,
}  # fmt: skip
HEADS = {"conv2d": nn.Conv2d, "conv3d": nn.Conv3d, "conv_transpose2d": nn.ConvTranspose2d}
HEADS |= {"conv_transpose3d": nn.ConvTranspose3d}
POOLS = ("avg_pool", "max_pool", "upsample")
MOST_SMALL, CHANNELS_SMALL = 10, 16


@dataclass(frozen=True)
class Program:
    """A head with its sizes and the layers behind it, each a word with its number, if it has one."""

    text: str

    @property
    def words(self) -> list[list[str]]:
        return [part.split() for part in self.text.split("|")]

    @property
    def name(self) -> str:
        """What it does, and the sizes: `conv2d_batch_norm_mish 64x32x128x128`."""
        (head, sizes, *_), *layers = self.words
        return f"{'_'.join([head, *(layer[0] for layer in layers)])} {sizes}"

    @property
    def kind(self) -> str:
        return self.words[0][0]

    def shape(self, small: bool = False) -> tuple[int, ...]:
        batch, channels, *space = map(int, self.words[0][1].split("x"))
        if not small:
            return batch, channels, *space
        return min(batch, 4), min(channels, CHANNELS_SMALL), *(min(size, MOST_SMALL) for size in space)

    def made(self, small: bool = False) -> Chain:
        """The model, with weights that are the same each time."""
        torch.manual_seed(0)
        return Chain(self, small)


class Chain(nn.Module):
    """A head and the layers behind it."""

    def __init__(self, program: Program, small: bool) -> None:
        super().__init__()
        (kind, _, _, out, *options), *layers = program.words
        shape, width = program.shape(small), min(int(out), CHANNELS_SMALL) if small else int(out)
        numbers = {option[0]: int(option[1:]) for option in options}
        if kind == "linear":
            self.head: nn.Module = nn.Linear(shape[1], width)
        else:
            self.head = HEADS[kind](shape[1], width, numbers.get("k", 3), numbers.get("s", 1))
        with torch.no_grad():
            x = copy.deepcopy(self.head).to("meta")(torch.zeros(shape, device="meta"))
        self.layers = nn.ModuleList()
        self.words = [(name, *rest) for name, *rest in layers]
        for name, *rest in layers:
            self.layers.append(_layer(name, rest, width, x))
            x = self._applied(self.layers[-1], name, rest, x, x)
            width = x.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        x = kept = self.head(x)
        for layer, (name, *rest) in zip(self.layers, self.words, strict=True):
            x = self._applied(layer, name, rest, x, kept)
            kept = x if name == "keep" else kept
        return x

    def _applied(self, layer: nn.Module, name: str, rest: list[str], x: Tensor, kept: Tensor) -> Tensor:
        if name in ALONG:
            behind = tuple(range(2, x.dim()))
            return ALONG[name](x, behind if "space" in rest else behind[:1] if "depth" in rest else (1,))
        if name == "residual":
            return x + kept
        if name == "global_avg_pool":
            return x.mean(tuple(range(2, x.dim())), keepdim=True)
        # Of shapes alone: what keeps a shape is not asked.
        return x if x.device.type == "meta" and name not in POOLS else layer(x)


class Weight(nn.Module):
    """A parameter of one number a channel, by which a value is scaled, or which is added to it."""

    def __init__(self, how: str, channels: int, rank: int) -> None:
        super().__init__()
        self.how, self.values = how, nn.Parameter(torch.randn(channels, *[1] * (rank - 2)) * 0.1 + 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.values if self.how == "scale" else x + self.values if self.how == "bias" else x - self.values


class By(nn.Module):
    """Arithmetic with a number."""

    def __init__(self, how: str, number: float) -> None:
        super().__init__()
        self.how, self.number = how, number

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "clamp":
            return x.clamp(-self.number, self.number)
        return {"multiply": x * self.number, "divide": x / self.number, "subtract_number": x - self.number}[self.how]


class Pool(nn.Module):
    def __init__(self, how: str, size: int) -> None:
        super().__init__()
        self.how, self.size = how, size

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "upsample":
            return F.interpolate(x, scale_factor=float(self.size))
        if x.dim() == 2:
            of = F.avg_pool1d if self.how == "avg_pool" else F.max_pool1d
            return of(x.unsqueeze(1), self.size).squeeze(1)
        pools = {"avg_pool": (F.avg_pool2d, F.avg_pool3d), "max_pool": (F.max_pool2d, F.max_pool3d)}
        return pools[self.how][x.dim() - 4](x, self.size)


def _layer(name: str, rest: list[str], width: int, x: Tensor) -> nn.Module:
    number = next((float(one) for one in rest if re.fullmatch(r"[\d.]+", one)), 2.0)
    if name in ACTIVATIONS:
        return ACTIVATIONS[name]()
    if name in ("scale", "bias", "subtract"):
        return Weight(name, width, x.dim())
    if name in ("multiply", "divide", "subtract_number", "clamp"):
        return By(name, number)
    if name in POOLS:
        return Pool(name, int(number))
    if name == "group_norm":
        return nn.GroupNorm(min(int(number), width // 2), width)
    if name == "layer_norm":
        return nn.LayerNorm(tuple(x.shape[1:]) if "all" in rest else x.shape[-1])
    if name in ("batch_norm", "instance_norm"):
        kinds = {"batch_norm": (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)}
        kinds["instance_norm"] = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
        return kinds[name][max(0, x.dim() - 3)](width)
    assert name in (*ALONG, "residual", "keep", "global_avg_pool"), name
    return nn.Identity()


TEXTS = """
conv2d 128x32x128x128 > 64 k3 | batch_norm | relu
conv2d 128x32x128x128 > 64 k3 | batch_norm | multiply 1.5
conv2d 128x16x128x128 > 64 k3 | silu | batch_norm
conv2d 64x64x128x128 > 64 k3 | batch_norm | hardswish | keep | residual
conv2d 64x32x96x96 > 128 k3 | batch_norm | mish | max_pool 2
conv2d 64x32x64x64 > 128 k3 | batch_norm | leaky_relu | avg_pool 2
conv2d 128x16x128x128 > 32 k3 | batch_norm | tanh | global_avg_pool
conv2d 128x16x96x96 > 64 k3 | group_norm 8 | relu
conv2d 128x16x96x96 > 64 k3 | group_norm 8 | tanh | hardswish | residual | logsumexp
conv2d 128x16x128x128 > 64 k3 | group_norm 16 | scale | max_pool 4 | clamp 0.8
conv2d 64x32x128x128 > 64 k3 | bias | multiply 2 | sigmoid | group_norm 8
conv2d 64x32x112x112 > 96 k3 | group_norm 12 | gelu | mean space
conv2d 64x64x128x128 > 96 k3 | instance_norm | divide 2
conv2d 64x32x128x128 > 64 k3 | instance_norm | relu | residual
conv2d 32x32x112x112 > 64 k3 | instance_norm | softplus | max_pool 2
conv2d 128x16x128x128 > 64 k3 | mish | mish
conv2d 128x32x128x128 > 64 k3 | subtract_number 0.5 | subtract_number 0.2 | mish
conv2d 128x16x128x128 > 64 k3 | relu | hardswish
conv2d 128x16x128x128 > 64 k3 | hardswish | relu
conv2d 128x16x128x128 > 64 k3 | divide 3 | leaky_relu
conv2d 128x16x112x112 > 64 k3 | relu | bias
conv2d 64x32x128x128 > 64 k3 | scale | leaky_relu | gelu
conv2d 128x16x128x128 > 32 k3 | min | tanh | tanh
conv2d 128x32x112x112 > 64 k3 | multiply 2 | min
conv2d 128x16x128x128 > 64 k3 | clamp 0.5 | bias | multiply 2
conv2d 128x16x128x128 > 64 k3 | subtract_number 0.5 | tanh | subtract_number 0.2 | avg_pool 2
conv2d 128x32x128x128 > 64 k3 | subtract | hardswish | max_pool 2 | mish
conv2d 64x64x128x128 > 128 k3 | tanh | multiply 2 | bias | max_pool 4
conv2d 128x16x128x128 > 64 k3 | avg_pool 4 | sigmoid | sum
conv2d 128x16x112x112 > 64 k3 | gelu | global_avg_pool
conv2d 128x16x112x112 > 64 k3 | softmax | bias | sigmoid
conv2d 64x32x112x112 > 64 k3 | elu | max_pool 2 | logsumexp
conv2d 64x32x112x112 > 64 k3 | selu | avg_pool 2 | bias
conv2d 64x16x96x96 > 64 k3 | upsample 2 | hardtanh
conv2d 64x32x96x96 > 64 k3 | relu6 | layer_norm
conv2d 256x64x56x56 > 64 k1 | batch_norm | relu | residual
conv2d 256x64x56x56 > 128 k3 s2 | batch_norm | relu6
conv2d 64x64x56x56 > 256 k1 | batch_norm | hardsigmoid | scale
conv3d 16x8x32x64x64 > 32 k3 | group_norm 8 | mean space
conv3d 32x8x24x48x48 > 32 k3 | hardswish | group_norm 4 | mean space
conv3d 32x8x24x48x48 > 24 k3 | group_norm 8 | min | clamp 1
conv3d 32x8x24x48x48 > 32 k3 | leaky_relu | bias | clamp 1 | gelu
conv3d 32x3x24x64x64 > 24 k3 | softmax | max_pool 2 | max_pool 2
conv3d 32x8x24x48x48 > 32 k3 | min depth | softmax
conv3d 16x16x24x48x48 > 32 k3 | mish | tanh
conv3d 32x8x24x48x48 > 32 k3 | relu | leaky_relu | gelu | sigmoid | bias
conv3d 32x8x24x48x48 > 24 k3 | multiply 2 | tanh | scale | sigmoid
conv3d 16x16x24x48x48 > 24 k3 | scale | instance_norm | clamp 1 | multiply 2 | max
conv3d 32x8x24x48x48 > 24 k3 | divide 2 | max_pool 2 | global_avg_pool | bias | sum
conv3d 16x16x24x48x48 > 32 k3 | max_pool 2 | logsumexp | relu
conv3d 16x16x24x48x48 > 32 k3 | batch_norm | silu
conv3d 16x16x24x48x48 > 32 k3 | avg_pool 2 | batch_norm | elu
conv3d 16x16x24x48x48 > 32 k3 | upsample 2 | hardsigmoid
conv_transpose2d 64x64x64x64 > 64 k4 s2 | gelu | group_norm 8
conv_transpose2d 64x64x64x64 > 64 k4 s2 | batch_norm | tanh | max_pool 2 | group_norm 8
conv_transpose2d 64x64x64x64 > 64 k4 s2 | subtract | tanh
conv_transpose2d 64x64x64x64 > 64 k4 s2 | bias | clamp 1 | multiply 2 | clamp 1 | divide 2
conv_transpose2d 64x64x64x64 > 64 k4 s2 | mish | bias | hardtanh | multiply 2
conv_transpose2d 64x64x64x64 > 64 k4 s2 | softmax | bias | multiply 2 | sigmoid
conv_transpose2d 64x64x64x64 > 64 k3 s2 | max_pool 2 | hardtanh | mean space | tanh
conv_transpose2d 64x64x64x64 > 64 k3 s2 | multiply 0.5 | global_avg_pool | mean
conv_transpose2d 64x64x64x64 > 64 k3 | global_avg_pool | bias | logsumexp | sum | multiply 10
conv_transpose2d 32x64x64x64 > 64 k4 s2 | min | sum space | gelu | bias
conv_transpose2d 64x32x64x64 > 64 k4 s2 | bias | min | gelu | multiply 2
conv_transpose2d 64x64x64x64 > 64 k4 s2 | instance_norm | leaky_relu
conv_transpose2d 64x64x64x64 > 64 k4 s2 | batch_norm | relu | residual
conv_transpose2d 64x32x64x64 > 64 k4 s2 | avg_pool 2 | silu | layer_norm
conv_transpose2d 64x64x48x48 > 64 k3 | softsign | scale | max space
conv_transpose3d 16x16x16x32x32 > 32 k3 s2 | batch_norm | avg_pool 2 | avg_pool 2
conv_transpose3d 16x16x16x32x32 > 32 k3 s2 | batch_norm | subtract
conv_transpose3d 16x16x16x32x32 > 32 k4 s2 | softmax | sigmoid
conv_transpose3d 16x16x16x32x32 > 32 k3 s2 | bias | hardswish
conv_transpose3d 16x16x16x32x32 > 32 k3 s2 | bias | residual | scale | residual
conv_transpose3d 16x16x16x32x32 > 32 k4 s2 | logsumexp | hardswish | subtract_number 0.2 | clamp 1
conv_transpose3d 16x16x16x32x32 > 32 k4 s2 | bias | layer_norm | avg_pool 2 | gelu
conv_transpose3d 16x16x16x32x32 > 32 k4 s2 | layer_norm | gelu | multiply 2
conv_transpose3d 16x16x16x32x32 > 32 k3 s2 | clamp 1 | min | divide 2
conv_transpose3d 16x16x16x32x32 > 32 k3 s2 | leaky_relu | scale | leaky_relu | max_pool 2
conv_transpose3d 16x16x16x32x32 > 32 k3 s2 | silu | group_norm 8 | hardswish
conv_transpose3d 16x16x16x32x32 > 32 k3 s2 | relu | group_norm 8
conv_transpose3d 16x16x16x32x32 > 32 k3 s2 | multiply 2 | avg_pool 2 | bias | multiply 2
conv_transpose3d 16x16x16x32x32 > 32 k3 s2 | avg_pool 2 | clamp 1 | softmax | multiply 2
conv_transpose3d 16x16x16x32x32 > 32 k3 s2 | max_pool 2 | softmax | subtract | silu | max
conv_transpose3d 16x16x16x32x32 > 32 k3 s2 | multiply 2 | batch_norm | global_avg_pool
conv_transpose3d 16x16x16x32x32 > 32 k3 s2 | mean depth | bias | softmax | tanh | multiply 2
conv_transpose3d 16x16x16x32x32 > 32 k3 s2 | multiply 2 | max_pool 2 | global_avg_pool | clamp 1
linear 1024x8192 > 8192 | silu | bias | layer_norm | sum
linear 1024x8192 > 8192 | group_norm 64 | leaky_relu | residual
linear 1024x8192 > 8192 | multiply 2 | residual | clamp 10 | logsumexp | mish
linear 1024x8192 > 8192 | group_norm 512 | min | bias
linear 1024x8192 > 8192 | bias | hardtanh | mish | group_norm 256
linear 1024x8192 > 8192 | group_norm 16 | hardtanh
linear 1024x8192 > 8192 | batch_norm | bias | divide 2 | silu
linear 1024x8192 > 8192 | batch_norm | scale | softmax
linear 4096x4096 > 4096 | scale | batch_norm
linear 16384x4096 > 4096 | batch_norm | gelu | relu
linear 1024x8192 > 8192 | avg_pool 16 | gelu | multiply 2 | max
linear 1024x8192 > 8192 | sigmoid | logsumexp
linear 1024x8192 > 8192 | gelu | softmax
linear 1024x8192 > 8192 | mish | mish
linear 1024x8192 > 8192 | divide 2 | gelu
linear 1024x8192 > 8192 | subtract | multiply 2 | relu
linear 1024x8192 > 8192 | silu | divide 2 | clamp 1 | tanh | clamp 1
linear 1024x8192 > 8192 | logsumexp | leaky_relu | leaky_relu | gelu | gelu
linear 1024x8192 > 8192 | max_pool 2 | sum | multiply 0.5
linear 1024x8192 > 8192 | bias | silu | tanh | gelu | hardtanh
linear 4096x4096 > 4096 | layer_norm | logsigmoid | residual
linear 4096x4096 > 4096 | softshrink | layer_norm
linear 4096x4096 > 4096 | celu | tanhshrink | mean
linear 1024x8192 > 8192 | max | subtract_number 1 | gelu
"""
PROGRAMS = {made.name: made for line in TEXTS.strip().splitlines() for made in [Program(line)]}
"""By name."""
