"""One cause at a time, put into a step that is otherwise healthy: it is found, at its line, and nothing else is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cuda_traces
import pytest
import torch
import torch.nn.functional as F
from findings import HOPPER, KEPT, UNFUSED, EveryGradient, EveryOutput, known
from torch import Tensor, nn

import tracefuse
from tracefuse.diagnose.diagnose import diagnose
from tracefuse.findings.finding import Case
from tracefuse.measure.op_times import modelled

WIDTH = 2048


class Step:
    """Two matmuls of bfloat16 at a size that people train with, of which a cause overrides one part."""

    def __init__(self) -> None:
        self.first, self.last = (nn.Linear(WIDTH, WIDTH, bias=False).bfloat16() for _ in range(2))
        self.x = torch.empty(8192, WIDTH).bfloat16()
        self.optimizer = torch.optim.SGD([self.first.weight, self.last.weight], lr=0.1, foreach=True)

    def between(self, hidden: Tensor) -> Tensor:
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        return self.last(hidden)

    def run(self) -> None:
        self.head(self.between(self.first(self.x))).sum().backward()


class WithoutCause(Step):
    pass


class Cast(Step):
    def head(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden[:512], self.last.weight.bfloat16())  # weights cast

    def __init__(self) -> None:
        super().__init__()
        self.last.float()


class EmptyOperand(Step):
    def between(self, hidden: Tensor) -> Tensor:
        return torch.cat([hidden, hidden[:, :0]], dim=1)  # empty operand


class Parts(Step):
    def between(self, hidden: Tensor) -> Tensor:
        return torch.cat([hidden[:, : WIDTH // 2].neg(), hidden[:, WIDTH // 2 :]], dim=1)  # two parts


class ByHand(Step):
    def between(self, hidden: Tensor) -> Tensor:
        q = hidden.view(8, 1024, 16, -1).transpose(1, 2)
        return (torch.softmax(q @ q.mT, -1) @ q).transpose(1, 2).reshape(hidden.shape)  # attention


class Vocabulary(Step):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, 50_257, bias=False).bfloat16()
        self.optimizer = torch.optim.SGD([self.first.weight, self.last.weight], lr=0.1, foreach=True)

    def head(self, hidden: Tensor) -> Tensor:
        return self.last(hidden[:4096]).sin()  # 50,257 wide


class Data(Step):
    def __init__(self) -> None:
        super().__init__()
        self.x.requires_grad_()


class Unheld(Step):
    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.SGD([self.last.weight], lr=0.1)


class Dropped(Step):
    def head(self, hidden: Tensor) -> Tensor:
        return self.last(EveryGradient.apply(hidden, torch.empty(WIDTH, WIDTH).bfloat16()))


class Frozen(Step):
    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.empty(512, 512, 3, 3).bfloat16(), requires_grad=False)

    def between(self, hidden: Tensor) -> Tensor:
        picture = hidden.view(64, 512, 16, -1)
        return EveryOutput.apply(F.pad(picture, (1, 1, 1, 1)), self.filters).view(hidden.shape)


class Kept(Step):
    def between(self, hidden: Tensor) -> Tensor:
        return hidden.sin().exp().cos().tanh().sigmoid()  # pointwise chain


class Loop(Step):
    def __init__(self) -> None:
        super().__init__()
        self.averages = [torch.zeros(64) for _ in range(100)]

    def run(self) -> None:
        loss = self.head(self.between(self.first(self.x))).sum()
        loss.backward()
        for average in self.averages:
            average += self.first.weight.grad[0, :64]  # a hundred


class Single(Step):
    def __init__(self) -> None:
        super().__init__()
        self.first.float()
        self.last.float()
        self.x = self.x.float()


class Read(Step):
    """On the CPU: there is nothing to read on "meta"."""

    def between(self, hidden: Tensor) -> Tensor:
        return hidden if hidden.sum() > 0 else hidden * 2  # branch


CAUSES: dict[type[Step], dict[str, str]] = {
    WithoutCause: {},
    Cast: {"weights-cast-each-step": "# weights cast"},
    EmptyOperand: {"cat-of-nothing": "# empty operand"},
    Parts: {"cat-in-forward": "# two parts"},
    ByHand: {"attention-by-hand": "# attention"},
    Vocabulary: {"unaligned-matmul": "# 50,257 wide"},
    Data: {"gradient-of-data": "self.first(self.x)"},
    Unheld: {"gradient-without-optimizer": "self.first(self.x)"},
    Dropped: {"gradient-dropped": "x @ weight.t()"},
    Frozen: {"frozen-weight-gradient": "torch.conv2d(x, weight)", "not-channels-last": "torch.conv2d(x, weight)"},
    Kept: {KEPT: "# pointwise chain"},
    Loop: {"loop-of-small-kernels": "# a hundred"},
    Single: {"tf32-off": "self.first(self.x)"},
    Read: {"host-sync": "# branch"},
}


def as_on_a_gpu(make: type[Step]) -> Case:
    device = "cpu" if make is Read else "meta"
    with torch.device(device), pytest.MonkeyPatch.context() as patch:
        if make is Read:
            patch.setattr(f"{__name__}.WIDTH", 64)
        step = make()
        optimizer = step.optimizer
        with tracefuse.capture() as c:
            step.run()
    assert optimizer is step.optimizer
    here = Case(c.program, c.trace, modelled(c.trace), c.update)
    update = c.update and cuda_traces.on_cuda(c.update)
    there = replace(known(here, environment=HOPPER), trace=cuda_traces.on_cuda(c.trace), update=update)
    return here if make is Read else there


@pytest.mark.parametrize("make", CAUSES)
def test_a_cause_is_found_and_nothing_else(make: type[Step]) -> None:
    found: dict[str, Any] = {one.id: one for one in diagnose(as_on_a_gpu(make))}
    assert found.keys() - {UNFUSED, KEPT} == CAUSES[make].keys() - {KEPT}
    for name, fragment in CAUSES[make].items():
        assert fragment in found[name].source
