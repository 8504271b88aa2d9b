"""One clock: what was measured stands, what changed is calibrated by it, and parts sum to steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import programs
import pytest
import torch
from torch import Tensor

import tracefuse
from tracefuse.measure import predicted
from tracefuse.measure.op_times import OpTimes, Transfer, modelled
from tracefuse.measure.predicted import (
    MATMUL,
    OPERAND,
    VIEW,
    Anchor,
    Forecast,
    Predictor,
    by_traffic,
    fitted,
    host_launches,
    keys,
    traffic,
    typical_error,
    with_waits,
)
from tracefuse.optimizers.costs.cost import Peaks
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.ops import does_work
from tracefuse.optimizers.trace import Trace, call
from tracefuse.variant import Variant

PEAKS = Peaks(1e12, 1e14, "test")
DEVICE = "a device"


@cache
def variant() -> Variant:
    return tracefuse.capture(programs.PROGRAMS["gpt"](torch.float32).run).optimize()


def profiled(trace: Trace, factor: float = 3.0, overhead_us: float = 2.0) -> OpTimes:
    """As if each op took so many times its roofline and so much more."""
    us = {name: overhead_us + factor * us for name, us in modelled(trace, PEAKS).us.items()}
    return OpTimes(us, f"measured on {DEVICE}, op by op", device=DEVICE)


def anchor(of: Variant, step_us: float | None = None) -> Anchor:
    return Anchor(of.whole, profiled(of.whole), step_us)


def predictor(*anchors: Anchor, runs_triton: bool = True) -> Predictor:
    return Predictor(anchors, PEAKS, runs_triton)


# --- what was measured ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_us", [None, 1e4])
def test_the_prediction_of_an_unchanged_configuration_is_its_measurement(step_us: float | None) -> None:
    base = variant().baseline
    times = predictor(anchor(base, step_us))(base.whole)
    assert (times.kind, times.predicted) == ("measured", frozenset())
    expected = step_us or profiled(base.whole).step_us
    assert times.step_us == pytest.approx(expected, rel=1e-12)


def test_a_measured_configuration_has_its_own_step_whatever_else_was_measured() -> None:
    v = variant()
    found = predictor(anchor(v.baseline, 5e3), anchor(v, 3e3))
    assert [found(one.whole).step_us for one in (v.baseline, v)] == pytest.approx([5e3, 3e3], rel=1e-12)


def test_another_configuration_of_the_same_program_is_measured_too() -> None:
    v = variant().with_config(optimizer_step=False)
    assert v.config != variant().config
    assert predictor(anchor(variant()))(v.whole).kind == "measured"


def test_ops_that_the_passes_left_keep_their_measured_times() -> None:
    v = variant()
    base = anchor(v.baseline, 5e3)
    times = predictor(base)(v.whole)
    kept = {name for name, _ in keys(v.whole).items() & keys(v.baseline.whole).items()}
    assert kept
    assert all(times.us[name] == base.us[name] for name in kept if name in times.us)
    assert times.predicted == set(times.us) - kept
    assert (times.kind, times.device) == ("predicted", DEVICE)


@pytest.mark.parametrize("step_us", [None, 1e4, 10.0])
def test_what_lays_out_operands_is_the_same_part_of_an_op_wherever_the_op_is_told(step_us: float | None) -> None:
    v = variant()
    base, times = v.baseline.whole, profiled(v.baseline.whole)
    halves = {name: us / 2 for name, us in times.us.items()}
    known = predictor(Anchor(base, replace(times, laid_out_us=halves), step_us))
    for of in (v.baseline, v):
        told = known(of.whole)
        kept = {name for name, _ in keys(of.whole).items() & keys(base).items()} & told.us.keys()
        assert kept == told.laid_out_us.keys()
        busy_us = known.anchors[0].busy_us
        assert all(told.laid_out_us[name] == pytest.approx(busy_us[name] / 2) for name in kept)


def test_ops_that_were_not_profiled_are_scaled_to_a_longer_step() -> None:
    """A model says little of how long they take, and all of how they compare."""
    base = variant().baseline
    times = profiled(base.whole)
    known = Anchor(base.whole, replace(times, predicted=frozenset(times.us)), 3 * times.step_us)
    assert all(known.us[name] == pytest.approx(3 * us) for name, us in times.us.items())


def test_a_device_that_is_behind_hides_what_the_host_does() -> None:
    v = variant()
    busy = profiled(v.whole)
    ahead = Anchor(v.whole, busy, busy.step_us, host_us=0.01)
    assert list(ahead.us.values()) == pytest.approx(list(busy.us.values()), rel=1e-3)


def test_a_device_that_is_ahead_waits_for_each_launch() -> None:
    """A host that takes ten times as long as the kernels: the step has its launches, and at the end the last kernel."""
    base, v = variant().baseline, variant()
    times = profiled(base.whole)
    host_us = 10 * times.step_us
    last_us = [*times.us.values()][-1]
    behind = Anchor(base.whole, times, host_us + last_us, host_us)
    assert sum(behind.us.values()) == pytest.approx(host_us + last_us)
    launches, fewer = (sum(host_launches(one).values()) for one in (base.whole, v.whole))
    assert launches > 1.2 * fewer
    assert predictor(behind)(v.whole).step_us == pytest.approx(host_us * fewer / launches, rel=0.02)


@pytest.mark.parametrize(
    ("busy", "waits"), [([3, 3, 3, 3], [4, 3, 3, 3]), ([1, 9, 1, 1], [2, 9, 1, 1]), ([1, 1, 1, 1], [2, 1, 1, 1])]
)
def test_a_kernel_begins_when_it_was_launched_and_the_one_before_has_ended(busy: list[int], waits: list[int]) -> None:
    """One launch takes 1 µs; the host is ahead of all but the first kernel."""
    trace = tracefuse.capture(lambda x: ((x.sin().cos() * x).exp(),), torch.randn(3, 3)).trace
    names = [node.name for node in trace.ops]
    found = with_waits(trace, dict(zip(names, map(float, busy), strict=True)), 1.0)
    assert list(found.values()) == waits
    assert with_waits(trace, dict.fromkeys(names, 1.0), 5.0) == dict(zip(names, (6, 5, 5, 5), strict=True))


def test_a_host_that_may_have_waited_for_room_in_the_queue_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    v = variant()
    busy = profiled(v.whole)
    monkeypatch.setattr(predicted, "QUEUE", 10)
    assert Anchor(v.whole, busy, 1.05 * busy.step_us, busy.step_us).launch_us == 0
    assert Anchor(v.whole, busy, 2.0 * busy.step_us, 2 * busy.step_us).launch_us > 0


def test_of_a_host_that_waits_in_the_step_no_launch_is_known() -> None:
    """What blocks it, or a size that it must read, is in its time."""
    trace = tracefuse.capture(lambda x: (x.sin().cos().exp(),), torch.randn(3, 3)).trace
    sin, cos, exp = (node.name for node in trace.ops)
    busy = OpTimes({sin: 30.0, cos: 900.0, exp: 50.0}, f"measured on {DEVICE}", device=DEVICE)
    ahead = Anchor(trace, busy, 1000.0, 60.0)
    assert ahead.launch_us == 20
    assert ahead.us == {sin: 50, cos: 900, exp: 50}
    copied = replace(busy, transfers={exp: Transfer(50.0, 40.0, 5.0, 5.0, "pageable", to_host=True)})
    waiting = Anchor(trace, copied, 1000.0, 1000.0)
    assert waiting.launch_us == 0
    assert waiting.us == pytest.approx({name: us * 1000 / 980 for name, us in busy.us.items()})
    read = tracefuse.capture(lambda x: (x.sin().nonzero().sum(),), torch.randn(3, 3)).trace
    assert Anchor(read, OpTimes(dict.fromkeys([n.name for n in read.ops], 1.0), "measured"), 9.0, 9.0).launch_us == 0


def test_a_program_without_work_takes_no_time() -> None:
    trace = tracefuse.capture(lambda x: (x.view(-1),), torch.randn(3, 3)).trace
    assert Anchor(trace, OpTimes({}, f"measured on {DEVICE}"), 5.0, 3.0).op_times.step_us == 0


def test_of_two_programs_that_differ_in_views_each_is_itself() -> None:
    x, w = torch.randn(3, 3), torch.randn(3, 3)
    viewed = tracefuse.capture(lambda x, w: ((x @ w).view(-1).view(3, 3) @ w,), x, w).trace
    plain = tracefuse.capture(lambda x, w: ((x @ w) @ w,), x, w).trace

    def of(trace: Trace, step_us: float) -> Anchor:
        times = OpTimes({n.name: 2.0 for n in trace.ops if does_work(n)}, f"measured on {DEVICE}", device=DEVICE)
        return Anchor(trace, times, step_us, step_us)

    for order in (1, -1):
        known = predictor(*[of(viewed, 20.0), of(plain, 10.0)][::order])
        found = [known(one) for one in (viewed, plain)]
        assert [(one.kind, round(one.step_us, 9)) for one in found] == [("measured", 20.0), ("measured", 10.0)]


def test_an_operator_that_calls_many_takes_the_host_as_many_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tracefuse.capture(lambda x: (x.sin() @ x.t(),), torch.randn(3, 3)).trace
    assert list(host_launches(trace).values()) == [1, MATMUL + VIEW]
    monkeypatch.setitem(predicted.CALLED, torch.ops.aten.mm.default, 20)
    assert list(host_launches(trace).values()) == [1, 20 + VIEW]


def test_a_kernel_takes_the_host_longer_the_more_operands_it_has() -> None:
    x = torch.randn(3, 3)
    for step, operands in ((lambda x, y: ((x.sin() * y).exp(),), 2), (lambda x, y: ((x.sin() * x).exp() + 0 * x,), 1)):
        fused = tracefuse.capture(step, x, x.clone()).optimize().whole
        assert list(host_launches(fused).values()) == [1 + OPERAND * operands]


def test_a_kernel_that_reads_and_writes_what_a_measured_one_does_takes_as_long() -> None:
    """A slow kernel of another program is told from its fast neighbour."""
    given = torch.randn(64, 64), torch.randn(64, 256)

    def programs_of(first: Callable[[Tensor], Tensor]) -> Trace:
        return tracefuse.capture(lambda x, w: (((first(x) + 1) @ w).cos().exp(),), *given).optimize().whole

    def kernels_of(trace: Trace) -> list[str]:
        return [node.name for node in trace.ops if isinstance(node.target, Kernel)]

    known, other = programs_of(torch.sin), programs_of(torch.tanh)
    (slow, fast), (like_slow, _) = kernels_of(known), kernels_of(other)
    model = modelled(known, PEAKS).us
    us = {**model, slow: 10 * model[slow]}
    told = predictor(Anchor(known, OpTimes(us, f"measured on {DEVICE}", device=DEVICE)))(other)
    assert model[slow] != model[fast]
    assert told.us[like_slow] == pytest.approx(us[slow])
    assert like_slow in told.predicted


def test_a_kernel_that_reads_a_part_tells_nothing_of_one_that_reads_the_whole() -> None:
    """Both take the same operand and write the same."""
    x = torch.randn(4096, 1024)
    part, whole = (
        tracefuse.capture(lambda x, of=of: (of(x) * 2 + 1,), x).optimize().whole
        for of in (lambda x: x[:1].sin(), lambda x: x.sin().mean(0, keepdim=True))
    )
    (one,), (other,) = ([n for n in trace.ops if isinstance(n.target, Kernel)] for trace in (part, whole))
    assert traffic(one)[:2] == traffic(other)[:2]
    times = OpTimes({one.name: 2.0}, f"measured on {DEVICE}", device=DEVICE)
    assert traffic(other) not in by_traffic([Anchor(part, times)])


def test_a_view_more_costs_a_share_of_a_launch_where_the_step_waits_for_the_host() -> None:
    v = variant()
    busy = profiled(v.whole)
    slow_us = 10 * busy.step_us
    waiting, ahead = predictor(Anchor(v.whole, busy, slow_us, slow_us)), predictor(Anchor(v.whole, busy, slow_us, 1.0))
    trace = v.whole.copy()
    op = next(node for node in trace.ops if does_work(node) and node.all_input_nodes)
    with trace.graph.inserting_before(op):
        operand = op.all_input_nodes[0]
        op.replace_input_with(operand, call(op, torch.ops.aten.alias.default, operand))
    assert keys(trace) == keys(v.whole)
    times, known = waiting(trace), waiting.anchors[0]
    assert known.launch_us > 0
    assert times.us[op.name] == pytest.approx(known.us[op.name] + VIEW * known.launch_us)
    assert times.predicted == {op.name}
    assert ahead(trace).us == pytest.approx(ahead.anchors[0].us)


def test_a_step_shorter_than_its_profile_scales_its_ops() -> None:
    base = variant().baseline
    times = profiled(base.whole)
    known = anchor(base, times.step_us / 2)
    assert all(known.us[name] == pytest.approx(us / 2) for name, us in times.us.items())
    assert known.op_times.provenance.endswith("scaled to the measured step")


# --- what changed -----------------------------------------------------------------------------------------------------


def test_an_op_of_a_known_key_takes_what_that_takes_in_the_mean() -> None:
    v = variant()
    base = anchor(v.baseline)
    times = predictor(base)(v.with_config(fuse=False).whole)
    known = {name: key for name, key in keys(v.with_config(fuse=False).whole).items() if key in base.by_key}
    copies = [name for name in known if name not in base.us]
    assert copies, "remat computes some ops again, under names of their own"
    assert all(times.us.get(name, 0.0) == pytest.approx(base.by_key[known[name]]) for name in copies)


def test_a_new_kernel_is_modelled_and_calibrated() -> None:
    """Where every op takes 3 times its roofline and 2 µs, so does what nobody has measured."""
    v = variant()
    times = predictor(anchor(v.baseline))(v.whole)
    kernels = [node.name for node in v.whole.ops if isinstance(node.target, Kernel)]
    expected = profiled(v.whole).us
    assert [times.us[name] for name in kernels] == pytest.approx([expected[name] for name in kernels], rel=1e-3)


def test_two_kernels_tell_what_a_third_takes() -> None:
    """Each is near its roofline where the ops that they stand for are not."""
    x, w = torch.randn(2048, 2048), torch.randn(2048, 2048, requires_grad=True)
    v = tracefuse.capture(lambda: (x * w).sin().exp().square().sum().backward()).optimize()
    other = v.with_config(remat=None)
    anchors = (
        Anchor(v.baseline.whole, profiled(v.baseline.whole, 5.0, 0.0)),
        Anchor(v.whole, profiled(v.whole, 1.1, 0.0)),
    )
    kernels = [[n.name for n in one.whole.ops if isinstance(n.target, Kernel)] for one in (v, other)]
    assert len(kernels[0]) < 3
    times, expected = predictor(*anchors)(other.whole), profiled(other.whole, 1.1, 0.0)
    assert times.predicted >= set(kernels[1])
    assert [times.us[name] for name in kernels[1]] == pytest.approx([expected.us[name] for name in kernels[1]])


def test_a_device_without_triton_runs_the_ops_of_a_kernel() -> None:
    v = variant().with_config(decompose=False, remat=None)
    base = anchor(v.baseline)
    times = predictor(base, runs_triton=False)(v.whole)
    node = next(n for n in v.whole.ops if isinstance(n.target, Kernel))
    inside = [n for n in node.target.body.ops if does_work(n)]
    assert len(inside) > 1
    assert times.us[node.name] > profiled(v.whole).us[node.name]
    assert times.step_us == pytest.approx(profiled(v.baseline.whole).step_us, rel=0.05)


def test_of_two_anchors_the_one_most_alike_counts() -> None:
    v = variant()
    far, near = anchor(v.baseline, 5e3), anchor(v, 1e3)
    other = v.with_config(remat=None)
    names = keys(other.whole).items() & keys(v.whole).items()
    times = predictor(far, near)(other.whole)
    assert all(times.us[name] == near.us[name] for name, _ in names if name in near.us)


# --- arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("points", "at", "expected"),
    [
        ([], 7.0, 7.0),
        ([(1.0, 5.0), (2.0, 7.0), (10.0, 23.0)], 4.0, 11.0),
        ([(1.0, 2.0), (2.0, 4.0), (4.0, 8.0)], 3.0, 6.0),
        ([(0.0, 3.0), (0.0, 3.0), (0.0, 3.0)], 0.0, 3.0),
        ([(1.0, 4.0), (2.0, 3.0), (3.0, 2.0)], 9.0, 3.0),
    ],
)
def test_a_fit_has_an_overhead_and_a_rate_neither_below_zero(
    points: list[tuple[float, float]], at: float, expected: float
) -> None:
    fit = fitted(points)
    assert fit(at) == pytest.approx(expected)
    assert sum(fit(m) for m, _ in points) == pytest.approx(sum(t for _, t in points))


def test_the_record_says_how_far_predictions_were_off() -> None:
    one, other, third = Forecast(110, 100), Forecast(98, 100), Forecast(80, 100)
    assert one.error == pytest.approx(0.1)
    assert typical_error({}) is None
    assert typical_error({1: one, 2: other}) == pytest.approx(0.06)
    assert typical_error({1: one, 2: other, 3: third}) == pytest.approx(0.1)


def test_what_was_measured_of_ops_that_the_trace_does_not_have_is_no_ops_time() -> None:
    """A replay writes the update in place, with copies that no trace is priced with."""
    trace, times = variant().whole, profiled(variant().whole)
    more = replace(times, us={**times.us, "_foreach_copy__default": 5.0})
    found = predictor(Anchor(trace, more, 5e3))(trace)
    assert found.us.keys() == times.us.keys()
    assert found.step_us == pytest.approx(5e3, rel=1e-12)
