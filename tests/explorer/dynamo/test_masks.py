"""`x[mask] = value` trains as eager does in one graph of ours, and what is no `where` is left as it came."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import tracefuse
from tracefuse.backend import tracefuse as backend

BATCH, LENGTH, WIDTH = 3, 5, 4


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Masked(nn.Module):
    """Writes what `value` makes of a parameter to what `at` makes of a mask."""

    def __init__(self, value: Callable[[Tensor], Tensor], at: Callable[[Tensor], Tensor] = lambda mask: mask) -> None:
        super().__init__()
        self.value, self.at = value, at
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        self.row = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = (x @ self.weight).sin()
        hidden[self.at(mask)] = self.value(self.row)
        return (hidden @ self.weight).cos()


VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "a row": lambda row: row * 2,
    "a row of one": lambda row: row[None],
    "a row behind more sizes of one": lambda row: row[None, None],
    "a number": lambda row: row.sum(),
    "one number in a row": lambda row: row.sum()[None],
}
MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "some": lambda mask: mask,
    "none": torch.zeros_like,
    "all": torch.ones_like,
}


def trained(model: nn.Module, run: Callable[..., Tensor], *given: Tensor) -> list[Tensor]:
    x = given[0].clone().requires_grad_()
    result = run(x, *given[1:])
    result.square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return [result.detach(), x.grad, *gradients]


def compared(model: nn.Module, *given: Tensor, **options: object) -> list[str]:
    """What was told while the compiled model left what eager does."""
    expected = trained(model, model, *given)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = trained(model, torch.compile(model, backend=backend, **options), *given)
    torch.testing.assert_close(found, expected)
    return [str(one.message) for one in told if "graph of this model" in str(one.message)]


def masked() -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64), torch.rand(BATCH, LENGTH) > 0.5


@pytest.mark.parametrize("at", MASKS)
@pytest.mark.parametrize("value", VALUES)
def test_one_row_goes_to_all_elements_at_a_mask(value: str, at: str) -> None:
    model = Masked(VALUES[value], MASKS[at])
    assert compared(model, *masked()) == []
    (graph,) = tracefuse.compiled(model)
    assert sum("where" in str(node.target) for node in graph.trace.ops)


@pytest.mark.parametrize("at", [lambda mask: mask[:, 0], lambda mask: mask[..., None].expand(-1, -1, WIDTH)])
def test_masks_of_fewer_and_of_all_dimensions(at: Callable[[Tensor], Tensor]) -> None:
    model = Masked(lambda row: row.sum(), at)
    assert compared(model, *masked()) == []
    assert len(tracefuse.compiled(model)) == 1


def test_in_one_whole_graph_and_at_sizes_that_vary() -> None:
    model = Masked(VALUES["a row"])
    assert compared(model, *masked(), fullgraph=True) == []
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    eager = copy.deepcopy(model)
    for length in (3, 7, 4):
        x, mask = torch.randn(2, length, WIDTH, dtype=torch.float64), torch.rand(2, length) > 0.5
        torch.testing.assert_close(trained(model, compiled, x, mask), trained(eager, eager, x, mask))
    assert len(tracefuse.compiled(model)) >= 3


def test_a_value_that_wants_no_gradient_stays_an_index_put() -> None:
    model = Masked(lambda row: row.detach())
    model.row.grad = torch.zeros_like(model.row)
    x, mask = masked()
    expected = model(x, mask)
    torch.testing.assert_close(torch.compile(model, backend=backend)(x, mask), expected, rtol=0, atol=0)
    (graph,) = tracefuse.compiled(model)
    assert any("index_put" in str(node.target) for node in graph.trace.ops)


def test_the_numbers_behind_a_mask_are_those_that_were_not_finite() -> None:
    model = Masked(VALUES["a row"])
    x, mask = masked()
    x[mask] = torch.inf
    expected, found = trained(model, model, x, mask), trained(model, torch.compile(model, backend=backend), x, mask)
    torch.testing.assert_close(found, expected, equal_nan=True)
