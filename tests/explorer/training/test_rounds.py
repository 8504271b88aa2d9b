"""What a loop does before the forward belongs to that step, in whatever callback; what cannot be told is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from whole_step_loops import (
    Averaged,
    AveragedByHand,
    Loop,
    NeverZeroed,
    ZeroedInPlace,
    captured,
    check,
    data_of,
)

import tracefuse
from tracefuse.errors import ExportError


class Begun(Loop):
    """A loop that calls `begin` at the start of each step, and nothing at its end."""

    def begin(self) -> None: ...
    def after(self) -> None: ...

    def step(self, *data: Tensor) -> None:
        self.begin()
        super().step(*data)


class AveragedBefore(Begun, Averaged):
    def begin(self) -> None:
        self.ema.update_parameters(self.model)


class AveragedInline(Averaged):
    def step(self, *data: Tensor) -> None:
        self.ema.update_parameters(self.model)
        self.zero()
        self.loss(*data).backward()
        self.opt.step()


class AveragedByHandBefore(Begun, AveragedByHand):
    def begin(self) -> None:
        AveragedByHand.after(self)


class AveragedInAHook(Averaged):
    def more(self) -> None:
        super().more()
        self.model.register_forward_pre_hook(lambda *_: self.ema.update_parameters(self.model))

    def after(self) -> None: ...


class Clamped(Begun):
    @torch.no_grad()
    def begin(self) -> None:
        for one in self.model.parameters():
            one.clamp_(-0.3, 0.3)


class ZeroedAndClamped(ZeroedInPlace):
    @torch.no_grad()
    def zero(self) -> None:
        super().zero()
        for one in self.model.parameters():
            one.clamp_(-0.3, 0.3)


class DecayedBefore(AveragedBefore):
    """Something before the forward and something behind the update."""

    @torch.no_grad()
    def after(self) -> None:
        for one in self.model.parameters():
            one.mul_(0.99)


class NormsOfOld(Begun):
    def more(self) -> None:
        self.norm = torch.zeros((), dtype=torch.float64)

    def begin(self) -> None:
        for one in self.model.parameters():
            if one.grad is not None:
                self.norm += one.grad.norm()


class NormsOfKept(NormsOfOld, NeverZeroed): ...


class LoggedLate(Begun):
    last: Any = None

    def begin(self) -> None:
        self.seen = None if self.last is None else (self.last.item(), float(self.last.detach().abs().mean()))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.last = super().loss(x, y)
        return self.last

    def left(self) -> dict[str, Tensor]:
        return {name: one for name, one in super().left().items() if name != "last"}


class Events(Averaged):
    """Every callback is called by one line, of which each caller has its own."""

    def fire(self, event: str) -> None:
        for one in [self]:
            getattr(one, event)()

    def move_average(self) -> None:
        self.ema.update_parameters(self.model)

    def update(self) -> None:
        self.opt.step()

    def step(self, *data: Tensor) -> None:
        self.fire("move_average")
        self.zero()
        self.loss(*data).backward()
        self.fire("update")


HOLDS = [
    AveragedBefore, AveragedInline, AveragedByHandBefore, AveragedInAHook, Clamped, ZeroedAndClamped, DecayedBefore,
    NormsOfKept, LoggedLate, Events,
]  # fmt: skip


@pytest.mark.parametrize("kind", HOLDS)
def test_what_runs_before_the_forward_is_the_first_of_its_step(kind: type[Loop]) -> None:
    check(kind)


@pytest.mark.parametrize("average", [{}, {"use_buffers": True}], ids=["weights", "buffers too"])
def test_an_average_moves_with_its_own_step_and_the_third_step_is_the_third(average: dict[str, Any]) -> None:
    loop = Averaged()
    loop.ema = torch.optim.swa_utils.AveragedModel(loop.model, **average)
    with tracefuse.capture_step(n=3) as c:
        for batch in data_of(5):
            loop.step(*batch)
    assert c.steps is not None
    assert c.steps.captured == 3
    assert not c.steps.steps[3].difference


class OldAdded(Loop):
    """Gradients of the step before, which the step has given up."""

    def step(self, x: Tensor, y: Tensor) -> None:  # type: ignore[override]
        old = [one.grad for one in self.model.parameters()]
        self.zero()
        self.loss(x, y).backward()
        for one, before in zip(self.model.parameters(), old, strict=True):
            if before is not None and one.grad is not None:
                one.grad.add_(before, alpha=0.9)
        self.opt.step()


class Carried(Loop):
    """Gradients of the step before, in a list that each step makes anew."""

    old: Any = None

    def more(self) -> None:
        self.start()

    def start(self) -> None: ...

    def keep(self) -> None:
        self.old = [one.grad.clone() for one in self.model.parameters() if one.grad is not None]

    def step(self, x: Tensor, y: Tensor) -> None:  # type: ignore[override]
        self.zero()
        self.loss(x, y).backward()
        for one, before in zip(self.model.parameters(), self.old or (), strict=bool(self.old)):
            assert one.grad is not None
            one.grad.add_(before, alpha=0.5)
        self.keep()
        self.opt.step()


class Kept(Carried):
    """The remedy: tensors that are made once."""

    def start(self) -> None:
        self.old = [torch.zeros_like(one) for one in self.model.parameters()]

    def keep(self) -> None:
        for one, before in zip(self.model.parameters(), self.old, strict=True):
            assert one.grad is not None
            before.copy_(one.grad)


class InOneLine(Averaged):
    """One line calls what averages, what computes and what updates: their order in the list is all that there is."""

    def parts(self, *data: Tensor) -> list[Callable[[], Any]]:
        return [self.move_average, lambda: self.loss(*data).backward(), self.update]

    def move_average(self) -> None:
        self.ema.update_parameters(self.model)

    def update(self) -> None:
        self.opt.step()
        self.zero()

    def step(self, *data: Tensor) -> None:
        for part in self.parts(*data):
            part()


REFUSED = {
    NormsOfOld: (r"a gradient that the step before has left in `.grad` \(.*self.norm \+= .*before `optimizer.step", None),
    OldAdded: (r"a gradient that the step before has left in `.grad` \(.*one.grad.add_\(before", None),
    Carried: (r"^the update reads a tensor that the step before has made anew \(.*one.grad.add_\(.*make it once", Kept),
    InOneLine: (r"update_parameters\(self.model\) writes to tensors.*call the two in lines of their own", AveragedInline),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_compiled_step_would_do_at_another_time_is_refused_and_the_remedy_holds(kind: type[Loop]) -> None:
    said, remedied = REFUSED[kind]
    with pytest.raises(ExportError, match=said):
        captured(loop := kind(), data_of(loop.n + 2)).compile()
    if remedied is not None:
        check(remedied)


class Recurrent(Loop):
    """A state that each step makes for the next one's forward."""

    state: Any = None

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        state = torch.zeros_like(y) if self.state is None else self.state
        found = torch.tanh(self.model(x) + state)
        self.state = found.detach()
        return F.mse_loss(found, y)


