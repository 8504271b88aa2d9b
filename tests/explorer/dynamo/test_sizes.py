"""Graphs of `torch.compile` whose sizes vary: the numbers of eager for each, and one program for each that is reused."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tracefuse
from tracefuse.backend import tracefuse as backend
from tracefuse.demo import GPT, batch
from tracefuse.dynamo import sizes


@pytest.fixture(autouse=True)
def _dynamo_starts_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def both(model: nn.Module, *, dynamic: bool | None) -> Callable[..., None]:
    """A function that holds a compiled copy of the model against the model: result, gradients, buffers."""
    ours = copy.deepcopy(model)
    compiled = torch.compile(ours, backend=backend, dynamic=dynamic)

    def compared(*inputs: Any) -> None:
        found, expected = [], []
        for run, of, into in ((compiled, ours, found), (model, model, expected)):
            of.zero_grad()
            torch.manual_seed(3)
            given = [one.detach().clone().requires_grad_(one.is_floating_point()) for one in inputs]
            result = run(*given)
            if torch.is_grad_enabled():
                result.double().square().mean().backward()
            into += [result, *(one.grad for one in given), *(p.grad for p in of.parameters()), *of.buffers()]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    compared.model = ours  # type: ignore[attr-defined]
    return compared


def quiet() -> warnings.catch_warnings[Any]:
    """Warnings of ours as errors, which would end the test."""
    return warnings.catch_warnings(record=True)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_gpt_on_texts_of_many_lengths(dynamic: bool | None) -> None:
    torch.manual_seed(0)
    model = GPT(layers=1, width=16, heads=2, vocab=61, length=64)
    compared = both(model, dynamic=dynamic)
    with quiet() as said:
        warnings.simplefilter("always")
        for size, length in ((2, 7), (2, 12), (3, 12), (2, 9), (1, 5), (2, 12), (2, 7)):
            compared(*batch(61, size, length))
    assert not [one for one in said if "op by op" in str(one.message)]


@pytest.mark.parametrize("dynamic", [None, True])
def test_training_and_evaluation_and_no_gradients(dynamic: bool | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Dropout(0.0), nn.Linear(6, 3))
    compared = both(model, dynamic=dynamic)
    for rows in (6, 9, 4):
        compared(torch.randn(rows, 8))
    for one in (model, compared.model):  # type: ignore[attr-defined]
        one.eval()
    for rows in (6, 5):
        compared(torch.randn(rows, 8))
        with torch.no_grad():
            compared(torch.randn(rows + 7, 8))


class Sized(nn.Module):
    """Returns sizes, and numbers made of them, among its results."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        return x.shape[0], (x @ self.weight).sin(), 2 * x.shape[0] + 1, None, x.shape[1], x.sum() / x.shape[0]


@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_that_are_returned(dynamic: bool | None) -> None:
    model = Sized()
    compiled = torch.compile(model, backend=backend, dynamic=dynamic)
    for rows in (3, 5, 8, 5):
        x = torch.randn(rows, 4)
        found, expected = compiled(x), model(x)
        assert [type(one) for one in found] == [type(one) for one in expected]
        assert [one for one in found if isinstance(one, int)] == [rows, 2 * rows + 1, 4]
        torch.testing.assert_close((found[1], found[5]), (expected[1], expected[5]))
        found[1].sum().backward()
        mine, model.weight.grad = model.weight.grad, None
        expected[1].sum().backward()
        torch.testing.assert_close(mine, model.weight.grad)
        model.weight.grad = None


def test_sizes_in_the_arithmetic() -> None:
    def mean_of_halves(x: Tensor) -> Tensor:
        half = x.shape[0] // 2
        return x[:half].sum() / half + x.view(-1, x.shape[1] * 2).sin().sum() * x.shape[0] ** 0.5

    compiled = torch.compile(mean_of_halves, backend=backend, dynamic=True)
    for rows in (4, 6, 10):
        x, y = (torch.arange(rows * 3.0).view(rows, 3).requires_grad_() for _ in range(2))
        found, expected = compiled(x), mean_of_halves(y)
        (found * 2).backward()
        (expected * 2).backward()
        torch.testing.assert_close((found, x.grad), (expected, y.grad))


