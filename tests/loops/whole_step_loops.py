"""Small loops as people write them, which a compiled step follows, and `check`: ten compiled steps beside ten eager ones."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.nn.utils import clip_grad_norm_
from torch.optim import lr_scheduler, swa_utils

import tracefuse

NEAR, SEEN = 1e-10, 4
Average = swa_utils.AveragedModel


def network(*widths: int) -> nn.Sequential:
    first, hidden, last = widths
    inner = nn.Linear(first, hidden, bias=False)  # the gradient of one before a batch norm is rounding alone
    return nn.Sequential(inner, nn.BatchNorm1d(hidden), nn.Tanh(), nn.Linear(hidden, last)).double()


class Loop:
    """A loop with one optimizer; kinds of it say what else a step does, and what the host does between two steps."""

    micro, n = 1, 3

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = network(4, 6, 3)
        self.prepare()
        self.opt = self.optimizer()
        self.more()

    def prepare(self) -> None: ...
    def more(self) -> None: ...
    def after(self) -> None: ...
    def between(self) -> None: ...

    def optimizer(self) -> optim.Optimizer:
        return optim.AdamW(self.model.parameters(), lr=0.01, fused=True)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.model(x), y) / self.micro

    def zero(self) -> None:
        self.opt.zero_grad()

    def step(self, *data: Tensor) -> None:
        self.zero()
        for at in range(0, len(data), 2):
            self.loss(*data[at : at + 2]).backward()
        clip_grad_norm_(self.model.parameters(), 0.1)
        self.opt.step()
        self.after()

    def left(self) -> dict[str, Tensor]:
        """Weights, buffers and state of all that the loop holds."""
        found = {name: one for name, one in vars(self).items() if isinstance(one, Tensor)}
        for name, held in vars(self).items():
            if isinstance(held, nn.Module):
                found |= {f"{name}.{key}": one for key, one in held.state_dict().items()}
            for at, entries in enumerate(held.state.values() if isinstance(held, optim.Optimizer) else ()):
                found |= {f"{name} {at} {key}": one for key, one in entries.items() if isinstance(one, Tensor)}
        return found


def data_of(steps: int, micro: int = 1) -> list[list[Tensor]]:
    made = torch.Generator().manual_seed(7)
    return [
        [torch.randn(5, width, dtype=torch.float64, generator=made) for _ in range(micro) for width in (4, 3)]
        for _ in range(steps)
    ]


def captured(loop: Loop, data: list[list[Tensor]]) -> Any:
    with tracefuse.capture_step(n=loop.n) as c:
        for batch in data:
            loop.step(*batch)
            loop.between()
    return c.optimize()


def check(kind: type[Loop], further: int = 1) -> None:
    """Ten compiled steps after as many eager ones as a capture of step `n` sees, which is `further` ones."""
    eager, ours = kind(), kind()
    seen = ours.n + further
    data = data_of(seen + 10, ours.micro)
    step = captured(ours, data[:seen]).compile()
    for batch in data[:seen]:
        eager.step(*batch)
        eager.between()
    for batch in data[seen:]:
        step(*batch)
        ours.between()
        eager.step(*batch)
        eager.between()
    mine, theirs = ours.left(), eager.left()
    assert all(one.isfinite().all() for one in theirs.values())
    far = {key: float((mine[key].double() - theirs[key].double()).abs().max()) for key in theirs}
    assert max(far.values()) < NEAR, far


# --- loops that hold --------------------------------------------------------------------------------------------------


class Averaged(Loop):
    average: dict[str, Any] = {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)}  # noqa: RUF012

    def more(self) -> None:
        self.ema = Average(self.model, **self.average)

    def after(self) -> None:
        self.ema.update_parameters(self.model)


class AveragedOneByOne(Averaged):
    average = {"avg_fn": swa_utils.get_ema_avg_fn(0.9)}  # noqa: RUF012


class AveragedBuffers(Averaged):
    average = {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9), "use_buffers": True}  # noqa: RUF012


class Mean(Averaged):
    average: dict[str, Any] = {}  # noqa: RUF012


class AveragedByHand(Loop):
    def more(self) -> None:
        self.ema = copy.deepcopy(self.model)

    @torch.no_grad()
    def after(self) -> None:
        for mine, new in zip(self.ema.state_dict().values(), self.model.state_dict().values(), strict=True):
            mine.lerp_(new, 0.1) if mine.is_floating_point() else mine.copy_(new)


class Falling(Loop):
    """The step itself lowers the rate, which a compiled step leaves to the program."""

    def lower(self, *_: Any) -> None:
        for group in self.opt.param_groups:
            group["lr"] *= 0.8

    def after(self) -> None:
        self.lower()


class FallingByHook(Falling):
    def more(self) -> None:
        self.opt.register_step_post_hook(self.lower)

    def after(self) -> None: ...


class Centralised(Loop):
    """Gradients that a step makes anew of what the backward left."""

    def step(self, x: Tensor, y: Tensor) -> None:  # type: ignore[override]
        self.zero()
        self.loss(x, y).backward()
        for one in self.model.parameters():
            if one.dim() > 1:
                assert one.grad is not None
                one.grad = one.grad - one.grad.mean(1, keepdim=True)
        self.opt.step()


class DoubledData(Loop):
    """Gradients that are given other data."""

    def step(self, x: Tensor, y: Tensor) -> None:  # type: ignore[override]
        self.zero()
        self.loss(x, y).backward()
        for one in self.model.parameters():
            assert one.grad is not None
            one.grad.data = one.grad.data * 2
        self.opt.step()


class Weighed(Loop):
    """Its update reads the data too."""

    def step(self, x: Tensor, y: Tensor) -> None:  # type: ignore[override]
        self.zero()
        self.loss(x, y).backward()
        for one in self.model.parameters():
            assert one.grad is not None
            one.grad.mul_(y.abs().mean())
        self.opt.step()


class ZeroedInPlace(Loop):
    def zero(self) -> None:
        self.opt.zero_grad(set_to_none=False)


class ZeroedAfterwards(Loop):
    def zero(self) -> None: ...

    def after(self) -> None:
        self.opt.zero_grad()


class ZeroedInPlaceAfterwards(ZeroedAfterwards):
    def after(self) -> None:
        self.opt.zero_grad(set_to_none=False)


class NeverZeroed(Loop):
    def zero(self) -> None: ...


class Decayed(NeverZeroed):
    def after(self) -> None:
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)


class Accumulated(Loop):
    micro = 4


class AccumulatedInPlace(ZeroedInPlace):
    micro = 2


class AccumulatedAfterwards(ZeroedInPlaceAfterwards):
    micro = 4


class AccumulatedForever(NeverZeroed):
    micro = 2


class Groups(Loop):
    def optimizer(self) -> optim.Optimizer:
        first, *rest = ([*one.parameters()] for one in self.model if [*one.parameters()])
        others = {"params": rest[0], "weight_decay": 0.0}, {"params": rest[1], "eps": 1e-6}
        return optim.AdamW([{"params": first, "lr": 0.1, "betas": (0.8, 0.99)}, *others], lr=0.01, fused=True)

    def more(self) -> None:
        self.schedule = lr_scheduler.CosineAnnealingLR(self.opt, 20)

    def between(self) -> None:
        self.schedule.step()


class Unused(Groups):
    """Groups of which nothing is updated, as a Trainer makes one for what does not decay; schedules change their rates too."""

    def prepare(self) -> None:
        self.dead = nn.Linear(3, 3).double()

    def optimizer(self) -> optim.Optimizer:
        groups = [self.model.parameters(), self.dead.parameters(), []]
        return optim.AdamW([{"params": list(one)} for one in groups], lr=0.01, fused=True)


class TwoOptimizers(Groups):
    def optimizer(self) -> optim.Optimizer:
        self.other = optim.SGD(self.model[0].parameters(), lr=0.1, momentum=0.9, fused=True)
        return optim.AdamW(self.model[1:].parameters(), lr=0.01, fused=True)

    def zero(self) -> None:
        self.model.zero_grad()

    def after(self) -> None:
        self.other.step()


class MuonAndSGD(TwoOptimizers):
    def optimizer(self) -> optim.Optimizer:
        parameters = list(self.model.parameters())
        self.other = optim.SGD([p for p in parameters if p.dim() != 2], lr=0.01)
        return optim.Muon([p for p in parameters if p.dim() == 2], lr=0.01)

    def between(self) -> None: ...


class Adversaries(Loop):
    """Two networks, whose losses are there before either steps."""

    def more(self) -> None:
        self.judge = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()
        self.other = optim.AdamW(self.judge.parameters(), lr=0.02, fused=True)

    def judged(self, fake: Tensor, y: Tensor) -> Tensor:
        return F.softplus(-self.judge(y)).mean() + F.softplus(self.judge(fake.detach())).mean()

    def step(self, x: Tensor, y: Tensor) -> None:  # type: ignore[override]
        fake = self.model(x)
        self.opt.zero_grad()
        self.other.zero_grad()
        self.judged(fake, y).backward(inputs=list(self.judge.parameters()))
        F.softplus(-self.judge(fake)).mean().backward(inputs=list(self.model.parameters()))
        self.other.step()
        self.opt.step()


class Closure(Loop):
    def step(self, *data: Tensor) -> None:
        def closure() -> float:
            self.zero()
            loss = self.loss(*data)
            loss.backward()
            return float(loss)

        self.opt.step(closure)


class Scaled(Loop):
    """Every second batch overflows: the scale is halved, and the optimizer does nothing."""

    micro = 2

    def more(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        self.times = torch.zeros((), dtype=torch.float64)

    def step(self, *data: Tensor) -> None:
        self.zero()
        for at in range(0, len(data), 2):
            factor = torch.where(self.times % 2 == 1, torch.inf, 1.0)
            self.scaler.scale(self.loss(*data[at : at + 2]) * factor).backward()
        self.scaler.unscale_(self.opt)
        clip_grad_norm_(self.model.parameters(), 0.1)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.times += 1

    def left(self) -> dict[str, Tensor]:
        return super().left() | {"scale": self.scaler._scale, "tracker": self.scaler._growth_tracker}  # type: ignore[dict-item]


class Counted(Loop):
    """A step that keeps sums of what the forward gave, and an average whose weight follows from a count."""

    def more(self) -> None:
        self.total, self.seen = torch.zeros(3, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        self.ema = copy.deepcopy(self.model)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.out = self.model(x)
        return F.mse_loss(self.out, y)

    @torch.no_grad()
    def after(self) -> None:
        self.total += self.out.detach().sum(0)
        self.seen += 1
        weight = ((1 + self.seen) / (10 + self.seen)).clamp(max=0.9)
        for mine, new in zip(self.ema.parameters(), self.model.parameters(), strict=True):
            mine.lerp_(new, 1 - weight)
        del self.out
