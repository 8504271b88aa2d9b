"""Tensors that are given the memory of another, by `set_` or `.data = …`: what they hold then is what was computed there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import tracefuse
from tracefuse.errors import CaptureError, ExportError
from tracefuse.optimizers.trace import Trace

Give = Callable[[Tensor, Tensor], None]


def by_set(tensor: Tensor, other: Tensor) -> None:
    tensor.set_(other)


def by_data(tensor: Tensor, other: Tensor) -> None:
    tensor.data = other


def read(x: Tensor, y: Tensor, give: Give) -> Tensor:
    made = x * 2
    give(made, y * 3)
    return made + 1


def returned(x: Tensor, y: Tensor, give: Give) -> Tensor:
    made = x * 2
    give(made, y * 3)
    return made


def overwritten(x: Tensor, y: Tensor, give: Give) -> Tensor:
    made, other = x * 2, y * 3
    give(made, other)
    made.mul_(2)
    return other + 1


def overwritten_before(x: Tensor, y: Tensor, give: Give) -> Tensor:
    made, other = x * 2, y * 3
    view = other[1:]
    other.mul_(2)
    give(made, view)
    return made + 1


def with_a_view_of_what_it_was(x: Tensor, y: Tensor, give: Give) -> Tensor:
    made = x * 2
    view = made.view(2, 2)
    give(made, y * 3)
    made.add_(1)
    return view + made.sum()


def inputs_own(x: Tensor, y: Tensor, give: Give) -> Tensor:
    made = x * 2
    y.mul_(2)
    give(made, y)
    return made + 1


def view_of_a_written_input(x: Tensor, y: Tensor, give: Give) -> Tensor:
    view, made = y[1:], x * 2
    y.mul_(2)
    give(made, view)
    return made + 1


PROGRAMS = [
    read,
    returned,
    overwritten,
    overwritten_before,
    with_a_view_of_what_it_was,
    inputs_own,
    view_of_a_written_input,
]


def names(trace: Trace) -> set[str]:
    return {entry.source for entry in trace.inputs}


@pytest.mark.parametrize("give", [by_set, by_data])
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_trace_is_the_program_for_other_numbers_too(program: Callable[..., Tensor], give: Give) -> None:
    x, y = torch.randn(4), torch.randn(4)
    captured = tracefuse.capture(program, x, y, give)
    assert captured.check().differing == 0
    given = {"x": torch.randn(4), "y": torch.randn(4)}
    again = tracefuse.replay(captured.trace, [given[entry.source].clone() for entry in captured.trace.inputs])
    assert torch.equal(again[0], program(given["x"], given["y"], give))
    reads_x = program is with_a_view_of_what_it_was
    assert names(captured.trace) == ({"x", "y"} if reads_x else {"y"})


@pytest.mark.parametrize("give", [by_set, by_data])
def test_a_gradient_that_is_given_other_memory_is_what_was_computed_there(give: Give) -> None:
    weight, x = torch.randn(4, requires_grad=True), torch.randn(4)
    with tracefuse.capture() as captured:
        (weight * x).sum().backward()
        give(weight.grad, weight.grad * 0.5)
    assert captured.check().differing == 0
    gradient = next(at for at, out in enumerate(captured.trace.outputs) if out.kind == "gradient")
    torch.testing.assert_close(captured.replay()[gradient], x / 2)


def test_a_tensor_that_gave_its_memory_back_is_filled_anew() -> None:
    def emptied(x: Tensor, y: Tensor) -> Tensor:
        made = x * 2
        made.set_()
        return made.resize_(4).copy_(y) + 1

    captured = tracefuse.capture(emptied, torch.randn(4), torch.randn(4))
    other = torch.randn(4)
    inputs = [other if entry.source == "y" else torch.zeros(4) for entry in captured.trace.inputs]
    assert torch.equal(tracefuse.replay(captured.trace, inputs)[0], other + 1)


def given_data(average: Tensor, weight: Tensor) -> None:
    average.data = average.data * 0.9 + weight.data * 0.1


def given_by_set(average: Tensor, weight: Tensor) -> None:
    average.set_(average * 0.9 + weight.data * 0.1)


def copied(average: Tensor, weight: Tensor) -> None:
    average.copy_(average * 0.9 + weight * 0.1)


class Averaging:
    """Steps that have an average of a weight `follow` it."""

    def __init__(self, follow: Callable[[Tensor, Tensor], None]) -> None:
        torch.manual_seed(0)
        self.model, self.x, self.average, self.follow = nn.Linear(4, 4), torch.randn(2, 4), torch.zeros(4, 4), follow
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)

    def step(self) -> None:
        model, average, optimizer = self.model, self.average, self.optimizer
        optimizer.zero_grad()
        loss = model(self.x).square().mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            self.follow(average, model.weight)


def averaging(
    follow: Callable[[Tensor, Tensor], None],
) -> tuple[tracefuse.Capture, nn.Linear, torch.optim.Optimizer, Tensor]:
    """The second of three such steps."""
    loop = Averaging(follow)
    with tracefuse.capture_step(n=2) as captured:
        for _ in range(3):
            loop.step()
    return captured, loop.model, loop.optimizer, loop.average


def test_an_average_that_is_written_to_is_followed() -> None:
    captured, model, optimizer, average = averaging(copied)
    assert not captured.unrecorded
    step, before = captured.optimize().compile(), average.clone()
    step(torch.randn(2, 4))
    assert optimizer.state[model.weight]["step"] == 4
    torch.testing.assert_close(average, before * 0.9 + model.weight.detach() * 0.1)


@pytest.mark.parametrize(
    ("follow", "written"), [(given_data, "`average.data = …`"), (given_by_set, "`average.set_(…)`")]
)
def test_an_average_that_a_compiled_step_cannot_follow_is_named(
    follow: Callable[[Tensor, Tensor], None], written: str
) -> None:
    captured, *_ = averaging(follow)
    remedy = "write `average.copy_(…)` under `torch.no_grad()`."
    (said,) = captured.unrecorded
    assert said.startswith(f"{written} gives a tensor other memory")
    assert said.endswith(remedy)
    with pytest.raises(ExportError) as refused:
        captured.optimize().compile()
    assert str(refused.value).startswith(f"{written} gives a tensor other memory")
    assert str(refused.value).endswith(remedy)


@pytest.mark.parametrize("follow", [given_data, given_by_set])
def test_so_it_is_where_only_one_step_was_seen(follow: Callable[[Tensor, Tensor], None]) -> None:
    loop = Averaging(follow)
    loop.step()
    with tracefuse.capture() as captured:
        loop.step()
    with pytest.raises(ExportError, match=r"gives a tensor other memory .* write `average\.copy_\(…\)`"):
        captured.optimize().compile()


def moved(average: Tensor, weight: Tensor) -> Tensor:
    return average * 0.9 + weight * 0.1


def given_by_a_function(average: Tensor, weight: Tensor) -> None:
    average.data = moved(average.data, weight.data)


def given_anew(average: Tensor, weight: Tensor) -> None:
    average.data = weight.data.clone()


@pytest.mark.parametrize("follow", [given_data, given_by_a_function, given_anew, copied])
def test_an_average_that_moves_before_the_forward_reads_it_is_followed_or_refused(
    follow: Callable[[Tensor, Tensor], None],
) -> None:
    """As MoCo moves its second encoder: what the captured step gave it is where the next step begins."""

    def loop() -> tuple[Callable[[Tensor], None], nn.Linear, nn.Linear]:
        torch.manual_seed(0)
        query, key = nn.Linear(4, 3).double(), nn.Linear(4, 3).double().requires_grad_(False)
        optimizer = torch.optim.SGD(query.parameters(), lr=0.1)

        def step(x: Tensor) -> None:
            with torch.no_grad():
                for average, weight in zip(key.parameters(), query.parameters(), strict=True):
                    follow(average, weight)
            optimizer.zero_grad()
            (query(x) * key(x)).sum().backward()
            optimizer.step()

        return step, query, key

    batches = torch.randn(7, 5, 4, dtype=torch.float64)
    (step, *ours), (eager, *theirs) = loop(), loop()
    with tracefuse.capture_step(n=3) as captured:
        for x in batches[:4]:
            step(x)
    if follow is not copied:
        with pytest.raises(ExportError, match=r"`\w+\.data = …`.*write (to it|`average)\b.*copy_\(…\)"):
            captured.optimize().compile()
        return
    compiled = captured.optimize().compile()
    for x in batches[4:]:
        compiled(x)
    for x in batches:
        eager(x)
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.state_dict(), wanted.state_dict())


class OneNumber(nn.Module):
    """A parameter of one number, without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x.sum(1)


