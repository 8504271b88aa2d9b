"""Replays draw from the generators as they were; whoever draws next must not notice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tracefuse.assembly.draws import undisturbed


def test_draws_inside_are_not_noticed_outside() -> None:
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    with undisturbed([]):
        torch.rand(5)
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize(("is_in_use", "devices"), [(True, [1]), (False, [])])
def test_a_gpu_in_use_is_left_alone_too_where_no_input_lies_on_it(
    is_in_use: bool, devices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    forked = []

    @contextmanager
    def fork_rng(devices: list[int]) -> Iterator[None]:
        forked.append(devices)
        yield

    monkeypatch.setattr(torch.random, "fork_rng", fork_rng)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_in_use)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with undisturbed([torch.ones(2)]):
        pass
    assert forked == [devices]
