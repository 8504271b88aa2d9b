"""Layers in other forms, functions with a backward of their own, and reinforcement learning."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils import parametrizations, parametrize

from people_programs.losses import net, of_loss
from people_programs.made import Made, program, trained


@program("layer")
def weight_norms() -> Made:
    model = nn.Sequential(*(parametrizations.weight_norm(nn.Linear(8, 8)) for _ in range(2)), nn.ReLU())
    return trained(model, torch.randn(6, 8))


@program("layer")
def spectral_norms() -> Made:
    model = nn.Sequential(parametrizations.spectral_norm(nn.Conv2d(3, 8, 3)), nn.ReLU(), nn.Flatten())
    return trained(model, torch.randn(2, 3, 8, 8))


@program("layer")
def orthogonal_weights() -> Made:
    return trained(parametrizations.orthogonal(nn.Linear(8, 8)), torch.randn(6, 8))


@program("layer")
def old_weight_norm() -> Made:
    return trained(nn.utils.weight_norm(nn.Conv1d(4, 8, 3)), torch.randn(2, 4, 10))


@program("layer")
def own_parametrization() -> Made:
    class Symmetric(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.triu() + weight.triu(1).mT

    layer = nn.Linear(8, 8)
    parametrize.register_parametrization(layer, "weight", Symmetric())

    def loss(layer: nn.Module) -> Tensor:
        with parametrize.cached():
            return layer(layer(torch.ones(3, 8, device=layer.bias.device))).square().mean()

    return of_loss(layer, loss)


@program("layer")
def pruned_weights() -> Made:
    from torch.nn.utils import prune

    model = net(8, 32, 4)
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    prune.random_structured(model[2], "weight", amount=0.25, dim=0)
    return trained(model, torch.randn(6, 8))


@program("layer")
def activations_in_place() -> Made:
    layers: list[Any] = [
        nn.ReLU(True),
        nn.LeakyReLU(0.1, True),
        nn.ELU(inplace=True),
        nn.SiLU(True),
        nn.Hardswish(True),
        nn.ReLU6(True),
        nn.SELU(True),
        nn.CELU(inplace=True),
        nn.Hardtanh(inplace=True),
        nn.Threshold(0.1, 0.0, True),
    ]
    parts = [part for layer in layers for part in (nn.Linear(8, 8), nn.LayerNorm(8), layer)]
    return trained(nn.Sequential(*parts), torch.randn(6, 8))


@program("layer")
def dropouts() -> Made:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.Dropout2d(0.2),
        nn.ELU(),
        nn.FeatureAlphaDropout(0.2),
        nn.Flatten(),
        nn.AlphaDropout(0.1),
        nn.Linear(288, 4),
        nn.Dropout1d(0.1),
        nn.RReLU(),
    )
    return trained(model, torch.randn(2, 3, 8, 8))


# --- functions with a backward of their own ---


class Straight(torch.autograd.Function):
    """Rounds, and passes gradients straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Swish(torch.autograd.Function):
    """Saves its input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return gradient * (s * (1 + x * (1 - s)))


class Reversed(torch.autograd.Function):
    """The layer that turns a gradient round, by a factor; setup_context apart."""

    @staticmethod
    def forward(x: Tensor, by: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.by = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.by * gradient, None


class Pair(torch.autograd.Function):
    """Two results, of which one cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        out, best = (x @ weight).max(-1)
        ctx.save_for_backward(x, weight, best)
        ctx.mark_non_differentiable(best)
        return out, best

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight, best = ctx.saved_tensors
        full = torch.zeros(*x.shape[:-1], weight.shape[1], dtype=x.dtype, device=x.device)
        full.scatter_(-1, best[..., None], gradient[..., None])
        wants = ctx.needs_input_grad
        return (full @ weight.T if wants[0] else None), (x.flatten(0, -2).T @ full.flatten(0, -2) if wants[1] else None)


@program("layer")
def straight_through_function() -> Made:
    model, x = net(8, 32, 4), torch.randn(6, 8)
    return of_loss(model, lambda m: Straight.apply(m(x)).square().mean())


@program("layer")
def function_that_saves_its_input() -> Made:
    model, x = net(8, 32, 4), torch.randn(6, 8)
    return of_loss(model, lambda m: Swish.apply(m(Swish.apply(x))).square().mean())


@program("layer")
def reversed_gradients() -> Made:
    body, heads, x = net(8, 32), nn.ModuleList([net(32, 3), net(32, 2)]), torch.randn(12, 8)
    y, domain = torch.randint(3, (12,)), torch.randint(2, (12,))

    def run(body: nn.Module) -> Tensor:
        seen = body(x)
        loss = F.cross_entropy(heads[0](seen), y) + F.cross_entropy(heads[1](Reversed.apply(seen, 0.3)), domain)
        loss.backward()
        return loss

    return Made(run, (body,), modules=(heads,))