def shared(average: Tensor, weight: Tensor) -> None:
    average.data = weight.detach()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "many numbers": lambda: nn.Linear(4, 3).double(),
    "one number each": lambda: nn.Linear(4, 1, bias=False).double(),
    "no dimension": OneNumber,
}


class Following:
    """Training in which a second network follows the first one before the forward reads it, or behind the update."""

    def __init__(self, make: Callable[[], nn.Module], follow: Callable[[nn.Module, nn.Module], None]) -> None:
        torch.manual_seed(0)
        self.query, self.key, self.follow = make(), make(), follow
        self.optimizer = torch.optim.SGD(self.query.parameters(), lr=0.1)

    def step(self, x: Tensor) -> None:
        with torch.no_grad():
            self.follow(self.key, self.query)
        self.optimizer.zero_grad()
        (self.query(x) - self.key(x) + 1).square().mean().backward()
        self.optimizer.step()

    def parameters(self) -> list[Tensor]:
        return [*self.query.parameters(), *self.key.parameters()]

    def captured(self, batches: list[Tensor], seen: str | tuple[int, int]) -> tuple[tracefuse.Capture, int]:
        """One of the first steps, in a cell behind the first or as the one of that number of so many; how many ran."""
        if isinstance(seen, str):
            self.step(batches[0])
            with tracefuse.capture() as cell:
                self.step(batches[1])
            return cell, 2
        number, done = seen
        with tracefuse.capture_step(n=number) as captured:
            for x in batches[:done]:
                self.step(x)
        return captured, done


