"""Copies that readers could do without, and what the readers would lose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from findings import case, found, kind_said
from planting import on_a_gpu
from torch import Tensor, nn

import tracefuse
from tracefuse.findings.finding import Case, Finding
from tracefuse.measure.op_times import OpTimes
from tracefuse.optimizers.costs.cost import packet_name
from tracefuse.optimizers.trace import origin, val

BF16 = torch.bfloat16


def large(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True)


def on_gpu(step: Callable[[], Tensor]) -> Case:
    return on_a_gpu(tracefuse.capture(lambda: step().sum().backward()))


def gated() -> Tensor:
    value, gate = (large(32_768, 4096) * 2).chunk(2, -1)
    return (value.contiguous() * torch.sigmoid(gate.contiguous())) @ large(2048, 2048)


H200_US = {"clone": 157.7, "sigmoid": 72.4, "mul": 93.0}
"""Of bfloat16[32768, 2048], one by one: copies of halves of a chunk, and two readers of what is contiguous."""
STRIDED_US = {"sigmoid": 185.5, "mul": 181.1}
"""What the readers take of halves of a chunk."""


def measured(of: Case, us: dict[str, float], elsewhere_us: float) -> Case:
    """The case with these times by operator, in a step that takes as much more elsewhere."""
    times = {n.name: us[packet_name(n)] for n in of.trace.ops if packet_name(n) in us}
    return replace(of, times=OpTimes({**times, "elsewhere": elsewhere_us}, "measured on NVIDIA H200, op by op"))


def the(name: str, of: Case) -> Finding:
    (one,) = found(name, of)
    assert one.kind == kind_said(one.worth)
    return one


def test_about_nothing_is_won_where_readers_lose_what_the_copies_take() -> None:
    one = the("needless-copy", measured(on_gpu(gated), H200_US, 6000.0))
    assert one.severity == "low"
    assert "leave it" in one.fix
    assert "about nothing is won" in one.fix
    assert one.worth.startswith("about nothing: 315 µs of copies, less ")
    assert one.kind == "predicted"
    assert {fix.kind for fix in one.fixes} == {"passes"}, "what gains nothing is not offered"
    lost = STRIDED_US["sigmoid"] - H200_US["sigmoid"] + 2 * (STRIDED_US["mul"] - H200_US["mul"])
    assert one.worth_us == pytest.approx(2 * H200_US["clone"] - lost, abs=0.15 * lost)


def test_the_readers_of_the_copy_alone_lose_and_those_of_what_they_make_do_not() -> None:
    of = measured(on_gpu(gated), H200_US, 6000.0)
    one = the("needless-copy", of)
    assert dict(one.evidence)["read strided instead"].startswith("3 ops, ")


def test_a_copy_that_a_matmul_reads_is_worth_what_it_takes() -> None:
    weight = large(2048, 2048)
    of = on_gpu(lambda: (large(32_768, 4096) * 2).chunk(2, -1)[0].contiguous() @ weight)
    one = the("needless-copy", of)
    (copy,) = [n for n in of.trace.ops if packet_name(n) == "clone"]
    assert one.worth_us == of.us([copy])
    assert "read strided instead" not in dict(one.evidence)
    assert [fix.kind for fix in one.fixes] == ["left out"]


def test_a_clone_of_what_lies_alike_is_worth_its_copy_and_no_sum_of_gradients() -> None:
    """Autograd sums the gradients of both readers in the clone's node, and without a clone in another one."""
    x, weight = large(32_768, 2048), large(2048, 2048)
    of = on_gpu(lambda: (y := x * 2).clone() + y @ weight)
    summed = [n for n in of.trace.ops if origin(n).autograd == "CloneBackward0"]
    assert [packet_name(n) for n in summed] == ["add"]
    one = the("needless-copy", of)
    assert one.worth_us == of.us([n for n in of.trace.ops if packet_name(n) == "clone"])


def test_copies_that_lie_alike_without_them_lose_nothing() -> None:
    def step() -> Tensor:
        x, y = large(2048, 8192) * 2, large(2048, 8192) * 2
        return (x.t().contiguous() * y.t().contiguous()).sum(0)

    one = the("needless-copy", on_gpu(step))
    assert "read strided instead" not in dict(one.evidence)
    assert one.worth_us is not None
    assert one.worth_us > 0


BROADCAST_US = {BF16: (110.56, 93.89, 167.87), torch.float32: (82.38, 95.26, 102.05)}
"""Of an H200, 134 MB a tensor: a repeat, the sum with what it yields, and the sum with what is expanded."""


@pytest.mark.parametrize("dtype", BROADCAST_US)
def test_what_broadcasts_is_read_one_by_one(dtype: torch.dtype) -> None:
    length = 4096 // dtype.itemsize
    x, place = large(16, length, 2048, dtype=dtype), large(1, length, 2048, dtype=dtype)
    repeat_us, add_us, broadcast_us = BROADCAST_US[dtype]
    of = measured(on_gpu(lambda: x + place.repeat(16, 1, 1)), {"repeat": repeat_us, "add": add_us}, 2000.0)
    one = the("repeat-not-expand", of)
    assert one.worth_us is not None
    assert repeat_us + add_us - one.worth_us == pytest.approx(broadcast_us, rel=0.15)
    assert [fix.kind for fix in one.fixes] == ["left out"]


def test_readers_of_several_results_are_passed_over() -> None:
    row = large(2048)
    of = on_gpu(lambda: (repeated := row.repeat(16, 4096, 1)) * torch.frexp(repeated.detach())[1])
    assert "frexp" in map(packet_name, of.trace.ops)
    assert the("repeat-not-expand", of).worth_us


def test_readers_on_a_cpu_lose_nothing() -> None:
    x, out = torch.randn(64, 128, requires_grad=True), nn.Linear(64, 64)

    def step() -> None:
        value, gate = (x * 2).chunk(2, -1)
        out(value.contiguous() * torch.sigmoid(gate)).sum().backward()

    of = case(tracefuse.capture(step))
    (copy,) = [n for n in of.trace.ops if packet_name(n) == "clone"]
    times = OpTimes({n.name: 2.0 for n in of.trace.ops if isinstance(val(n), Tensor)}, "measured on CPU, op by op")
    one = the("needless-copy", replace(of, times=times))
    assert one.values == (copy.name,)
    assert (one.worth_us, one.kind) == (2.0, "measured")