def test_strides_and_shared_memory_are_other_programs() -> None:
    def added(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x * y

    compiled = torch.compile(added, backend=backend, dynamic=True)
    for make in (
        lambda n: (torch.randn(n, 4), torch.randn(n, 4)),
        lambda n: (torch.randn(4, n).t(), torch.randn(n, 4)),
    ):
        for rows in (5, 7):
            x, y = make(rows)
            mine = x.clone()
            torch.testing.assert_close(compiled(mine, y), added(x, y))
            torch.testing.assert_close(mine, x)
    for rows in (5, 9):
        memory = torch.randn(rows, 4)
        other = memory.clone()
        torch.testing.assert_close(compiled(memory, memory.view(rows, 4)), added(other, other.view(rows, 4)))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The sizes of what is compiled from now on."""
    made: list[tuple[int, ...]] = []
    compiled = sizes.BySize._compiled

    def noted(self: sizes.BySize, arguments: Any) -> Any:
        made.append(tuple(arguments[self.positions[-1]].shape))
        return compiled(self, arguments)

    monkeypatch.setattr(sizes.BySize, "_compiled", noted)
    return made


def test_a_size_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = counted(monkeypatch)
    model = nn.Linear(4, 4)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for rows in (3, 5, 3, 5, 5, 7):
        compiled(torch.randn(rows, 4)).sum().backward()
    assert made == [(3, 4), (5, 4), (7, 4)]
    assert len(tracefuse.compiled(model)) == 3


def test_only_the_first_size_waits_for_kernels_to_be_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from tracefuse.variant import Variant

    judged: list[Variant] = []
    monkeypatch.setattr(Variant, "judge", lambda self, **options: judged.append(self) or self)
    compiled = torch.compile(nn.Linear(4, 4), backend=backend, dynamic=True)
    for rows in (3, 5, 7):
        compiled(torch.randn(rows, 4)).sum().backward()
    assert len(judged) == 1


def test_many_sizes_are_said_and_more_run_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "MANY_SIZES", 2)
    monkeypatch.setattr(sizes, "MOST_SIZES", 3)
    made, model = counted(monkeypatch), nn.Linear(4, 4)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    said = []
    for rows in (3, 5, 7, 9, 11, 3):
        x = torch.randn(rows, 4)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = compiled(x)
        said.append([str(one.message) for one in caught if "sizes" in str(one.message)])
        torch.testing.assert_close(found, model(x))
        found.sum().backward()
    assert [len(one) for one in said] == [0, 1, 1, 0, 0, 0]
    assert "was compiled for 2 sizes, which took" in said[1][0]
    assert "if more are to come" in said[1][0]
    assert "other ones run op by op: pad its inputs" in said[2][0]
    assert len(made) == 3


class Scaled(nn.Module):
    """Reads a Python float of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.factor = nn.Parameter(torch.ones(4)), 0.5

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sin() * self.factor


def test_a_float_of_the_module_is_known_when_it_is_called() -> None:
    model = Scaled()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for step, rows in enumerate((3, 5, 5, 5, 5, 5, 5, 5, 3)):
        model.factor = 0.5 + step
        x = torch.randn(rows, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = compiled(x)
        torch.testing.assert_close(found, (x * model.weight).sin() * model.factor)
        found.sum().backward()


FLOATS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "a view of a product": lambda h, k: (h * k).t() * 2,
    "a temperature": lambda h, k: (h / k).softmax(-1),
    "the weight of a loss": lambda h, k: h.square().mean() * k + h.mean(),
    "a power": lambda h, k: h.exp() ** k,
}


@pytest.mark.parametrize("name", FLOATS)
def test_a_float_that_varies_is_compiled_for_four_numbers(name: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(4, 4)

        def forward(self, x: Tensor, k: float) -> Tensor:
            return FLOATS[name](self.project(x), k)

    model = Model().double()
    compiled = torch.compile(model, backend=backend)
    with quiet() as said:
        warnings.simplefilter("always")
        for k in (1.0, 2.0, 2.5, 0.5):
            x, found = torch.randn(4, 4, dtype=torch.float64), []
            for run in (compiled, model):
                model.zero_grad()
                result = run(x, k)
                result.sum().backward()
                found.append([result.detach(), *(one.grad.clone() for one in model.parameters())])
            torch.testing.assert_close(*found)
    assert [str(one.message) for one in said] == []
    assert len(tracefuse.compiled(model)) in (2, 4)  # torch may make a tensor of it that all further numbers share


def test_no_number_is_drawn_while_a_size_is_compiled() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    ours = copy.deepcopy(model)
    compiled = torch.compile(ours, backend=backend, dynamic=True)
    for rows in (3, 5, 8):
        x = torch.randn(rows, 4)
        torch.manual_seed(1)
        first = compiled(x)
        after = torch.get_rng_state()
        torch.manual_seed(1)
        torch.testing.assert_close(compiled(x), first)
        assert torch.equal(torch.get_rng_state(), after)


def test_threads_that_bring_other_sizes_make_their_programs_one_after_the_other() -> None:
    """Tracing changes what all threads see; what another one made meanwhile is not made again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()
    compiled, started = torch.compile(model, backend=backend, dynamic=True), threading.Barrier(4)
    with torch.no_grad():
        compiled(torch.randn(5, 8).double())

    def at(size: int) -> None:
        x = torch.randn(size, 8, dtype=torch.float64)
        started.wait()
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))

    with quiet(), ThreadPoolExecutor(4) as threads:
        assert list(threads.map(at, [20, 31, 42, 53, 20, 20, 31, 64])) == [None] * 8
    assert len(tracefuse.compiled(model)) <= 6, "one for each size, and none is made twice"


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_an_integer_that_only_item_reads_is_no_float() -> None:
    run = torch.compile(lambda x, k: x * k.item(), backend=backend, dynamic=True)
    x = torch.randn(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in (torch.tensor(2), torch.tensor(3), torch.tensor(2.5)):
            torch.testing.assert_close(run(x, number), x * number)


def test_what_cannot_be_compiled_runs_op_by_op_at_each_size() -> None:
    model = nn.Embedding(10, 4, sparse=True)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for length in (3, 5):
        tokens = torch.arange(length)
        with pytest.warns(UserWarning, match=r"op by op.*nn\.Embedding\(sparse=False\)"):
            found = compiled(tokens)
        torch.testing.assert_close(found, model.weight[:length])


def test_autocast_around_the_call() -> None:
    model = nn.Linear(8, 8)
    ours = copy.deepcopy(model)
    compiled = torch.compile(ours, backend=backend, dynamic=True)
    for rows in (3, 6, 9):
        x = torch.randn(rows, 8)
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = compiled(x), model(x)
        assert found.dtype is expected.dtype is torch.bfloat16
        torch.testing.assert_close(found, expected)


def test_a_loss_over_texts_of_many_lengths_returns_its_count() -> None:
    torch.manual_seed(0)
    head = nn.Linear(8, 11)

    def loss(x: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return F.cross_entropy(head(x).flatten(0, 1), targets.flatten()), targets.numel()

    compiled = torch.compile(loss, backend=backend)
    for length in (4, 6, 9, 6):
        x, targets = torch.randn(2, length, 8), torch.randint(11, (2, length))
        found, count = compiled(x, targets)
        assert count == 2 * length
        found.backward()
        mine, head.weight.grad = head.weight.grad, None
        expected = loss(x, targets)[0]
        expected.backward()
        torch.testing.assert_close((found, mine), (expected, head.weight.grad))
        head.weight.grad = None


def test_memory_that_inputs_share_in_another_place() -> None:
    def written(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return y + 1

    compiled = torch.compile(written, backend=backend, dynamic=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it runs op by op, which it says
        for start in (6, 1, 2):
            ours, theirs = torch.arange(20.0), torch.arange(20.0)
            found = compiled(ours[:6], ours[start : start + 6])
            torch.testing.assert_close(found, written(theirs[:6], theirs[start : start + 6]))


def test_zeros_of_both_signs_are_two_numbers() -> None:
    compiled = torch.compile(lambda x, by: x / by, backend=backend, dynamic=True)
    for by in (2.5, 0.0, -0.0):
        torch.testing.assert_close(compiled(torch.ones(3), by), torch.ones(3) / by)


class Decoder(nn.Module):
    """Reads how far a text has come, which no size tells, and says how far it is then."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.linear = nn.Embedding(64, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, past: int) -> tuple[Tensor, int]:
        at = torch.arange(past, past + x.shape[1])
        return (self.linear(x + self.places(at)) * (past + 1)).sin(), past + x.shape[1]


def called(run: Callable[..., tuple[Tensor, int]], model: nn.Module, x: Tensor, past: int) -> list[Any]:
    result, reached = run(x, past)
    result.square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return [result.detach(), *gradients, torch.tensor(reached)]


def test_a_program_for_each_integer_that_is_no_size() -> None:
    torch.manual_seed(0)
    model, x = Decoder(), torch.randn(2, 5, 8)
    compiled = torch.compile(model, backend=backend)
    with quiet() as said:
        warnings.simplefilter("always")
        for past in (4, 5, 10, 4, 5, 10, 4):
            torch.testing.assert_close(called(compiled, model, x, past), called(model, model, x, past))
    assert not [one for one in said if "op by op" in str(one.message)]
    assert len(tracefuse.compiled(model)) == 1 + 3  # dynamo takes the first 4 for a constant


def test_integers_that_are_another_one_in_each_call_are_told_after_a_few() -> None:
    model, x = Decoder(), torch.randn(2, 5, 8)
    compiled = torch.compile(model, backend=backend)
    with quiet() as said:
        warnings.simplefilter("always")
        for past in range(3, 3 + 2 * sizes.MOST_NUMBERS):
            torch.testing.assert_close(called(compiled, model, x, past), called(model, model, x, past))
    assert {str(one.message) for one in said if "op by op" in str(one.message)} == {sizes.VARIES}
    assert len(tracefuse.compiled(model)) == 1 + sizes.MOST_NUMBERS  # dynamo takes the first for a constant


def test_lengths_that_vary_beside_an_integer_are_told_by_lines_of_its_own() -> None:
    """A line of programs at one integer tells nothing of another."""
    model = Decoder()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    with quiet() as said:
        warnings.simplefilter("always")
        for past in (3, 7):
            for length in (8, 12, 16, 10, 14):
                x = torch.randn(2, length, 8)
                torch.testing.assert_close(called(compiled, model, x, past), called(model, model, x, past))
    assert not [one for one in said if "op by op" in str(one.message)]


@pytest.mark.parametrize("stage", ["varying_sizes", "specialised"])
def test_a_stage_of_ours_that_fails_runs_op_by_op(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise ZeroDivisionError("injected")

    monkeypatch.setattr(tracefuse.backend if stage == "varying_sizes" else sizes, stage, failing)
    model = Decoder()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    with quiet() as said:
        warnings.simplefilter("always")
        for length in (5, 9):
            x = torch.randn(2, length, 8)
            torch.testing.assert_close(called(compiled, model, x, 3), called(model, model, x, 3), rtol=0, atol=0)
    assert any("op by op" in str(one.message) and "injected" in str(one.message) for one in said)


def test_an_integer_alone_and_its_remedy() -> None:
    def scaled(x: Tensor, by: int | Tensor) -> Tensor:
        return x * by

    x, compiled = torch.ones(3), torch.compile(scaled, backend=backend)
    with quiet() as said:
        warnings.simplefilter("always")
        for by in range(2, 9):
            assert compiled(x, by).tolist() == [by] * 3
    assert {str(one.message) for one in said if "op by op" in str(one.message)} == {sizes.VARIES}
    torch._dynamo.reset()
    compiled = torch.compile(scaled, backend=backend)
    with quiet() as said:
        warnings.simplefilter("always")
        for by in range(2, 9):
            assert compiled(x, torch.tensor(by)).tolist() == [by] * 3
    assert not [one for one in said if "op by op" in str(one.message)]


@pytest.mark.parametrize("dynamic", [None, True])
def test_whether_a_size_is_large_is_a_number_too(dynamic: bool | None) -> None:
    """`x * (length > 6)`: the graph has a comparison of a size, which is no polynomial of it."""

    def scaled(x: Tensor) -> Tensor:
        return x.sin() * (x.shape[0] > 6)

    compiled = torch.compile(scaled, backend=backend, dynamic=dynamic)
    with quiet() as said:
        warnings.simplefilter("always")
        for length in (4, 8, 5, 9, 4):
            x = torch.randn(length)
            torch.testing.assert_close(compiled(x), scaled(x))
    assert not [one for one in said if "op by op" in str(one.message)]
