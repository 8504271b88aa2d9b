"""`torch.func`, complex numbers, Fourier transforms, sums by index."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vmap

from people_programs.losses import net, of_loss
from people_programs.made import Made, program, trained


@program("function")
def gradients_of_each_sample() -> Made:
    model, x, y = net(8, 16, 3), torch.randn(6, 8), torch.randint(3, (6,))

    def one(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    each = vmap(grad(one), in_dims=(None, 0, 0))

    def run(each: Callable[..., Any]) -> dict[str, Tensor]:
        return each({name: p.detach() for name, p in model.named_parameters()}, x, y)

    return Made(run, (each,), modules=(model,))


@program("function")
def ensemble_by_vmap() -> Made:
    models, x = [net(8, 16, 3) for _ in range(4)], torch.randn(6, 8)
    shell = copy.deepcopy(models[0])

    def run() -> Tensor:
        parameters, buffers = stack_module_state(models)
        out = vmap(lambda p, b: functional_call(shell, (p, b), (x,)))(parameters, buffers)
        loss = out.var(0).mean()
        loss.backward()
        return torch.stack([loss.detach(), *(p.grad.norm() for p in parameters.values())])

    return Made(run, modules=tuple(models))


@program("function")
def one_step_of_maml() -> Made:
    model, (x, z), y = net(4, 16, 1), torch.randn(2, 6, 4), torch.randn(6, 1)

    def run(model: nn.Module) -> Tensor:
        now = dict(model.named_parameters())
        inner = F.mse_loss(functional_call(model, now, (x,)), y)
        slopes = torch.autograd.grad(inner, list(now.values()), create_graph=True)
        then = {name: p - 0.1 * g for (name, p), g in zip(now.items(), slopes, strict=True)}
        loss = F.mse_loss(functional_call(model, then, (z,)), y)
        loss.backward()
        return loss

    return Made(run, (model,))


@program("function")
def physics_by_jacrev() -> Made:
    model, x = net(2, 16, 1), torch.rand(8, 2)

    def loss(model: nn.Module) -> Tensor:
        def u(point: Tensor) -> Tensor:
            return model(point).squeeze(-1)

        slopes, curves = vmap(jacrev(u))(x), vmap(hessian(u))(x)
        return (slopes[:, 0] - 0.1 * curves[:, 1, 1]).square().mean()

    return of_loss(model, loss)


@program("function")
def tangents_by_jvp() -> Made:
    model, x, along = net(8, 16, 3), torch.randn(6, 8), torch.randn(6, 8)

    def loss(model: nn.Module) -> Tensor:
        out, tangent = jvp(model, (x,), (along,))
        return out.square().mean() + tangent.square().mean()

    return of_loss(model, loss)


@program("function")
def functional_call_with_a_tied_weight() -> Made:
    model, x = net(8, 8, 8), torch.randn(6, 8)
    extra = torch.randn(8, 8, requires_grad=True)

    def run(model: nn.Module) -> Tensor:
        out = functional_call(model, {"0.weight": extra, "2.weight": extra.T}, (x,))
        loss = out.square().mean()
        loss.backward()
        return loss

    return Made(run, (model,), (extra,))


class Spectral(nn.Module):
    """A Fourier layer: a few modes, each with a complex matrix."""

    def __init__(self, width: int = 8, modes: int = 5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.complex128) / width)
        self.local, self.modes = nn.Conv1d(width, width, 1), modes

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x)
        out = torch.zeros_like(spectrum)
        out[..., : self.modes] = torch.einsum("bim,iom->bom", spectrum[..., : self.modes], self.weight)
        return F.gelu(torch.fft.irfft(out, n=x.shape[-1]) + self.local(x))


@program("function")
def fourier_neural_operator() -> Made:
    return trained(nn.Sequential(Spectral(), Spectral()), torch.randn(2, 8, 24))


@program("function")
def spectrogram_loss() -> Made:
    model, x, y = nn.Conv1d(1, 1, 9, padding=4), torch.randn(2, 1, 96), torch.randn(2, 96)
    window = torch.hann_window(32)

    def loss(model: nn.Module) -> Tensor:
        mine, theirs = (
            torch.stft(t, 32, 8, window=window, return_complex=True).abs().clamp_min(1e-4)
            for t in (model(x).squeeze(1), y)
        )
        return (mine - theirs).norm() / theirs.norm() + F.l1_loss(mine.log(), theirs.log())

    return of_loss(model, loss)


@program("function")
def complex_linear_layers() -> Made:
    weight = torch.randn(2, 8, 8, dtype=torch.complex128).requires_grad_()
    x = torch.randn(6, 8, dtype=torch.complex128)

    def forward(weight: Tensor) -> Tensor:
        hidden = x @ weight[0]
        return (torch.polar(hidden.abs().tanh(), hidden.angle()) @ weight[1].conj().T).abs().square().mean()

    made = of_loss(nn.Identity(), lambda called: called(weight))
    return Made(made.run, (forward,), (weight,))


@program("function")
def quantum_state() -> Made:
    angles = torch.rand(3, requires_grad=True)

    def energy(angles: Tensor) -> Tensor:
        state = torch.zeros(2, dtype=torch.complex128, device=angles.device)
        state[0] = 1
        x = torch.tensor([[0, 1], [1, 0]], dtype=torch.complex128, device=angles.device)
        z = torch.tensor([[1, 0], [0, -1]], dtype=torch.complex128, device=angles.device)
        for at, angle in enumerate(angles):
            turn = torch.linalg.matrix_exp(-0.5j * angle * (x if at % 2 else z + x))
            state = turn @ state
        return (state.conj() @ z @ state).real

    made = of_loss(nn.Identity(), lambda called: called(angles))
    return Made(made.run, (energy,), (angles,))


@program("function")
def state_space_convolution() -> Made:
    x = torch.randn(2, 4, 16)
    decay, turn, into = (torch.rand(4, 6, requires_grad=True) for _ in range(3))

    def forward(decay: Tensor, turn: Tensor, into: Tensor) -> Tensor:
        poles = -decay.exp() + 1j * math.pi * turn
        steps = torch.arange(x.shape[-1], device=x.device)
        kernel = 2 * torch.einsum("hn,hnl->hl", into.to(poles.dtype), (poles[..., None] * steps * 0.1).exp()).real
        out = torch.fft.irfft(torch.fft.rfft(x, n=32) * torch.fft.rfft(kernel, n=32), n=32)[..., :16]
        return F.silu(out).square().mean()

    made = of_loss(nn.Identity(), lambda called: called(decay, turn, into))
    return Made(made.run, (forward,), (decay, turn, into))


@program("function")
def einsum_attention() -> Made:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.randn(3, 32, 4, 8) / 6)
            self.out = nn.Parameter(torch.randn(4, 8, 32) / 6)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = torch.einsum("bld,tdhe->tblhe", x, self.weights)
            scores = torch.einsum("blhe,bmhe->bhlm", q, k) / math.sqrt(8)
            weights = scores.masked_fill(torch.ones_like(scores[0, 0]).triu(1).bool(), -torch.inf).softmax(-1)
            return torch.einsum("bhlm,bmhe,hed->bld", weights, v, self.out)

    return trained(Attention(), torch.randn(2, 12, 32))


class Graph(nn.Module):
    """Messages along edges, summed by `index_add`, averaged by `scatter_reduce`, weighed by attention of each node."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update, self.score = nn.Linear(16, 16), nn.Linear(24, 8), nn.Linear(16, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        pair = torch.cat([x[source], x[target]], -1)
        score = F.leaky_relu(self.score(pair), 0.2).squeeze(-1)
        most = torch.full_like(x[:, 0], -torch.inf).scatter_reduce(0, target, score, "amax")
        weight = (score - most[target]).exp()
        total = torch.zeros_like(most).scatter_add(0, target, weight)
        sent = self.message(pair) * (weight / total[target])[:, None]
        got = torch.zeros(len(x), 16, dtype=x.dtype, device=x.device).index_add_(0, target, sent)
        return F.relu(self.update(torch.cat([x, got], -1)))


