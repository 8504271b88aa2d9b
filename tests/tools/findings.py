"""What tests of findings share: the findings of a captured program, names of some, and functions that earn one."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import tracefuse
from tracefuse.diagnose.diagnose import diagnose
from tracefuse.findings.finding import Case, Finding
from tracefuse.measure.op_times import modelled
from tracefuse.optimizers.trace import Trace

UNFUSED, KEPT = "unfused-pointwise", "saved-not-recomputed"
HOPPER = {"capability": "9.0", "tf32": "False", "cudnn": "on", "cudnn benchmark": "on"}


def case(capture: tracefuse.Capture, trace: Trace | None = None) -> Case:
    trace = trace or capture.trace
    return Case(capture.program, trace, modelled(trace), capture.update)


def known(of: Case, **facts: Any) -> Case:
    """The case of a program of which other things are known."""
    return replace(of, program=replace(of.program, **facts))


def kind_said(worth: str) -> str:
    """How a worth is known by its own words: "measured", "predicted" or "modelled"; "" of one that names no time."""
    said = re.search(r"\((measured|predicted|modelled)", worth)
    return said[1] if said else ""


def found(name: str, of: Case) -> list[Finding]:
    return [one for one in diagnose(of) if one.id == name]


class EveryGradient(torch.autograd.Function):
    """A linear layer whose backward does not ask which gradients are needed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        to_x = gradient @ weight
        to_weight = gradient.t() @ x
        return to_x, to_weight


class EveryOutput(torch.autograd.Function):
    """A convolution whose backward asks the operator for every gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.conv2d(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        zeros, ones = [0, 0], [1, 1]
        found = torch.ops.aten.convolution_backward(
            gradient, *ctx.saved_tensors, None, ones, zeros, ones, False, zeros, 1, [True, True, False]
        )
        return found[0], None
