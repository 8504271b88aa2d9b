"""An operator whose shape or number depends on data: torch breaks the graph and compiles the pieces where it may, and the
graph runs op by op elsewhere; the reason names the operator and the user's line, and no exception of ours leaves."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import tracefuse
from tracefuse.backend import tracefuse as backend

BROKEN, OP_BY_OP = "torch breaks a graph of this model", "runs op by op, without tracefuse"


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sin()


class Model(nn.Module):
    """What `then` does with the results of one layer goes on to another."""

    def __init__(self, then: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.then = Layer(), Layer(), then

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return self.last(self.then(self.first(x), *more))


def rows_at_mask(hidden: Tensor, mask: Tensor) -> Tensor:
    """As many rows as the mask has elements, which only data tells."""
    hidden, rows = hidden.clone(), hidden[0, :2] * 2
    hidden[mask] = rows
    return hidden


def padded(hidden: Tensor, count: Tensor) -> Tensor:
    return F.pad(hidden, (0, count, 0, 0), mode="reflect")[..., :4]


MASK = torch.zeros(3, 5, dtype=torch.bool)
MASK[0, 1] = MASK[2, 3] = True
CASES: dict[str, tuple[Callable[..., Tensor], Tensor, str, str]] = {
    "a shape": (rows_at_mask, MASK, "aten.nonzero.default", "hidden[mask] = rows"),
    "a number": (padded, torch.tensor(2), "aten._local_scalar_dense.default", "F.pad(hidden"),
}


def trained(model: nn.Module, run: Callable[..., Tensor], *given: Tensor) -> list[Tensor]:
    result = run(*given)
    result.square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return [result.detach(), *gradients]


def told_while_it_trains_as_eager(
    name: str, batches: tuple[int, ...] = (3,), **options: object
) -> tuple[nn.Module, list[str]]:
    then, more, _, _ = CASES[name]
    model = Model(then)
    compiled = torch.compile(model, backend=backend, **options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for batch in batches:
            x = torch.randn(batch, 5, 4)
            given = F.pad(more, (0, 0, 0, batch - 3)) if more.dim() else more
            torch.testing.assert_close(
                trained(model, compiled, x, given), trained(model, model, x, given), rtol=0, atol=0
            )
    return model, list(dict.fromkeys(str(one.message) for one in told if "graph of this model" in str(one.message)))


@pytest.mark.parametrize("name", CASES)
def test_torch_breaks_the_graph_and_the_layers_are_compiled_by_themselves(name: str) -> None:
    model, (told,) = told_while_it_trains_as_eager(name)
    _, _, operator, line = CASES[name]
    assert told.startswith(BROKEN)
    assert operator in told
    assert "test_data_dependent.py:" in told
    assert line in told
    assert "defect" not in told
    assert len(tracefuse.compiled(model)) == 2


def test_a_whole_graph_is_never_broken_and_says_the_same_reason() -> None:
    model, (told,) = told_while_it_trains_as_eager("a shape", fullgraph=True)
    assert OP_BY_OP in told
    assert "has a size that depends on data" in told
    assert "test_data_dependent.py:" in told
    assert CASES["a shape"][3] in told
    assert "defect" not in told
    assert tracefuse.compiled(model) == []


@pytest.mark.parametrize("name", CASES)
def test_where_graph_breaks_are_errors_it_runs_op_by_op(name: str) -> None:
    with torch._dynamo.error_on_graph_break(True):
        model, (told,) = told_while_it_trains_as_eager(name)
    assert OP_BY_OP in told
    assert CASES[name][2] in told
    assert tracefuse.compiled(model) == []


@pytest.mark.parametrize("name", CASES)
def test_nothing_leaves_while_the_model_runs(name: str) -> None:
    """Graphs whose sizes vary are traced at their calls, where nobody takes a graph break."""
    _, told = told_while_it_trains_as_eager(name, batches=(3, 6, 4), dynamic=True)
    assert any(OP_BY_OP in one and CASES[name][2] in one for one in told)
    assert not any("defect" in one for one in told)


def test_nor_where_dynamo_does_not_call_it() -> None:
    graph = fx.Graph()
    x, mask = graph.placeholder("x"), graph.placeholder("mask")
    hidden = graph.call_method("clone", (x,))
    rows = graph.call_method("narrow", (graph.call_method("select", (x, 0, 0)), 0, 0, 2))
    graph.output((graph.call_function(torch.index_put, (hidden, (mask,), rows)),))
    given = (torch.randn(3, 5, 4, requires_grad=True), MASK)
    with pytest.warns(UserWarning, match=f"{OP_BY_OP}: aten.nonzero.default has a shape that depends on data"):
        run = backend(fx.GraphModule(nn.Module(), graph), given)
    expected = given[0].clone()
    expected[MASK] = given[0][0, :2]
    torch.testing.assert_close(run(*given)[0], expected, rtol=0, atol=0)


def test_the_remedy_is_compiled() -> None:
    def scattered(hidden: Tensor, mask: Tensor) -> Tensor:
        return hidden.masked_scatter(mask[..., None], hidden[0, :2] * 2)

    x, model = torch.randn(3, 5, 4), Model(scattered)
    expected = trained(model, model, x, MASK)
    torch.testing.assert_close(rows_at_mask(x, MASK), scattered(x, MASK), rtol=0, atol=0)
    torch.testing.assert_close(trained(model, torch.compile(model, backend=backend), x, MASK), expected)
    assert len(tracefuse.compiled(model)) == 1


def test_what_calls_a_broken_function_is_told_to_explore() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    weight = model[0].weight

    def step(x: Tensor, mask: Tensor) -> Tensor:
        return rows_at_mask(x @ weight, mask)

    with pytest.warns(UserWarning, match=BROKEN):
        torch.compile(step, backend=backend)(torch.randn(3, 5, 4), MASK).sum().backward()
    with pytest.raises(tracefuse.TracefuseError, match=r"aten\.nonzero\.default .*has a shape that depends on data"):
        tracefuse.explore(model)