@program("function")
def graph_attention() -> Made:
    edges = torch.cat([torch.arange(10).expand(2, 10), torch.randint(10, (2, 30))], 1)
    return trained(Graph(), torch.randn(10, 8), edges)


@program("function")
def graph_convolution_with_pooling() -> Made:
    weight, x = nn.Linear(8, 16), torch.randn(12, 8)
    edges, graph = torch.randint(12, (2, 40)), torch.arange(12) // 4

    def loss(weight: nn.Module) -> Tensor:
        degree = torch.bincount(edges[1], minlength=12).clamp_min(1).to(x.dtype)
        scale = (degree[edges[0]] * degree[edges[1]]).rsqrt()
        hidden = weight(x)
        passed = torch.zeros_like(hidden).index_add(0, edges[1], hidden[edges[0]] * scale[:, None]).relu()
        pooled = torch.zeros(3, 16, dtype=x.dtype, device=x.device)
        pooled = pooled.scatter_reduce(0, graph[:, None].expand_as(passed), passed, "mean", include_self=False)
        return pooled.square().mean()

    return of_loss(weight, loss)


@program("function")
def bags_of_words() -> Made:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sums, self.most = nn.EmbeddingBag(40, 16, mode="mean"), nn.EmbeddingBag(40, 16, mode="max")
            self.out = nn.Linear(32, 3)

        def forward(self, words: Tensor, starts: Tensor) -> Tensor:
            return self.out(torch.cat([self.sums(words, starts), self.most(words, starts)], -1))

    return trained(Bags(), torch.randint(40, (20,)), torch.tensor([0, 4, 4, 11]))


@program("function")
def factorization_machine() -> Made:
    class Machine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.factors = nn.Embedding(50, 1), nn.Embedding(50, 8)

        def forward(self, fields: Tensor) -> Tensor:
            v = self.factors(fields)
            return self.linear(fields).sum((1, 2)) + 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(1)

    return trained(Machine(), torch.randint(50, (16, 5)))
