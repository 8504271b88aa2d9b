"""A loss in a loop over the steps of a sequence is named, and what is proposed runs and gives the same loss and gradients."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from findings import case, found
from torch import Tensor, nn

import tracefuse

STEPS, BATCH, WIDTH, KINDS = 12, 4, 8, 16


class Sequences:
    """What the forms below compute losses of, and modules that they compute with."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.head, self.cell, self.criterion = nn.Linear(WIDTH, KINDS), nn.GRUCell(WIDTH, WIDTH), nn.CrossEntropyLoss()
        self.x, self.y = torch.randn(STEPS, BATCH, WIDTH), torch.randint(0, KINDS, (STEPS, BATCH))


def of_the_first_dimension(s: Sequences) -> Tensor:
    logits, y, loss = s.head(s.x), s.y, 0
    for t in range(STEPS):
        loss += F.cross_entropy(logits[t], y[t])
    return loss


def of_the_second_dimension(s: Sequences) -> Tensor:
    logits, y, loss = s.head(s.x).transpose(0, 1), s.y.t(), torch.zeros(())
    for t in range(STEPS):
        loss = loss + F.cross_entropy(logits[:, t], y[:, t], reduction="sum")
    return loss


def of_a_part(s: Sequences) -> Tensor:
    logits, y, loss = s.head(s.x), s.y, 0
    for t in range(STEPS - 1):
        loss = F.cross_entropy(logits[t], y[t + 1]) + loss
    return loss


def of_a_cell(s: Sequences) -> Tensor:
    state, loss = torch.zeros(BATCH, WIDTH), 0
    for t in range(STEPS):
        state = s.cell(s.x[t], state)
        loss += s.criterion(s.head(state), s.y[t])
    return loss


