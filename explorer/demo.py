"""The embedded example: a GPT as people write it by hand, sized by its arguments. No downloads, CPU by default."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROPE_LEAF = Path(__file__).with_name("rope_leaf.tfz")
"""A session file of a step with a leaf on the CPU, as an H200 ran and measured it: notebook 02 writes such a file."""


class SelfAttention(nn.Module):
    """Causal multi-head attention with one projection for q, k and v: `[B, T, C] -> [B, T, C]`."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=2)
        q = q.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        k = k.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        v = v.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).reshape(batch, length, width)
        return F.dropout(self.proj(y), self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(F.gelu(self.up(x))), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.attn = nn.LayerNorm(width), SelfAttention(width, heads, dropout)
        self.norm_2, self.mlp = nn.LayerNorm(width), MLP(width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm_1(x))
        x = x + self.mlp(self.norm_2(x))
        return x


class GPT(nn.Module):
    """Tokens `i64[B, T]` and targets `i64[B, T]` to the mean cross-entropy. The head shares the embedding's weight."""

    def __init__(
        self, layers: int = 1, width: int = 64, heads: int = 4, vocab: int = 256, length: int = 64, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(length, width)
        self.dropout = dropout
        self.h = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(_initialise)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        place = torch.arange(tokens.shape[1], device=tokens.device)
        x = F.dropout(self.tokens(tokens) + self.positions(place), self.dropout, self.training)
        for block in self.h:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _initialise(module: nn.Module) -> None:
    """As GPT-2: a first loss near log(vocab), where torch's own embedding of unit variance makes it hundreds."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def batch(vocab: int, size: int, length: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Random tokens and targets, each `i64[size, length]`."""
    tokens = torch.randint(vocab, (size, length + 1), device=device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