@program("layer")
def function_of_two_results() -> Made:
    model, x, weight = net(8, 16), torch.randn(6, 8), nn.Parameter(torch.randn(16, 5))
    made = of_loss(model, lambda m: Pair.apply(m(x), weight)[0].square().mean())
    return Made(made.run, made.compiled, (weight,))


# --- reinforcement ---


@program("layer")
def ppo() -> Made:
    model, x, actions = net(6, 32, 5), torch.randn(32, 6), torch.randint(4, (32,))
    gained, old = torch.randn(32), torch.randn(32) * 0.1 - 1.4

    def run(model: nn.Module) -> Tensor:
        logits, value = model(x).split((4, 1), -1)
        policy = torch.distributions.Categorical(logits=logits)
        ratio = (policy.log_prob(actions) - old).exp()
        worth = (gained - gained.mean()) / (gained.std() + 1e-8)
        surrogate = torch.min(ratio * worth, ratio.clamp(0.8, 1.2) * worth)
        loss = -surrogate.mean() + 0.5 * F.mse_loss(value.squeeze(-1), gained) - 0.01 * policy.entropy().mean()
        loss.backward()
        return loss

    return Made(run, (model,))


@program("layer")
def deep_q() -> Made:
    model, target = net(6, 32, 4), net(6, 32, 4)
    x, following, rewards, actions = torch.randn(16, 6), torch.randn(16, 6), torch.randn(16), torch.randint(4, (16,))
    over = torch.rand(16) < 0.1

    def run(model: nn.Module) -> Tensor:
        chosen = model(x).gather(1, actions[:, None]).squeeze(1)
        with torch.no_grad():
            best = target(following).gather(1, model(following).argmax(1, keepdim=True)).squeeze(1)
        loss = F.smooth_l1_loss(chosen, rewards + 0.99 * best * ~over)
        loss.backward()
        return loss

    return Made(run, (model,))


@program("layer")
def soft_actor_critic() -> Made:
    actor, first, second, target = net(5, 32, 4), net(7, 32, 1), net(7, 32, 1), net(7, 32, 1)
    x, following, done, rewards = torch.randn(8, 5), torch.randn(8, 5), torch.randn(8, 2), torch.randn(8, 1)
    log_heat = torch.zeros((), requires_grad=True)

    def run(actor: nn.Module, first: nn.Module, second: nn.Module) -> Tensor:
        def acted(state: Tensor) -> tuple[Tensor, Tensor]:
            mean, spread = actor(state).chunk(2, -1)
            policy = torch.distributions.Normal(mean, spread.clamp(-5, 2).exp())
            raw = policy.rsample()
            chance = policy.log_prob(raw) - torch.log(1 - raw.tanh().square() + 1e-6)
            return torch.cat([state, raw.tanh()], -1), chance.sum(-1, keepdim=True)

        with torch.no_grad():
            both, chance = acted(following)
            wanted = rewards + 0.99 * (target(both) - log_heat.exp() * chance)
        known = torch.cat([x, done], -1)
        critic = F.mse_loss(first(known), wanted) + F.mse_loss(second(known), wanted)
        both, chance = acted(x)
        policy = (log_heat.detach().exp() * chance - torch.min(first(both), second(both))).mean()
        loss = critic + policy - (log_heat * (chance - 2.0).detach()).mean()
        loss.backward()
        return loss

    return Made(run, (actor, first, second), (log_heat,), (target,))


# --- quantised ---


class Stepped(torch.autograd.Function):
    """Rounded to steps of a learned size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor) -> Tensor:
        ctx.save_for_backward(x / step)
        return (x / step).round().clamp(-8, 7) * step

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (steps,) = ctx.saved_tensors
        is_inside = (steps >= -8) & (steps <= 7)
        return grad * is_inside, (grad * torch.where(is_inside, steps.round() - steps, steps.clamp(-8, 7))).sum()


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 4)])
        self.steps = nn.ParameterList(torch.tensor(size) for size in (0.1, 0.05))

    def forward(self, x: Tensor) -> Tensor:
        first, second = (Stepped.apply(at.weight, step) for at, step in zip(self.layers, self.steps, strict=True))
        return F.linear(F.silu(F.linear(x, first, self.layers[0].bias)), second, self.layers[1].bias)


@program("layer")
def learned_steps_of_weights() -> Made:
    return trained(Quantized(), torch.randn(6, 8))
