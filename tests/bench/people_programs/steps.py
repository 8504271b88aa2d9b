"""Whole steps: accumulation, clipping, several optimizers, and what else people do around a backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from people_programs.losses import net
from people_programs.made import Made, program


@program("step")
def gradient_accumulation() -> Made:
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
def clipping_by_norm() -> Made:
    model, x, y = net(8, 32, 3), torch.randn(6, 8), torch.randint(3, (6,))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def run(model: nn.Module) -> tuple[Tensor, Tensor]:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
        return loss, norm

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
