"""Timelines: every op is on one, what the GPU did belongs to the op that asked for it, nothing is lost."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from functools import cache

import numpy as np
import programs
import pytest
import torch
from cuda_traces import on_cuda

import tracefuse
from tracefuse.config.configuration import Config
from tracefuse.demo import GPT, batch
from tracefuse.errors import ExportError
from tracefuse.optimizers.ops import does_work, op_name
from tracefuse.timeline.events import LAUNCHES, MARK, NOT_KERNELS, Event, marked, recorded
from tracefuse.timeline.lanes import Lane, ProgramTimeline
from tracefuse.timeline.replayed import Timeline, attributed, measured_on, stepwise, stepwise_replay, timeline


@cache
def captured(name: str = "gpt") -> tracefuse.Capture:
    return tracefuse.capture(programs.PROGRAMS[name](torch.float32).run)


@cache
def measured() -> Timeline:
    return timeline(captured().optimize())


def both() -> list[tuple[ProgramTimeline, tracefuse.Trace]]:
    traces = captured().trace, captured().optimize().trace
    return list(zip(measured().programs, traces, strict=True))


# --- on the CPU -------------------------------------------------------------------------------------------------------


def test_every_op_is_on_the_lane_of_the_host_once_and_in_order() -> None:
    for program, trace in both():
        assert program.lanes == (Lane("CPU", "cpu"),)
        assert [program.values[at - 1] for at in program.value] == [node.name for node in trace.ops]
        assert [program.names[at] for at in program.name] == [op_name(n).removeprefix("aten.") for n in trace.ops]


def test_events_follow_one_another_inside_the_span() -> None:
    for program, _ in both():
        start, end = program.start_us, program.start_us + program.duration_us
        assert start[0] == 0
        assert (program.duration_us >= 0).all()
        # Half a microsecond: durations are 32-bit numbers.
        assert (start[1:] >= end[:-1] - 0.5).all()
        assert 0 < end.max() == pytest.approx(program.span_us)


def test_columns_have_the_types_of_the_wire_format() -> None:
    program = measured().programs[1]
    columns = (program.start_us, program.duration_us, program.name, program.value, program.lane)
    assert [column.dtype.str for column in columns] == ["<f8", "<f4", "<u4", "<u4", "<u2"]
    assert {len(column) for column in columns} == {len(program.values)}


def test_ops_that_do_work_have_times_and_others_have_none() -> None:
    for program, trace in both():
        assert program.op_us.keys() == {node.name for node in trace.ops if does_work(node)}
        assert 0 < sum(program.op_us.values()) <= program.span_us


def test_the_programs_are_the_captured_one_and_the_variant() -> None:
    found = measured()
    assert [(p.label, p.config) for p in found.programs] == [("captured", Config.off()), ("optimised", Config())]
    assert found.provenance == f"{found.device}, op by op, the middle of 3 profiled replays"
    assert found.device.startswith("measured on CPU")


def test_a_baseline_may_be_any_variant() -> None:
    c = captured()
    found = timeline(c.optimize(), baseline=c.optimize(cat=False))
    assert [(p.label, p.config.cat) for p in found.programs] == [("baseline", False), ("optimised", True)]


def test_op_times_are_those_of_the_program_and_say_so() -> None:
    times = measured().op_times(1)
    assert times.provenance.startswith("measured on ")
    assert times.provenance.endswith("op by op, the middle of 3 profiled replays")
    assert times.us == measured().programs[1].op_us


@pytest.mark.parametrize("name", ["gpt", "rope", "conv_batchnorm", "data_dependent_branch"])
def test_what_is_profiled_computes_what_the_trace_does(name: str) -> None:
    variant = captured(name).optimize()
    program = variant.compile()
    inputs = [tensor.detach() for tensor in captured(name).example_inputs]
    program.restarts(captured(name).rng_states)()
    with torch.no_grad():
        found = stepwise(variant.trace, vars(program.module))(*inputs)
    expected = tracefuse.replay(variant.trace, inputs, captured(name).rng_states)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_cell_that_is_no_step_is_refused() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tracefuse.capture() as c:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        after = model(torch.ones(2, 4))
    assert after.requires_grad
    with pytest.raises(ExportError, match=r"the program goes on .* with what the optimizer changed"):
        timeline(c.optimize())


def test_the_same_random_numbers_are_drawn_each_time_and_the_next_ones_are_left_alone() -> None:
    variant = captured().optimize()
    run = stepwise_replay(variant)
    assert all(map(torch.equal, run(), run()))
    after: list[torch.Tensor] = []
    for act in (lambda: None, lambda: timeline(variant)):
        torch.manual_seed(1)
        act()
        after.append(torch.rand(1))
    assert torch.equal(*after)


def test_only_the_second_run_is_recorded() -> None:
    runs = []

    def run() -> None:
        with marked(f"run {len(runs)}"):
            runs.append(torch.ones(3).exp())

    found = [event.mark for event in recorded(run) if event.mark]
    assert (len(runs), found) == (2, ["run 1"])


# --- what a GPU reports -----------------------------------------------------------------------------------------------


def on_host(name: str, start_us: int, us: int, correlation: int = 0, operator: int = 0) -> Event:
    return Event(name, False, 7, 7, 1000 * start_us, 1000 * us, correlation, operator)


def on_gpu(name: str, start_us: int, us: int, correlation: int, operator: int = 0, stream: int = 13) -> Event:
    return Event(name, True, 0, stream, 1000 * start_us, 1000 * us, correlation, operator)


@cache
def chain() -> tracefuse.Trace:
    """exp, sin, cos and a copy, as on a GPU: what runs there has no time of its own on the host."""
    return on_cuda(tracefuse.capture(lambda x: x.exp().sin().cos().clone(), torch.ones(4)).trace)


EVENTS = [
    on_host(f"{MARK}exp", 100, 10, correlation=1),
    on_host("aten::exp", 101, 8, correlation=2),
    on_host("cudaLaunchKernel", 102, 5, correlation=2, operator=2),
    # Launched by no operator, as Triton does.
    on_host(f"{MARK}sin", 120, 10, correlation=3),
    on_host("cuLaunchKernelEx", 122, 5, correlation=9),
    on_host("cuLaunchKernelEx", 124, 5, correlation=10),
    on_host(f"{MARK}cos", 140, 2, correlation=4),
    # Operators and calls are numbered apart.
    on_host("aten::cos", 140, 1, correlation=9),
    on_host(f"{MARK}result", 142, 8, correlation=5),
    on_host("cudaMemcpyAsync", 143, 5, correlation=11, operator=5),
    on_gpu("exp_kernel", 110, 20, correlation=2, operator=2),
    on_gpu("sin_kernel", 131, 7, correlation=9),
    on_gpu("sin_finish", 139, 2, correlation=10),
    on_gpu("Memcpy DtoD (Device -> Device)", 145, 3, correlation=11, operator=5, stream=14),
    on_gpu("Memset (Device)", 150, 1, correlation=12),
]


def program_of(events: list[Event]) -> ProgramTimeline:
    return attributed("optimised", Config(), chain(), events)


def shown(program: ProgramTimeline, is_idle: bool = False) -> list[tuple[str, str, str, float, float]]:
    """(lane, name, value, start, duration) of each event, or of each gap."""
    named = ("", *program.values)
    rows = zip(program.lane, program.name, program.value, program.start_us, program.duration_us, strict=True)
    found = [(program.lanes[a], program.names[b], named[c], float(d), float(e)) for a, b, c, d, e in rows]
    return [(lane.name, *rest) for lane, *rest in found if (lane.kind == "idle") == is_idle]


def test_what_the_gpu_did_belongs_to_the_op_that_asked_for_it() -> None:
    assert shown(program_of(EVENTS)) == [
        ("CPU", "exp.default", "exp", 0, 10),
        ("stream 13", "exp_kernel", "exp", 10, 20),
        ("CPU", "sin.default", "sin", 20, 10),
        ("stream 13", "sin_kernel", "sin", 31, 7),
        ("stream 13", "sin_finish", "sin", 39, 2),
        ("CPU", "cos.default", "cos", 40, 2),
        ("CPU", "clone.default", "result", 42, 8),
        ("stream 14 copies", "Memcpy DtoD (Device -> Device)", "result", 45, 3),
        ("stream 13", "Memset (Device)", "", 50, 1),
    ]


def test_the_gpu_is_idle_in_between_with_a_cause_and_the_op_that_waits() -> None:
    assert shown(program_of(EVENTS), is_idle=True) == [
        ("idle", "start of the window", "exp", 0, 10),
        ("idle", "launch latency", "sin", 30, 1),
        ("idle", "launch latency", "sin", 38, 1),
        ("idle", "host-bound launch", "result", 41, 4),
        ("idle", "unknown", "", 48, 2),
    ]


def test_the_delay_is_from_the_launch_to_the_start() -> None:
    program = program_of(EVENTS)
    named = dict(zip((program.names[at] for at in program.name), program.delay_us.tolist(), strict=True))
    assert (named["exp_kernel"], named["sin_kernel"], named["Memcpy DtoD (Device -> Device)"]) == (8, 9, 2)
    assert math.isnan(named["exp.default"])


def test_a_call_whose_clock_is_off_is_known_by_its_operator() -> None:
    early = [e._replace(start_ns=e.start_ns - 6000) if e.name == "cudaLaunchKernel" else e for e in EVENTS]
    assert program_of(early).op_us == program_of(EVENTS).op_us


def test_a_launch_between_two_ops_is_nobodys() -> None:
    launched = on_host("cuLaunchKernel", 115, 3, correlation=20), on_gpu("between", 131, 2, correlation=20)
    assert ("stream 13", "between", "", 31, 2) in shown(program_of([*EVENTS, *launched]))


def test_a_copy_to_the_host_takes_as_long_as_the_copy_and_what_the_host_computes_its_range() -> None:
    trace = tracefuse.capture(lambda x: x.exp().sin(), torch.ones(4)).trace
    copy, product = (node.name for node in trace.ops)
    events = [
        on_host(f"{MARK}{copy}", 0, 50, correlation=1),
        on_host("cudaMemcpyAsync", 10, 30, correlation=2, operator=1),
        on_gpu("Memcpy DtoH (Device -> Pageable)", 12, 20, correlation=2, operator=1),
        on_host(f"{MARK}{product}", 60, 7, correlation=3),
    ]
    assert attributed("optimised", Config(), trace, events).op_us == {copy: 20, product: 7}


def test_an_ops_time_is_the_sum_of_what_it_ran_on_the_gpu() -> None:
    assert program_of(EVENTS).op_us == {"exp": 20, "sin": 9, "result": 3}


def test_copies_that_lay_out_operands_are_told_apart_within_an_op() -> None:
    copy = (
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda("
        "at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda()#12}::operator()() const::"
        "{lambda(c10::BFloat16)#1}>(at::TensorIteratorBase&, {lambda(c10::BFloat16)#1} const&)::{lambda(int)#1}>"
    )
    first = [event._replace(name=copy) if event.name == "sin_kernel" else event for event in EVENTS]
    assert program_of(first).laid_out_us == pytest.approx({"sin": 7})
    assert replace(program_of(first), op_us={"sin": 18.0}).laid_out_us == pytest.approx({"sin": 14}), "the middle time"
    alone = [event._replace(name=copy) if event.name == "exp_kernel" else event for event in EVENTS]
    assert program_of(alone).laid_out_us == {}, "an op that copies and does nothing else"
    assert program_of(EVENTS).laid_out_us == program_of([]).laid_out_us == {}
    times = Timeline("measured on a GPU", (program_of(first),)).op_times(0)
    assert (times.us["sin"], times.laid_out_us) == (9, pytest.approx({"sin": 7}))


def test_streams_come_before_copies_and_the_host_is_last() -> None:
    assert program_of(EVENTS).lanes == (
        Lane("stream 13", "gpu"),
        Lane("stream 14 copies", "copy"),
        Lane("idle", "idle"),
        Lane("CPU", "cpu"),
    )


def test_several_gpus_are_told_apart() -> None:
    other = Event("sin_kernel", True, 1, 13, 131_000, 7000, 9, 0)
    names = [lane.name for lane in program_of([*EVENTS, other]).lanes]
    streams = ["GPU 0 stream 13", "GPU 0 stream 14 copies", "GPU 1 stream 13"]
    assert names == [*streams, "GPU 0 idle", "GPU 1 idle", "CPU"]


def test_a_record_that_nothing_claims_is_kept_without_a_value() -> None:
    stray = on_gpu("stray", 160, 4, correlation=77, operator=78)
    program = program_of([*EVENTS, stray])
    assert shown(program)[-1] == ("stream 13", "stray", "", 60, 4)
    assert sum(program.op_us.values()) == 32


def test_launches_and_records_are_reconciled() -> None:
    complete, torn = program_of(EVENTS), program_of([e for e in EVENTS if e.name != "sin_kernel"])
    assert (complete.launches, complete.records, complete.is_complete) == (3, 3, True)
    assert (torn.launches, torn.records, torn.is_complete) == (3, 2, False)
    assert "incomplete" not in Timeline("measured on a GPU", (complete,)).provenance
    assert Timeline("measured on a GPU", (torn,)).provenance.endswith(
        "; optimised: 3 launches, 2 kernel records, so that times are incomplete"
    )


def test_what_ran_on_a_gpu_was_measured_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the inputs lie on: a cell may bring them there itself."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU of {device}")
    on_both, on_host_alone = program_of(EVENTS), program_of([e for e in EVENTS if not e.on_gpu])
    assert measured_on([on_host_alone, on_both]) == "measured on GPU of cuda"
    assert measured_on([on_host_alone]).startswith("measured on CPU")


def test_without_events_a_timeline_is_empty() -> None:
    program = program_of([])
    assert (program.span_us, program.lanes, len(program.start_us), program.op_us) == (0.0, (), 0, {})


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt", "rope"])
def test_on_a_gpu_every_record_belongs_to_an_op(name: str) -> None:
    capture = tracefuse.capture(programs.PROGRAMS[name](torch.float32, "cuda").run)
    variant = capture.optimize()
    for program, one in zip(timeline(variant).programs, (variant.baseline, variant), strict=True):
        assert program.is_complete
        assert program.records > 0
        kinds = [program.lanes[at].kind for at in program.lane]
        assert kinds.count("cpu") == len(one.trace.ops)
        assert all(number > 0 for number, kind in zip(program.value, kinds, strict=True) if kind != "idle")
        launched = {node.name for node in one.trace.ops if node.target in one.kernels}
        assert all(program.op_us[name] > 0 for name in launched)


@pytest.mark.gpu
def test_on_a_gpu_every_launch_is_recorded() -> None:
    x = torch.ones(1 << 20, device="cuda")
    found = recorded(lambda: [x.exp().sin() for _ in range(5)])
    kernels = [event for event in found if event.on_gpu and not event.name.startswith(NOT_KERNELS)]
    launches = [event for event in found if event.is_cuda_call and event.name.startswith(LAUNCHES)]
    assert len(kernels) == len(launches) == 10


@pytest.mark.gpu
def test_a_convolution_lays_out_a_gradient_that_lies_otherwise() -> None:
    layout = torch.channels_last
    x = torch.randn(8, 64, 56, 56, device="cuda", dtype=torch.bfloat16).to(memory_format=layout).requires_grad_()
    weight = torch.randn(64, 64, 3, 3, device="cuda", dtype=torch.bfloat16).to(memory_format=layout).requires_grad_()
    gradient = torch.randn(8, 64, 56, 56, device="cuda", dtype=torch.bfloat16)
    for given, is_laid_out in ((gradient, True), (gradient.to(memory_format=layout), False)):
        capture = tracefuse.capture(lambda given=given: torch.conv2d(x, weight, padding=1).backward(given))
        program = timeline(capture.variant(Config.off())).programs[0]
        (op,) = [n for n in capture.trace.ops if n.target is torch.ops.aten.convolution_backward.default]
        assert (0 < program.laid_out_us.get(op.name, 0.0) < program.op_us[op.name]) == is_laid_out


@pytest.mark.gpu
def test_a_copy_to_the_host_is_on_a_lane_of_copies() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x.exp().cpu() * 2).sum()

    x = torch.ones(1 << 20, device="cuda")
    program = timeline(tracefuse.capture(fn, x).optimize(fuse=False)).programs[1]
    (copy,) = [at for at, lane in enumerate(program.lane) if program.lanes[lane].kind == "copy"]
    assert "DtoH" in program.names[program.name[copy]]
    op = program.values[program.value[copy] - 1]
    assert "to_copy" in op
    assert program.op_us[op] > 0
    # The product is computed by the host.
    assert np.isfinite(list(program.op_us.values())).all()
    assert any(name.startswith("mul") and us > 0 for name, us in program.op_us.items())


def test_a_profiler_prints_nothing() -> None:
    """What a library writes to stderr appears under the user's cell."""
    code = (
        "import torch, tracefuse; x = torch.ones(3, requires_grad=True); "
        "from tracefuse.config import Config; "
        "f = lambda: x.exp().sum().backward(); c = tracefuse.capture(f); print(c.optimize().timeline().provenance)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "profiled replays" in done.stdout
    assert done.stderr == ""


def test_layers_and_findings_are_measured_once_a_timeline_was_taken() -> None:
    torch.manual_seed(0)
    model, data = GPT(layers=1, width=32, heads=2, vocab=61, length=16), batch(61, 2, 12)
    variant = tracefuse.capture(lambda: model(*data).backward()).optimize()
    assert variant.layers().provenance.startswith("modelled")
    variant.timeline()
    assert variant.op_times.provenance.startswith("measured on CPU")
    assert variant.layers().provenance.startswith("measured on CPU")
    other = variant.with_config(cat=False)
    assert other.op_times.provenance.startswith("modelled")
    assert other.layers().provenance.startswith("modelled")
