"""How near two outputs are: one rule, for what is measured and for the check of an exported file, which has a copy of the text
below the mark."""

from __future__ import annotations

import math

import torch

# --- copied into exported files above their check ---
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
TOLERANCE |= {torch.complex128: 1e-9, torch.complex64: 1e-3}
# Of the largest gradient: what a gradient stays below that rounding alone made.
NOISE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5}

# So many numbers are compared at a time, in float64.
PIECE = 2**24


def distances(ours, reference):
    """(relative, greatest) difference; what is NaN, or infinite with the same sign, in both does not count."""
    wide = torch.complex128 if ours.is_complex() or reference.is_complex() else torch.float64
    apart, size, greatest = 0.0, 0.0, 0.0
    for mine, theirs in zip(ours.reshape(-1).split(PIECE), reference.reshape(-1).split(PIECE), strict=True):
        mine, theirs = mine.to(wide), theirs.to(wide)
        size = math.hypot(size, float(torch.where(theirs.isfinite(), theirs, 0).norm()))
        same = torch.isclose(mine, theirs, rtol=0, atol=0, equal_nan=True)
        if not same.all():
            gap = torch.where(same, 0, mine - theirs).abs()
            apart, most = math.hypot(apart, float(gap.norm())), float(gap.max())
            greatest = most if most != most or most > greatest else greatest
    return apart / max(size, 1e-30), greatest


def magnitude(tensor):
    """The largest finite absolute value."""
    return float(torch.where(tensor.isfinite(), tensor, 0).abs().max()) if tensor.numel() > 0 else 0.0


def is_near(relative, greatest, size, tolerance, noise):
    """Whether `distances` are those of rounding; `noise`: how large a gradient can be that is nothing else."""
    return (math.isfinite(relative) and relative <= tolerance) or greatest <= 1e-12 or max(greatest, size) <= noise
