"""Training steps with mistakes that a replay can mend, at sizes that cost a GPU milliseconds, and at small ones for a CPU.

Each function makes a step on the default device. The first ones have one mistake each, the last ones are programs as people
write them, with several.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BF16 = torch.bfloat16
Step = Callable[[], object]
Made = Callable[[bool], Step]


@dataclass(frozen=True)
class Mistaken:
    """A program: `make` is told whether it is to be small; `ids` are the kinds of findings that are tried, all where it names
    none; `has_update` says that its step ends with an optimizer's, `on_gpu` that the mistake is about a GPU."""

    make: Made
    ids: tuple[str, ...] = ()
    has_update: bool = False
    on_gpu: bool = False


MISTAKEN: dict[str, Mistaken] = {}
"""By name, those that tell the most first."""


def mistaken(*ids: str, has_update: bool = False, on_gpu: bool = False) -> Callable[[Made], Made]:
    def register(make: Made) -> Made:
        MISTAKEN[make.__name__] = Mistaken(make, ids, has_update, on_gpu)
        return make

    return register


def trains(model: nn.Module, *inputs: Tensor) -> Step:
    def step() -> None:
        out = model(*inputs)
        (out.float().square().mean() if out.dim() else out).backward()

    return step


def stacked(block: Callable[[], nn.Module], count: int) -> nn.Sequential:
    return nn.Sequential(*(block() for _ in range(count)))


class Feed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


# --- work that is done again ------------------------------------------------------------------------------------------


@mistaken("checkpoint-not-needed")
def layers_checkpointed(small: bool) -> Step:
    width, rows = (32, 64) if small else (2048, 8192)
    layers, x = nn.ModuleList(Feed(width) for _ in range(4)).to(BF16), torch.randn(rows, width, dtype=BF16)

    def step() -> None:
        h = x.requires_grad_()
        for layer in layers:
            h = checkpoint(layer, h, use_reentrant=False)
        h.float().square().mean().backward()

    return step


@mistaken("computed-again")
def bias_in_each_layer(small: bool) -> Step:
    width, length = (32, 64) if small else (1024, 4096)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(width, 3 * width)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (-1, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
            at = torch.arange(length)
            bias = (-(at[:, None] - at).abs().float() / length).masked_fill(at[:, None] < at, -1e9).to(BF16)
            return x + F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)

    return trains(stacked(Attention, 6).to(BF16), torch.randn(1, length, width, dtype=BF16))


@mistaken("gradient-of-data")
def pictures_that_require_gradients(small: bool) -> Step:
    width, rows = (64, 128) if small else (4096, 16_384)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 64)).to(BF16)
    return trains(model, torch.randn(rows, width, dtype=BF16, requires_grad=True))


@mistaken("gradient-without-optimizer")
def a_backbone_that_no_optimizer_holds(small: bool) -> Step:
    width, rows = (64, 128) if small else (4096, 8192)
    backbone, head = stacked(lambda: nn.Linear(width, width), 3).to(BF16), nn.Linear(width, 64).to(BF16)
    optimizer, x = torch.optim.SGD(head.parameters(), lr=0.0), torch.randn(rows, width, dtype=BF16)

    def step() -> None:
        assert optimizer.param_groups
        head(torch.relu(backbone(x))).float().square().mean().backward()

    return step


