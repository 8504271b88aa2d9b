"""Casts of parameters that no kernel holds: one launch for all of them on a GPU, with the numbers that ATen's casts have.

The numbers are checked in the process that `test_triton.test_numbers_under_the_interpreter` starts for this file too.
"""

from __future__ import annotations

import re

import pytest
import torch
from cuda_traces import on_cuda
from interpreter import INTERPRETED, interpreted
from torch import Tensor, fx, nn

import tracefuse
from tracefuse.build.modules import launcher, machine_code
from tracefuse.optimizers.fuse import Fuse, casts
from tracefuse.optimizers.kernels.lists import ListKernel
from tracefuse.optimizers.passes import Decision
from tracefuse.optimizers.trace import Trace, phase, val
from tracefuse.optimizers.verify import verify

f32, bf16 = torch.float32, torch.bfloat16
aten = torch.ops.aten


def captured(layers: int = 3, trains: bool = True) -> tracefuse.Capture:
    """Linear layers under autocast, the first of which computes with a transposed weight."""
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
    net[0].weight = nn.Parameter(torch.randn(8, 8).t())
    x = torch.randn(4, 8)
    with tracefuse.capture() as c:
        with torch.autocast("cpu", bf16):
            loss = net(x).float().square().mean()
        if trains:
            loss.backward()
    return c


def fused(trace: Trace) -> tuple[Trace, list[Decision]]:
    """The pass, whose result is verified and stays as it is when the pass runs again."""
    decisions: list[Decision] = []
    before = trace.code
    after = Fuse().run(trace, decisions.append)
    verify(after)
    assert trace.code == before
    assert Fuse().run(after, lambda _: None).code == after.code
    return after, decisions


def calls(trace: Trace) -> list[fx.Node]:
    return [node for node in trace.ops if isinstance(node.target, ListKernel)]


def casts_in(trace: Trace) -> list[fx.Node]:
    parameters = {p for i, p in trace.input_pairs if i.kind == "parameter"}
    return [n for n in trace.ops if n.target is aten._to_copy.default and n.args[0] in parameters]


def test_all_weights_and_biases_are_cast_by_one_launch() -> None:
    trace = on_cuda(captured().trace)
    before = casts_in(trace)
    assert len(before) == 6
    after, decisions = fused(trace)
    (call,) = calls(after)
    assert not casts_in(after)
    assert [one.name for one in call.args[0]] == [cast.args[0].name for cast in before]  # type: ignore[union-attr]
    made = {node.name: val(node) for node in after.ops}
    for cast in before:
        assert (made[cast.name].dtype, made[cast.name].stride()) == (bf16, val(cast).stride())
    told = {d.value: d.action for d in decisions}
    assert told[call.name] == "merge"
    assert not told.keys() & {cast.name for cast in before}


def test_what_the_backward_reads_is_what_it_read() -> None:
    trace = on_cuda(captured().trace)
    after, _ = fused(trace)
    wanted = [
        [a.name for a in n.all_input_nodes] for n in trace.ops if phase(n) == "backward" and n.target is aten.mm.default
    ]
    found = [
        [a.name for a in n.all_input_nodes] for n in after.ops if phase(n) == "backward" and n.target is aten.mm.default
    ]
    assert found == wanted


def test_on_a_cpu_they_stay() -> None:
    after, _ = fused(captured().trace)
    assert not calls(after)
    assert len(casts_in(after)) == 6


def test_one_cast_alone_stays() -> None:
    net, x = nn.Linear(8, 8, bias=False), torch.randn(4, 8)
    with tracefuse.capture() as c, torch.autocast("cpu", bf16):
        loss = net(x).float().square().mean()
        loss.backward()
    after, _ = fused(on_cuda(c.trace))
    assert not calls(after)


def test_what_no_backward_reads_is_not_made_long_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases, and the weight of the first layer: its input needs no gradient."""
    monkeypatch.setattr(casts, "AHEAD", 8 * 8 * 2 - 1)
    after, _ = fused(on_cuda(captured().trace))
    (call,) = calls(after)
    assert len(call.args[0]) == 2  # type: ignore[arg-type]
    assert len(casts_in(after)) == 4
    after, _ = fused(on_cuda(captured(trains=False).trace))
    assert not calls(after)


def test_types_are_cast_apart() -> None:
    one, other = nn.Linear(8, 8), nn.Linear(8, 8)
    x = torch.randn(4, 8)

    def halved(layer: nn.Linear, x: Tensor, dtype: torch.dtype) -> Tensor:
        return nn.functional.linear(x.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype)).float()

    with tracefuse.capture() as c:
        loss = (halved(one, x, bf16) + halved(other, x, torch.float16)).square().mean()
        loss.backward()
    after, _ = fused(on_cuda(c.trace))
    assert sorted(str(val(call)[0][0].dtype) for call in calls(after)) == ["torch.bfloat16", "torch.float16"]


def kernel_that_casts() -> ListKernel:
    (call,) = calls(fused(on_cuda(captured().trace))[0])
    return call.target  # type: ignore[return-value]


@interpreted
def test_the_kernel_casts_each_tensor() -> None:
    """As near as the interpreter, which does not round, can tell."""
    ends = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.5]
    given = [torch.randn(17, 61).t(), torch.tensor(ends), torch.randn(2048), torch.randn(1)]
    (found,) = launcher(kernel_that_casts())(given)
    for one, tensor in zip(found, given, strict=True):
        torch.testing.assert_close(one, tensor.to(bf16), rtol=torch.finfo(bf16).eps, atol=0, equal_nan=True)
        assert one.stride() == tensor.stride()


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_a_gpu_rounds_to_nearest_as_aten_does() -> None:
    (made,) = machine_code(kernel_that_casts())
    converted = re.findall(r"cvt\.(\w+)\.bf16(?:x2)?\.f32", made.asm["ptx"])
    assert converted
    assert set(converted) == {"rn"}
