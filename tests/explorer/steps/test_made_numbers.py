"""Tensors that Python makes anew in each step: of other numbers they are inputs with a name, or no step is compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

import tracefuse
from tracefuse.errors import ExportError
from tracefuse.steps.stream import MOST_NUMBERS

STEPS, SHOWN = 8, 3


@dataclass
class Training:
    """A layer, its optimizer and an average of its weight."""

    net: nn.Module = field(default_factory=lambda: made())  # noqa: PLW0108 (defined below)
    average: Tensor = field(default_factory=lambda: torch.zeros(2, 4, dtype=torch.float64))
    rule: type[torch.optim.Optimizer] = torch.optim.SGD

    def __post_init__(self) -> None:
        self.opt = self.rule(self.net.parameters(), lr=0.1)  # type: ignore[call-arg]


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2).double()


def scaled(x: Tensor, by: Tensor) -> Tensor:
    return x.square().mean() * by


def in_the_loss(all_: Training, x: Tensor, k: int) -> None:
    scaled(all_.net(x), torch.tensor(1 / k)).backward()
    all_.opt.step()


def as_a_tensor_of_the_same_kind(all_: Training, x: Tensor, k: int) -> None:
    scaled(all_.net(x), x.new_tensor(1 / k)).backward()
    all_.opt.step()


def as_labels(all_: Training, x: Tensor, k: int) -> None:
    nn.functional.cross_entropy(all_.net(x), torch.tensor([(k + at) % 2 for at in range(5)])).backward()
    all_.opt.step()


def of_a_gradient(all_: Training, x: Tensor, k: int) -> None:
    all_.net(x).square().mean().backward()
    all_.net.weight.grad.mul_(torch.tensor(1 / k))  # type: ignore[union-attr]
    all_.opt.step()


def of_an_average(all_: Training, x: Tensor, k: int) -> None:
    all_.net(x).square().mean().backward()
    all_.opt.step()
    with torch.no_grad():
        all_.average.lerp_(all_.net.weight, torch.tensor(1 / k, dtype=torch.float64))


def of_an_average_by_name(all_: Training, x: Tensor, k: int) -> None:
    all_.net(x).square().mean().backward()
    all_.opt.step()
    weight = torch.tensor(1 / k, dtype=torch.float64)
    with torch.no_grad():
        all_.average.lerp_(all_.net.weight, weight)


Step = Callable[[Training, Tensor, int], None]


def data() -> list[Tensor]:
    return list(torch.randn(STEPS, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))


def seen(step: Step, all_: Training, xs: list[Tensor] | None = None) -> tracefuse.Capture:
    with tracefuse.capture_step(n=SHOWN) as c:
        for k, x in enumerate((xs or data())[: SHOWN + 1], 1):
            all_.opt.zero_grad()
            step(all_, x, k)
    return c


@pytest.mark.parametrize("step", [in_the_loss, as_a_tensor_of_the_same_kind])
def test_one_without_a_name_is_refused_with_the_remedy(step: Step) -> None:
    c = seen(step, Training())
    assert "torch.tensor" in {one.op for one in c.varying}
    with pytest.raises(
        ExportError, match=r"^data of torch.tensor \(.*make it in the loop, in a line that does nothing else"
    ):
        c.optimize().compile()


@pytest.mark.parametrize("step", [of_a_gradient, of_an_average, of_an_average_by_name])
def test_one_that_the_update_alone_reads_is_refused(step: Step) -> None:
    with pytest.raises(ExportError, match=r"^data of torch.tensor \(.*call it yourself behind the compiled step\.$"):
        seen(step, Training()).optimize().compile()


def test_of_a_larger_one_without_a_name_the_step_takes_another() -> None:
    eager, compiled = Training(), Training()
    run = seen(as_labels, compiled).optimize().compile()
    for k, x in enumerate(data(), 1):
        eager.opt.zero_grad()
        as_labels(eager, x, k)
        if k > SHOWN + 1:
            run(x, torch.tensor([(k + at) % 2 for at in range(5)]))
    torch.testing.assert_close(compiled.net.weight, eager.net.weight)


def test_one_that_is_only_logged_is_no_other_of_the_same_number() -> None:
    def step(all_: Training, x: Tensor, k: int) -> None:
        scaled(all_.net(x), torch.tensor(3)).backward()
        all_.opt.step()
        all_.seen = torch.tensor(k)  # type: ignore[attr-defined]

    c = seen(step, all_ := Training())
    assert {(one.here, one.there) for one in c.varying} == {(3, 4)}
    c.optimize().compile()
    del all_


def test_one_with_a_name_is_an_input() -> None:
    def step(all_: Training, x: Tensor, k: int) -> None:
        by = torch.tensor(1 / k)
        scaled(all_.net(x), by).backward()
        all_.opt.step()

    eager, compiled = Training(), Training()
    run = seen(step, compiled).optimize().compile()
    assert set(run.inputs) == {"x", "by"}
    for k, x in enumerate(data(), 1):
        eager.opt.zero_grad()
        step(eager, x, k)
        if k > SHOWN + 1:
            run(x=x, by=torch.tensor(1 / k))
    torch.testing.assert_close(compiled.net.weight, eager.net.weight)


@pytest.mark.gpu
def test_one_on_a_gpu_is_refused_or_an_input_too() -> None:
    def step(all_: Training, x: Tensor, k: int) -> None:
        scaled(all_.net(x), torch.tensor(1 / k, device="cuda")).backward()
        all_.opt.step()

    def named(all_: Training, x: Tensor, k: int) -> None:
        by = torch.tensor(1 / k, device="cuda")
        scaled(all_.net(x), by).backward()
        all_.opt.step()

    def same(all_: Training, x: Tensor, _: int) -> None:
        scaled(all_.net(x), torch.tensor(0.5, device="cuda")).backward()
        all_.opt.step()

    def on_gpu() -> Training:
        return Training(made().cuda(), torch.zeros(2, 4, dtype=torch.float64, device="cuda"))

    xs = [x.cuda() for x in data()]
    with pytest.raises(ExportError, match=r"^data of torch.tensor \("):
        seen(step, first := on_gpu(), xs).optimize().compile()
    seen(same, second := on_gpu(), xs).optimize().compile()
    del first, second
    eager, compiled = on_gpu(), on_gpu()
    run = seen(named, compiled, xs).optimize().compile()
    assert set(run.inputs) == {"x", "by"}
    for k, x in enumerate(xs, 1):
        eager.opt.zero_grad()
        named(eager, x, k)
        if k > SHOWN + 1:
            run(x=x, by=torch.tensor(1 / k, device="cuda"))
    torch.testing.assert_close(compiled.net.weight, eager.net.weight)


@pytest.mark.parametrize("number", [0.5, float("nan")])
def test_the_same_numbers_are_a_constant(number: float) -> None:
    def step(all_: Training, x: Tensor, _: int) -> None:
        scaled(all_.net(x), torch.tensor(number)).backward()
        all_.opt.step()

    c = seen(step, all_ := Training())
    assert not c.varying
    c.optimize().compile()
    del all_


def test_of_many_numbers_nothing_is_told() -> None:
    def step(all_: Training, x: Tensor, k: int) -> None:
        scaled(all_.net(x), torch.tensor([1 / k] * (MOST_NUMBERS + 1))).sum().backward()
        all_.opt.step()

    assert not seen(step, Training()).varying


@pytest.mark.parametrize("rule", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop])
def test_what_an_optimizer_makes_of_numbers_is_its_own(rule: type[torch.optim.Optimizer]) -> None:
    def step(all_: Training, x: Tensor, _: int) -> None:
        all_.net(x).square().mean().backward()
        all_.opt.step()

    all_ = Training(rule=rule)
    assert "torch.tensor" not in {one.op for one in seen(step, all_).varying}


def test_an_operator_that_raises_in_each_step_is_none() -> None:
    def step(all_: Training, x: Tensor, _: int) -> None:
        with contextlib.suppress(RuntimeError):
            all_.net(x[:, :3])
        all_.net(x).square().mean().backward()
        all_.opt.step()

    c = seen(step, all_ := Training())
    c.optimize().compile()
    del all_


def test_a_batch_norm_that_averages_over_all_steps_is_refused_with_what_it_can_do() -> None:
    def step(all_: Training, x: Tensor, _: int) -> None:
        all_.net(x).square().mean().backward()
        all_.opt.step()

    norm = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2, momentum=None)).double()
    with pytest.raises(ExportError, match=r"momentum of aten\.\w+.*give the batch norm a number as its `momentum`"):
        seen(step, Training(norm)).optimize().compile()


@pytest.mark.parametrize("option", ["momentum", "eps"])
def test_a_number_of_a_batch_norm_that_a_schedule_sets_is_refused_with_what_holds(option: str) -> None:
    def step(all_: Training, x: Tensor, number: int) -> None:
        setattr(all_.net[1], option, 0.1 * 0.9**number)
        all_.net(x).square().mean().backward()
        all_.opt.step()

    norm = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)).double()
    with pytest.raises(ExportError, match=rf"{option} of aten\.\w+.*keep the `{option}` of the batch norm as captured"):
        seen(step, Training(norm)).optimize().compile()