class Stays(Recurrent):
    """The remedy: a tensor that is made once."""

    def more(self) -> None:
        self.state = torch.zeros(5, 3, dtype=torch.float64)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        found = torch.tanh(self.model(x) + self.state)
        self.state.copy_(found.detach())
        return F.mse_loss(found, y)


def test_a_state_that_the_step_before_has_made_is_refused_and_one_that_stays_holds() -> None:
    with pytest.raises(ExportError, match=r"the forward reads what the step before has made \(.*state.copy_\(new\)"):
        captured(Recurrent(), data_of(5)).compile()
    check(Stays)


def unit(data: Tensor) -> Tensor:
    return (data - data.mean()) / (data.std() + 1e-5)


class Plotted(Loop):
    """One helper prepares the data, and what is plotted of the step before."""

    n = 4
    last: Any = None

    def step(self, *data: Tensor) -> None:
        x, y = data
        inputs = unit(x)
        if self.last is not None:
            unit(self.last)
        self.zero()
        out = self.model(inputs)
        F.mse_loss(out, y).backward()
        self.opt.step()
        self.last = out.detach()

    def left(self) -> dict[str, Tensor]:
        """A compiled step returns its loss, and plots none."""
        return {name: one for name, one in super().left().items() if name != "last"}


def test_data_may_be_read_in_a_line_that_reads_what_the_step_before_has_made() -> None:
    check(Plotted)


def test_a_variable_that_each_step_makes_for_the_next_is_given_to_the_step() -> None:
    """As weights of the rows, by the losses of the step before."""
    model = nn.Linear(4, 3)
    eager, weights = copy.deepcopy(model), torch.ones(5)
    opt, theirs = (torch.optim.SGD(one.parameters(), 0.1, fused=True) for one in (model, eager))
    x, y = torch.randn(5, 4), torch.randn(5, 3)
    with tracefuse.capture_step(n=3) as c:
        for _ in range(4):
            opt.zero_grad()
            per_row = (model(x) - y).square().mean(1)
            loss = (per_row * weights).mean()
            loss.backward()
            opt.step()
            weights = per_row.detach() / per_row.detach().mean()
    step = c.optimize().compile()
    assert step.inputs == ("x", "y", "weights")
    eager.load_state_dict(model.state_dict())
    for other in (weights, weights.flip(0)):
        ((eager(x) - y).square().mean(1) * other).mean().backward()
        step(x, y, other)
        theirs.step()
        theirs.zero_grad()
        torch.testing.assert_close(model.state_dict(), eager.state_dict())


def test_a_call_without_what_each_step_makes_anew_says_how_to_hand_it_on() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    batches = [(torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 1, dtype=torch.float64)) for _ in range(8)]
    average = torch.ones((), dtype=torch.float64)
    with tracefuse.capture_step(n=3) as c:
        for x, y in batches:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            average = 0.9 * average + 0.1 * loss.detach()
            (loss / average).backward()
            optimizer.step()
    step = c.optimize().compile()
    assert "average" in step.inputs
    said = r"pass average too\. Of average each step makes the next: .*c\.returned = loss, average"
    with pytest.raises(ValueError, match=said):
        step(*batches[0])
