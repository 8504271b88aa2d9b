"""Planted mistakes: training steps with one mistake each, marked on its line, and their healthy twins.

    @planted("einsum-copies", "torch.matmul")
    def mixing(mistake: bool) -> Step:
        ...
        if mistake:
            y = torch.einsum("…", x, w)  # mistake
        else:
            y = x @ w

Programs run on the device "meta" at the sizes of real runs, since shapes suffice for a trace and for the roofline that
findings are judged by; what reads values runs on the CPU. Then every value's type is put on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import cuda_traces
import meta_kernels
import pytest
import torch
import torch.distributed as dist
from findings import HOPPER
from torch import Tensor, nn

import tracefuse
from tracefuse.diagnose.diagnose import DETECTORS, Findings, diagnose
from tracefuse.findings.finding import Case
from tracefuse.measure.op_times import modelled
from tracefuse.optimizers.trace import fake_mode, line_of, val
from tracefuse.recording import frames

Step = Callable[[], object]
WELL_SET = HOPPER | {"tf32": "True"}
MARK = "# mistake"


@dataclass(frozen=True)
class Planted:
    """One mistake: the `id` of its finding, what its fix must name, and the step with it and without."""

    id: str
    fix: str
    make: Callable[[bool], Step]
    device: str = "meta"
    environment: Mapping[str, str] | None = None
    """What a GPU's surroundings are where the mistake lies in them."""
    moves: bool = False
    """Whether the marked line casts an input that lies on the CPU: the cast is a move."""

    @property
    def name(self) -> str:
        return self.make.__name__


PLANTED: list[Planted] = []


def planted(
    id: str, fix: str, device: str = "meta", environment: Mapping[str, str] | None = None, moves: bool = False
) -> Callable[[Callable[[bool], Step]], Callable[[bool], Step]]:
    def register(make: Callable[[bool], Step]) -> Callable[[bool], Step]:
        PLANTED.append(Planted(id, fix, make, device, environment, moves))
        return make

    return register


def captured(one: Planted, mistake: bool, monkeypatch: pytest.MonkeyPatch) -> tracefuse.Capture:
    installed = (*frames._INSTALLED, os.path.join(os.path.dirname(__file__), "fake_library.py"))
    monkeypatch.setattr(frames, "_INSTALLED", installed)
    frames.is_installed.cache_clear()
    if one.device == "meta":
        meta_kernels.install(monkeypatch)
    try:
        with torch.device(one.device):
            step = one.make(mistake)
            with tracefuse.capture() as c:
                step()
    finally:
        torch.autograd.set_detect_anomaly(False)
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUDA_LAUNCH_BLOCKING", None)
        if dist.is_initialized():
            dist.destroy_process_group()
    return c


def on_a_gpu(capture: tracefuse.Capture, environment: Mapping[str, str] | None = None) -> Case:
    """The capture as if it had been taken on an H100 that is set up well, but for `environment`."""
    stops = tuple(replace(one, read=replace(one.read, device=torch.device("cuda:0"))) for one in capture.program.stops)
    known = {**capture.program.environment, **WELL_SET, **(environment or {})}
    program = replace(capture.program, environment=known, stops=stops)
    trace = cuda_traces.on_cuda(capture.trace)
    update = capture.update and cuda_traces.on_cuda(capture.update)
    return Case(program, trace, modelled(trace), update)


def on_the_cpu(of: Case, is_pinned: bool) -> Case:
    """The case whose marked line casts an input that lies on the CPU: the cast is a move, and so is its gradient's."""
    trace = of.trace.copy()
    cast = next(n for n in trace.ops if n.target is torch.ops.aten._to_copy.default and MARK in line_of(n))
    node, outputs = cast.args[0], zip(trace.returned, trace.outputs, strict=True)
    back = [n for n, out in outputs if (out.kind, out.of) == ("gradient", node.name)]
    with fake_mode(trace.graph):
        for one in (node, *back):
            one.meta["val"] = torch.empty_like(val(one), device="cpu")
    for one, device in ((cast, "cuda:0"), *((one, "cpu") for one in back)):
        assert one.target is torch.ops.aten._to_copy.default
        one.kwargs = {**one.kwargs, "device": torch.device(device)}
    pinned = frozenset({node.name} if is_pinned else ())
    return replace(of, program=replace(of.program, pinned=pinned), trace=trace, times=modelled(trace))


def findings(one: Planted, mistake: bool, monkeypatch: pytest.MonkeyPatch) -> Findings:
    of = on_a_gpu(captured(one, mistake, monkeypatch), one.environment if mistake else None)
    is_data = one.id == "pageable-copy"
    if one.moves and (mistake or is_data):
        of = on_the_cpu(of, is_pinned=not mistake)
    for detector, ids in DETECTORS.items():
        assert {found.id for found in detector(of)} <= set(ids), (
            f"DETECTORS does not say that {detector.__name__} finds it"
        )
    return diagnose(of)


def trains(model: nn.Module, *inputs: Tensor, loss: Callable[[Any], Tensor] | None = None) -> Step:
    """A step that trains `model` on `inputs`."""

    def step() -> None:
        out = model(*inputs)
        (loss(out) if loss else out.float().square().mean() if out.dim() else out).backward()

    return step
