"""Types of values whose operator has no shape function: those that were recorded stand in for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import tracefuse


@pytest.fixture
def both() -> Iterator[torch._ops.OpOverloadPacket]:
    """An operator that yields a tensor and a list of two, as cuDNN's recurrent backward does, and that nobody can fake."""
    with torch.library._scoped_library("tracefuse_test", "FRAGMENT") as library:
        library.define("both(Tensor x) -> (Tensor, Tensor[])")
        library.impl("both", lambda x: (x * 2, [x.sin(), x.cos()]), "CPU")
        yield torch.ops.tracefuse_test.both


def test_a_list_among_the_results_has_the_types_that_were_recorded(both: torch._ops.OpOverloadPacket) -> None:
    x = torch.randn(4)

    def step() -> torch.Tensor:
        doubled, (sine, cosine) = both(x)
        return doubled + sine * cosine

    captured = tracefuse.capture(step)
    assert torch.equal(captured.replay()[0], step())
    assert torch.equal(captured.optimize().compile()(), step())
