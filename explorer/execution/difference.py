"""The largest difference of two tensors, in float64: none can hide behind an infinity or a NaN."""

from __future__ import annotations

import torch

from tracefuse.errors import MeasureError


def max_abs_difference(name: str, mine: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """`max |mine - expected|` in float64, complex numbers in both parts; equal infinities and NaNs differ by 0, a NaN in one
    alone is NaN.

    Raises `MeasureError` if only one is None or the shapes differ; `name` is for its message.
    """
    if mine is None and expected is None:
        return 0.0
    if mine is None or expected is None or mine.shape != expected.shape:
        shapes = [None if t is None else tuple(t.shape) for t in (mine, expected)]
        raise MeasureError(f"{name} has {shapes[0]} where the reference has {shapes[1]}: compare the same outputs")
    is_complex = mine.is_complex() or expected.is_complex()
    a, b = _numbers(mine, is_complex), _numbers(expected.to(mine.device), is_complex)
    same = (a == b) | (a.isnan() & b.isnan())
    delta = torch.where(same, 0.0, (a - b).abs())
    if is_complex:
        delta = torch.hypot(*delta.unbind(-1))
    return delta.max().item() if delta.numel() else 0.0


def _numbers(tensor: torch.Tensor, is_complex: bool) -> torch.Tensor:
    """In float64; of complex ones the parts, along a dimension of their own: an infinite part leaves the other as it is."""
    if not is_complex:
        return tensor.double()
    return torch.view_as_real(tensor.detach().to(torch.complex128).resolve_conj())
