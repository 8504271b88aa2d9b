"""Integers that places are computed from are exported as they were; those that are places may be drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from forks import run_python

import tracefuse
from tracefuse.execution.drawn import MAX_PLACES, behind_places

IDS = torch.randint(50, (4, 40))


def _boxes(count: int) -> torch.Tensor:
    low = torch.randint(0, 20, (count, 2))
    return torch.cat([low, low + torch.randint(0, 10, (count, 2))], 1)


def _capture(lookup) -> tracefuse.Capture:
    table = torch.randn(50, 3, requires_grad=True)
    return tracefuse.capture(lambda: lookup(table).square().sum().backward())


@pytest.mark.parametrize("count", [40, MAX_PLACES])
def test_boxes_of_which_widths_are_looked_up_stay_boxes(tmp_path: Path, count: int) -> None:
    boxes = _boxes(count)
    capture = _capture(lambda table: F.embedding(boxes[:, 2] - boxes[:, 0], table[:10]))
    variant = capture.optimize()
    done = run_python([str(variant.export(tmp_path / "step.py"))])
    assert done.returncode == 0, done.stdout + done.stderr
    module = variant.compile().module
    (drawn,) = (one for one in module.example_inputs() if one.dtype is torch.int64)
    assert drawn[: MAX_PLACES // 4].equal(boxes[: MAX_PLACES // 4])
    assert (drawn[:, 2] >= drawn[:, 0]).all()


@pytest.mark.parametrize(
    "lookup",
    [
        lambda table: F.embedding(IDS, table),
        lambda table: table[IDS.flatten()],
        lambda table: F.embedding(IDS.T.float().long() // 2, table),
        lambda table: F.embedding(torch.where(IDS < 3, 0, IDS), table),
        lambda table: table[torch.arange(50)[IDS[0]]],
        lambda table: F.embedding((table[:, 0][IDS] + IDS).argmax(-1), table),
    ],
)
def test_places_that_are_moved_or_computed_one_by_one_may_be_drawn(lookup) -> None:
    assert behind_places(_capture(lookup).trace) == frozenset()


@pytest.mark.parametrize(
    "lookup",
    [
        lambda table: F.embedding((IDS != 1).long().cumsum(-1), table),
        lambda table: table[IDS[0] - IDS[0].min()],
        lambda table: torch.gather(table, 0, (IDS[:, :3] - IDS[:, :3].sort().values).abs()),
    ],
)
def test_places_computed_from_several_are_known(lookup) -> None:
    trace = _capture(lookup).trace
    integers = {p.name for p in trace.placeholders if p.meta["val"].dtype is torch.int64}
    assert behind_places(trace) == integers != set()
