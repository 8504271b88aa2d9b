"""Kernels, regions and the whole step in one table, whose parts add up."""

from __future__ import annotations

import json

import pytest
from test_measure import event
from torch.autograd import DeviceType

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.execution.replays import Replays
from tracefuse.measure import side_by_side
from tracefuse.measure.profile import Profile, profile_step, step_work, summarise
from tracefuse.measure.step_work import Part, StepWork
from tracefuse.measure.timing import ProgramTiming, Timing, estimate
from tracefuse.widgets.payload.timing import Timed, timing_record

GPU = DeviceType.CUDA


def profiled() -> Profile:
    """Two Triton kernels, one of them in two launches, a matmul, a copy and a gap of 5 µs."""
    ran = [("fused_a_kernel", 10), ("fused_a_finish", 2), ("fused_b_kernel_0d1d", 4), ("gemm", 20), ("Memcpy DtoD", 1)]
    events, now = [event("cudaLaunchKernel", DeviceType.CPU) for _ in range(4)], 100.0
    for name, time_us in ran:
        events.append(event(name, GPU, time_us, start=now))
        now += time_us + (5 if name == "gemm" else 0)
    return summarise([*events, event("whole", GPU, 999, is_user_annotation=True)], "measured on a GPU")


def timing(work: StepWork | None) -> Timing:
    step = {"step": estimate([0.045] * 8)}
    programs = tuple(ProgramTiming(name, step, step, cold_ms=1.0) for name in ("captured", "optimised"))
    return Timing("measured on a GPU", programs, rounds=8, inner=1, stopped="budget of 1 s", work=work)


def test_the_window_is_from_the_first_start_to_the_last_end() -> None:
    assert profiled().window_us == 42
    assert summarise([], "measured on a GPU").window_us == 0


def test_the_parts_add_up_to_the_gpus_work_and_with_idle_time_to_the_window() -> None:
    work = step_work(profiled(), ["fused_a", "fused_b"])
    assert (work.triton, work.aten, work.copies) == (Part(3, 16), Part(1, 20), Part(1, 1))
    assert work.together == Part(5, 37)
    rows = {part: (calls, us, remark) for part, calls, us, remark in work.rows(0.045, 8)}
    assert rows["the GPU's work"][:2] == (5, 37)
    assert rows["first to last"] == (None, 42, "of it 5 µs idle")
    assert rows["step, end to end"] == (None, 45, "unprofiled, median of 8 rounds")
    assert work.rows(0.045, 1)[-1][3] == "unprofiled, one sample"


def test_work_on_several_streams_is_not_called_idle() -> None:
    work = StepWork(Part(1, 30), Part(1, 30), Part(0, 0), 40, 2, 2)
    assert "20 µs of it at once" in work.rows(0.045, 8)[4][3]


def test_launches_are_reconciled_with_records() -> None:
    assert step_work(profiled(), []).note == "4 launches, 4 kernel records"
    assert "they differ, so that the GPU's times are incomplete" in StepWork(*[Part(0, 0)] * 3, 0, 3, 2).note


def test_a_measurement_shows_it_as_text_and_in_the_view() -> None:
    found = timing(step_work(profiled(), ["fused_a", "fused_b"]))
    text = str(found)
    assert "part of the optimised step" in text
    assert "4 launches, 4 kernel records" in text
    config = tracefuse.Config()
    record = json.loads(json.dumps(timing_record(Timed(found, config), stale=False)))
    assert [one["label"] for one in record["work"]][-1] == "step, end to end"
    assert "4 launches, 4 kernel records" in record["notes"]
    assert "part of" not in str(timing(None))
    assert timing_record(Timed(timing(None), config), stale=False)["work"] == []


def test_what_ran_on_a_gpu_is_profiled_once_after_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = GPT(layers=1, width=32, heads=2, vocab=61, length=16), batch(61, 2, 12)
    variant = tracefuse.capture(lambda: model(*data).backward()).optimize()
    assert variant.measure(budget_s=0.1).work is None
    asked: list[Replays] = []
    monkeypatch.setattr(side_by_side, "profile_step", lambda program: asked.append(program) or profiled())
    monkeypatch.setattr(type(variant), "runs_triton", True)
    found = variant.measure(budget_s=0.1)
    assert len(asked) == 1
    assert found.work.together == Part(5, 37)


@pytest.mark.gpu
def test_on_a_gpu_the_window_holds_the_work() -> None:
    import torch

    x = torch.ones(1 << 22, device="cuda", requires_grad=True)
    variant = tracefuse.capture(lambda: (x.exp() * x).sum().backward()).optimize()
    found = variant.measure(budget_s=0.5)
    assert found.work.triton.calls > 0
    assert found.work.launches == found.work.records
    assert found.work.together.us <= 1.001 * found.work.window_us
    program = variant.compile().replays(variant.capture.example_inputs)
    assert profile_step(program).is_complete
