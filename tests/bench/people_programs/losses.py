"""Losses that torch has and that people write themselves, over small networks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from people_programs.made import Made, program


def net(*widths: int) -> nn.Sequential:
    layers = ((nn.Linear(a, b), nn.GELU()) for a, b in itertools.pairwise(widths))
    return nn.Sequential(*itertools.chain.from_iterable(layers))[:-1]


def of_loss(model: nn.Module, loss_of: Callable[[Callable[..., Any]], Tensor]) -> Made:
    """The loss that a function makes of the model, and its backward."""

    def run(called: Callable[..., Any]) -> Tensor:
        loss = loss_of(called)
        loss.backward()
        return loss

    return Made(run, (model,))


@program("loss")
def ctc() -> Made:
    x, targets = torch.randn(20, 3, 8), torch.randint(1, 11, (3, 6))
    lengths = torch.full((3,), 20), torch.tensor([6, 4, 5])
    return of_loss(net(8, 32, 11), lambda m: F.ctc_loss(m(x).log_softmax(-1), targets, *lengths, zero_infinity=True))


@program("loss")
def triplet() -> Made:
    parts = torch.randn(3, 12, 8).unbind(0)
    return of_loss(
        net(8, 32, 16), lambda m: F.triplet_margin_loss(*(F.normalize(m(x), dim=-1) for x in parts), margin=0.2)
    )


@program("loss")
def focal() -> Made:
    x, y = torch.randn(24, 8), torch.randint(5, (24,))

    def loss(model: nn.Module) -> Tensor:
        ce = F.cross_entropy(model(x), y, reduction="none")
        return (0.25 * (1 - torch.exp(-ce)) ** 2 * ce).mean()

    return of_loss(net(8, 32, 5), loss)


@program("loss")
def contrastive() -> Made:
    x = torch.randn(2, 12, 8)

    def loss(model: nn.Module) -> Tensor:
        seen = F.normalize(torch.cat([model(view) for view in x]), dim=-1)
        alike = (seen @ seen.T / 0.1).fill_diagonal_(-1e9)
        return F.cross_entropy(alike, torch.arange(24, device=x.device).roll(12))

    return of_loss(net(8, 32, 16), loss)


@program("loss")
def supervised_contrastive() -> Made:
    x, y = torch.randn(16, 8), torch.randint(3, (16,))

    def loss(model: nn.Module) -> Tensor:
        seen = F.normalize(model(x), dim=1)
        logits = seen @ seen.t() / 0.2
        logits = logits - logits.max(1, keepdim=True).values.detach()
        others = ~torch.eye(16, dtype=torch.bool, device=x.device)
        same = (y[:, None] == y[None]) & others
        log_p = logits - (logits.exp() * others).sum(1, keepdim=True).log()
        return -((log_p * same).sum(1) / same.sum(1).clamp_min(1)).mean()

    return of_loss(net(8, 32, 16), loss)


@program("loss")
def distillation() -> Made:
    x, y, teacher = torch.randn(24, 8), torch.randint(5, (24,)), net(8, 64, 5)

    def loss(student: nn.Module) -> Tensor:
        with torch.no_grad():
            soft = (teacher(x) / 4).softmax(-1)
        said = student(x)
        return F.kl_div((said / 4).log_softmax(-1), soft, reduction="batchmean") * 16 + F.cross_entropy(said, y)

    return of_loss(net(8, 32, 5), loss)


@program("loss")
def dice_and_cross_entropy() -> Made:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    x, y = torch.randn(2, 3, 12, 12), torch.randint(4, (2, 12, 12))

    def loss(model: nn.Module) -> Tensor:
        logits = model(x)
        p, true = logits.softmax(1), F.one_hot(y, 4).movedim(-1, 1)
        overlap = (p * true).sum((0, 2, 3))
        dice = 1 - (2 * overlap + 1) / (p.sum((0, 2, 3)) + true.sum((0, 2, 3)) + 1)
        return dice.mean() + F.cross_entropy(logits, y, weight=torch.ones(4, device=x.device), label_smoothing=0.1)

    return of_loss(model, loss)


@program("loss")
def mixture_density() -> Made:
    x, y = torch.randn(32, 4), torch.randn(32, 1)

    def loss(model: nn.Module) -> Tensor:
        weight, mean, log_scale = model(x).chunk(3, -1)
        log_p = -0.5 * ((y - mean) / log_scale.exp()) ** 2 - log_scale - 0.5 * math.log(2 * math.pi)
        return -torch.logsumexp(weight.log_softmax(-1) + log_p, -1).mean()

    return of_loss(net(4, 32, 15), loss)


@program("loss")
def evidence_of_distributions() -> Made:
    x = torch.randn(16, 8)

    def loss(model: nn.Module) -> Tensor:
        mean, raw = model(x).chunk(2, -1)
        found = torch.distributions.Normal(mean, F.softplus(raw) + 1e-3)
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        return torch.distributions.kl_divergence(found, prior).sum(-1).mean() - found.log_prob(found.rsample()).mean()

    return of_loss(net(8, 32, 8), loss)


@program("loss")
def barlow_twins() -> Made:
    x = torch.randn(2, 16, 8)

    def loss(model: nn.Module) -> Tensor:
        a, b = (F.batch_norm(model(view), None, None, training=True) for view in x)
        c = a.T @ b / 16
        diagonal = torch.diagonal(c).add_(-1).pow_(2).sum()
        rest = c.flatten()[:-1].view(11, 13)[:, 1:].pow(2).sum()
        return diagonal + 5e-3 * rest

    return of_loss(net(8, 32, 12), loss)


@program("loss")
def huber_margin_cosine() -> Made:
    x, y, sign = torch.randn(2, 16, 8), torch.randn(16, 4), torch.randint(2, (16,)) * 2 - 1

    def loss(model: nn.Module) -> Tensor:
        a, b = model(x[0]), model(x[1])
        ranked = F.margin_ranking_loss(a[:, 0], b[:, 0], sign.to(a.dtype), margin=0.1)
        return F.huber_loss(a, y) + F.cosine_embedding_loss(a, b, sign, margin=0.2) + ranked + F.smooth_l1_loss(b, y)

    return of_loss(net(8, 32, 4), loss)


@program("loss")
def counts_and_labels() -> Made:
    x, counts = torch.randn(16, 8), torch.poisson(torch.rand(16, 4) * 3)
    many = (torch.rand(16, 4) < 0.3).to(torch.get_default_dtype())

    def loss(model: nn.Module) -> Tensor:
        out = model(x)
        bce = F.binary_cross_entropy_with_logits(out, many, pos_weight=torch.full((4,), 2.0, device=x.device))
        return (
            F.poisson_nll_loss(out, counts)
            + bce
            + F.multilabel_soft_margin_loss(out, many)
            + F.soft_margin_loss(out, many * 2 - 1)
        )

    return of_loss(net(8, 32, 4), loss)


@program("loss")
def arc_face() -> Made:
    x, y, weight = torch.randn(16, 8), torch.randint(6, (16,)), nn.Parameter(torch.randn(6, 16))

    def loss(model: nn.Module) -> Tensor:
        cosine = F.linear(F.normalize(model(x)), F.normalize(weight)).clamp(-1 + 1e-7, 1 - 1e-7)
        turned = torch.cos(torch.acos(cosine) + 0.5)
        return F.cross_entropy(16 * torch.where(F.one_hot(y, 6).bool(), turned, cosine), y)

    made = of_loss(net(8, 32, 16), loss)
    return Made(made.run, made.compiled, (weight,))


@program("loss")
def sinkhorn() -> Made:
    x, y = torch.randn(10, 4), torch.randn(12, 4)

    def loss(model: nn.Module) -> Tensor:
        cost = torch.cdist(model(x), y) ** 2
        f, g = torch.zeros(10, device=x.device), torch.zeros(12, device=x.device)
        for _ in range(5):
            f = -torch.logsumexp(g - cost / 0.5 - math.log(12), 1)
            g = -torch.logsumexp(f[:, None] - cost / 0.5 - math.log(10), 0)
        return ((f[:, None] + g - cost / 0.5 - math.log(120)).exp() * cost).sum()

    return of_loss(net(4, 16, 4), loss)
