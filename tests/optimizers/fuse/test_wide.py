"""Wide regions: how often a kernel is lowered does not grow with how many values it has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fused import fused, kernels
from torch import Tensor

from tracefuse.optimizers.fuse import carving
from tracefuse.optimizers.kernels.functions import lower
from tracefuse.optimizers.lowering import placements


def _counted(monkeypatch: pytest.MonkeyPatch, module: object, name: str, function: Callable[..., object]) -> list[None]:
    """A list that grows by one with each call of what `module` has as `name`."""
    calls: list[None] = []

    def counted(*args: object) -> object:
        calls.append(None)
        return function(*args)

    monkeypatch.setattr(module, name, counted)
    return calls


def _joined(x: Tensor) -> tuple[Tensor, ...]:
    """Values that are both returned and concatenated: one kernel cannot write the small ones and the large one."""
    parts = [torch.tanh(row @ row.T) * 0.5 for row in x]
    return torch.cat(parts).exp() + 1, *parts


@pytest.mark.parametrize("count", [6, 24])
def test_what_does_not_fit_is_cut_off_at_once(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carving, "_known", {})
    lowered = _counted(monkeypatch, carving, "lower", lower)
    result = fused(_joined, torch.randn(count, 4, 4))
    assert len(kernels(result)) == count + 1
    assert len(lowered) <= 5  # the region, its large output, and the equal small ones
    (split,) = result.reasons("split")
    assert "elements, where the kernel's programs share out" in split


def _taken_apart(x: Tensor) -> list[Tensor]:
    """Each part of a concatenation, read at a place that is known."""
    joined = torch.cat([row @ row.T for row in x]) * 2
    return [part + 1 for part in joined.view(-1, 4, 4).unbind()]


@pytest.mark.parametrize("count", [8, 32])
def test_a_part_at_a_known_place_is_found_without_a_walk(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = _counted(monkeypatch, placements, "_inside", placements._inside)
    monkeypatch.setattr(carving, "_known", {})
    assert kernels(fused(_taken_apart, torch.randn(count, 4, 4)))
    assert len(looked_at) <= 8 * count
