"""Constants of a compiled graph: numbers are made by an op, tensors are inputs behind the primals; all is optimised."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import tracefuse
from tracefuse.backend import tracefuse as backend
from tracefuse.optimizers.trace import origin


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """A linear layer, then what a test does to its result."""

    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.then = nn.Linear(8, 8), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.linear(x))


def with_a_column_of_zeros(y: Tensor) -> Tensor:
    y[:, 0] = 0.0
    return y


def with_ones_where_positive(y: Tensor) -> Tensor:
    y[y > 0] = 1.0
    return y


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "a column": with_a_column_of_zeros,
    "a mask": with_ones_where_positive,
    "a number": lambda y: y * torch.tensor(0.5),
    "an integer": lambda y: y * torch.tensor(3),
    "infinity": lambda y: torch.where(y > 0, y, torch.tensor(float("-inf"))).exp(),
    "no number": lambda y: torch.where(y > 100, torch.tensor(float("nan")), y),
    "a truth": lambda y: torch.where(torch.tensor(True), y, -y),
    "a complex number": lambda y: (y * torch.tensor(1 + 2j)).imag,
    "half a precision": lambda y: y * torch.tensor(0.3, dtype=torch.bfloat16),
    "new_tensor": lambda y: y + y.new_tensor(2.0),
}
TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "a vector": lambda y: y * torch.tensor([1.0, 2.0] * 4),
    "lengths": lambda y: y * (torch.arange(8)[None] < torch.tensor([2, 3, 4, 5, 6, 7])[:, None]),
    "another dtype": lambda y: y * torch.tensor([1.0, 2.0] * 4).to(torch.bfloat16).to(y.dtype),
    "both": lambda y: y.new_tensor([1.0, 3.0] * 4) * y + torch.tensor(0.5),
}


def trained(then: Callable[[Tensor], Tensor], **given: object) -> tuple[nn.Module, nn.Module]:
    """Eager and compiled, after three steps on the same numbers; falling back is an error."""
    torch.manual_seed(0)
    eager = Net(then).double()
    model = copy.deepcopy(eager)
    run = torch.compile(model, backend=backend, **given)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (eager, model)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            x = torch.randn(6, 8, dtype=torch.float64)
            for called, optimizer in zip((eager, run), optimizers, strict=True):
                optimizer.zero_grad()
                called(x).square().mean().backward()
                optimizer.step()
    assert not [one for one in said if "runs op by op" in str(one.message)]
    return eager, model


@pytest.mark.parametrize("name", [*NUMBERS, *TENSORS])
def test_a_graph_with_constants_is_compiled_and_trains_as_eager_does(name: str) -> None:
    eager, model = trained((NUMBERS | TENSORS)[name])
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    (graph,) = tracefuse.compiled(model)
    constants = [entry.name for entry in graph.trace.inputs if entry.name.startswith("constant")]
    assert bool(constants) == (name in TENSORS)


def test_a_number_is_part_of_the_kernel_that_reads_it() -> None:
    _, model = trained(lambda y: torch.tanh(y * torch.tensor(0.5)))
    (graph,) = tracefuse.compiled(model)
    variant = graph.optimize()
    assert variant.kernels
    assert not [node for node in variant.forward.ops if node.target is torch.ops.aten.full.default]


def test_a_constant_is_read_where_it_lies() -> None:
    _, model = trained(TENSORS["a vector"])
    variant = tracefuse.compiled(model)[0].optimize()
    assert not [node for node in variant.trace.ops if node.target is torch.ops.aten.clone.default]


def test_a_copy_of_a_constant_to_another_dtype_is_made_once() -> None:
    _, model = trained(TENSORS["another dtype"])
    (graph,) = tracefuse.compiled(model)
    assert not [node for node in graph.trace.ops if node.target is torch.ops.aten._to_copy.default]
    (entry,) = [p for p in graph.trace.placeholders if p.name.startswith("constant")]
    assert entry.meta["val"].dtype is torch.float64


def test_a_result_that_is_a_constant_is_the_users_to_write_to() -> None:
    run = torch.compile(lambda x: (x + 1, torch.tensor([1.0, 2.0]), torch.tensor(3.0)), backend=backend)
    for _ in range(2):
        _, vector, number = run(torch.ones(2))
        assert (vector.tolist(), number.item()) == ([1.0, 2.0], 3.0)
        vector.zero_()
        number.zero_()


def test_a_graph_with_constants_is_measured_and_exported() -> None:
    _, model = trained(TENSORS["both"])
    variant = tracefuse.compiled(model)[0].optimize()
    assert variant.measure(budget_s=0.1).programs[1].difference.gradients < 1e-9
    assert "def forward" in variant.source


def test_without_gradients_too() -> None:
    model = Net(TENSORS["both"])
    x = torch.randn(6, 8)
    with torch.no_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    assert not [one for one in said if "runs op by op" in str(one.message)]


def test_a_check_of_the_data_yields_nothing_and_is_left_out() -> None:
    """`one_hot` checks its classes, as the experts of transformers do, in a graph without gradients."""

    def experts(x: Tensor, chosen: Tensor) -> Tensor:
        with torch.no_grad():
            hit = torch.nn.functional.one_hot(chosen, 4)
        return x * hit.sum(1, keepdim=True)

    x, chosen = torch.randn(6, 3, requires_grad=True), torch.randint(4, (6,))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.testing.assert_close(torch.compile(experts, backend=backend)(x, chosen), experts(x, chosen))
        with torch.no_grad():
            torch.testing.assert_close(torch.compile(experts, backend=backend)(x, chosen), experts(x, chosen))
    assert not [one for one in said if "this model" in str(one.message)]


def test_outermost_modules_of_one_graph_have_their_variables_as_names() -> None:
    """The only one with parameters needs none."""

    def adversarial(G: nn.Module, D: nn.Module, loss: nn.Module) -> Tensor:
        return loss(D(G(torch.ones(2, 8))), torch.zeros(2, 8))

    def alone(model: nn.Module, loss: nn.Module) -> Tensor:
        return loss(model(torch.ones(2, 8)), torch.zeros(2, 8))

    one, other = (nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))
    torch.compile(adversarial, backend=backend)(one, other, nn.MSELoss()).backward()
    (trace,) = [c.trace for c in tracefuse.compiled(one)]
    assert [i.source for i in trace.inputs if i.source.endswith("weight")] == ["G.0.weight", "D.0.weight"]
    assert {origin(n).module for n in trace.ops} >= {"G.0", "G.1", "D.0", "D.1", "loss"}
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    torch.compile(alone, backend=backend)(model, nn.MSELoss()).backward()
    (trace,) = [c.trace for c in tracefuse.compiled(model)]
    assert [i.source for i in trace.inputs if i.source.endswith("weight")] == ["0.weight"]
    assert {origin(n).module for n in trace.ops} >= {"0", "1", "loss"}
