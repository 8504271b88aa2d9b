"""What findings about layers and layouts say is true of the lines that they name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from findings import case, found
from torch import Tensor, nn

import tracefuse
from tracefuse.diagnose.diagnose import diagnose

LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "log": (lambda x: torch.softmax(x, -1).log(), "softmax is computed in two ops, and is minus infinity where"),
    "clamp": (lambda x: torch.softmax(x, -1).clamp(min=1e-6).log(), "softmax is computed in two ops, and a clamp cuts"),
    "added": (lambda x: (torch.sigmoid(x) + 1e-8).log(), "sigmoid is computed in two ops, and an added number changes"),
    # ATen bounds the logarithm at -100, so that no loss is infinite.
    "bounded by ATen": (
        lambda x: F.binary_cross_entropy(torch.sigmoid(x), torch.ones_like(x)),
        "sigmoid is computed in two ops, and gives no gradient where the sigmoid rounds to 0 or 1",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_only_a_bare_logarithm_is_said_to_be_infinite(name: str) -> None:
    loss, said = LOSSES[name]
    x = torch.randn(64, 64, requires_grad=True)
    (finding,) = found("log-of-softmax", case(tracefuse.capture(lambda: loss(x).sum().backward())))
    assert said in finding.title


def test_one_convolution_of_several_reads() -> None:
    net, x = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3)), torch.randn(2, 1, 12, 12)
    (one,) = found("not-channels-last", case(tracefuse.capture(lambda: net(x).sum().backward())))
    assert one.title == "1 of 2 convolutions reads tensors that do not lie in channels_last"


def test_one_value_is_computed_again() -> None:
    x = torch.randn(256, requires_grad=True)

    def step() -> None:
        y = x
        for _ in range(64):
            y = torch.sin(y) * torch.arange(256.0)
        y.sum().backward()

    (one,) = found("computed-again", case(tracefuse.capture(step)))
    assert one.title == "1 value of `step` is computed 64 times from the same operands"


class GRU(nn.Module):
    """A recurrent net by hand, of the name that torch's has."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, all_of = torch.zeros(x.shape[1], 8), []
        for row in x:
            z = torch.sigmoid(self.gate(torch.cat([row, h], -1)))
            h = torch.tanh(h * z + row * (1 - z))
            all_of.append(h)
        return torch.stack(all_of), h


LOOPS = {"per-sample-loop", "loop-of-small-kernels", "stack-of-matmuls"}


def test_a_recurrent_net_that_is_called_on_two_lines_is_no_loop() -> None:
    net, x = nn.LSTM(8, 8), torch.randn(32, 4, 8)

    def step() -> None:
        once, state = net(x)
        twice, _ = net(once, state)
        twice.square().mean().backward()

    with torch.backends.mkldnn.flags(enabled=False):
        found = tracefuse.capture(step).findings()
    assert not {one.id for one in found} & {"per-sample-loop", "loop-of-small-kernels"}


@pytest.mark.parametrize(("net", "is_loop"), [(nn.GRU(8, 8), False), (GRU(), True)], ids=["torch's", "by hand"])
def test_torchs_recurrent_nets_are_no_loops_of_the_users(net: nn.Module, is_loop: bool) -> None:
    """On a GPU they are one op of cuDNN's."""
    x = torch.randn(32, 4, 8)

    def step() -> None:
        net(x)[0].square().mean().backward()

    said = {finding.id for finding in diagnose(case(tracefuse.capture(step)))}
    assert bool(said & LOOPS) == is_loop


def test_a_loop_that_takes_two_tensors_apart_is_said_once_with_masks_in_place_of_selections() -> None:
    """Hard triplets of a batch, one anchor at a time."""
    embed, x, labels = nn.Linear(16, 8), torch.randn(32, 16), torch.arange(32) % 4

    def step() -> None:
        out = embed(x)
        apart, losses = torch.cdist(out, out), []
        for i in range(len(labels)):
            farthest = apart[i][labels == labels[i]].max()
            nearest = apart[i][labels != labels[i]].min()
            losses.append(torch.relu(farthest - nearest + 0.5))
        torch.stack(losses).mean().backward()

    (finding,) = found("per-sample-loop", case(tracefuse.capture(step)))
    assert "`masked_fill` or `torch.where` in place of a selection" in finding.fix
    assert "vmap" not in finding.fix