def each(follow: Callable[[Tensor, Tensor], None]) -> Callable[[nn.Module, nn.Module], None]:
    """Let every parameter of a network follow that of another."""

    def follows(key: nn.Module, query: nn.Module) -> None:
        for average, weight in zip(key.parameters(), query.parameters(), strict=True):
            follow(average, weight)

    return follows


@pytest.mark.parametrize("seen", ["a cell", (2, 2), (2, 3), (3, 5)], ids=str)
@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("follow", [given_data, given_by_a_function, given_anew, shared, copied])
@pytest.mark.parametrize("model", MODELS)
def test_a_network_that_follows_another_does_so_in_a_compiled_step_or_is_refused(
    model: str, follow: Callable[[Tensor, Tensor], None], is_trained: bool, seen: str | tuple[int, int]
) -> None:
    """Whatever its size, whether it is frozen, and however many steps were seen."""
    batches = list(torch.randn(8, 5, 4, dtype=torch.float64))
    ours, eager = (Following(MODELS[model], each(follow)) for _ in range(2))
    for one in (ours, eager):
        one.key.requires_grad_(is_trained)
    captured, done = ours.captured(batches, seen)
    if follow not in (shared, copied):
        with pytest.raises((CaptureError, ExportError), match=r"copy_\((…|\.\.\.)\)"):
            captured.optimize().compile()
        return
    compiled = captured.optimize().compile()
    for x in batches[done:]:
        compiled(x)
    for x in batches:
        eager.step(x)
    torch.testing.assert_close(ours.parameters(), eager.parameters())


# --- without a line that says so --------------------------------------------------------------------------------------


def on_its_own_line(key: nn.Module, query: nn.Module) -> None:
    for average, weight in zip(key.parameters(), query.parameters(), strict=True):
        new = weight.data.clone()
        average.data = new


def by_a_vector(key: nn.Module, query: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(query.parameters()), key.parameters())


def as_another_parameter(key: nn.Module, query: nn.Module) -> None:
    for name, weight in list(query.named_parameters()):
        setattr(key, name, nn.Parameter(weight.data.clone()))


def by_lists(key: nn.Module, query: nn.Module) -> None:
    news = [one.clone() for one in key.parameters()]
    torch._foreach_mul_(news, 0.5)
    torch._foreach_add_(news, [one.data for one in query.parameters()], alpha=0.5)
    for average, new in zip(key.parameters(), news, strict=True):
        average.data = new


def moved_elsewhere(key: nn.Module, query: nn.Module) -> None:
    for average in key.parameters():
        new = torch.empty_like(average)
        new.copy_(average)
        average.data = new


@pytest.mark.parametrize("seen", ["a cell", (2, 2), (3, 5)], ids=str)
@pytest.mark.parametrize("follow", [on_its_own_line, by_a_vector, as_another_parameter, by_lists, moved_elsewhere])
def test_what_a_parameter_is_given_is_known_by_its_memory(
    follow: Callable[[nn.Module, nn.Module], None], seen: str | tuple[int, int]
) -> None:
    """No text tells of it: the step computes in one line, and gives the parameter its memory in another, or within torch."""

    batches = list(torch.randn(8, 5, 4, dtype=torch.float64))
    ours, eager = (Following(MODELS["many numbers"], follow) for _ in range(2))
    for one in (ours, eager):
        one.key.requires_grad_(False)
    captured, done = ours.captured(batches, seen)
    # In a loop the next step reads another tensor, and nothing tells what it holds.
    if follow is not moved_elsewhere or seen == (3, 5):
        with pytest.raises(ExportError, match=r"copy_\((…|new)\)|reads other parameters"):
            captured.optimize().compile()
        return
    compiled = captured.optimize().compile()
    for x in batches[done:]:
        compiled(x)
    for x in batches:
        eager.step(x)
    torch.testing.assert_close(ours.parameters(), eager.parameters())
