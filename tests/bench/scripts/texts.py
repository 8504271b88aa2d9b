"""Train a language model on synthetic text.

python texts.py            a GPU, 8 sequences of 1024 tokens a step
python texts.py --small    a CPU, a few seconds
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Shape:
    """The sizes of a model."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257
    length: int = 1024
    dropout: float = 0.0


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q = q.view(batch, length, self.heads, -1).transpose(1, 2)
        k = k.view(batch, length, self.heads, -1).transpose(1, 2)
        v = v.view(batch, length, self.heads, -1).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        mask = torch.triu(torch.ones(length, length, dtype=torch.bool, device=x.device), diagonal=1)
        scores = scores.masked_fill(mask, float("-inf"))
        weights = self.drop(scores.softmax(dim=-1))
        y = (weights @ v).transpose(1, 2).reshape(batch, length, width)
        return self.out(y)


class Feedforward(nn.Module):
    """Two matmuls with GELU between them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(F.gelu(self.up(x), approximate="tanh")))


class Block(nn.Module):
    """Attention and feedforward, each behind a norm, each added to the stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention, self.feedforward = Attention(shape), Feedforward(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feedforward(self.norm2(x))


class LanguageModel(nn.Module):
    """Tokens in, logits out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.apply(self.initialise)

    @staticmethod
    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Text:
    """Batches of a text that repeats itself with noise."""

    def __init__(self, vocabulary: int, length: int, batch: int) -> None:
        self.vocabulary, self.length, self.batch = vocabulary, length, batch
        self.generator = torch.Generator().manual_seed(1)
        self.motif = torch.randint(vocabulary, (64,), generator=self.generator)

    def next(self) -> tuple[Tensor, Tensor]:
        start = torch.randint(64, (self.batch, 1), generator=self.generator)
        places = (start + torch.arange(self.length + 1)) % 64
        text = self.motif[places]
        noise = torch.rand(text.shape, generator=self.generator) < 0.05
        text = torch.where(noise, torch.randint(self.vocabulary, text.shape, generator=self.generator), text)
        return text[:, :-1], text[:, 1:]


def losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy, and a penalty that keeps the logits' normaliser near 1."""
    logits = logits.float().flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten())
    return loss, 1e-4 * logits.logsumexp(dim=-1).square().mean()


def scheduled(step: int, steps: int) -> float:
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = Shape(options.layers, options.width, options.heads, options.vocabulary, options.length, options.dropout)
    model = LanguageModel(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: scheduled(step, options.steps))
    text = Text(options.vocabulary, options.length, options.batch)
    total = torch.zeros((), device=device)
    start = time.perf_counter()
    for step in range(options.steps):
        tokens, targets = text.next()
        if device.type == "cuda":
            tokens, targets = tokens.pin_memory(), targets.pin_memory()
        tokens, targets = tokens.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = model(tokens)
            loss, penalty = losses(logits, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward(retain_graph=True)
        penalty.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        total += loss.detach()
        if (step + 1) % options.every == 0:
            mean = total.item() / options.every
            seconds = (time.perf_counter() - start) / options.every
            print(f"step {step + 1:4d}  loss {mean:.3f}  {tokens.numel() / seconds:.0f} tokens/s", flush=True)
            total.zero_()
            start = time.perf_counter()
    if options.save:
        torch.save({"model": model.state_dict(), "shape": shape}, options.save)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    if options.small:
        options.layers, options.width, options.heads, options.vocabulary = 2, 128, 4, 1009
        options.length, options.batch, options.steps, options.every = 64, 2, 4, 2
    train(options)


if __name__ == "__main__":
    main()
