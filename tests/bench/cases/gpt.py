"""The GPT that several benchmarks train: its sizes, with attention in one kernel or by hand, and a batch for it."""

from __future__ import annotations

import math
from argparse import Namespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tracefuse.demo import GPT, SelfAttention, batch

SIZES = {"layers": 12, "width": 768, "heads": 12, "vocab": 50257, "length": 1024, "batch": 8}
SMALL = {"layers": 2, "width": 64, "heads": 4, "vocab": 211, "length": 32, "batch": 2}


class AttentionByHand(SelfAttention):
    """Causal attention whose probabilities are tensors of the program, `[B, heads, T, T]`."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__(width, heads, dropout=0.0)
        self.register_buffer("mask", torch.ones(length, length, dtype=torch.bool).tril().view(1, 1, length, length))

    def forward(self, x: Tensor) -> Tensor:
        size, length, width = x.shape
        q, k, v = (
            part.view(size, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.shape[-1]))
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        weights = F.dropout(F.softmax(scores, dim=-1), self.dropout, self.training)
        y = (weights @ v).transpose(1, 2).contiguous().view(size, length, width)
        return F.dropout(self.proj(y), self.dropout, self.training)


def model_of(program: str, sizes: dict[str, int], device: str) -> nn.Module:
    shape = {k: sizes[k] for k in ("layers", "width", "heads", "vocab", "length")}
    model = GPT(**shape, dropout=0.0)
    if program == "tf32":
        for block in model.h:
            block.attn = AttentionByHand(sizes["width"], sizes["heads"], sizes["length"])
    return model.to(device, torch.bfloat16 if program == "bf16" else torch.float32)


def model_and_batch(options: Namespace) -> tuple[GPT, Tensor, Tensor]:
    torch.manual_seed(0)
    sizes = SMALL if options.small else SIZES
    shape = {k: sizes[k] for k in ("layers", "width", "heads", "vocab", "length")}
    model = GPT(**shape, dropout=options.dropout).to(options.device, torch.bfloat16)
    return model, *batch(sizes["vocab"], sizes["batch"], sizes["length"], options.device)
