"""What a refusal of a program that is not one step says to do: each remedy is followed, and its part runs as eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.utils import clip_grad_norm_

import tracefuse
from tracefuse.errors import ExportError

Cell = Callable[[], object]
Pair = tuple[nn.Module, Cell, Cell]
"""The parameters' owner, the program as people write it, and as the remedy says."""


@pytest.fixture(autouse=True)
def in_double() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def _net(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*[layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.Tanh())])


def _then_a_step(part: Cell, opt: torch.optim.Optimizer) -> Cell:
    def program() -> None:
        part()
        opt.step()

    return program


def _accumulation() -> Pair:
    model, xs = _net(8, 16, 1), torch.randn(3, 6, 8)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def part() -> None:
        opt.zero_grad()
        for x in xs:
            (model(x).square().mean() / len(xs)).backward()

    return model, _then_a_step(part, opt), part


def _clipping() -> Pair:
    model, x, y = _net(8, 16, 3), torch.randn(6, 8), torch.randint(3, (6,))
    opt = torch.optim.AdamW(model.parameters())

    def part() -> None:
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        clip_grad_norm_(model.parameters(), 0.1)

    return model, _then_a_step(part, opt), part


def _gan() -> Pair:
    maker, judge, real, seed = _net(4, 16, 8), _net(8, 16, 1), torch.randn(16, 8), torch.randn(16, 4)
    opts = [torch.optim.Adam(one.parameters()) for one in (maker, judge)]

    def judged(fake: Tensor) -> None:
        (F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()).backward()

    def fooled(fake: Tensor) -> None:
        F.softplus(-judge(fake)).mean().backward()

    def program() -> None:
        fake = maker(seed)
        judged(fake)
        opts[1].step()
        opts[1].zero_grad()
        fooled(fake)
        opts[0].step()

    return nn.ModuleList([maker, judge]), program, lambda: judged(maker(seed))


def _penalty() -> Pair:
    judge, between = _net(8, 16, 1), torch.randn(6, 8, requires_grad=True)

    def program() -> None:
        (slope,) = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
        (slope.norm(dim=1) - 1).square().mean().backward()

    return judge, program, lambda: judge(between).sum().backward()


def _saliency() -> Pair:
    model, x = _net(8, 16, 1), torch.randn(6, 8, requires_grad=True)

    def program() -> None:
        energy = model(x).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        ((force - 1).square().mean() + energy.square()).backward()

    return model, program, lambda: model(x).sum().square().backward()


