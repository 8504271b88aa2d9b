"""What a program reads of its data to decide by, such as whether a mask has padding: it is told, however it is written."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import tracefuse

Masked = Callable[[Tensor, Tensor], Tensor]


def has_padding(mask: Tensor) -> bool:
    return not bool(mask.all())


def by_a_helper(x: Tensor, mask: Tensor) -> Tensor:
    return x * mask if has_padding(mask) else x


def by_a_variable(x: Tensor, mask: Tensor) -> Tensor:
    padded = bool((mask == 0).any())
    if padded:
        x = x * mask
    return x


def by_a_count(x: Tensor, mask: Tensor) -> Tensor:
    shortest = int(mask.sum(1).min().item())
    return x * mask if shortest < 4 else x


def by_a_look_at_all(x: Tensor, mask: Tensor) -> Tensor:
    is_full = torch.equal(mask, torch.ones_like(mask))
    return x if is_full else x * mask


def by_two_lines(x: Tensor, mask: Tensor) -> Tensor:
    padded = has_padding(mask)
    count = int(mask.sum())
    return x * mask if count < 20 or padded or has_padding(mask) else x


def by_nothing(x: Tensor, mask: Tensor) -> Tensor:
    return x * mask


def by_a_check_of_torchs(x: Tensor, mask: Tensor) -> Tensor:
    """`one_hot` looks at its numbers on a CPU, and distributions at what they are given."""
    kept = torch.distributions.Normal(x.detach(), 1.0, validate_args=True).mean
    return x * F.one_hot(mask.long(), 2)[..., 1] + 0.0 * kept


def step_of(masked: Masked) -> tuple[Callable[..., Tensor], list[str], optim.Optimizer]:
    """The compiled step of a loop whose masks are full, what compiling it tells of decisions, and what else it needs."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    opt = optim.SGD(model.parameters(), 0.1, fused=True)
    with tracefuse.capture_step(n=3) as c:
        for x, mask in [(torch.randn(5, 4), torch.ones(5, 4)) for _ in range(5)]:
            loss = train(model, opt, masked, x, mask)
            losses.append(loss.item())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step = c.optimize().compile()
    return step, [str(one.message) for one in told if "decide" in str(one.message)], opt


losses: list[float] = []


def train(model: nn.Module, opt: optim.Optimizer, masked: Masked, x: Tensor, mask: Tensor) -> Tensor:
    loss = model(masked(x, mask)).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss


@pytest.mark.parametrize(
    ("masked", "is_sure"),
    [(by_a_helper, True), (by_a_variable, True), (by_a_count, False), (by_a_look_at_all, True)],
)
def test_what_decides_by_data_alone_is_told_with_the_data_and_what_to_capture(masked: Masked, is_sure: bool) -> None:
    step, (said,), _ = step_of(masked)
    assert said.startswith(
        f"the program {'decides' if is_sure else 'may decide'} by what it reads of mask in test_decided.py:"
    )
    assert said.endswith("or capture one whose data make it compute more, such as a batch with padding")
    with pytest.raises(
        ValueError, match=r"nothing called mask: pass no more\. The captured one only read a value of mask, in "
    ):
        step(x=torch.randn(5, 4), mask=torch.zeros(5, 4))


def test_of_several_lines_the_first_one_is_told_and_how_many_follow() -> None:
    _, (said,), _ = step_of(by_two_lines)
    assert "return not bool(mask.all()) and 1 more line, and a compiled step" in said


@pytest.mark.parametrize("masked", [by_nothing, by_a_check_of_torchs])
def test_of_what_is_computed_and_of_checks_nothing_is_told(masked: Masked) -> None:
    """Nor of the loss that the loop reads: it depends on parameters."""
    step, said, _opt = step_of(masked)
    assert said == []
    assert step(x=torch.randn(5, 4), mask=torch.zeros(5, 4)).isfinite()


def test_a_step_captured_with_padding_takes_masks_of_both_kinds() -> None:
    """The remedy that is told, followed."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    opt = optim.SGD(model.parameters(), 0.0, fused=True)
    full, padded = torch.ones(5, 4), torch.ones(5, 4).tril()
    with tracefuse.capture_step(n=3) as c:
        for x, mask in [(torch.randn(5, 4), padded.clone()) for _ in range(5)]:
            train(model, opt, by_a_helper, x, mask)
    with pytest.warns(UserWarning, match="decides by what it reads of mask"):
        step = c.optimize().compile()
    x = torch.randn(5, 4)
    for mask in (full, padded):
        torch.testing.assert_close(step(x=x, mask=mask), model(x * mask).square().mean())


def by_the_number(x: Tensor, mask: Tensor) -> Tensor:
    return x / (mask != 0).sum().item()


def by_the_tensor(x: Tensor, mask: Tensor) -> Tensor:
    return x / (mask != 0).sum()


def test_a_number_that_is_computed_with_is_told_as_such_and_the_remedy_holds() -> None:
    model = nn.Linear(4, 3)
    opt = optim.SGD(model.parameters(), 0.1, fused=True)

    def told_of(masked: Masked) -> list[str]:
        with tracefuse.capture_step(n=3) as c:
            for x, mask in [(torch.randn(5, 4), torch.ones(5, 4)) for _ in range(5)]:
                train(model, opt, masked, x, mask)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            c.optimize().compile()
        return [str(one.message) for one in told if "mask" in str(one.message)]

    (said,) = told_of(by_the_number)
    assert said.startswith("the program computes with a number that it reads of mask in ")
    assert "drop `.item()`" in said
    assert not told_of(by_the_tensor)