class EveryGradient(torch.autograd.Function):
    """A convolution that asks its operator for every gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.conv2d(x, weight, padding=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        x, weight = ctx.saved_tensors
        run = torch.ops.aten.convolution_backward
        both = run(gradients[0], x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
        return both[0], None


@mistaken("frozen-weight-gradient")
def a_frozen_convolution_paid_for(small: bool) -> Step:
    channels, count, size = (8, 2, 8) if small else (256, 128, 56)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
            self.second.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return EveryGradient.apply(F.relu(self.first(x)), self.second.weight)

    model = Net().to(BF16, memory_format=torch.channels_last)
    x = torch.randn(count, channels, size, size, dtype=BF16)
    return trains(model, x.to(memory_format=torch.channels_last))


# --- casts and copies -------------------------------------------------------------------------------------------------


@mistaken("cast-round-trip")
def activation_in_float32(small: bool) -> Step:
    width, rows = (32, 64) if small else (2048, 16_384)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.silu(self.up(x).float()).to(x.dtype))

    return trains(stacked(Block, 2).to(BF16), torch.randn(rows, width, dtype=BF16))


@mistaken("norm-in-float32")
def norm_in_float32(small: bool) -> Step:
    width, rows = (32, 64) if small else (4096, 16_384)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.feed = nn.LayerNorm(width), nn.Linear(width, width).to(BF16)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.feed(self.norm(x.float()).to(x.dtype))

    return trains(stacked(Block, 3), torch.randn(rows, width, dtype=BF16))


@mistaken("dropout-in-float32", on_gpu=True)
def dropout_in_float32(small: bool) -> Step:
    width, rows = (32, 64) if small else (4096, 16_384)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.feed = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            return x + F.dropout(self.feed(x).float(), 0.1).to(x.dtype)

    return trains(stacked(Block, 3).to(BF16), torch.randn(rows, width, dtype=BF16))


@mistaken("logits-in-float32")
def logits_upcast(small: bool) -> Step:
    width, words, rows = (32, 512, 64) if small else (1024, 32_000, 16_384)

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(width, words, bias=False)

        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(self.out(x).float(), targets)

    return trains(Head().to(BF16), torch.randn(rows, width, dtype=BF16), torch.randint(words, (rows,)))


@mistaken("cast-again")
def a_stream_cast_for_each_reader(small: bool) -> Step:
    width, rows = (64, 64) if small else (4096, 16_384)

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(width, width // 4).to(BF16) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.query(x.to(BF16)) * torch.sigmoid(self.key(x.to(BF16))) + self.value(x.to(BF16))

    return trains(Reads(), torch.randn(rows, width))


@mistaken("weights-cast-each-step")
def weights_cast_by_hand(small: bool) -> Step:
    width, rows = (64, 64) if small else (8192, 2048)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(width, width) / math.sqrt(width))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight.to(BF16))

    return trains(stacked(Layer, 3), torch.randn(rows, width, dtype=BF16))


@mistaken("needless-copy")
def a_gate_made_contiguous(small: bool) -> Step:
    width, rows = (64, 64) if small else (4096, 16_384)

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.out = nn.Linear(width, 2 * width), nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            value, gate = self.wide(x).chunk(2, dim=-1)
            return self.out(value.contiguous() * torch.sigmoid(gate.contiguous()))

    return trains(stacked(Gated, 2).to(BF16), torch.randn(rows, width, dtype=BF16))


@mistaken("needless-copy")
def a_residual_of_a_clone(small: bool) -> Step:
    width, rows = (32, 64) if small else (2048, 32_768)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.feed = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            return x.clone() + self.feed(x)

    return trains(stacked(Block, 4).to(BF16), torch.randn(rows, width, dtype=BF16))


@mistaken("repeat-not-expand")
def positions_repeated(small: bool) -> Step:
    width, length, batch = (32, 16, 4) if small else (2048, 2048, 16)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position, self.read = nn.Parameter(torch.randn(1, length, width)), nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            return self.read(x + self.position.repeat(x.shape[0], 1, 1))

    return trains(Model().to(BF16), torch.randn(batch, length, width, dtype=BF16))


# --- what passes mend -------------------------------------------------------------------------------------------------


@mistaken("unaligned-matmul", on_gpu=True)
def vocabulary_of_an_odd_size(small: bool) -> Step:
    width, words, rows = (512, 2003, 1024) if small else (768, 50_257, 8192)

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(words, width), nn.Linear(width, words, bias=False)

        def forward(self, tokens: Tensor) -> Tensor:
            return F.cross_entropy(self.out(self.words(tokens)), tokens)

    return trains(Head().to(BF16), torch.randint(words, (rows,)))


@mistaken("cat-of-nothing")
def a_cache_of_nothing(small: bool) -> Step:
    width, length = (32, 64) if small else (2048, 4096)

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read = nn.Linear(width, width)

        def forward(self, x: Tensor, cache: Tensor) -> Tensor:
            return torch.cat([cache, self.read(x)], dim=1).square()

    inputs = torch.randn(8, length, width, dtype=BF16), torch.randn(8, 0, width, dtype=BF16)
    return trains(Cached().to(BF16), *inputs)


@mistaken("unfused-pointwise")
def pointwise_ops_one_by_one(small: bool) -> Step:
    width, rows = (64, 64) if small else (8192, 16_384)

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x * self.scale + self.shift) * torch.sigmoid(x) + x

    return trains(stacked(Gate, 2).to(BF16), torch.randn(rows, width, dtype=BF16))


@mistaken("log-of-softmax")
def likelihood_by_hand(small: bool) -> Step:
    width, words, rows = (32, 512, 64) if small else (512, 16_384, 16_384)

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(width, words)

        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            return F.nll_loss(torch.softmax(self.out(x), dim=-1).log(), targets)

    return trains(Classifier().to(BF16), torch.randn(rows, width, dtype=BF16), torch.randint(words, (rows,)))


@mistaken("constant-each-step")
def positions_made_each_step(small: bool) -> Step:
    width, length = (32, 64) if small else (1024, 65_536)

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            angles = torch.arange(length)[:, None] / 10_000 ** (torch.arange(width) / width)
            return self.read(x + angles.sin().to(BF16))

    return trains(Encoder().to(BF16), torch.randn(2, length, width, dtype=BF16))


@mistaken("optimizer-not-fused", "update-share", has_update=True, on_gpu=True)
def an_update_tensor_by_tensor(small: bool) -> Step:
    width, rows = (64, 32) if small else (4096, 512)
    model, x = stacked(lambda: nn.Linear(width, width), 6), torch.randn(rows, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False, fused=False)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


# --- what lies on the host --------------------------------------------------------------------------------------------


@mistaken("cpu-leaf", "moved-each-step", on_gpu=True)
def a_leaf_left_on_the_cpu(small: bool) -> Step:
    rows, width = (64, 32) if small else (4096, 2048)
    prompt = nn.Parameter(torch.randn(rows, width, device="cpu"))
    model, x = nn.Linear(width, width), torch.randn(8, rows, width)

    def step() -> None:
        model(x + prompt.to(x.device)).square().mean().backward()

    return step


@mistaken("pageable-copy", on_gpu=True)
def a_batch_from_pageable_memory(small: bool) -> Step:
    rows, width = (64, 32) if small else (16_384, 1024)
    model, batch = nn.Linear(width, width), torch.randn(rows, width, device="cpu")

    def step() -> None:
        model(batch.to(model.weight.device)).square().mean().backward()

    return step


# --- as people write them ---------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer's layer with attention by hand, whose mask is made in each layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, dim=-1))
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~mask, float("-inf"))
        mixed = (torch.softmax(scores, dim=-1) @ v).transpose(1, 2).contiguous().flatten(2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.second(x))))


class Decoder(nn.Module):
    def __init__(self, width: int, heads: int, layers: int, words: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.blocks = stacked(lambda: Block(width, heads), layers)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.words(tokens)))
        return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def decoder(small: bool) -> tuple[Decoder, Tensor]:
    width, heads, layers, words, length, batch = (32, 2, 2, 403, 16, 2) if small else (1024, 16, 4, 50_257, 1024, 8)
    return Decoder(width, heads, layers, words), torch.randint(words, (batch, length))


@mistaken()
def a_decoder_by_hand(small: bool) -> Step:
    model, tokens = decoder(small)
    return trains(model.to(BF16), tokens)


@mistaken()
def a_decoder_under_autocast(small: bool) -> Step:
    model, tokens = decoder(small)

    def step() -> None:
        with torch.autocast(tokens.device.type, BF16):
            loss = model(tokens)
        loss.backward()

    return step


@mistaken()
def a_net_of_pictures(small: bool) -> Step:
    width, count, size = (8, 2, 16) if small else (128, 64, 64)

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

        def forward(self, x: Tensor) -> Tensor:
            return x + F.relu(self.norm(self.turn(x)))

    return trains(stacked(Residual, 4).to(BF16), torch.randn(count, width, size, size, dtype=BF16))


@mistaken()
def adapters_beside_frozen_layers(small: bool) -> Step:
    """LoRA whose product with its adapter is made before it meets the batch, and an update that torch makes list by list."""
    width, rows = (64, 64) if small else (4096, 4096)

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(width, width, bias=False).requires_grad_(False)
            self.down = nn.Parameter(torch.randn(width, 16) / width)
            self.up = nn.Parameter(torch.randn(16, width) / 16)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.base(x) + x @ (self.down @ self.up))

    return trains(stacked(Adapted, 3).to(BF16), torch.randn(rows, width, dtype=BF16, requires_grad=True))
