"""Whole steps: accumulation, clipping, several optimizers, and what else people do around a backward."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from people_programs.losses import net
from people_programs.made import Made, program


@program("step")
def gradient_accumulation() -> Made:
    model, xs = net(8, 32, 1), torch.randn(4, 6, 8)

    def run(model: nn.Module) -> list[Tensor]:
        losses = []
        for x in xs:
            losses.append(model(x).square().mean() / len(xs))
            losses[-1].backward()
        return losses

    return Made(run, (model,))


@program("step")
def accumulation_then_a_step() -> Made:
    model, xs = net(8, 32, 1), torch.randn(4, 6, 8)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def run(model: nn.Module) -> list[Tensor]:
        opt.zero_grad()
        losses = []
        for x in xs:
            losses.append(model(x).square().mean() / len(xs))
            losses[-1].backward()
        opt.step()
        return losses

    return Made(run, (model,))


@program("step")
def gradient_from_before() -> Made:
    model, x = net(8, 32, 1), torch.randn(6, 8)
    model(x).sum().backward()

    def run(model: nn.Module) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return Made(run, (model,))


@program("step")
def zero_grad_in_place() -> Made:
    model, x = net(8, 32, 1), torch.randn(6, 8)
    model(x).sum().backward()

    def run(model: nn.Module) -> Tensor:
        model.zero_grad(set_to_none=False)
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return Made(run, (model,))


@program("step")
def clipping_by_norm() -> Made:
    model, x, y = net(8, 32, 3), torch.randn(6, 8), torch.randint(3, (6,))

    def run(model: nn.Module) -> tuple[Tensor, Tensor]:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss, nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    return Made(run, (model,))


@program("step")
def clipping_by_value() -> Made:
    model, x, y = net(8, 32, 3), torch.randn(6, 8), torch.randint(3, (6,))

    def run(model: nn.Module) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        return loss

    return Made(run, (model,))


@program("step")
def clipping_then_adamw() -> Made:
    model, x, y = net(8, 32, 3), torch.randn(6, 8), torch.randint(3, (6,))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plan = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)

    def run(model: nn.Module) -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
        plan.step()
        return loss

    return Made(run, (model,))


@program("step")
def gan() -> Made:
    maker, judge = net(4, 32, 8), net(8, 32, 1)
    opts = [torch.optim.Adam(m.parameters(), lr=1e-3, betas=(0.5, 0.999)) for m in (maker, judge)]
    real = torch.randn(16, 8)

    def run(maker: nn.Module, judge: nn.Module) -> tuple[Tensor, Tensor]:
        ones, zeros = torch.ones(16, 1, device=real.device), torch.zeros(16, 1, device=real.device)
        fake = maker(torch.randn(16, 4, device=real.device))
        opts[1].zero_grad()
        judged = F.binary_cross_entropy_with_logits(judge(real), ones)
        judged = judged + F.binary_cross_entropy_with_logits(judge(fake.detach()), zeros)
        judged.backward()
        opts[1].step()
        opts[0].zero_grad()
        fooled = F.binary_cross_entropy_with_logits(judge(fake), ones)
        fooled.backward()
        opts[0].step()
        return judged, fooled

    return Made(run, (maker, judge))


@program("step")
def losses_of_a_gan() -> Made:
    maker, judge, real = net(4, 32, 8), net(8, 32, 1), torch.randn(16, 8)

    def run(maker: nn.Module, judge: nn.Module) -> Tensor:
        fake = maker(torch.randn(16, 4, device=real.device))
        judged = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
        fooled = F.softplus(-judge(fake)).mean()
        (judged + fooled).backward()
        return judged + fooled

    return Made(run, (maker, judge))


@program("step")
def two_backwards() -> Made:
    model, x = net(8, 32, 2), torch.randn(6, 8)

    def run(model: nn.Module) -> tuple[Tensor, Tensor]:
        out = model(x)
        first, second = out[:, 0].square().mean(), out[:, 1].abs().mean()
        first.backward(retain_graph=True)
        second.backward()
        return first, second

    return Made(run, (model,))


@program("step")
def the_same_backward_twice() -> Made:
    model, x = net(8, 32, 2), torch.randn(6, 8)

    def run(model: nn.Module) -> Tensor:
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    return Made(run, (model,))


@program("step")
def moving_average_of_weights() -> Made:
    model, x = net(8, 32, 1), torch.randn(6, 8)
    slow = copy.deepcopy(model).requires_grad_(False)

    def run(model: nn.Module) -> Tensor:
        loss = (model(x) - slow(x)).square().mean() + model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for old, new in zip(slow.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.01)
        return loss

    return Made(run, (model,), modules=(slow,))


@program("step")
def deepcopy_in_the_block() -> Made:
    model, x = net(8, 32, 1), torch.randn(6, 8)

    def run(model: nn.Module) -> Tensor:
        frozen = copy.deepcopy(model)
        loss = (model(x) - 2 * frozen(x).detach()).square().mean()
        loss.backward()
        return loss

    return Made(run, (model,))


@program("step")
def loader_with_workers() -> Made:
    model = net(8, 32, 1)
    device = model[0].weight.device
    loader = DataLoader(TensorDataset(torch.randn(8, 8, device="cpu")), batch_size=4, num_workers=1)

    def run(model: nn.Module) -> Tensor:
        loss = sum(model(x.to(device)).square().mean() for (x,) in loader)
        loss.backward()
        return loss

    return Made(run, (model,))


@program("step")
def loader_without_workers() -> Made:
    model = net(8, 32, 1)
    device = model[0].weight.device
    loader = DataLoader(TensorDataset(torch.randn(8, 8, device="cpu")), batch_size=4, shuffle=True)

    def run(model: nn.Module) -> Tensor:
        loss = sum(model(x.to(device)).square().mean() for (x,) in loader)
        loss.backward()
        return loss

    return Made(run, (model,))


@program("step")
def record_function() -> Made:
    model, x = net(8, 32, 1), torch.randn(6, 8)

    def run(model: nn.Module) -> Tensor:
        with torch.profiler.record_function("forward"):
            loss = model(x).square().mean()
        with torch.profiler.record_function("backward"):
            loss.backward()
        return loss

    return Made(run, (model,))


@program("step")
def autocast_with_a_scaler() -> Made:
    model, x = net(8, 32, 1), torch.randn(6, 8)
    scaler = torch.amp.GradScaler(x.device.type, init_scale=1024.0)

    def run(model: nn.Module) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        return loss

    return Made(run, (model,))


@program("step")
def gradient_penalty() -> Made:
    judge, real, fake = net(8, 32, 1), torch.randn(6, 8), torch.randn(6, 8)

    def run(judge: nn.Module) -> Tensor:
        between = torch.lerp(real, fake, torch.rand(6, 1, device=real.device)).requires_grad_()
        (slope,) = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
        loss = judge(fake).mean() - judge(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        return loss

    return Made(run, (judge,))
