"""What the view is told of the board: names of configurations, what two of them differ by."""

from __future__ import annotations

import pytest
import torch

import tracefuse
from tracefuse.config import Config
from tracefuse.widgets.payload.board import said


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
