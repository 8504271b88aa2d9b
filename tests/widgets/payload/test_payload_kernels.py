"""Kernels in the wire format: their times, what those reach of the GPU's bandwidth, and what a kernel takes of a GPU."""

from __future__ import annotations

from functools import cache

import programs
import pytest
import torch
from torch import Tensor

import tracefuse
from tracefuse.build.modules import resources
from tracefuse.errors import OptionError
from tracefuse.measure.op_times import OpTimes, modelled
from tracefuse.measure.profile import KernelTime, Profile
from tracefuse.optimizers.costs.cost import Peaks
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.kernels.long_sum import LongSum
from tracefuse.optimizers.lowering.layouts import Tuning
from tracefuse.optimizers.ops import does_work
from tracefuse.variant import Variant
from tracefuse.widgets.payload.kernels import (
    aten_records,
    inspect_kernel,
    kernel_calls,
    kernel_record,
    kernel_records,
    mean_bytes_read,
    speed,
)
from tracefuse.widgets.payload.program import payload

GPU = "measured on NVIDIA H100 80GB HBM3"
THREE_TB_S = Peaks(3e12, 7e14, "measured peaks of a GPU")


@cache
def variant() -> Variant:
    return tracefuse.capture(programs.PROGRAMS["gpt"](torch.float32).run).optimize()


def profile_of(*times: KernelTime, device: str = GPU) -> Profile:
    return Profile(device, times, 5, 5)


# --- times ------------------------------------------------------------------------------------------------------------


def test_a_kernel_time_is_the_mean_over_its_own_calls() -> None:
    kernel = variant().kernels[0]
    found = profile_of(KernelTime(f"{kernel.name}_kernel", 4, 20.0), KernelTime("gemm", 1, 99.0))
    record = kernel_record(kernel, 4, found)
    assert (record["time_us"], record["provenance"]) == (5.0, f"{GPU}, profiled once")


def test_a_kernel_in_two_steps_takes_as_long_as_both() -> None:
    """The second launch sums what the first has summed in chunks."""
    kernel = variant().kernels[0]
    steps = KernelTime(f"{kernel.name}_kernel", 4, 20.0), KernelTime(f"{kernel.name}_finish", 4, 4.0)
    assert kernel_record(kernel, 4, profile_of(*steps))["time_us"] == 6.0


def test_the_calls_of_a_long_sum_read_its_operands_in_the_mean() -> None:
    def fn(*operands: Tensor) -> tuple[Tensor, Tensor]:
        few, many = sum(operands[1:8], operands[0]), sum(operands[1:12], operands[0] * 2 @ operands[0])
        return few @ few, many @ many

    trace = tracefuse.capture(fn, *(torch.randn(4, 4) for _ in range(12))).optimize(fuse=True, simplify=False).trace
    kernel = next(n.target for n in trace.ops if isinstance(n.target, LongSum))
    counts = [len(n.args) for n in trace.ops if n.target == kernel]
    assert sorted(counts) == [8, 12]
    assert mean_bytes_read(kernel, trace) == 10 * 64


# --- how fast ---------------------------------------------------------------------------------------------------------


def test_without_a_time_nothing_is_said_of_speed() -> None:
    found = speed(10**9, None, profile_of(), THREE_TB_S)
    assert set(found.values()) == {None, ""}
    for record in kernel_records(variant(), peaks=THREE_TB_S):
        assert {key: record[key] for key in found} == found


def test_speed_is_set_beside_the_copy_that_was_measured() -> None:
    found = speed(3 * 10**8, 200.0, profile_of(), THREE_TB_S)
    assert (found["gb_per_s"], found["peak_share"]) == (pytest.approx(1500), pytest.approx(0.5))
    assert found["peak_source"] == "3 TB/s, measured peaks of a GPU"
    assert (found["bound"], found["least_us"]) == ("memory", pytest.approx(100))


def test_without_a_measured_copy_it_is_the_datasheet_that_says_so() -> None:
    found = speed(3 * 10**8, 200.0, profile_of())
    assert found["peak_share"] == pytest.approx(1.5 / 3.35)
    assert found["peak_source"] == "3.35 TB/s, H100 SXM datasheet, not measured"


def test_of_a_gpu_that_nothing_is_known_of_there_is_no_share() -> None:
    found = speed(3 * 10**8, 200.0, profile_of(device="measured on NVIDIA L4"))
    assert (found["gb_per_s"], found["peak_share"], found["peak_source"]) == (pytest.approx(1500), None, "")


def test_aten_operators_are_listed_where_their_times_were_measured() -> None:
    v = variant()
    us = {node.name: 2.0 for node in v.trace.ops if does_work(node)}
    assert aten_records(v, modelled(v.trace), THREE_TB_S) == []
    assert aten_records(v, None, THREE_TB_S) == []
    found = aten_records(v, OpTimes(us, f"{GPU}, op by op"), THREE_TB_S)
    assert sum(one["calls"] for one in found) == sum(
        does_work(node) and not isinstance(node.target, Kernel) for node in v.trace.ops
    )
    product = next(one for one in found if one["name"].startswith("mm "))
    assert product["tflop_per_s"] > 0
    assert product["provenance"] == f"{GPU}, op by op"
    shown = payload(v, times=(None, OpTimes(us, f"{GPU}, op by op")), peaks=THREE_TB_S)["aten"]
    assert shown == found


def test_every_call_counts_the_bytes_that_it_moves() -> None:
    (kernel, _), *_ = kernel_calls(variant().trace)
    record = kernel_records(variant(), profile_of(KernelTime(f"{kernel.name}_kernel", 1, 8.0)), THREE_TB_S)[0]
    assert record["gb_per_s"] == pytest.approx((record["nbytes_read"] + record["nbytes_written"]) / 8e3)


# --- what it takes ----------------------------------------------------------------------------------------------------


def test_a_kernel_is_inspected_when_asked() -> None:
    kernel = variant().kernels[0]
    found, expected = inspect_kernel(variant(), kernel.name), resources(kernel)
    assert (found["registers"], found["shared_bytes"], found["spills"]) == (
        expected.registers, expected.shared_bytes, expected.spills,
    )  # fmt: skip
    assert found["registers"] > 0
    assert found["target"].startswith("sm_")
    shown = {k["name"]: k["resources"] for k in payload(variant(), inspected={kernel.name: found})["kernels"]}
    assert shown.pop(kernel.name) == found
    assert set(shown.values()) == {None}


def test_it_is_inspected_under_the_block_sizes_that_it_runs_with() -> None:
    capture = tracefuse.capture(lambda x: x.exp().sin().sum(-1), torch.ones(64, 2048))
    tuned = capture.optimize()
    kernel, tuning = tuned.kernels[0], Tuning(warps=2)
    tuned.tunings = {kernel.name: tuning}
    assert resources(kernel, tuning=tuning).num_warps != resources(kernel).num_warps
    assert inspect_kernel(tuned, kernel.name)["registers"] == resources(kernel, tuning=tuning).registers


def test_a_kernel_that_is_not_there_cannot_be_inspected() -> None:
    with pytest.raises(OptionError, match="'nope'"):
        inspect_kernel(variant(), "nope")
