"""Gradients: what was there before, what `torch.autograd.grad` gives, what is returned, and what is read again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import tracefuse

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, 1e-3),
    "fused AdamW": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
}


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_by_all_of_the_gradient(name: str, accumulated: bool, backwards: int, clip: bool) -> None:
    net, x = nn.Linear(8, 4), torch.randn(16, 8)
    optimizer = OPTIMIZERS[name](net.parameters())
    if accumulated:
        net(x + 1).square().mean().backward()
    with tracefuse.capture() as c:
        for _ in range(backwards):
            net(x).square().mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        optimizer.step()
    assert "bit for bit" in str(c.check())
    assert c.update is not None
    found = dict(zip(c.update.outputs, c.replay()[len(c.trace.outputs) :], strict=True))
    weight = next(i.name for i in c.update.inputs if (i.kind, i.source) == ("parameter", "weight"))
    assert torch.equal(next(v for o, v in found.items() if o.kind == "mutation" and o.of == weight), net.weight)


@pytest.mark.parametrize("by", ["module", "foreach"])
def test_gradients_set_to_zero_are_no_part_of_a_step(by: str) -> None:
    net, x = nn.Linear(8, 4), torch.randn(16, 8)
    net(x).square().mean().backward()
    zeroing = net if by == "module" else torch.optim.SGD(net.parameters(), 0.1, foreach=True)
    with tracefuse.capture() as c:
        zeroing.zero_grad(set_to_none=False)
        loss = net(x).square().mean()
        loss.backward()
    assert [o.kind for o in c.trace.outputs] == ["result", "gradient", "gradient"]
    found = c.replay()
    assert torch.equal(found[1], net.weight.grad)
    assert torch.equal(found[2], net.bias.grad)
    c.optimize().compile()


@pytest.fixture
def step() -> tuple[nn.Module, Callable[[], Tensor]]:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(3, 4)
    return net, lambda: net(x).square().mean()


def kinds(c: tracefuse.Capture) -> list[str]:
    return [out.kind for out in c.trace.outputs]


def test_gradients_that_autograd_grad_returns_are_gradients(step) -> None:
    net, loss = step
    c = tracefuse.capture(lambda: torch.autograd.grad(loss(), list(net.parameters())))
    assert kinds(c) == ["result"] + ["gradient"] * 4
    assert [o.of for o in c.trace.outputs[1:]] == [i.name for i in c.trace.inputs if i.trainable]
    expected = torch.autograd.grad(loss(), list(net.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(c.replay()[1:], expected, strict=True))
    c.optimize().compile()


def test_a_gradient_of_a_leaf_may_be_returned(step) -> None:
    net, loss = step

    def run() -> Tensor:
        loss().backward()
        return net[0].weight.grad

    c = tracefuse.capture(run)
    assert kinds(c) == ["result"] + ["gradient"] * 4
    assert "bit for bit" in str(c.check())
    c.optimize().compile()


def test_two_backwards_from_one_loss_are_one_of_twice_the_gradient(step) -> None:
    net, loss = step

    def run() -> Tensor:
        out = loss()
        out.backward(retain_graph=True)
        out.backward()
        return out

    c = tracefuse.capture(run)
    assert "bit for bit" in str(c.check())
    assert [i.kind for i in c.trace.inputs].count("cotangent") == 1
    assert torch.equal(c.replay()[1], net[0].weight.grad)
    c.optimize().compile()


def test_a_gradient_that_was_there_has_a_name() -> None:
    net, x = nn.Linear(8, 4), torch.randn(16, 8)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net(x).sum().backward()
    with tracefuse.capture() as c:
        net(x).square().mean().backward()
        optimizer.step()
    assert c.update is not None
    assert {"weight_grad", "bias_grad"} <= {i.source for i in c.update.inputs}


@pytest.mark.parametrize("is_unpacked", [True, False])
def test_gradients_that_variables_hold_are_those_of_the_program(is_unpacked: bool) -> None:
    x, w, b = torch.randn(3, 4), torch.randn(4, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    with tracefuse.capture() as c:
        loss = (x @ w + b).square().sum()
        if is_unpacked:
            of_w, of_b = torch.autograd.grad(loss, (w, b))
        else:
            both = torch.autograd.grad(loss, (w, b))
    found = dict(zip(((out.kind, out.of) for out in c.trace.outputs), c.replay(), strict=True))
    assert found.keys() == {("result", "loss"), ("gradient", "w"), ("gradient", "b")}
    of_w, of_b = (of_w, of_b) if is_unpacked else both
    assert torch.equal(found["gradient", "w"], of_w)
    assert torch.equal(found["gradient", "b"], of_b)
    assert c.backward.op_count
    assert c.dropped == ()


def test_a_gradient_that_a_penalty_reads_is_none_of_the_program() -> None:
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    with tracefuse.capture() as c:
        out = (x @ w).square().sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        loss = out + slope.square().sum()
        loss.backward(inputs=[w])
    assert [out.of for out in c.trace.outputs if out.kind == "gradient"] == ["w"]


# --- gradients of one's own making ------------------------------------------------------------------------------------


def _scaled(parameters: list[nn.Parameter], losses: list[Tensor]) -> Sequence[Tensor | None]:
    return [gradient * 2 for gradient in torch.autograd.grad(losses[0] + losses[1], parameters)]


def _surgery(parameters: list[nn.Parameter], losses: list[Tensor]) -> Sequence[Tensor | None]:
    """The gradients of one loss, and those of another without what they have against the first."""
    first = torch.autograd.grad(losses[0], parameters, retain_graph=True)
    second = torch.autograd.grad(losses[1], parameters)
    products = torch.stack([(a * b).sum() for a, b in zip(first, second, strict=True)])
    against = products.sum() / torch.stack([a.square().sum() for a in first]).sum()
    return [a + b - against * a for a, b in zip(first, second, strict=True)]


def _of_one_beside_the_backwards(parameters: list[nn.Parameter], losses: list[Tensor]) -> Sequence[Tensor | None]:
    (first,) = torch.autograd.grad(losses[0], parameters[:1], retain_graph=True)
    losses[1].backward()
    return [first * 3, *(parameter.grad for parameter in parameters[1:])]


@pytest.mark.parametrize("name", ["SGD", "SGD with momentum", "fused AdamW"])
@pytest.mark.parametrize("made", [_scaled, _surgery, _of_one_beside_the_backwards])
def test_an_optimizer_steps_by_what_a_program_makes_of_gradients(
    made: Callable[[list[nn.Parameter], list[Tensor]], Sequence[Tensor | None]], name: str
) -> None:
    torch.manual_seed(0)
    ours: nn.Module = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    eager = copy.deepcopy(ours)
    batches = list(torch.randn(6, 4, 8, dtype=torch.float64))
    optimizers: dict[nn.Module, torch.optim.Optimizer]
    optimizers = {net: OPTIMIZERS[name](net.parameters()) for net in (ours, eager)}

    def step(net: nn.Module, x: Tensor) -> Tensor:
        optimizers[net].zero_grad()
        parameters, y = list(net.parameters()), net(x)
        losses = [y.square().mean(), y.abs().mean()]
        for parameter, gradient in zip(parameters, made(parameters, losses), strict=True):
            parameter.grad = gradient
        optimizers[net].step()
        return losses[0]

    with tracefuse.capture_step(n=2) as c:
        for x in batches[:3]:
            step(ours, x)
    assert c.update is not None
    compiled = c.optimize().compile()
    for x in batches[:3]:
        step(eager, x)
    for x in batches[3:]:
        compiled(x)
        step(eager, x)
    torch.testing.assert_close(list(ours.parameters()), list(eager.parameters()))
