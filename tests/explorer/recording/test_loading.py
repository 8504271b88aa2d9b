"""What a `DataLoader` does to make a batch is its own: no wait for a GPU, no finding; a data set's own code is the user's."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import tracefuse


def _captured(data: Dataset) -> tracefuse.Capture:
    model = nn.Linear(64, 1)
    with tracefuse.capture() as c:
        for (x,) in DataLoader(data, batch_size=64, shuffle=True):
            loss = model(x).mean()
        loss.backward()
    return c


class Reading(TensorDataset):
    def __getitem__(self, at: int) -> tuple[Tensor]:
        (x,) = super().__getitem__(at)
        if x.sum().item() > 1e9:
            raise ValueError
        return (x,)


def test_how_it_shuffles_and_collates_is_no_finding() -> None:
    c = _captured(TensorDataset(torch.randn(64, 64)))
    assert any("stack" in str(op.target) or "cat" in str(op.target) for op in c.trace.ops)
    assert {one.id for one in c.findings()} & {"host-sync", "cat-in-forward"} == set()
    assert c.stops == ()
    (loader,) = [row for row in c.optimize(fuse=False).layers() if row.path == "DataLoader"]
    assert loader.forward_ops[0] > 0


def test_what_a_data_set_reads_is_the_users() -> None:
    c = _captured(Reading(torch.randn(64, 64)))
    assert len(c.stops) == 64
    assert all("x.sum().item()" in str(stop.source) for stop in c.stops)


def test_a_concatenation_of_the_users_own_is_one() -> None:
    x, w = torch.randn(64, 64), torch.randn(64, 128, requires_grad=True)
    c = tracefuse.capture(lambda: (torch.cat([x, x], 1) * w).sum().backward())
    assert "cat-in-forward" in {one.id for one in c.findings()}
