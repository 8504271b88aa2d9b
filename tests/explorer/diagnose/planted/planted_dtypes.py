"""Mistakes of dtype: casts back and forth, float32 and float64 where they are not needed, TF32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from meta_kernels import Autocast
from planting import Step, planted, trains
from torch import Tensor, nn

BF16 = torch.bfloat16


@planted("tf32-off", "set_float32_matmul_precision", environment={"tf32": "False"})
def matmuls_of_float32(mistake: bool) -> Step:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(2048, 8192), nn.Linear(8192, 2048)

        def forward(self, x: Tensor) -> Tensor:
            h = F.gelu(self.up(x))  # mistake
            return self.down(h)

    return trains(Net(), torch.empty(8192, 2048))


@planted("cast-round-trip", "leave both casts out")
def activation_in_float32(mistake: bool) -> Step:
    class Feed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            if mistake:
                h = F.silu(h.float()).to(x.dtype)  # mistake
            else:
                h = F.silu(h)
            return self.down(h)

    return trains(nn.Sequential(*(Feed() for _ in range(3))).to(BF16), torch.empty(8, 1024, 1024, dtype=BF16))


@planted("cast-again", "cast it once")
def stream_cast_for_each_reader(mistake: bool) -> Step:
    """A residual stream in float32, as autocast leaves it, and matmuls of half precision that read it."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(2048, 512).to(BF16) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            if not mistake:
                x = x.to(BF16)
            q = self.query(x.to(BF16))  # mistake
            k = self.key(x.to(BF16))
            v = self.value(x.to(BF16))
            return q * torch.sigmoid(k) + v

    return trains(Reads(), torch.empty(16, 2048, 2048))


@planted("cast-again", "cast it once")
def autocast_of_one_stream_for_three(mistake: bool) -> Step:
    """Autocast keeps the casts of weights, and casts activations for each op anew."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(2048)
            self.query, self.key, self.value = (nn.Linear(2048, 256) for _ in range(3))
            self.all = nn.Linear(2048, 768)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            if not mistake:
                q, k, v = self.all(h).chunk(3, dim=-1)
                return q * torch.sigmoid(k) + v
            q = self.query(h)  # mistake
            return q * torch.sigmoid(self.key(h)) + self.value(h)

    model, x = Reads(), torch.empty(16, 2048, 2048)

    def step() -> None:
        with Autocast():
            loss = model(x).float().square().mean()
        loss.backward()

    return step


@planted("cast-round-trip", "keep the casts")
def a_block_without_autocast(mistake: bool) -> Step:
    """A part of the model that was taken out of autocast, so that its input and its output are cast."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            h = torch.sigmoid(h.float()) * 2.0 if mistake else torch.sigmoid(h) * 2.0  # mistake
            return self.down(h)

    model, x = Gated(), torch.empty(8, 2048, 1024)

    def step() -> None:
        with Autocast():
            loss = model(x).float().square().mean()
        loss.backward()

    return step


@planted("logits-in-float32", "F.cross_entropy")
def logits_upcast(mistake: bool) -> Step:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(32_000, 512), nn.Linear(512, 32_000, bias=False)

        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            logits = self.out(self.words(tokens)).flatten(0, 1)
            if mistake:
                logits = logits.float()  # mistake
            return F.cross_entropy(logits, targets.flatten())

    tokens = torch.zeros(8, 1024, dtype=torch.long)
    return trains(Head().to(BF16), tokens, tokens)


@planted("logits-in-float32", "under `with torch.autocast(device_type, enabled=False)")
def logits_upcast_under_autocast(mistake: bool) -> Step:
    words, out = nn.Embedding(32_000, 512), nn.Linear(512, 32_000, bias=False)
    tokens = torch.zeros(8, 1024, dtype=torch.long)

    def step() -> None:
        with Autocast():
            logits = out(words(tokens)).flatten(0, 1)
            if mistake:
                logits = logits.float()  # mistake
        F.cross_entropy(logits, tokens.flatten()).backward()

    return step


@planted("norm-in-float32", "F.layer_norm")
def norm_in_float32(mistake: bool) -> Step:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.feed = nn.LayerNorm(1024), nn.Linear(1024, 1024)
            if mistake:
                self.norm.float()

        def forward(self, x: Tensor) -> Tensor:
            if mistake:
                h = self.norm(x.float()).to(x.dtype)  # mistake
            else:
                h = self.norm(x)
            return x + self.feed(h)

    blocks = nn.Sequential(*(Block() for _ in range(4)))
    for block in blocks:
        block.feed.to(BF16)
        if not mistake:
            block.norm.to(BF16)
    return trains(blocks, torch.empty(8, 2048, 1024, dtype=BF16))


@planted("dropout-in-float32", "F.dropout")
def dropout_in_float32(mistake: bool) -> Step:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.feed = nn.Linear(1024, 1024)

        def forward(self, x: Tensor) -> Tensor:
            h = self.feed(x)
            if mistake:
                h = F.dropout(h.float(), 0.1).to(x.dtype)  # mistake
            else:
                h = F.dropout(h, 0.1)
            return x + h

    return trains(nn.Sequential(*(Block() for _ in range(4))).to(BF16), torch.empty(8, 2048, 1024, dtype=BF16))


@planted("float64-leak", "dtype=torch.float32")
def schedule_in_float64(mistake: bool) -> Step:
    """A diffusion step whose noise schedule comes from numpy, in float64."""

    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(1024, 1024), nn.Linear(1024, 1024)
            self.register_buffer("alphas", torch.empty(1000, dtype=torch.float64 if mistake else torch.float32))

        def forward(self, x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
            alpha = self.alphas[t][:, None]  # mistake
            noisy = alpha.sqrt() * x + (1 - alpha).sqrt() * noise
            guess = self.second(F.silu(self.first(noisy.float())))
            return F.mse_loss(guess, noise)

    x, t = torch.empty(65_536, 1024), torch.zeros(65_536, dtype=torch.long)
    return trains(Denoiser(), x, torch.empty_like(x), t)


@planted("weights-cast-each-step", "keep the model in bfloat16")
def weights_cast_by_hand(mistake: bool) -> Step:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4096, 4096, dtype=torch.float32 if mistake else BF16))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight.to(BF16))  # mistake

    return trains(nn.Sequential(*(Layer() for _ in range(4))), torch.empty(1024, 4096, dtype=BF16))


@planted("log-of-softmax", "F.cross_entropy")
def likelihood_by_hand(mistake: bool) -> Step:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(512, 8192)

        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            logits = self.out(x)
            if mistake:
                likelihood = torch.softmax(logits, dim=-1).log()  # mistake
                return F.nll_loss(likelihood, targets)
            return F.cross_entropy(logits, targets)

    return trains(Classifier().to(BF16), torch.empty(16_384, 512, dtype=BF16), torch.zeros(16_384, dtype=torch.long))


@planted("log-of-softmax", "binary_cross_entropy_with_logits")
def sigmoid_before_the_loss(mistake: bool) -> Step:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(256, 4096)

        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            logits = self.out(x)
            if mistake:
                return F.binary_cross_entropy(torch.sigmoid(logits), targets)  # mistake
            return F.binary_cross_entropy_with_logits(logits, targets)

    return trains(Tagger(), torch.empty(16_384, 256), torch.empty(16_384, 4096))
