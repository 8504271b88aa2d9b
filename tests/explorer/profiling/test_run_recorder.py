"""Profiling a run as it is: the timeline of a block or of a call, with other clocks beside the profiler's."""

from __future__ import annotations

import pytest
import torch

import tracefuse
from tracefuse.errors import MeasureError, TracefuseError
from tracefuse.profiling.findings import LOOKED_FOR


def step() -> float:
    x = torch.randn(64, 64, requires_grad=True)
    loss = (x @ x).relu().sum()
    loss.backward()
    return loss.item()


def operators(run: tracefuse.profiling.timeline.RunTimeline) -> list[str]:
    return [event.name for event in run.events if event.category == "cpu_op" and not event.is_range]


def test_a_block_runs_once_and_is_all_that_is_in_the_window() -> None:
    calls = []
    torch.ones(3).cos()
    with tracefuse.profile_run() as run:
        calls.append(step())
    torch.ones(3).cosh()
    names = operators(run.timeline)
    assert len(calls) == 1
    assert names.count("aten::mm") == 3
    assert not {"aten::cos", "aten::cosh"} & set(names)
    assert run.timeline.provenance.startswith("measured on CPU")
    assert run.timeline.recording.account.is_balanced
    assert str(run) == str(run.timeline)


def test_a_call_is_warmed_up_and_only_its_second_run_is_shown() -> None:
    calls = []

    def run(number: int) -> None:
        calls.append(number)
        torch.ones(3).cos() if len(calls) == 2 else torch.ones(3).sin()

    found = operators(tracefuse.profile_run(run, 5))
    assert calls == [5, 5]
    assert "aten::cos" in found
    assert "aten::sin" not in found


def test_the_hosts_clock_measured_the_same_window() -> None:
    ((name, measured_us, said_us),) = tracefuse.profile_run(lambda: [step() for _ in range(20)]).clocks
    assert name.startswith("the host's clock")
    assert said_us == pytest.approx(measured_us, rel=0.02)


def test_backward_operators_are_linked_to_their_forward() -> None:
    links = {a.name: b.name for a, b in tracefuse.profile_run(step).recording.backward.items()}
    assert links["ReluBackward0"] == "aten::relu"
    assert links["MmBackward0"] == "aten::mm"


def test_without_a_gpu_it_says_what_ran_on_the_host_and_when_nothing_did() -> None:
    found = tracefuse.profile_run(step)
    assert found.idle == ()
    assert "no GPU did anything in it; the host ran no operator for" in str(found)
    covered = sum(end - start for start, end in found.without_operator)
    assert 0 < covered < found.window[1] - found.window[0]


def test_python_that_runs_for_long_is_a_finding() -> None:
    def slow() -> None:
        torch.ones(3).cos()
        sum(range(3_000_000))
        torch.ones(3).cos()

    (finding,) = tracefuse.profile_run(slow).findings()
    assert (finding.id, finding.severity) == ("host-idle", "high")
    assert finding.title.startswith("no operator runs, in stretches of 100 µs and more, for ")
    assert "measured on CPU" in finding.worth


def test_busy_operators_are_none() -> None:
    x = torch.randn(700, 700)
    findings = tracefuse.profile_run(lambda: x @ x).findings()
    assert findings.looked_for == LOOKED_FOR
    assert not findings or findings[0].severity == "low"


def test_what_the_block_raises_leaves_it_and_the_profiler_is_off() -> None:
    with pytest.raises(ZeroDivisionError), tracefuse.profile_run() as run:
        raise ZeroDivisionError
    assert not torch.autograd._profiler_enabled()
    with pytest.raises(MeasureError, match="ended without an error"):
        _ = run.timeline
    with pytest.raises(ZeroDivisionError):
        tracefuse.profile_run(lambda: 1 / 0)
    assert not torch.autograd._profiler_enabled()


def test_there_can_be_but_one_profiler() -> None:
    with torch.profiler.profile(), pytest.raises(TracefuseError, match="end that first"), tracefuse.profile_run():
        pass


def test_stacks_are_recorded_if_asked_for() -> None:
    assert len(tracefuse.profile_run(step).recording.frames) == 0
    assert any("step" in frame.name for frame in tracefuse.profile_run(step, with_stack=True).recording.frames)


@pytest.mark.gpu
@pytest.mark.alone  # on a shared GPU the profiler sees its own process only
def test_on_a_gpu_cuda_events_measured_the_same_window() -> None:
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        y = x
        for _ in range(50):
            y = y @ x

    found = tracefuse.profile_run(run)
    clocks = {name: (measured, said) for name, measured, said in found.clocks}
    measured, said = clocks["CUDA events around it"]
    assert said == pytest.approx(measured, rel=0.02)
    (one,) = found.idle
    assert one.busy_ns + sum(gap.duration_ns for gap in one.gaps) == one.window_ns
    assert found.findings() == ()


@pytest.mark.gpu
def test_on_a_gpu_a_value_that_is_read_in_each_step_is_found() -> None:
    x = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    found = tracefuse.profile_run(lambda: [(x @ x).sum().item() for _ in range(20)]).findings()
    assert "host-sync" in {finding.id for finding in found}


@pytest.mark.parametrize("part", ["_profiler", "marked", "_stamp", "_wait", "_timeline"])
def test_a_block_goes_on_where_profiling_fails(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(f"tracefuse.profiling.recorder.{part}", fail)
    with pytest.warns(UserWarning, match="goes on without it") as told, tracefuse.profile_run() as run:
        total = torch.ones(3).sum().item()
    assert total == 3
    assert len(told) == 1
    with pytest.raises(MeasureError, match="injected"):
        _ = run.timeline
    assert not torch.autograd._profiler_enabled()


def test_what_a_profiled_block_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError), tracefuse.profile_run():
        torch.ones(1 // 0)
    with pytest.raises(ZeroDivisionError):
        tracefuse.profile_run(lambda: torch.ones(1 // 0))
    assert not torch.autograd._profiler_enabled()


def test_a_search_for_unused_parameters_is_a_finding_and_none_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        found = {}
        for searches in (True, False):
            layer = torch.nn.Linear(8, 8)
            model = torch.nn.parallel.DistributedDataParallel(layer, find_unused_parameters=searches)
            run = tracefuse.profile_run(lambda model=model: model(torch.ones(4, 8)).sum().backward())
            found[searches] = [one for one in run.findings() if one.id == "find-unused-parameters"]
    finally:
        torch.distributed.destroy_process_group()
    (one,) = found[True]
    assert "1 time" in one.title
    assert "without `find_unused_parameters=True`" in one.fix
    assert one.worth.startswith("at least ")
    assert found[False] == []
