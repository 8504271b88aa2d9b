"""What people do to autograd's graph: hooks, checkpoints, gradients that are asked for."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from people_programs.losses import net, of_loss
from people_programs.made import Made, program, trained


@program("graph")
def tensor_hooks() -> Made:
    model, x = net(8, 32, 4), torch.randn(6, 8)

    def run(model: nn.Module) -> Tensor:
        hidden = model(x)
        hidden.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        hidden.retain_grad()
        loss = hidden.square().mean()
        loss.backward()
        return loss

    return Made(run, (model,))


@program("graph")
def hooks_of_parameters() -> Made:
    model, x = net(8, 32, 4), torch.randn(6, 8)

    def halved(parameter: Tensor) -> None:
        parameter.grad.mul_(0.5)

    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 3)
        parameter.register_post_accumulate_grad_hook(halved)
    return trained(model, x)


@program("graph")
def hooks_of_modules() -> Made:
    model, x, kept = net(8, 32, 4), torch.randn(6, 8), {}
    model[0].register_forward_pre_hook(lambda module, given: (given[0] * 1.5,))
    model[1].register_forward_hook(lambda module, given, out: kept.update(out=out) or out + 0.1)
    model[2].register_full_backward_hook(lambda module, into, out: (into[0] * 0.9,))
    return of_loss(model, lambda m: m(x).square().mean() + 1e-3 * kept["out"].abs().mean())


@program("graph")
def saved_tensors_packed() -> Made:
    model, x = net(8, 32, 4), torch.randn(6, 8)

    def run(model: nn.Module) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            loss = model(x).square().mean()
        loss.backward()
        return loss

    return Made(run, (model,))


@program("graph")
def saved_on_the_host() -> Made:
    model, x = net(8, 32, 4), torch.randn(6, 8)

    def run(model: nn.Module) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            loss = model(x).square().mean()
        loss.backward()
        return loss

    return Made(run, (model,))


class Checkpointed(nn.Module):
    """Blocks with dropout, each computed again in the backward."""

    def __init__(self, reentrant: bool, nested: bool = False) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(8, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2)) for _ in range(3)
        )
        self.again = partial(checkpoint, use_reentrant=reentrant)
        self.nested = nested

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.nested:
            return self.out(self.again(self.inside, x))
        for block in self.blocks:
            x = x + self.again(block, x)
        return self.out(x)

    def inside(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.again(block, x)
        return x


@program("graph")
def checkpoints() -> Made:
    return trained(Checkpointed(reentrant=False), torch.randn(6, 8))


@program("graph")
def reentrant_checkpoints() -> Made:
    return trained(Checkpointed(reentrant=True), torch.randn(6, 8))


@program("graph")
def nested_checkpoints() -> Made:
    return trained(Checkpointed(reentrant=False, nested=True), torch.randn(6, 8))


@program("graph")
def nested_reentrant_checkpoints() -> Made:
    return trained(Checkpointed(reentrant=True, nested=True), torch.randn(6, 8))


class Sequence(nn.Module):
    """Layers in segments."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1)) for _ in range(6)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.layers, 3, x, use_reentrant=False)


@program("graph")
def checkpoints_in_sequence() -> Made:
    return trained(Sequence(), torch.randn(6, 16, requires_grad=True))


@program("graph")
def gradients_returned() -> Made:
    model, x = net(8, 32, 1), torch.randn(6, 8, requires_grad=True)

    def run(model: nn.Module) -> list[Tensor]:
        loss = model(x).square().mean()
        return [loss, *torch.autograd.grad(loss, [x, *model.parameters()])]

    return Made(run, (model,), (x,))


@program("graph")
def gradient_of_a_leaf_returned() -> Made:
    model, x = net(8, 32, 1), torch.randn(6, 8, requires_grad=True)

    def run(model: nn.Module) -> Tensor:
        model(x).square().mean().backward()
        return x.grad

    return Made(run, (model,), (x,))


@program("graph")
def saliency_in_a_loss() -> Made:
    model, x = net(8, 32, 1), torch.randn(6, 8, requires_grad=True)

    def run(model: nn.Module) -> Tensor:
        energy = model(x).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        loss = (force - 1).square().mean() + energy.square()
        loss.backward()
        return loss

    return Made(run, (model,), (x,))


@program("graph")
def backward_of_a_vector() -> Made:
    model, x, into = net(8, 32, 4), torch.randn(6, 8), torch.randn(6, 4)

    def run(model: nn.Module) -> Tensor:
        out = model(x)
        out.backward(into)
        return out

    return Made(run, (model,))


@program("graph")
def backward_into_some() -> Made:
    model, x = net(8, 32, 4), torch.randn(6, 8, requires_grad=True)
    weight = model[2].weight

    def run(model: nn.Module) -> Tensor:
        loss = model(x).square().mean()
        loss.backward(inputs=[x, weight])
        return loss

    return Made(run, (model,), (x,))


@program("graph")
def frozen_below() -> Made:
    model, x = net(8, 32, 32, 4), torch.randn(6, 8)
    model[0].requires_grad_(False)
    with torch.no_grad():
        model[2].bias.zero_()
    return trained(model, x)


@program("graph")
def detached_and_without_gradients() -> Made:
    model, x = net(8, 32, 8), torch.randn(6, 8)

    def loss(model: nn.Module) -> Tensor:
        with torch.no_grad():
            goal = model(x).roll(1, 0)
        first = model(x)
        return (model(first.detach()) - goal).square().mean() + F.mse_loss(first, goal)

    return of_loss(model, loss)


@program("graph")
def anomalies_looked_for() -> Made:
    model, x = net(8, 32, 4), torch.randn(6, 8)

    def run(model: nn.Module) -> Tensor:
        with torch.autograd.detect_anomaly(check_nan=True):
            loss = model(x).square().mean()
            loss.backward()
        return loss

    return Made(run, (model,))
