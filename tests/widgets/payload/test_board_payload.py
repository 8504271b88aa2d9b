"""What the view is told of the board: names of configurations, the frontier, what two of them differ by."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tracefuse
from tracefuse.config import Config
from tracefuse.widgets.payload.board import frontier, said

_NUMBERS = st.integers(0, 6).map(float)


@given(st.lists(st.tuples(_NUMBERS, _NUMBERS), max_size=12))
def test_nothing_beats_the_frontier_and_all_else_is_beaten(points: list[tuple[float, float]]) -> None:
    best = frontier(points)

    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one != other and one[0] <= other[0] and one[1] <= other[1]

    for at, point in enumerate(points):
        is_beaten = any(beats(other, point) for other in points)
        is_again = point in [points[other] for other in best if other != at]
        assert (at in best) == (not is_beaten and not (is_again and at not in best))


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (Config.off(), "captured"),
        (Config(), "all passes"),
        (Config.of(cat=False, fuse=False), "without cat, fuse"),
        (Config.of(remat=0.0), "weight 0"),
        (Config.of(remat=None, memory_budget=0.5), "without remat"),
        (Config.of(memory_budget=0.5), "saves at most 50 %"),
        (Config.of(memory_budget="2GiB"), "saves at most 2 GiB"),
        (Config.of(freeze=["h.*"], save=["a"]), "h.* frozen, saves a"),
        (Config.of(remat={"longest_chain": 8}), "longest_chain 8"),
        (Config.off().changed(cat=True), "only cat"),
    ],
)
def test_a_configuration_has_a_name(config: Config, name: str) -> None:
    assert said(config) == name


def test_a_name_says_when_a_pass_of_ones_own_is_off() -> None:
    x = torch.ones(2, requires_grad=True)
    variant = tracefuse.capture(lambda: x.sin().sum().backward()).optimize(pad=False)
    assert said(variant.config) == "without pad"
