"""Learning rates and groups of parameters of a compiled step's optimizers, changed after the capture."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from whole_step_loops import NEAR, Loop, captured, data_of


def test_a_group_that_was_added_is_refused_by_number() -> None:
    loop, data = Loop(), data_of(5)
    step = captured(loop, data[:4]).compile()
    loop.opt.add_param_group({"params": [torch.zeros(2, requires_grad=True)]})
    with pytest.raises(
        ValueError, match="opt has 2 parameter groups, and the step was captured with 1: capture it again"
    ):
        step(*data[4])


class Shared(Loop):
    """One tensor is the learning rate of two groups."""

    def optimizer(self) -> torch.optim.Optimizer:
        rate = torch.tensor(0.01, dtype=torch.float64)
        groups = [{"params": list(layer.parameters())} for layer in (self.model[0], self.model[3])]
        return torch.optim.AdamW(groups, lr=rate, fused=True)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1, dtype=torch.float64)], ids=["number", "tensor"])
def test_a_rate_that_groups_shared_is_not_changed_for_one_of_them(at: int, rate: float | Tensor) -> None:
    loop, data = Shared(), data_of(5)
    step = captured(loop, data[:4]).compile()
    shared, before = loop.opt.param_groups[0]["lr"], loop.left()
    before = {name: one.clone() for name, one in before.items()}
    loop.opt.param_groups[at]["lr"] = rate
    said = r"opt.param_groups\[0\] and loop.opt.param_groups\[1\] had one tensor as their lr .* capture the step again"
    with pytest.raises(ValueError, match=said):
        step(*data[4])
    assert float(shared) == 0.01
    assert all(torch.equal(one, before[name]) for name, one in loop.left().items())


def test_a_rate_that_groups_shared_and_that_changes_for_all_is_followed() -> None:
    ours, eager, data = Shared(), Shared(), data_of(7)
    step = captured(ours, data[:4]).compile()
    for batch in data[:4]:
        eager.step(*batch)
    for at, batch in enumerate(data[4:]):
        for loop in (ours, eager):
            if at == 0:
                loop.opt.param_groups[0]["lr"].fill_(0.1)
            for group in loop.opt.param_groups if at else ():
                group["lr"] = torch.tensor(0.1 + at, dtype=torch.float64)
        step(*batch)
        eager.step(*batch)
    theirs = eager.left()
    assert max(float((one - theirs[name]).detach().abs().max()) for name, one in ours.left().items()) < NEAR


class Mine(torch.optim.SGD):
    """An optimizer of one's own: tensor by tensor it computes with the learning rate as a number."""


class Plain(Loop):
    def optimizer(self) -> torch.optim.Optimizer:
        return Mine(self.model.parameters(), lr=0.1, fused=self.fused)

    fused = False


class FusedPlain(Plain):
    fused = True


@pytest.mark.parametrize("when", ["before compiling", "after compiling"])
def test_a_rate_that_the_update_computes_with_is_refused_with_what_lets_it_change(when: str) -> None:
    loop, data = Plain(), data_of(5)
    variant = captured(loop, data[:4])
    step = variant.compile() if when == "after compiling" else None
    loop.opt.param_groups[0]["lr"] = 0.05
    said = r"\['lr'\] is 0.05, .* with 0.1: for a rate that changes make Mine with `fused=True`, and capture it again$"
    with pytest.raises(ValueError, match=said):
        (step or variant.compile())(*data[4])


def test_what_the_refusal_of_another_rate_says_lets_it_change() -> None:
    loop, eager, data = FusedPlain(), FusedPlain(), data_of(5)
    step = captured(loop, data[:4]).compile()
    for batch in data[:4]:
        eager.step(*batch)
    for one in (loop, eager):
        one.opt.param_groups[0]["lr"] = 0.05
    step(*data[4])
    eager.step(*data[4])
    theirs = eager.left()
    assert max(float((one - theirs[name]).detach().abs().max()) for name, one in loop.left().items()) < NEAR
