"""A Triton kernel of the user's own, launched from Python."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def double_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * 2, at < n)


def double(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    double_kernel[(1,)](x, out, x.numel(), BLOCK=8)
    return out
