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


def distances(ours, reference):
    """(relative, greatest) difference; what is NaN, or infinite with the same sign, in both does not count."""
    wide = torch.complex128 if reference.is_complex() else torch.float64
    ours, reference = ours.to(wide), reference.to(wide)
    same = torch.isclose(ours, reference, rtol=0, atol=0, equal_nan=True)
    if same.all():
        return 0.0, 0.0
    gap = torch.where(same, 0, ours - reference).abs()
    size = torch.where(reference.isfinite(), reference, 0).norm().clamp_min(1e-30)
    return float(gap.norm() / size), float(gap.max())


def magnitude(tensor):
    """The largest finite absolute value."""
    return float(torch.where(tensor.isfinite(), tensor, 0).abs().max()) if tensor.numel() > 0 else 0.0


def is_near(relative, greatest, size, tolerance, noise):
    """Whether `distances` are those of rounding; `noise`: how large a gradient can be that is nothing else."""
    return (math.isfinite(relative) and relative <= tolerance) or greatest <= 1e-12 or max(greatest, size) <= noise
