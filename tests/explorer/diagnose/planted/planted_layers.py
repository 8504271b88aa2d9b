"""Mistakes in layers and attention: batch norm, biases, attention by hand."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from planting import Step, planted, trains
from torch import Tensor, nn

BF16 = torch.bfloat16


@planted("batch-norm-few-samples", "nn.GroupNorm")
def batch_norm_of_two(mistake: bool) -> Step:
    class Projector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.second = nn.Linear(2048, 2048), nn.BatchNorm1d(2048), nn.Linear(2048, 256)

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.norm(self.first(x)))  # mistake
            return self.second(h)

    return trains(Projector(), torch.empty(8 if mistake else 256, 2048))


@planted("bias-before-batch-norm", "bias=False")
def bias_before_batch_norm(mistake: bool) -> Step:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn, self.norm = nn.Conv2d(64, 64, 1, bias=mistake), nn.BatchNorm2d(64)

        def forward(self, x: Tensor) -> Tensor:
            return x + F.relu(self.norm(self.turn(x)))  # mistake

    model = nn.Sequential(*(Block() for _ in range(3))).to(BF16).to(memory_format=torch.channels_last)
    return trains(model, torch.empty(128, 64, 56, 56, dtype=BF16).to(memory_format=torch.channels_last))


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
    return torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1) @ v  # mistake


def attention_in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    return torch.softmax(scores, dim=-1).to(v.dtype) @ v  # mistake


class Attends(nn.Module):
    def __init__(self, heads: int, width: int, mixes) -> None:
        super().__init__()
        self.qkv, self.out, self.heads, self.mixes = nn.Linear(width, 3 * width), nn.Linear(width, width), heads, mixes

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        return x + self.out(self.mixes(q, k, v).transpose(1, 2).flatten(2))


@planted("attention-by-hand", "scaled_dot_product_attention")
def attention_by_hand(mistake: bool) -> Step:
    mixes = attention if mistake else lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return trains(Attends(16, 1024, mixes).to(BF16), torch.empty(8, 1024, 1024, dtype=BF16))


@planted("attention-by-hand", "scaled_dot_product_attention")
def attention_over_short_windows(mistake: bool) -> Step:
    mixes = attention if mistake else lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return trains(Attends(4, 512, mixes).to(BF16), torch.empty(512, 64, 512, dtype=BF16))


@planted("attention-by-hand", "scaled_dot_product_attention")
def attention_with_a_softmax_in_float32(mistake: bool) -> Step:
    mixes = attention_in_float32 if mistake else F.scaled_dot_product_attention
    return trains(Attends(8, 512, mixes).to(BF16), torch.empty(16, 512, 512, dtype=BF16))


@planted("attention-by-hand", "scaled_dot_product_attention")
def attention_of_float32(mistake: bool) -> Step:
    mixes = attention if mistake else lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return trains(Attends(8, 512, mixes), torch.empty(8, 512, 512))


@planted("attention-by-hand", "scaled_dot_product_attention")
def attention_by_einsum(mistake: bool) -> Step:
    def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
        return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(dim=-1), v)  # mistake

    mixes = by_einsum if mistake else F.scaled_dot_product_attention
    return trains(Attends(8, 512, mixes).to(BF16), torch.empty(16, 512, 512, dtype=BF16))