def of_numbers(s: Sequences) -> Tensor:
    guess, wanted, loss = s.head(s.x), s.x.repeat(1, 1, KINDS // WIDTH), 0
    for t in range(STEPS):
        loss += F.mse_loss(guess[t], wanted[t])
    return loss


def of_reversed_steps(s: Sequences) -> Tensor:
    guess, wanted, loss = s.head(s.x), s.x.repeat(1, 1, KINDS // WIDTH), 0
    for t in range(STEPS):
        loss += F.mse_loss(guess[t], wanted[STEPS - 1 - t])
    return loss


def of_steps_from_the_end(s: Sequences) -> Tensor:
    guess, wanted, loss = s.head(s.x), s.x.repeat(1, 1, KINDS // WIDTH), 0
    for t in range(STEPS):
        loss += F.mse_loss(guess[-t], wanted[-t])
    return loss


PROPOSED: list[tuple[Callable[[Sequences], Tensor], str]] = [
    (of_the_first_dimension, "loss = loss + 12 * F.cross_entropy(logits.flatten(0, 1), y.flatten())"),
    (of_the_second_dimension, "loss = loss + F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction='sum')"),
    (of_a_part, "loss = loss + 11 * F.cross_entropy(torch.cat(outputs), torch.cat(wanted))"),
    (of_a_cell, "loss = loss + 12 * s.criterion(torch.cat(outputs), torch.cat(wanted))"),
    (of_numbers, "loss = loss + 12 * F.mse_loss(guess, wanted)"),
    (of_reversed_steps, "loss = loss + 12 * F.mse_loss(torch.cat(outputs), torch.cat(wanted))"),
    (of_steps_from_the_end, "loss = loss + 12 * F.mse_loss(guess, wanted)"),
]


def told(form: Callable[[Sequences], Tensor]) -> list[Any]:
    s = Sequences()
    return found("loss-in-loop", case(tracefuse.capture(lambda: form(s).backward())))


def proposed(form: Callable[[Sequences], Tensor], fix: str, source: str) -> Callable[[Sequences], Tensor]:
    """The form as the fix says it: the loss's line is gone, or fills lists, and one stands behind the loop."""
    lines, begin = inspect.getsourcelines(form)
    *in_loop, behind = re.findall(r"`([^`]*(?:append|= loss \+)[^`]*)`", fix)
    at = int(re.match(r"\S+py:(\d+)", source)[1]) - begin  # type: ignore[index]
    body = [f"        {one}\n" for one in in_loop] or ["        pass\n"]
    new = [
        lines[0],
        "    outputs, wanted_ = [], []\n" if in_loop else "",
        *lines[1:at],
        *body,
        f"    {behind}\n",
        *lines[at + 1 :],
    ]
    text = (
        textwrap.dedent("".join(new))
        .replace("wanted.append", "wanted_.append")
        .replace("torch.cat(wanted)", "torch.cat(wanted_)")
    )
    names = dict(globals())
    exec("from __future__ import annotations\n" + text, names)
    return names[form.__name__]


@pytest.mark.parametrize(("form", "line"), PROPOSED, ids=[form.__name__ for form, _ in PROPOSED])
def test_one_loss_gives_the_loss_and_gradients_of_many(form: Callable[[Sequences], Tensor], line: str) -> None:
    (finding,) = told(form)
    assert f"`{line}`" in finding.fix
    results = []
    for computed in (form, proposed(form, finding.fix, finding.source)):
        s = Sequences()
        loss = computed(s)
        loss.backward()
        results.append((loss.detach(), *(p.grad for m in (s.head, s.cell) for p in m.parameters())))
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


def test_steps_that_weigh_differently_get_no_code_and_the_divisor_of_each() -> None:
    weight = torch.linspace(1, 2, KINDS)

    def weighted(s: Sequences) -> Tensor:
        logits, loss = s.head(s.x), 0
        for t in range(STEPS):
            loss += F.cross_entropy(logits[t], s.y[t], weight)
        return loss

    def as_told(s: Sequences) -> Tensor:
        each = F.cross_entropy(s.head(s.x).flatten(0, 1), s.y.flatten(), weight, reduction="none")
        return (each.view(STEPS, BATCH).sum(1) / weight[s.y].sum(1)).sum()

    (finding,) = told(weighted)
    assert "`loss" not in finding.fix
    assert "multiply by the number" not in finding.fix
    assert (
        "with `reduction='none'`, and divide the sum of each step by the sum of the weights of its own" in finding.fix
    )
    torch.testing.assert_close(as_told(Sequences()), weighted(Sequences()))


@pytest.mark.parametrize("reduction", ["sum", "none", "mean"])
def test_losses_of_a_list_are_told_what_makes_one_loss_their_sum(reduction: str) -> None:
    def listed(s: Sequences) -> Tensor:
        logits = s.head(s.x)
        return sum([F.cross_entropy(logits[t], s.y[t], reduction=reduction) for t in range(STEPS)]).sum()  # type: ignore[union-attr]

    (finding,) = told(listed)
    assert ("multiply by the number of steps" in finding.fix) == (reduction == "mean")
    s = Sequences()
    whole = F.cross_entropy(s.head(s.x).flatten(0, 1), s.y.flatten(), reduction=reduction)
    if reduction == "mean":
        whole = STEPS * whole
    if found := re.search(r"`(\.unflatten.*)` adds up", finding.fix):
        whole = eval(f"whole{found[1]}").sum()
    assert bool(found) == (reduction == "none")
    torch.testing.assert_close(whole, listed(Sequences()))


def test_a_weight_of_each_step_is_in_no_code() -> None:
    weights = torch.rand(STEPS, KINDS)

    def weighted(s: Sequences) -> Tensor:
        logits, wanted, loss = s.head(s.x), s.x.repeat(1, 1, KINDS // WIDTH).sigmoid(), 0
        for t in range(STEPS):
            loss += F.binary_cross_entropy_with_logits(logits[t], wanted[t], weight=weights[t], reduction="sum")
        return loss

    (finding,) = told(weighted)
    assert "`loss" not in finding.fix
    assert "and of what else each of them is given" in finding.fix


def test_one_loss_a_few_losses_and_losses_that_are_not_summed_are_no_loop() -> None:
    def one(s: Sequences) -> Tensor:
        return F.cross_entropy(s.head(s.x).flatten(0, 1), s.y.flatten())

    def few(s: Sequences) -> Tensor:
        return sum(F.cross_entropy(s.head(s.x[t]), s.y[t]) for t in range(3))  # type: ignore[return-value]

    def weighed_by_the_largest(s: Sequences) -> Tensor:
        return torch.stack([F.cross_entropy(s.head(s.x[t]), s.y[t]) for t in range(STEPS)]).max()

    for form in (one, few, weighed_by_the_largest):
        assert not told(form), form.__name__