def _maml() -> Pair:
    model, x, y = _net(4, 16, 1), torch.randn(6, 4), torch.randn(6, 1)

    def inner(now: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(functional_call(model, now, (x,)), y)

    def program() -> None:
        now = dict(model.named_parameters())
        slopes = torch.autograd.grad(inner(now), list(now.values()), create_graph=True)
        then = {name: p - 0.1 * g for (name, p), g in zip(now.items(), slopes, strict=True)}
        inner(then).backward()

    return model, program, lambda: inner(dict(model.named_parameters())).backward()


def _physics() -> Pair:
    model, x = _net(2, 16, 1), torch.rand(8, 2)

    def program() -> None:
        vmap(jacrev(lambda point: model(point).squeeze(-1)))(x).square().mean().backward()

    return model, program, lambda: model(x).square().mean().backward()


def _own_gradient() -> Pair:
    model, x = _net(4, 8, 3), torch.randn(6, 4)

    def program() -> None:
        y = model(x)
        y.backward(y.detach() * 2)

    return model, program, lambda: model(x).square().sum().backward()


def _restored_state() -> Pair:
    model, x = _net(4, 8, 8), torch.randn(6, 4)

    def program() -> None:
        torch.manual_seed(1)
        first = model(x) * torch.rand(8)
        torch.manual_seed(1)
        (first + torch.rand(6, 8)).sum().backward()

    def part() -> None:
        noise = torch.rand(6, 8)
        (model(x) * noise[0] + noise).sum().backward()

    return model, program, part


def _meta() -> Pair:
    model, x = _net(4, 3), torch.randn(2, 4)
    meta, there = nn.Linear(4, 3, device="meta"), torch.empty(2, 4, device="meta")
    return model, lambda: meta(there).sum().backward(), lambda: model(x).sum().backward()


SAID = {
    _accumulation: r"the first of its optimizer: it makes momentum_buffer of 0\.weight.* or capture a later step",
    _clipping: r"the first of its optimizer: it makes exp_avg of 0\.weight.* or capture a later step",
    _gan: "the captured step is the first of its optimizer",
    _penalty: "computed from gradients .* capture a part of it that is one forward and one backward",
    _saliency: "computed from gradients .* capture a part of it that is one forward and one backward",
    _maml: "computed from gradients .* capture a part of it that is one forward and one backward",
    _physics: "computed from gradients .* capture a part of it that is one forward and one backward",
    _own_gradient: r"Reduce to a loss and call `\.backward\(\)` on that",
    _restored_state: "Draw the numbers once, keep them in a variable and use them twice",
    _meta: "capture it with its model and inputs on the CPU",
}


@pytest.mark.parametrize("make", SAID)
def test_a_refusal_says_what_then_runs(make: Callable[[], Pair]) -> None:
    owner, program, part = make()
    refused = tracefuse.capture(program).optimize()
    with pytest.raises(ExportError, match=SAID[make]):
        refused.compile()

    owner.zero_grad()
    torch.manual_seed(5)
    c = tracefuse.capture(part)
    wanted = [p.grad for p in owner.parameters()]
    compiled = c.optimize().compile()
    owner.zero_grad()
    torch.manual_seed(5)
    result = compiled()
    torch.autograd.backward([r for r in (result if isinstance(result, tuple) else (result,)) if r.requires_grad])
    for mine, theirs in zip((p.grad for p in owner.parameters()), wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


# --- an optimizer's first step ----------------------------------------------------------------------------------------


class Training:
    """A loop whose cell is an accumulation, a clipped step or half of a GAN's, with a schedule."""

    def __init__(self, name: str, fused: bool = True) -> None:
        torch.manual_seed(0)
        self.name, self.model, self.judge = name, _net(8, 16, 3), _net(3, 16, 1)
        kind = partial(torch.optim.SGD, momentum=0.9) if name == "accumulation" else torch.optim.AdamW
        trained = self.judge if name == "judge of a GAN" else self.model
        self.opt = kind(trained.parameters(), lr=1e-2, fused=fused)
        self.plan = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, 10)

    def cell(self, x: Tensor) -> None:
        self.opt.zero_grad()
        if self.name == "accumulation":
            for part in x.chunk(2):
                (self.model(part).square().mean() / 2).backward()
        elif self.name == "clipping":
            self.model(x).square().mean().backward()
            clip_grad_norm_(self.model.parameters(), 0.1)
        else:
            with torch.no_grad():
                fake = self.model(x)
            F.softplus(self.judge(fake)).mean().backward()
        self.opt.step()

    def left(self) -> list[Tensor]:
        states = [entry for state in self.opt.state.values() for entry in state.values()]
        return [*self.model.parameters(), *self.judge.parameters(), *states]


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "in Python"])
@pytest.mark.parametrize("by", ["run once more", "capture_step"])
@pytest.mark.parametrize("name", ["accumulation", "clipping", "judge of a GAN"])
def test_a_later_step_of_an_optimizer_is_compiled_and_trains_as_eager(name: str, by: str, fused: bool) -> None:
    ours, eager, data = Training(name, fused), Training(name, fused), torch.randn(6, 4, 8)
    model, judge, opt = ours.model, ours.judge, ours.opt  # noqa: F841  (names for the capture)
    if by == "capture_step":
        with tracefuse.capture_step(n=3) as c:
            for x in data[:4]:
                ours.cell(x)
                ours.plan.step()
    else:
        for at, x in enumerate(data[:4]):
            with tracefuse.capture() as c:
                ours.cell(x)
            ours.plan.step()
            if at == 0:
                with pytest.raises(ExportError, match=r"first of its optimizer.*Run the cell once more, or .*n=3"):
                    c.optimize().compile()
    step = c.optimize().compile()
    for x in data[4:]:
        step(x)
        ours.plan.step()
    for x in data:
        eager.cell(x)
        eager.plan.step()
    for mine, theirs in zip(ours.left(), eager.left(), strict=True):
        torch.testing.assert_close(mine, theirs)
