"""A step computes the leaves that it makes (`h.requires_grad_()`): what they are made of is its data, and not they."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

import tracefuse
from tracefuse.errors import ExportError

generator = torch.Generator().manual_seed(1)
DATA = [(torch.randn(5, 4, generator=generator).double(), torch.randn(5, 4, generator=generator)) for _ in range(8)]


class Loop:
    """A frozen encoder, and a head that is trained on what it gives."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.encoder = nn.Linear(4, 4).double().requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
        self.opt = optim.AdamW(self.head.parameters(), lr=0.01)
        self.noise: Tensor | None = None

    def fit(self, h: Tensor, y: Tensor) -> Tensor:
        self.opt.zero_grad()
        loss = F.mse_loss(self.head(h), y.double())
        loss.backward()
        self.opt.step()
        return loss.detach()

    def distance(self, other: Loop) -> float:
        pairs = zip(self.head.parameters(), other.head.parameters(), strict=True)
        return max(float((mine - theirs).detach().abs().max()) for mine, theirs in pairs)


Step = Callable[[Loop, Tensor, Tensor], Tensor]


def normalised(loop: Loop, x: Tensor, y: Tensor) -> Tensor:
    x = (x - 0.5) / 0.25
    x.requires_grad_()
    return loop.fit(x, y)


def encoded(loop: Loop, x: Tensor, y: Tensor) -> Tensor:
    h = loop.encoder(x)
    h.requires_grad_()
    return loop.fit(h, y)


def recomputed(loop: Loop, x: Tensor, y: Tensor) -> Tensor:
    h = loop.encoder(x).requires_grad_()
    return loop.fit(checkpoint(lambda one: one.tanh(), h, use_reentrant=True), y)


def detached(loop: Loop, x: Tensor, y: Tensor) -> Tensor:
    return loop.fit(x.detach().requires_grad_(), y)


def of_its_data(loop: Loop, x: Tensor, y: Tensor) -> Tensor:
    h = loop.encoder(x).data
    h.requires_grad_()
    return loop.fit(h, y)


def twice(loop: Loop, x: Tensor, y: Tensor) -> Tensor:
    h = loop.encoder(x).requires_grad_()
    return loop.fit(h[:, :] + (h.detach() * 2).requires_grad_(), y)


def written(loop: Loop, x: Tensor, y: Tensor) -> Tensor:
    h = loop.encoder(x).requires_grad_()
    assert h.sum().requires_grad
    with torch.no_grad():
        h.mul_(0.5)
    return loop.fit(h, y)


def scaled_by_its_gradient(loop: Loop, x: Tensor, y: Tensor) -> Tensor:
    h = loop.encoder(x).requires_grad_()
    loop.opt.zero_grad()
    loss = F.mse_loss(loop.head(h), y.double())
    loss.backward()
    assert h.grad is not None
    for p in loop.head.parameters():
        p.grad /= 1 + h.grad.norm()
    loop.opt.step()
    return loss.detach()


def of_weights(loop: Loop, x: Tensor, y: Tensor) -> Tensor:
    weights = {name: p.detach().clone().requires_grad_() for name, p in loop.head.named_parameters()}
    loss = F.mse_loss(torch.func.functional_call(loop.head, weights, (x,)), y.double())
    loss.backward()
    for name, p in loop.head.named_parameters():
        p.grad = weights[name].grad
    loop.opt.step()
    return loss.detach()


STEPS = [
    normalised,
    encoded,
    recomputed,
    detached,
    of_its_data,
    twice,
    written,
    scaled_by_its_gradient,
    of_weights,
]


@pytest.mark.parametrize("step", STEPS, ids=lambda one: one.__name__)
def test_a_step_makes_its_leaves_of_its_data_at_each_call(step: Step) -> None:
    eager, ours = Loop(), Loop()
    wanted = [step(eager, x.clone(), y) for x, y in DATA]
    with tracefuse.capture_step(n=3) as c:
        for x, y in DATA[:4]:
            step(ours, x.clone(), y)
    compiled = c.optimize().compile()
    assert compiled.inputs == ("x", "y")
    for (x, y), loss in zip(DATA[4:], wanted[4:], strict=True):
        torch.testing.assert_close(compiled(x, y), loss)
    assert ours.distance(eager) < 1e-12


