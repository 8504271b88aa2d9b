"""A module that puts a new tensor in the place of a buffer (`self.least = …`): to the trace, a write to that buffer."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tracefuse
from tracefuse.optimizers.trace import Output


class Least(nn.Module):
    """Keeps the least that it has seen, as quantised models do."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self._change = nn.Linear(4, 4), change
        self.register_buffer("least", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.least = self._change(self.least, y.detach())
        return y * self.least


def _through_a_view(least: Tensor, y: Tensor) -> Tensor:
    found = torch.minimum(least, y.min())
    found.view(-1)[0] += 1
    return found


@pytest.mark.parametrize("change", [lambda least, y: torch.minimum(least, y.min()), _through_a_view])
@pytest.mark.parametrize("times", [1, 2])
def test_it_is_a_write(change: Callable[[Tensor, Tensor], Tensor], times: int) -> None:
    torch.manual_seed(0)
    model, x = Least(change), torch.randn(3, 4)
    with tracefuse.capture() as c:
        loss = sum(model(x).sum() for _ in range(times))
        loss.backward()
    assert Output("mutation", "least") in c.trace.outputs
    at = c.trace.outputs.index(Output("mutation", "least"))
    assert c.replay()[at].equal(model.least)
    assert not model.least.equal(torch.zeros(1))
    agreement = c.check()
    assert agreement is not None
    assert (agreement.compared, agreement.differing) == (len(c.trace.outputs), 0)

    step, eager = c.optimize().compile(), copy.deepcopy(model)
    step()
    for _ in range(times):
        eager(x)
    torch.testing.assert_close(model.least, eager.least)


@pytest.mark.parametrize("change", [lambda least, y: least, lambda least, y: y.min(), lambda least, y: torch.zeros(1)])
def test_what_is_no_new_value_of_that_kind_is_none(change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """The buffer itself, one of another shape; and one that does not replace what was read."""
    model, x = Least(change), torch.randn(3, 4)
    c = tracefuse.capture(lambda: model(x).sum().backward())
    assert Output("mutation", "least") not in c.trace.outputs
