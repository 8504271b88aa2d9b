"""Mistakes of computing again: masks and tables in each layer, constants in each step, checkpoints, second backwards."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from planting import Step, planted, trains
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BF16 = torch.bfloat16


def rotary_tables(length: int, width: int) -> tuple[Tensor, Tensor]:
    turns = 10_000 ** (-torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(length).float(), turns)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(BF16), angles.sin().to(BF16)  # mistake


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


@planted("computed-again", "before the layers")
def rotary_tables_in_each_layer(mistake: bool) -> Step:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(1024, 3072), nn.Linear(1024, 1024)

        def forward(self, x: Tensor, tables: tuple[Tensor, Tensor] | None) -> Tensor:
            q, k, v = (t.unflatten(-1, (16, 64)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
            tables = tables or rotary_tables(x.shape[1], 64)
            mixed = F.scaled_dot_product_attention(turned(q, *tables), turned(k, *tables), v, is_causal=True)
            return x + self.out(mixed.transpose(1, 2).flatten(2))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Attention() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            tables = None if mistake else rotary_tables(x.shape[1], 64)
            for layer in self.layers:
                x = layer(x, tables)
            return x

    return trains(Model().to(BF16), torch.empty(8, 2048, 1024, dtype=BF16))


@planted("computed-again", "register_buffer")
def mask_in_each_layer(mistake: bool) -> Step:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(512, 1536)

        def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            if bias is None:
                bias = distances(x.shape[1])
            return x + F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], attn_mask=bias)[:, 0]

    def distances(length: int) -> Tensor:
        at = torch.arange(length)
        return (-(at[:, None] - at).abs().float() / length).masked_fill(at[:, None] < at, -1e9).to(BF16)  # mistake

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Attention() for _ in range(6))
            self.register_buffer("bias", distances(2048))

        def forward(self, x: Tensor) -> Tensor:
            bias = None if mistake else self.bias
            for layer in self.layers:
                x = layer(x, bias)
            return x

    return trains(Model().to(BF16), torch.empty(4, 2048, 512, dtype=BF16))


@planted("constant-each-step", "register_buffer")
def relative_bias_each_step(mistake: bool) -> Step:
    def sinusoids(length: int, width: int) -> Tensor:
        angles = torch.arange(length)[:, None] / 10_000 ** (torch.arange(width) / width)
        return angles.sin().to(BF16)  # mistake

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read = nn.Linear(256, 256)
            self.register_buffer("places", sinusoids(65_536, 256))

        def forward(self, x: Tensor) -> Tensor:
            places = sinusoids(65_536, 256) if mistake else self.places
            return self.read(x + places)

    return trains(Encoder().to(BF16), torch.empty(2, 65_536, 256, dtype=BF16))


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(1024), nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@planted("checkpoint-not-needed", "without `checkpoint`")
def everything_checkpointed(mistake: bool) -> Step:
    layers = nn.ModuleList(Feed() for _ in range(4)).to(BF16)
    x = torch.empty(8, 1024, 1024, dtype=BF16, requires_grad=True)

    def step() -> None:
        h = x.detach()
        for layer in layers:
            h = checkpoint(layer, h, use_reentrant=False) if mistake else layer(h)  # mistake
        h.float().square().mean().backward()

    return step


@planted("checkpoint-not-needed", "keeps the matmuls")
def what_is_cheap_to_keep_checkpointed(mistake: bool) -> Step:
    """A projection to a few features: its result is small, and computing it takes a matmul."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(1024, 4096), nn.Sequential(nn.Linear(4096, 64), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            h = F.gelu(self.up(x))
            if mistake:
                return checkpoint(self.down, h, use_reentrant=False)  # mistake
            return self.down(h)

    return trains(Pooled().to(BF16), torch.empty(16_384, 1024, dtype=BF16))


@planted("second-backward", "(loss_a + loss_b).backward()")
def two_losses_two_backwards(mistake: bool) -> Step:
    trunk = nn.Sequential(Feed(), Feed()).to(BF16)
    left, right = (nn.Linear(1024, 1024).to(BF16) for _ in range(2))
    x = torch.empty(8, 1024, 1024, dtype=BF16)

    def step() -> None:
        h = trunk(x)
        one, two = left(h).float().square().mean(), right(h).float().abs().mean()
        if mistake:
            one.backward(retain_graph=True)
            two.backward()  # mistake
        else:
            (one + two).backward()

    return step


@planted("constant-from-host", "register_buffer", device="cpu")
def constants_made_in_a_loop(mistake: bool) -> Step:
    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read = nn.Linear(64, 64)
            self.register_buffer("means", torch.linspace(0, 1, 64))

        def forward(self, x: Tensor) -> Tensor:
            for at in range(4):
                means = torch.tensor([i / 63 for i in range(64)]) if mistake else self.means  # mistake
                x = torch.relu(self.read(x - means)) + at
            return x

    return trains(Normalised(), torch.randn(32, 64))


@planted("never-used", "do not call what computes it", device="cpu")
def branch_that_nobody_uses(mistake: bool) -> Step:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main, self.auxiliary = nn.Linear(256, 256), nn.Linear(256, 512)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.main(x))
            if mistake:
                torch.softmax(self.auxiliary(h), dim=-1)  # mistake
            return h

    return trains(Model(), torch.randn(256, 256))
