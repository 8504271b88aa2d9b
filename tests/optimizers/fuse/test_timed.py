"""What was timed decides: a kernel that lost is left to ATen with both times, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernels import kernel_of_types
from torch import Tensor

import tracefuse
from tracefuse.config.configuration import Config, Machine
from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.fuse.timed import NOT_TIMED, TimedKernel
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.ops import op_name
from tracefuse.optimizers.passes import Decision, run_pipeline
from tracefuse.optimizers.trace import Trace

GPU = "an H200"


def program(x: Tensor, w: Tensor) -> Tensor:
    """Two kernels with a matmul between them."""
    return ((x * 2 + 1) @ w).exp() * 3 + 1


def captured(function: Callable[..., Any] = program) -> Trace:
    generator = torch.Generator().manual_seed(0)
    return tracefuse.capture(function, *(torch.randn(8, 8, generator=generator) for _ in range(2))).trace


def fused(trace: Trace, *timed: TimedKernel) -> tuple[Trace, list[Decision]]:
    (record,) = run_pipeline(trace, [Fuse(timed=timed)])
    return record.after, list(record.decisions)


def kernels(trace: Trace) -> list[Kernel]:
    return [node.target for node in trace.ops if isinstance(node.target, Kernel)]


def times(kernel: Kernel, ours_us: float, aten_us: float) -> TimedKernel:
    return TimedKernel(kernel.key, ours_us, aten_us, GPU)


def printed(trace: Trace) -> list[tuple[Any, ...]]:
    return [(node.name, op_name(node), str(node.args)) for node in trace.graph.nodes]


def test_a_kernel_that_lost_is_left_to_aten_with_both_times() -> None:
    trace = captured()
    first, second = kernels(fused(trace)[0])
    after, decisions = fused(trace, times(first, 16.0, 14.2), times(second, 9.0, 12.0))
    assert kernels(after) == [second]
    assert [op_name(n) for n in after.ops[:2]] == ["aten.mul.Tensor", "aten.add.Tensor"]
    (left,) = [d for d in decisions if d.action == "leave" and "us" in d.reason]
    assert left.reason == "ATen's 2 ops take 14.2 us, this kernel 16.0: measured on an H200"
    inputs = [torch.randn(8, 8), torch.randn(8, 8)]
    (found,), (wanted,) = tracefuse.replay(after, inputs), tracefuse.replay(trace, inputs)
    torch.testing.assert_close(found, wanted)


def test_all_may_lose_and_as_fast_is_no_loss() -> None:
    trace = captured()
    first, second = kernels(fused(trace)[0])
    after, _ = fused(trace, times(first, 2.0, 1.0), times(second, 2.0, 1.0))
    assert printed(after) == printed(trace)
    after, _ = fused(trace, times(first, 1.0, 1.0), times(second, 1.0, 1.0))
    assert kernels(after) == [first, second]


def test_one_that_lost_is_cut_beside_its_reduction_and_its_parts_are_decided_in_turn() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 32, generator=generator)

    def normalized(x: Tensor) -> Tensor:
        return F.layer_norm((x * 2).tanh() + 1, (32,)).exp() * 3 - x

    trace, lost = tracefuse.capture(normalized, x).trace, list[TimedKernel]()
    formed, said = [], []
    while True:
        after, decisions = fused(trace, *lost)
        (found,) = tracefuse.replay(after, [x])
        torch.testing.assert_close(found, normalized(x))
        if not kernels(after):
            break
        formed.append([kernel.name.rpartition("_")[0] for kernel in kernels(after)])
        said += [d.reason for d in decisions if d.action == "split" and d.reason not in said]
        lost += [times(kernel, 2.0, 1.0) for kernel in kernels(after)]
    assert formed == [
        ["fused_mul_tanh_add_sub"],
        ["fused_mul_tanh_add", "fused_native_layer_norm_exp_mul_sub"],
        ["fused_native_layer_norm", "fused_exp_mul_sub"],
    ]
    assert said == [
        "ATen's 7 ops take 1.0 us, this kernel 2.0: measured on an H200; so 3 ops and 4 ops are tried apart",
        "ATen's 4 ops take 1.0 us, this kernel 2.0: measured on an H200; so 1 op and 3 ops are tried apart",
    ]
    assert printed(after) == printed(trace)


def test_a_part_that_is_too_small_to_be_why_a_kernel_lost_is_not_cut_off() -> None:
    """Behind the sum of a row is a thirty-second of the elements. To cut there moves fewest bytes, and changes nothing."""
    x = torch.randn(64, 256, 32)
    trace = tracefuse.capture(lambda x: ((x * 2 + 1).sum(-1) * 3).exp() + 1, x).trace
    (whole,) = kernels(fused(trace)[0])
    parts = kernels(fused(trace, times(whole, 2.0, 1.0))[0])
    assert [kernel.name.rpartition("_")[0] for kernel in parts] == ["fused_mul_add", "fused_sum_mul_exp_add"]


def test_the_same_times_give_the_same_trace_and_a_second_run_changes_nothing() -> None:
    trace = captured()
    first, second = kernels(fused(trace)[0])
    timed = (times(first, 2.0, 1.0), times(second, 1.0, 2.0))
    once, decisions = fused(trace, *timed)
    again, repeated = fused(trace, *reversed(timed))
    assert printed(once) == printed(again)
    assert decisions == repeated
    twice, _ = fused(once, *timed)
    assert printed(twice) == printed(once)


def test_times_of_other_kernels_change_nothing() -> None:
    trace = captured()
    other = kernel_of_types(lambda x: x * 5 - 1, ((64, 64), torch.float32))
    assert printed(fused(trace, times(other, 9.0, 1.0))[0]) == printed(fused(trace)[0])


def test_a_kernel_of_a_gpu_says_its_times_or_that_it_has_none() -> None:
    from cuda_traces import on_cuda

    trace = on_cuda(captured())
    after, decisions = fused(trace)
    first, _ = kernels(after)
    assert [NOT_TIMED in d.reason for d in decisions if d.action == "fuse"] == [True, True]
    _, decisions = fused(trace, times(first, 3.0, 4.5))
    said = [d.reason for d in decisions if d.action == "fuse"]
    assert said[0].endswith("ATen's 2 ops take 4.5 us, this kernel 3.0: measured on an H200")
    assert said[1].endswith(NOT_TIMED)


def test_what_was_timed_travels_in_a_session(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    capture = tracefuse.capture(program, *(torch.randn(8, 8, generator=generator) for _ in range(2)))
    first, second = kernels(capture.optimize(remat=0.25).trace)
    capture._machine = capture.machine.knowing((times(first, 2.0, 1.0), times(second, 1.0, 2.0)))
    here = capture.variant(Config.of(remat=0.5))
    path = tmp_path / "run.tfz"
    capture.save(path)
    loaded = tracefuse.load(path)
    assert loaded.machine.fuse.timed == capture.machine.fuse.timed
    there = loaded.variant(Config.of(remat=0.5))
    assert printed(there.trace) == printed(here.trace)
    assert [k.key for k in there.kernels] == [second.key]


def test_later_times_of_a_kernel_take_the_place_of_earlier_ones() -> None:
    machine, one = Machine.here(), TimedKernel("k", 1.0, 2.0, GPU)
    known = machine.knowing((one,)).knowing((replace(one, ours_us=3.0), replace(one, key="l")))
    assert [(t.key, t.loses) for t in known.fuse.timed] == [("k", True), ("l", False)]


@pytest.mark.parametrize("count", [1, 8])
def test_looking_up_times_costs_no_more_for_many_kernels(count: int) -> None:
    """Each kernel is looked up once, by its key, whatever the table's length."""
    reads: list[str] = []

    class Counted(TimedKernel):
        @property
        def loses(self) -> bool:
            reads.append(self.key)
            return False

    trace = captured()
    keys = [kernel.key for kernel in kernels(fused(trace)[0])]
    table = [Counted(key, 1.0, 2.0, GPU) for key in (*keys, *(f"other {at}" for at in range(count * 100)))]
    fused(trace, *table)
    assert reads == keys
