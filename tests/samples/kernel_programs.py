"""Small functions that become one kernel each, pointwise and with shapes of their own, and numbers to run them on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from programs import apply_rope
from torch import Tensor

aten = torch.ops.aten
f32, f64, bf16, f16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


def rand(*shape: int, dtype: torch.dtype = f32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=f64).to(dtype)


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
    "sums on both sides of the channels": (lambda x: (x * 2).sum((0, 2, 3)), [(5, 7, 6, 9)]),
    "sums on both sides, in steps": (lambda x: ((x * 2).mean((0, 2)), x.square().sum((0, 2), True)), [(37, 3, 2011)]),
    "sums of channels that come last": (lambda x: (x.permute(0, 3, 1, 2) * 2).sum((0, 2, 3)), [(5, 6, 9, 33)]),
    "sums over what lies apart": (lambda x: (x * 2).sum((0, 2)), [(6, 5, 7, 33)]),
    "mean of images that lie across": (lambda x: x.permute(0, 3, 1, 2).exp().mean((2, 3)), [(3, 20, 21, 5)]),
    "moments of channels": (
        lambda x: torch.var_mean(x * 2, (0, 2, 3), correction=0, keepdim=True),
        [(5, 7, 6, 9)],
    ),
    "moments of channels in steps": (lambda x: torch.var_mean(x * 2, (0, 2, 3)), [(9, 3, 40, 53)]),
    "moments of channels that come last": (
        lambda x: (lambda var, mean: ((var + 1e-5).rsqrt(), mean * 0.1))(
            *torch.var_mean(x.permute(0, 3, 1, 2) * 2, (0, 2, 3), correction=0, keepdim=True)
        ),
        [(9, 40, 53, 5)],
    ),
    "moments of columns": (lambda x: (torch.var(x * 2, 0), (x * 2).mean(0)), [(300, 42)]),
    "moments of rows": (lambda x: torch.var_mean(x * 2, (2, 3), keepdim=True), [(5, 7, 6, 9)]),
    "moments of few long rows": (lambda x: torch.var_mean(x * 2, (1, 2), correction=0), [(3, 130, 170)]),
    "softmax along channels": (lambda x: torch.softmax(x * 2, 1) + 1, [(5, 7, 6, 9)]),
    "log_softmax along many channels": (lambda x: torch.log_softmax(x * 2, 1), [(2, 300, 5, 7)]),
    "extrema and logsumexp along channels": (
        lambda x: ((x * 2).amax(1), x.amin(1, keepdim=True), x.logsumexp(1)),
        [(3, 40, 6, 9)],
    ),
    "extrema and their places": (
        lambda x: (*(x * 2).max(1), *(x * 2).min(1), (x * 2).argmax(1, keepdim=True)),
        [(3, 9, 5, 7)],
    ),
    "places of equal elements": (lambda x: (x * 2).to(torch.int32).to(x.dtype).max(1), [(3, 70, 5)]),
    "places in long rows": (lambda x: (x * 2).max(-1), [(70, 16501)]),
    "places of NaN": (lambda x: torch.where(x > 1, float("nan"), x).min(1), [(3, 9, 5)]),
    "softmax of channels that come last": (lambda x: torch.softmax(x.permute(0, 3, 1, 2) * 2, 1), [(5, 6, 9, 33)]),
    "cumulative sums": (lambda x: ((y := (x * 2).cumsum(-1)) * x, y.sum(-1)), [(2, 3, 17)]),
    "cumulative sums along channels": (lambda x: (x * 2).cumsum(1) + 1, [(5, 7, 6, 9)]),
    "cumulative sums from the end": (lambda x: (x * 2).flip(1).cumsum(1).flip(1) + x, [(3, 33, 7)]),
    "cumulative sums of whole rows": (lambda x: (y := (x * 2).cumsum(-1), (y * x).sum(0)), [(90, 17)]),
    "flipped": (lambda x: (x * 2).flip(0, 2).view(15, 7).flip(1) + x.view(-1, 7), [(3, 5, 7)]),
    "numbers for each channel": (
        lambda x, m, s, b: ((x - m) * s + b.view(-1, 1, 1)).relu(),
        [(3, 5, 16, 24), (1, 5, 1, 1), (1, 5, 1, 1), (5,)],
    ),
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
