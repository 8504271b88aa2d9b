"""Of the last step of a loop the one before it tells what varies; what nothing tells is said once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import tracefuse
from tracefuse.errors import ExportError
from tracefuse.training.refusals import not_compared

STEPS = 12


class Loop:
    def __init__(self) -> None:
        torch.manual_seed(0)
        made = torch.Generator().manual_seed(1)
        shapes = ((5, 4), (5, 3), (4,))
        self.data = [[torch.rand(*one, dtype=torch.float64, generator=made) for one in shapes] for _ in range(STEPS)]
        self.model, self.other = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()
        self.opt = optim.SGD([*self.model.parameters(), *self.other.parameters()], lr=0.1, fused=True)
        self.slow = [p.detach().clone() for p in self.model.parameters()]

    def step(self, at: int) -> None:
        x, y, _ = self.data[at]
        self.opt.zero_grad()
        loss = F.mse_loss(self.chosen(at)(x), y)
        loss.backward()
        self.opt.step()
        self.after(at)

    def chosen(self, at: int) -> nn.Module:
        return self.model

    def after(self, at: int) -> None: ...

    def run(self, start: int, end: int) -> None:
        for at in range(start, end):
            self.step(at)


class ReadsData(Loop):
    """Its update reads data that the forward does not, which its program holds."""

    @torch.no_grad()
    def after(self, at: int) -> None:
        self.model.weight.mul_(1 - 0.1 * self.data[at][2])


class Alternating(Loop):
    def chosen(self, at: int) -> nn.Module:
        return (self.model, self.other)[at % 2]


class Thawing(Loop):
    def chosen(self, at: int) -> nn.Module:
        self.model.weight.requires_grad_(at % 2 == 0)
        return self.model


class Lookahead(Loop):
    every = 2

    @torch.no_grad()
    def after(self, at: int) -> None:
        if (at + 1) % self.every == 0:
            for slow, p in zip(self.slow, self.model.parameters(), strict=True):
                slow.add_(0.5 * (p - slow))
                p.copy_(slow)


class OfThree(Lookahead):
    every = 3


class Scaled(Loop):
    """A number of Python's own that changes."""

    def chosen(self, at: int) -> nn.Module:
        factor = 1 / (at + 1)
        return lambda x: self.model(x) * factor  # type: ignore[return-value]


SAID: dict[type[Loop], str] = {
    ReadsData: "the update reads another tensor in each step",
    Alternating: "a step before step 3 reads other parameters",
    Thawing: "the step before step 3 ran other ops",
    Lookahead: "the step before step 3 ran other ops",
    OfThree: "the step before step 3 ran other ops",
    Scaled: "cannot follow a Python number that changes from step to step",
}


def captured(loop: Loop, steps: int) -> tracefuse.Capture:
    with tracefuse.capture_step(n=3) as c:
        loop.run(0, steps)
    return c


@pytest.mark.parametrize("kind", SAID)
def test_the_step_before_the_last_one_tells_what_varies(kind: type[Loop]) -> None:
    with pytest.raises(ExportError, match=SAID[kind]):
        captured(kind(), 3).optimize().compile()


@pytest.mark.parametrize("kind", SAID)
def test_a_step_before_the_last_one_is_refused_as_ever(kind: type[Loop]) -> None:
    with pytest.raises(ExportError):
        captured(kind(), 4).optimize().compile()


class Averaged(Loop):
    @torch.no_grad()
    def after(self, at: int) -> None:
        for slow, p in zip(self.slow, self.model.parameters(), strict=True):
            slow.lerp_(p, 0.1)


class ZeroedBehind(Loop):
    """Gradients stay, and are zeroed before the next forward."""

    def step(self, at: int) -> None:
        x, y, _ = self.data[at]
        loss = F.mse_loss(self.model(x), y)
        self.opt.zero_grad(set_to_none=False)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.opt.step()


class Weighted(Loop):
    """Weights of its classes, a tensor that stays, are read by forward and update."""

    def chosen(self, at: int) -> nn.Module:
        return lambda x: self.model(x * self.data[0][2])  # type: ignore[return-value]

    @torch.no_grad()
    def after(self, at: int) -> None:
        self.model.weight.mul_(1 - 0.1 * self.data[0][2])


class Logged(Loop):
    """What is computed of weights and losses behind the loop is no part of its last step."""

    def run(self, start: int, end: int) -> None:
        losses = []
        for at in range(start, end):
            self.step(at)
            losses.append(F.mse_loss(self.model(self.data[at][0]), self.data[at][1]).detach())
        self.kept = [p.detach().clone() * 2 for p in self.model.parameters()], torch.stack(losses).mean()


@pytest.mark.parametrize("kind", [Loop, Averaged, ZeroedBehind, Weighted, Logged])
@pytest.mark.parametrize("steps", [3, 4, 6])
def test_ordinary_loops_compile_and_the_last_step_says_that_nothing_followed(
    kind: Callable[[], Loop], steps: int
) -> None:
    ours, eager = kind(), kind()
    eager.run(0, STEPS)
    c = captured(ours, steps)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = c.optimize().compile()
        assert c.optimize().compile() is step
    told = [str(one.message) for one in caught if "compared with" in str(one.message)]
    assert len(told) == (steps == 3)
    assert all("but the one before it, step 2" in one for one in told)
    for x, y, _ in ours.data[steps:]:
        step(x=x, y=y)
    pairs: list[tuple[Tensor, Tensor]] = list(zip(ours.model.parameters(), eager.model.parameters(), strict=True))
    pairs += zip(ours.slow, eager.slow, strict=True)
    assert max(float((one - other).abs().max()) for one, other in pairs) < 1e-12


@pytest.mark.parametrize("before", [None, "as the captured one"])
def test_what_is_said_of_a_step_that_nothing_follows_is_one_sentence_with_its_remedy(before: str | None) -> None:
    said = not_compared(SimpleNamespace(captured=3, next_difference=None, before=before))  # type: ignore[arg-type]
    assert len(said) < 200
    assert said.endswith(": capture one that others follow in its loop")
    assert ("step 2" in said) == (before is not None)
