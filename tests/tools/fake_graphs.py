"""CUDA graphs without a GPU: static memory that each forward overwrites and each backward uses up, and nothing else of them.

What `GraphedHalves` may do with graphs is a matter of that memory: a mistake in it is a wrong number here too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tracefuse.execution.graphs import Recordable


class FakeGraphs:
    """`tracefuse.execution.graphs.Graphs`, on a CPU, by running the two functions again. `turn` counts what has run."""

    @torch.inference_mode(False)
    def __init__(self, step: Recordable, inputs: Sequence[Tensor], in_place: frozenset[int]) -> None:
        self.step, self.in_place, self.turn = step, in_place, 0
        self.inputs = [t.detach() if at in in_place else t.detach().clone() for at, t in enumerate(inputs)]
        outputs = step.module.forward(*self.inputs)
        self.kept = [t.clone() for t in outputs[step.handed_out :]]

    @torch.no_grad()
    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        for at, (mine, given) in enumerate(zip(self.inputs, inputs, strict=True)):
            if at in self.in_place:
                assert mine.data_ptr() == given.data_ptr()
            else:
                mine.copy_(given)
        self.turn += 1
        outputs = self.step.module.forward(*self.inputs)
        for mine, new in zip(self.kept, outputs[self.step.handed_out :], strict=True):
            mine.data.copy_(new)
        return [t.clone() for t in outputs[: self.step.handed_out]]

    @torch.no_grad()
    def backward(self, cotangents: Sequence[Tensor]) -> list[Tensor]:
        self.turn += 1
        boxed = [*(t.clone() for t in self.kept), *(self.inputs[at] for at in self.step.read_again), *cotangents]
        gradients = [t.clone() for t in self.step.module.backward(boxed)]
        for used in self.kept:
            used.data.zero_()
        return gradients
