"""What the GPU did in a replay, in one table whose parts add up; whose a kernel is follows from the op that asked for it."""

from __future__ import annotations

import json
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_traces import on_cuda

import tracefuse
from tracefuse.config.configuration import Config
from tracefuse.measure.timing import ProgramTiming, Timing, estimate
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.timeline.events import MARK, Event
from tracefuse.timeline.gpu_work import GpuWork, Part, gpu_work
from tracefuse.timeline.lanes import ProgramTimeline
from tracefuse.timeline.replayed import Timeline, attributed
from tracefuse.widgets.payload.kernels import kernel_records
from tracefuse.widgets.payload.timing import Timed, timing_record

DEVICE = "measured on NVIDIA H100 80GB HBM3"


@cache
def variant(**fallbacks: str) -> Any:
    """A pointwise kernel, a product, and the same kernel again, as on a GPU."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x.exp().sin() @ x).exp().sin()

    made = tracefuse.capture(fn, torch.ones(64, 64)).optimize(simplify=False)
    trace = on_cuda(made.trace)
    found = SimpleNamespace(
        trace=trace, whole=trace, update=None, fallbacks=fallbacks, tunings={}, runs_triton=True,
        baseline=made.baseline, passes=made.passes,
    )  # fmt: skip
    assert [isinstance(node.target, Kernel) for node in found.trace.ops] == [True, False, True]
    assert len({node.target for node in found.trace.ops}) == 2
    return found


def program(last_stream: int = 7, drop: str = "") -> ProgramTimeline:
    """The first op runs a kernel in two launches, the second one of ATen's after a copy, the third, on a stream of its own,
    a kernel whose name says nothing, after a fill; a gap of 5 µs lies before the last."""
    first, product, last = (node.name for node in variant().trace.ops)
    ran = [
        (first, "fused_kernel_0d1d", 10, 0, 7), (first, "fused_finish", 2, 0, 7), (product, "Memcpy DtoD", 1, 0, 7),
        (product, "fused_kernel_of_somebody_else", 20, 0, 7), (last, "Memset (Device)", 1, 0, last_stream),
        (last, "a name", 4, 5, last_stream),
    ]  # fmt: skip
    events, now_ns = [], 200_000
    for number, name in enumerate((first, product, last)):
        events.append(Event(f"{MARK}{name}", False, 7, 7, 1000 * (100 + 20 * number), 15_000, 900 + number, 0))
    for number, (op, name, us, gap_us, stream) in enumerate(ran):
        around = next(one for one in events if one.mark == op)
        call = "cudaMemcpyAsync" if name.startswith("Mem") else "cuLaunchKernelEx"
        events.append(Event(call, False, 7, 7, around.start_ns + 1000 * number, 900, number, 0))
        now_ns += 1000 * gap_us
        events.append(Event(name, True, 0, stream, now_ns, 1000 * us, number, 0))
        now_ns += 1000 * us
    return attributed("optimised", Config(), variant().trace, [event for event in events if event.name != drop])


def found(**how: Any) -> GpuWork:
    work = gpu_work(program(**how), variant())
    assert work is not None
    return work


@pytest.mark.parametrize("last_stream", [7, 13])
def test_the_parts_add_up_to_the_gpus_work_and_with_idle_time_to_the_window(last_stream: int) -> None:
    work = found(last_stream=last_stream)
    assert (work.triton, work.aten, work.copies) == (Part(3, 16), Part(1, 20), Part(2, 2))
    assert work.together == Part(6, 38)
    rows = {part: (calls, us, remark) for part, calls, us, remark in work.rows(0.045, 8)}
    assert rows["the GPU's work"][:2] == (6, 38)
    assert rows["first to last"] == (None, 43, "of it 5 µs idle")
    assert rows["step, end to end"] == (None, 45, "unprofiled, median of 8 rounds")
    assert work.rows(0.045, 1)[-1][3] == "unprofiled, one sample"
    assert work.rows()[-1][0] == "first to last"


def test_the_calls_of_a_kernel_take_all_that_ran_inside_their_ops() -> None:
    """Its second launch, which sums what the first has summed in chunks, and what it fills; not what is only called so."""
    times = Timeline(DEVICE, (program(),)).op_times(0)
    assert [times.us[node.name] for node in variant().trace.ops] == [12, 21, 5]
    (record,) = kernel_records(variant(), times)
    assert (record["calls"], record["time_us"], record["provenance"]) == (2, 8.5, times.provenance)


def test_a_kernel_that_cannot_run_here_is_atens() -> None:
    (kernel,) = {node.target for node in variant().trace.ops if isinstance(node.target, Kernel)}
    refused = variant(**{kernel.name: "too many registers"})
    work = gpu_work(program(), refused)
    assert work is not None
    assert (work.triton, work.aten) == (Part(0, 0), Part(4, 36))


def test_work_on_several_streams_is_not_called_idle() -> None:
    work = GpuWork(Part(1, 30), Part(1, 30), Part(0, 0), 40, 2, 2)
    assert "20 µs of it at once" in work.rows(0.045, 8)[4][3]


def test_launches_are_reconciled_with_records() -> None:
    assert found().note == "4 launches, 4 kernel records"
    assert found(drop="fused_finish").note == (
        "4 launches, 3 kernel records: they differ, so that the GPU's times are incomplete"
    )


def test_without_a_gpu_there_is_no_such_table() -> None:
    capture = tracefuse.capture(lambda x: x.exp().sum(), torch.ones(4))
    assert capture.optimize().kernel_times().work is None
    none = attributed("optimised", Config(), variant().trace, [])
    assert gpu_work(none, variant()) is None


def test_a_measurement_shows_it_in_the_view() -> None:
    step = {"step": estimate([0.045] * 8)}
    programs = tuple(ProgramTiming(name, step, step, cold_ms=1.0) for name in ("captured", "optimised"))
    timed = Timed(Timing(DEVICE, programs, rounds=8, inner=1, stopped="budget of 1 s"), tracefuse.Config())
    record = json.loads(json.dumps(timing_record(timed, stale=False, work=found())))
    assert [one["label"] for one in record["work"]][-1] == "step, end to end"
    assert "4 launches, 4 kernel records" in record["notes"]
    assert timing_record(timed, stale=False)["work"] == []
    assert "ATen's kernels    1      20" in str(found())


@pytest.mark.gpu
def test_on_a_gpu_the_window_holds_the_work() -> None:
    x = torch.ones(1 << 22, device="cuda", requires_grad=True)
    one = tracefuse.capture(lambda: (x.exp() * x).sum().backward()).optimize()
    work = one.kernel_times().work
    assert work is not None
    assert work.triton.calls > 0
    assert work.launches == work.records
    assert work.together.us <= 1.001 * work.window_us
