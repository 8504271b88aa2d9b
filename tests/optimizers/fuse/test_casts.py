"""Casts of parameters that no kernel holds: one launch for all of them on a GPU, with the numbers that ATen's casts have.

The numbers are checked in the process that `test_triton.test_numbers_under_the_interpreter` starts for this file too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

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
    before, fuse = trace.code, Fuse(matmuls_cast=True)
    after = fuse.run(trace, decisions.append)
    verify(after)
    assert trace.code == before
    assert fuse.run(after, lambda _: None).code == after.code
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

    def read(trace: Trace) -> list[list[str]]:
        matmuls = [n for n in trace.ops if n.target in (aten.mm.default, aten.mm.dtype) and phase(n) == "backward"]
        return [[operand.name for operand in node.all_input_nodes] for node in matmuls]

    assert read(after) == read(trace)


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


# --- by matmuls -------------------------------------------------------------------------------------------------------


def into_float32(trace: Trace) -> list[fx.Node]:
    return [node for node in trace.ops if node.target is aten.mm.dtype]


@pytest.mark.parametrize("simplified", [False, True])
def test_a_weights_gradient_comes_in_float32_from_its_matmul(simplified: bool) -> None:
    """Of a weight that lies transposed, too."""
    net, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), torch.randn(16, 8)
    net[0].weight = nn.Parameter(torch.randn(8, 16).t())
    with tracefuse.capture() as c:
        with torch.autocast("cpu", bf16):
            loss = net(x).float().square().mean()
        loss.backward()
    trace = on_cuda(c.optimize(simplify=simplified, fuse=False, remat=None).trace)
    after, decisions = fused(trace)
    before = {out.of: val(node) for out, node in trace.output_pairs if out.kind == "gradient"}
    made = {out.of: node for out, node in after.output_pairs if out.kind == "gradient"}
    weights = [name for name in made if name.endswith("weight")]
    assert len(into_float32(after)) == len(weights) == 2
    for name in weights:
        assert (val(made[name]).dtype, val(made[name]).stride()) == (f32, before[name].stride())
        assert made[name].name == f"grad_{name}"
        assert any(one.value == made[name].name and "yields float32 itself" in one.reason for one in decisions)
    assert {one.value for one in decisions} <= {node.name for node in after.graph.nodes}
    wide = [node for node in after.ops if node.target is aten.mm.default]
    assert {val(node).dtype for node in wide} <= {bf16}
    assert not into_float32(Fuse().run(trace, lambda _: None))


def traced(compute: Callable[[Tensor, Tensor], Any], columns: int = 8, dtype: torch.dtype = bf16) -> Trace:
    """A trace, on a GPU, of what is computed of two matrices."""
    x, y = torch.randn(16, 8, dtype=dtype), torch.randn(8, columns, dtype=dtype)
    return on_cuda(tracefuse.capture(lambda: compute(x, y)).trace)


STAYS = {
    "read by another op": lambda x, y: ((z := x @ y).float(), z.relu()),
    "viewed for another op": lambda x, y: ((z := (x @ y).t()).float(), z.relu()),
    "returned as it is": lambda x, y: ((z := x @ y).float(), z),
    "cast to another type": lambda x, y: (x @ y).double(),
    "a sum with a bias": lambda x, y: torch.addmm(y[0], x, y).float(),
    "laid out anew": lambda x, y: (x @ y).t().to(f32, memory_format=torch.contiguous_format),
    "of float32": lambda x, y: (x.float() @ y.float()).to(f32, copy=True),
    "cast in a part": lambda x, y: (x @ y)[:8].float(),
    "selected from": lambda x, y: (x @ y)[-1].float(),
    "seen as another type": lambda x, y: (x @ y).view(torch.int16).float(),
    "seen as another type and back": lambda x, y: (x @ y).view(torch.int16).view(bf16).float(),
    "seen as a type of its size": lambda x, y: (x @ y).view(torch.float16).float(),
}


@pytest.mark.parametrize("name", STAYS)
def test_a_matmul_stays_whose_result_is(name: str) -> None:
    trace = traced(STAYS[name])
    assert any(node.target in (aten.mm.default, aten.addmm.default) for node in trace.ops)
    assert not into_float32(fused(trace)[0])


def test_a_matmul_of_float16_stays() -> None:
    """Torch may be told to sum it in float16."""
    assert not into_float32(fused(traced(lambda x, y: (x @ y).float(), dtype=torch.float16))[0])


class CastLate(torch.autograd.Function):
    """Keeps what a matmul made in bfloat16, and reads it in its backward alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x @ y)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.saved_tensors[0].float().clone(), None


def test_what_is_kept_in_bfloat16_for_the_backward_stays() -> None:
    x, y = torch.randn(16, 8, dtype=bf16, requires_grad=True), torch.randn(8, 8, dtype=bf16)
    with tracefuse.capture() as c:
        CastLate.apply(x, y).float().sum().backward()
    assert not into_float32(fused(on_cuda(c.trace))[0])


def test_a_cast_that_a_kernel_holds_stays_in_it() -> None:
    assert not into_float32(fused(traced(lambda x, y: (x @ y).float().exp() + 1))[0])


def test_a_matmul_over_unaligned_rows_stays() -> None:
    assert not into_float32(fused(traced(lambda x, y: (x @ y).float(), columns=7))[0])
    assert into_float32(fused(traced(lambda x, y: (x @ y).float(), columns=8))[0])


def test_on_a_cpu_a_matmul_stays() -> None:
    x, y = torch.randn(16, 8, dtype=bf16), torch.randn(8, 8, dtype=bf16)
    with tracefuse.capture() as c:
        (x @ y).float()
    assert not into_float32(fused(c.trace)[0])


@pytest.mark.gpu
def test_on_a_gpu_its_gradient_is_nearer_than_eagers() -> None:
    """Both from float64 of the same rounded factors."""
    for rows, inner, columns in ((64, 32, 48), (1000, 136, 264), (4096, 768, 2304)):
        torch.manual_seed(rows)
        net = nn.Linear(inner, columns, bias=False, device="cuda")
        x, g = (torch.randn(rows, n, device="cuda") for n in (inner, columns))
        exact = g.to(bf16).double().t() @ x.to(bf16).double()
        off = []
        for run in (torch.compile(net, backend="tracefuse"), net):
            net.weight.grad = None
            with torch.autocast("cuda", bf16):
                y = run(x)
            y.backward(g.to(bf16))
            assert net.weight.grad.dtype is f32
            off.append((net.weight.grad.double() - exact).abs().max().item())
        assert off[0] < off[1] / 4


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
