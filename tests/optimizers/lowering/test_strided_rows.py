"""Long rows between whose elements those of other rows lie: a sum goes down columns, all other reductions stay with ATen."""

from __future__ import annotations

import pytest
import torch

import tracefuse
from tracefuse.optimizers.kernels.fusible import refusal
from tracefuse.optimizers.ops import op_name
from tracefuse.optimizers.trace import Trace

SIDE = 40


def pooled(how: str, order: torch.memory_format, side: int = SIDE) -> Trace:
    x = torch.randn(2, 8, side, side).contiguous(memory_format=order)
    return tracefuse.capture(lambda x: getattr(x.tanh(), how)((2, 3)), x).trace


def reason(trace: Trace, how: str) -> str | None:
    (node,) = (n for n in trace.ops if op_name(n).split(".")[1] == how)
    return refusal(node)


@pytest.mark.parametrize("how", ["amax", "amin"])
def test_an_extremum_of_an_image_whose_channels_lie_side_by_side_is_atens(how: str) -> None:
    said = "its rows have more than 1024 elements, between which others lie"
    assert reason(pooled(how, torch.channels_last), how) == said


@pytest.mark.parametrize(
    ("how", "order", "side"),
    [
        ("amax", torch.contiguous_format, SIDE),
        ("amax", torch.channels_last, 32),
        ("mean", torch.channels_last, SIDE),
    ],
)
def test_rows_that_lie_together_or_are_short_or_added_up_are_not(
    how: str, order: torch.memory_format, side: int
) -> None:
    assert reason(pooled(how, order, side), how) is None