def test_a_hook_that_makes_the_output_of_a_frozen_embedding_a_leaf_leaves_tokens_the_data() -> None:
    def made() -> tuple[nn.Sequential, optim.Optimizer]:
        torch.manual_seed(0)
        embedding = nn.Embedding(9, 4).requires_grad_(False)
        embedding.register_forward_hook(lambda module, args, out: out.requires_grad_(True))
        model = nn.Sequential(embedding, nn.Linear(4, 3))
        return model, optim.SGD(model[1].parameters(), lr=0.1)

    def train(model: nn.Module, opt: optim.Optimizer, tokens: Tensor) -> Tensor:
        opt.zero_grad()
        loss = model(tokens).pow(2).mean()
        loss.backward()
        opt.step()
        return loss.detach()

    data = [torch.randint(0, 9, (5,)) for _ in range(8)]
    eager, ours = made(), made()
    wanted = [train(*eager, tokens) for tokens in data]
    with tracefuse.capture_step(n=3) as c:
        for tokens in data[:4]:
            train(*ours, tokens)
    compiled = c.optimize().compile()
    assert compiled.inputs == ("tokens",)
    for tokens, loss in zip(data[4:], wanted[4:], strict=True):
        torch.testing.assert_close(compiled(tokens), loss)
    torch.testing.assert_close(ours[0].state_dict(), eager[0].state_dict())


def test_the_gradient_of_a_leaf_that_a_step_makes_is_returned_where_it_says_so() -> None:
    def step(loop: Loop, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
        h = loop.encoder(x).requires_grad_()
        return loop.fit(h, y), h.grad

    eager, ours = Loop(), Loop()
    wanted = [step(eager, x, y) for x, y in DATA]
    with tracefuse.capture_step(n=3) as c:
        for x, y in DATA[:4]:
            c.returned = step(ours, x, y)
    compiled = c.optimize().compile()
    for (x, y), (loss, gradient) in zip(DATA[4:], wanted[4:], strict=True):
        found = compiled(x, y)
        assert any(torch.equal(one, loss) for one in found)
        assert any(one.shape == gradient.shape and torch.allclose(one, gradient) for one in found)


def test_a_leaf_made_of_gradients_of_the_same_step_is_refused() -> None:
    def attacked(loop: Loop, x: Tensor, y: Tensor) -> Tensor:
        delta = torch.zeros_like(x, requires_grad=True)
        (gradient,) = torch.autograd.grad(F.mse_loss(loop.head(x + delta), y.double()), delta)
        delta = (0.1 * gradient.sign()).requires_grad_()
        return loop.fit(x + delta, y)

    loop = Loop()
    with tracefuse.capture_step(n=3) as c:
        for x, y in DATA[:4]:
            attacked(loop, x, y)
    with pytest.raises(ExportError, match="computed from gradients"):
        c.optimize().compile()


def test_a_step_without_an_optimizer_makes_its_leaves_too_and_one_without_an_update_starts_at_them() -> None:
    loop, (x, y) = Loop(), DATA[0]
    with tracefuse.capture() as c:
        z = (x - 0.5) / 0.25
        z.requires_grad_()
        F.mse_loss(loop.head(z), y.double()).backward()
    assert "z" in [one.name for one in c.trace.inputs]
    assert "x" not in [one.name for one in c.trace.inputs]
    for p in loop.head.parameters():
        p.grad = None
    with tracefuse.capture() as c:
        z = (x - 0.5) / 0.25
        z.requires_grad_()
        F.mse_loss(loop.head(z), y.double()).backward()
        with torch.no_grad():
            for p in loop.head.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    assert "x" in [one.name for one in c.trace.inputs]
    assert "z" not in [one.name for one in c.trace.inputs]


def test_a_leaf_that_an_optimizer_has_stays_an_input_though_the_program_made_it() -> None:
    x = torch.randn(3)
    with tracefuse.capture() as c:
        w = torch.ones(3).mul(2).requires_grad_()
        opt = optim.SGD([w], lr=0.1)
        (w * x).sum().backward()
        opt.step()
    assert "w" in [one.name for one in c.trace.inputs]
