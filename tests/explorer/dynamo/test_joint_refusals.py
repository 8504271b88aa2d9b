"""What a trace cannot say of a compiled graph: it runs op by op as torch would, the warning stands at the user's call and ends
with a remedy that works, and `explore` says the same."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import tracefuse
from tracefuse.backend import tracefuse as backend
from tracefuse.errors import CaptureError


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@torch.library.custom_op("tracefuse_tests::fill_with", mutates_args=("out",))
def fill_with(out: Tensor, x: Tensor) -> None:
    out.copy_(x * 3)


@torch.library.custom_op("tracefuse_tests::filled_with", mutates_args=())
def filled_with(x: Tensor) -> Tensor:
    return x * 3


filled_with.register_fake(torch.empty_like)


class Net(nn.Module):
    """What a test does to a matrix that has a gradient."""

    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.then = nn.Parameter(torch.eye(4) * 2), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(x @ self.weight)


def overwritten(y: Tensor) -> Tensor:
    buffer = torch.zeros(4, 4)
    fill_with(buffer, y.detach())
    return y * buffer


def either(y: Tensor) -> Tensor:
    return torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,))


def either_between_graphs(y: Tensor) -> Tensor:
    return torch.sin(y) if y.sum() > 0 else torch.cos(y)


CASES = {
    "an op that writes": (
        overwritten,
        r"fill_with\.default \(test_joint_refusals\.py:\d+  fill_with\(.*overwrites its arguments.*returns the new values",
        lambda y: y * filled_with(y.detach()),
    ),
    "an effect": (
        torch.linalg.cholesky,
        r"_linalg_check_errors.*raises where a matrix has no solution.*cholesky_ex",
        lambda y: torch.linalg.cholesky_ex(y)[0],
    ),
    "a branch": (either, r"cond \(test_joint_refusals\.py.*runs graphs.*plain Python", either_between_graphs),
}


def checks_are_compiled() -> bool:
    """Whether compiled `cholesky` still raises where eager does: with torch 2.11 it does not, whatever the backend."""
    try:
        torch.compile(torch.linalg.cholesky, backend="aot_eager")(-torch.eye(2))
    except torch.linalg.LinAlgError:
        return True
    return False


def run(model: nn.Module, *given: Tensor, **options: object) -> list[warnings.WarningMessage]:
    """What compiling `model` and a step of it says; gradients must be eager's."""
    eager = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.compile(model, backend=backend, **options)(*given).sum().backward()
    eager(*given).sum().backward()
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    return [one for one in caught if "runs op by op" in str(one.message)]


@pytest.mark.parametrize("name", CASES)
def test_what_no_trace_holds_is_named_with_a_remedy_that_works(name: str) -> None:
    then, said, remedied = CASES[name]
    if name == "an effect" and not checks_are_compiled():
        pytest.skip("this torch compiles cholesky without its check")
    model = Net(then)
    (warning,) = run(model, torch.eye(4))
    with pytest.raises(CaptureError, match=said):
        raise CaptureError(str(warning.message))
    with pytest.raises(CaptureError, match=said):
        tracefuse.explore(model)
    torch._dynamo.reset()
    assert not run(Net(remedied), torch.eye(4))


def test_the_warning_stands_at_the_users_call() -> None:
    source, first = inspect.getsourcelines(run)
    (warning,) = run(Net(either), torch.eye(4))
    assert warning.filename == __file__
    assert "torch.compile(" in source[warning.lineno - first]


def test_sparse_gradients() -> None:
    model = nn.Embedding(10, 4, sparse=True)
    (warning,) = run(model, torch.tensor([1, 2]))
    assert "nn.Embedding(sparse=False)" in str(warning.message)
    assert model.weight.grad.layout is torch.sparse_coo


@pytest.mark.parametrize("trains", [False, True])
def test_a_size_that_depends_on_numbers(trains: bool) -> None:
    """Also where a gradient has it, which comes in before the op that is told."""

    def positive(x: Tensor) -> Tensor:
        return x[x > 0] * 2

    x = torch.tensor([1.0, -1.0, 2.0], requires_grad=trains)
    with (
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        pytest.warns(
            UserWarning, match=r"aten\.\S+ \(test_joint_refusals\.py:\d+  .*has a size that depends on data.* let torch"
        ),
    ):
        assert torch.compile(positive, backend=backend)(x).tolist() == [2, 4]
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert torch.compile(positive, backend=backend)(x).tolist() == [2, 4]
    assert not [one for one in said if "runs op by op" in str(one.message)]


def test_inputs_that_share_memory() -> None:
    @torch.compile(backend=backend)
    def step(first: Tensor, second: Tensor) -> Tensor:
        first.add_(1)
        return second * 2

    whole, other = torch.ones(6), torch.ones(6)
    with pytest.warns(UserWarning, match=r"its input first shares memory.*first\.clone\(\)"):
        assert step(whole[:4], whole[2:]).tolist() == [4, 4, 2, 2]
    torch._dynamo.reset()  # torch does not guard on what shared memory
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert step(other[:4].clone(), other[2:]).tolist() == [2, 2, 2, 2]
    assert not [one for one in said if "runs op by op" in str(one.message)]


def test_the_step_of_an_optimizer() -> None:
    model = nn.Linear(4, 4)
    model(torch.ones(2, 4)).sum().backward()
    before = model.bias.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with pytest.warns(UserWarning, match=r"as the step of an optimizer does.*torch's own backend"):
        torch.compile(optimizer.step, backend=backend)()
    torch.testing.assert_close(model.bias, before - 1)


def test_compiled_autograd() -> None:
    model = nn.Linear(4, 4)
    eager, x = copy.deepcopy(model), torch.randn(3, 4)
    enabled = torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend))
    with pytest.warns(UserWarning, match="leave compiled autograd out"), enabled:
        torch.compile(model, backend=backend)(x).square().sum().backward()
    eager(x).square().sum().backward()
    torch.testing.assert_close(model.weight.grad, eager.weight.grad)
    assert tracefuse.compiled(model)
