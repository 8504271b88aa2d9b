"""Findings: every planted cause is found with its name and its line, and a program without it has no such finding."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import cuda_traces
import programs
import pytest
import torch
from findings import case, found, known
from torch import Tensor, nn

import tracefuse
from tracefuse.config.configuration import Config
from tracefuse.diagnose.diagnose import DETECTORS, beside, diagnose
from tracefuse.diagnose.needless_work import concatenations
from tracefuse.findings.finding import in_brief
from tracefuse.findings.kinds import KINDS
from tracefuse.findings.order import below_text, in_order
from tracefuse.lint import spared
from tracefuse.lint.spared import one_by_one
from tracefuse.measure.op_times import OpTimes, Transfer, how_to_measure, modelled
from tracefuse.optimizers.costs.alignment import unaligned
from tracefuse.optimizers.liveness import peak_bytes
from tracefuse.optimizers.ops import op_name
from tracefuse.optimizers.remat.forecast import Forecast
from tracefuse.optimizers.trace import Trace
from tracefuse.widgets.payload.program import payload

MiB = 2**20


# --- whole steps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
def test_a_whole_step_has_findings(fused: bool) -> None:
    """Of an optimizer that is one op, with lists of lists of results."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    optimizer, x = torch.optim.AdamW(model.parameters(), fused=fused), torch.randn(512, 64)

    def step() -> None:
        model(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    c = tracefuse.capture(step)
    assert Forecast(c.trace).peak(frozenset()) == peak_bytes(c.trace)
    assert "unfused-pointwise" in {one.id for one in c.findings()}
    assert c.findings() == c.variant(Config.off()).findings()


# --- who finds what ---------------------------------------------------------------------------------------------------


def test_a_batch_of_nothing_takes_no_time_and_has_shares_of_nothing() -> None:
    x = torch.randn(0, 8, requires_grad=True)

    def step() -> None:
        joined = torch.cat([x, x * 2])
        ((joined @ x.t()).softmax(-1) @ x).sin().sum(1).backward(torch.empty(0))

    variant = tracefuse.capture(step).optimize()
    (joined,) = (one for one in variant.findings() if one.id == "cat-of-nothing")
    assert "a step, 0 %" in joined.worth
    assert "cat-of-nothing" in {one["id"] for one in payload(variant)["findings"]}


def test_every_kind_that_a_trace_shows_has_a_detector():
    made = {one for ids in DETECTORS.values() for one in ids}
    assert made == {one for one, kind in KINDS.items() if not kind.of_run}


@pytest.mark.parametrize("name", ["gpt", "autocast", "rope", "two_backwards"])
def test_what_passes_leave_is_told_as_if_all_detectors_had_looked(name):
    capture = tracefuse.capture(programs.PROGRAMS[name](torch.float32).run)
    variant = capture.optimize()
    ran, left = (diagnose(case(capture, trace)) for trace in (capture.trace, variant.trace))
    told = variant.findings(), beside(ran, left, variant.config, variant.passes)
    one, other = ({one.key: replace(one, launches=0.0, launches_of=0.0) for one in found} for found in told)
    assert one == other


# --- devices ----------------------------------------------------------------------------------------------------------


def leaf_on_the_cpu(count: int = MiB) -> tuple[tracefuse.Capture, Trace]:
    """`leaf.cuda()` and a backward, recorded as a cast; then every value is on the GPU but the leaf and its gradient."""
    input_ts = torch.randn(count, requires_grad=True)
    freqs = torch.randn(count, dtype=torch.float64)

    with tracefuse.capture() as c:
        moved = input_ts.double()
        out = (moved * freqs.cos()).sum()
        out.backward()
    assert input_ts.grad is not None
    return c, cuda_traces.with_leaf_on_the_cpu(c.trace, "input_ts")


def test_a_leaf_on_the_cpu_is_named_with_its_line_and_its_bytes() -> None:
    capture, trace = leaf_on_the_cpu()
    (finding,) = found("cpu-leaf", case(capture, trace))
    assert finding.severity == "high"
    assert "`input_ts`" in finding.title
    assert "from cuda:0 to the CPU" in finding.title
    assert ("bytes", "4 MiB") in finding.evidence
    assert any("device move, not a dtype cast" in figure for _, figure in finding.evidence)
    assert "moved = input_ts.double()" in finding.source
    assert "on the GPU" in finding.fix
    assert "3.23 ms" in finding.worth
    assert [bar.label for bar in finding.bars] == ["wait", "copy @ 1.3 GB/s"]
    assert all(bar.us > 0 and bar.provenance.startswith("modelled") for bar in finding.bars)
    assert "time: wait" in str(finding)
    assert ("forward", "moves `input_ts` from pageable memory") in finding.evidence
    assert [fix.kind for fix in finding.trials] == ["on device", "pinned gradient"]


def test_what_was_measured_of_the_copy_is_its_worth() -> None:
    capture, trace = leaf_on_the_cpu()
    of = case(capture, trace)
    (value,) = found("cpu-leaf", of)[0].values
    measured = replace(of, times=OpTimes({value: 500_000.0, "out": 7_000.0}, "measured on a test"))
    (finding,) = found("cpu-leaf", measured)
    assert finding.worth == "500 ms of 507 ms a step, 99 % (measured on a test)"


def test_the_bars_of_a_profiled_copy_are_its_parts_and_the_wait_is_not_worth_anything() -> None:
    capture, trace = leaf_on_the_cpu()
    of = case(capture, trace)
    (value,) = found("cpu-leaf", of)[0].values
    copy = Transfer(530_000, wait_us=4_000, copy_us=500_000, host_us=20_000, memory="pageable", to_host=True)
    times = OpTimes({value: copy.own_us, "out": 7_000.0}, "measured on a test", {value: copy})
    (finding,) = found("cpu-leaf", replace(of, times=times))
    bars = {bar.label: bar.us for bar in finding.bars}
    assert bars == {"wait": 4_000, "copy @ 0.00839 GB/s": 500_000, "host": 20_000, "other": 6_000}
    assert sum(bars.values()) == copy.event_us
    assert ("event", "530 ms on the host") in finding.evidence
    assert finding.worth.startswith("526 ms of 533 ms a step")


def test_pinned_inputs_are_told() -> None:
    capture, trace = leaf_on_the_cpu()
    (finding,) = found("moved-each-step", known(case(capture, trace), pinned=frozenset({"input_ts"})))
    assert ("forward", "moves `input_ts` from pinned memory") in finding.evidence
    assert [fix.kind for fix in finding.trials] == ["on device"]


def test_a_cast_is_no_device_move() -> None:
    assert not found("cpu-leaf", case(leaf_on_the_cpu()[0]))


def test_an_input_that_is_moved_each_step() -> None:
    capture, trace = leaf_on_the_cpu()
    (finding,) = found("moved-each-step", case(capture, trace))
    assert "8 MiB from cpu to cuda:0" in finding.title  # what arrives is float64


# --- needless work ----------------------------------------------------------------------------------------------------


def test_weights_that_are_cast_every_step() -> None:
    model, x = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), torch.randn(4, 256)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().sum()
        loss.backward()

    (finding,) = found("weights-cast-each-step", case(tracefuse.capture(step)))
    assert finding.severity == "high"
    assert "casts 4 parameters from float32 to bfloat16" in finding.title
    assert ("casts", "4 in the forward, 4 of gradients") in finding.evidence


def test_inputs_that_are_cast_are_no_weights() -> None:
    x = torch.randn(64, 64)
    assert not found("weights-cast-each-step", case(tracefuse.capture(lambda: x.bfloat16().sum())))


def test_a_concatenation_with_nothing() -> None:
    capture = tracefuse.capture(programs.rope_full(torch.float32).run)
    (finding,) = found("cat-of-nothing", case(capture))
    assert finding.changes == {"simplify": True, "cat": True}
    assert not found(finding.id, case(capture, capture.optimize(fuse=False).trace))


def test_gradients_concatenated_in_the_backward() -> None:
    capture = tracefuse.capture(programs.qkv_unbind(torch.float32).run)
    (finding,) = found("cat-in-backward", case(capture))
    names = {n.name: op_name(n) for n in capture.trace.ops}
    assert all(names[value].split(".")[1] in ("cat", "stack") for value in finding.values)


def test_pointwise_ops_one_by_one_until_they_are_fused() -> None:
    capture = tracefuse.capture(programs.rope(torch.float32).run)
    plain = capture.variant(Config.off())
    (finding,) = [f for f in plain.findings() if f.id == "unfused-pointwise"]
    assert finding.severity == "low"
    assert finding.changes == {"fuse": True}
    (mended,) = [f for f in capture.optimize().findings() if f.id == "unfused-pointwise"]
    assert mended == replace(finding, changes=None, mended=mended.mended, is_mended=True, mended_by=("fuse",))
    assert mended.mended == "mended by `fuse` in this configuration"


@pytest.mark.parametrize("make", [lambda: nn.GroupNorm(4, 32), lambda: nn.BatchNorm2d(32)], ids=["group", "batch"])
@pytest.mark.parametrize("of", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_norm_is_among_what_kernels_spare_by_the_passes_that_it_needs(
    make: Callable[[], nn.Module], of: torch.memory_format
) -> None:
    norm, x = make(), torch.randn(8, 32, 16, 16).to(memory_format=of).requires_grad_()
    capture = tracefuse.capture(lambda: norm(x * 2).relu().square().mean().backward())
    plain = case(capture)
    (finding,) = found("unfused-pointwise", plain)
    assert finding.changes == {"decompose": True, "fuse": True}
    assert finding.fix.endswith("`decompose` with `fuse` does")
    fused = capture.variant(Config.off().changed(**finding.changes))
    assert not [n for n in fused.trace.ops if "norm" in op_name(n)]
    # How many kernels the ops around a norm become is not worked out for a finding: one image more or less is read.
    assert finding.worth_us == pytest.approx(plain.step_us - case(capture, fused.trace).step_us, rel=0.25)


def test_norms_as_a_gpu_records_them_are_among_what_kernels_spare() -> None:
    def step(x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        forward = torch.ops.aten._batch_norm_with_update_functional(x, weight, weight, weight, weight, 0.1, 1e-5)
        y, mean, rstd, reserve, *_ = forward
        own = torch.ops.aten.threshold_backward(grad, y, 0)
        return torch.ops.aten.batch_norm_backward(
            own, x, weight, None, None, mean, rstd, True, 1e-5, [True] * 3, reserve
        )

    capture = tracefuse.capture(step, torch.randn(4, 6, 5, 7), torch.randn(4, 6, 5, 7), torch.ones(6))
    names = [op_name(node).split(".")[1] for node in one_by_one(case(capture))]
    assert names == ["_batch_norm_with_update_functional", "threshold_backward", "batch_norm_backward"]


@pytest.mark.parametrize(
    ("width", "dtype", "count"),
    [(1000, torch.bfloat16, 0), (1001, torch.bfloat16, 1), (1000, torch.float32, 0), (1001, torch.float32, 1)],
)
def test_a_head_of_an_odd_width(width: int, dtype: torch.dtype, count: int) -> None:
    x, w = torch.randn(256, 256, dtype=dtype), torch.randn(width, 256, dtype=dtype, requires_grad=True)
    findings = found("unaligned-matmul", case(tracefuse.capture(lambda: (x @ w.t()).sum().backward())))
    assert len(findings) == count
    assert all("1,001" in one.title and re.search("1,?024", one.fix) for one in findings)


def test_a_padded_head_is_no_finding_any_more_and_one_that_pad_left_says_so() -> None:
    x, w = (torch.randn(n, 1024, dtype=torch.bfloat16, requires_grad=True) for n in (2048, 5003))
    capture = tracefuse.capture(lambda: (x @ w.t()).sin().sum().backward())
    (off,) = [one for one in capture.optimize(pad=False).findings() if one.id == "unaligned-matmul"]
    (on,) = [one for one in capture.optimize().findings() if one.id == "unaligned-matmul"]
    assert (off.mended, off.changes) == ("", {"pad": True})
    assert (on.mended, on.is_mended, on.changes) == ("mended by `pad` in this configuration", True, None)
    small = tracefuse.capture(lambda: (x[:128] @ w[:1003].t()).sum().backward())
    v = small.optimize(fuse=False)
    (left,) = [one for one in v.findings() if one.id == "unaligned-matmul"]
    assert v.passes["pad"] is next(step for step in v.passes if step.name == "pad")
    reasons = [one.reason for one in v.passes["pad"].decisions if one.value in left.values]
    assert left.mended.startswith(f"`pad` is on; left: {left.left}")
    assert left.left_share is not None
    assert left.mended_by == ()  # it mends nothing of these
    assert left.fix.startswith(
        "pad it in the model, since the copies that `pad` would make take longer than they spare"
    )
    assert f" a step, {left.left_share:.0%}".replace("%", " %") in left.left
    assert all(f"{reason} (1 op)" in left.mended for reason in reasons)

    def both() -> None:
        wide = (x @ w.t()).sin().sum()
        narrow = (x[:128] @ w[:1003].t()).sum()
        (wide + narrow).backward()

    findings = tracefuse.capture(both).optimize().findings()
    padded, kept = (one for one in (*findings, *findings.below) if one.id == "unaligned-matmul")
    assert ("5,003" in padded.title, padded.is_mended) == (True, True)
    assert ("1,003" in kept.title, kept.mended_by) == (True, ())
    assert reasons
    assert left.mended.endswith('; `print(v.passes["pad"])` has all decisions')
    assert not left.is_mended
    with pytest.raises(KeyError, match="no pass 'fuse' ran: choose from simplify"):
        _ = v.passes["fuse"]


def test_memory_that_is_handed_out_runs_nothing_and_costs_nothing() -> None:
    x, out = torch.randn(64, 64, requires_grad=True), []

    def step() -> None:
        y = torch.empty_like(x).bernoulli_(0.5) * x
        out.append(y.exp())
        out[0].sum().backward()

    capture = tracefuse.capture(step)
    (memory,) = [n for n in capture.trace.ops if op_name(n).startswith("aten.empty_like")]
    assert memory.name not in modelled(capture.trace).us
    (finding,) = found("unfused-pointwise", case(capture))
    assert memory.name not in finding.values
    assert finding.title.startswith(f"{len(finding.values)} pointwise ops")


def test_what_is_modelled_says_in_the_end_what_measures_it() -> None:
    plain = tracefuse.capture(programs.rope(torch.float32).run).variant(Config.off())
    assert str(plain.findings()).endswith("v.timeline() measures op by op")
    assert str(plain.layers()).endswith("v.timeline() measures op by op")
    plain.timeline()
    assert "(measured on" in str(plain.findings())
    assert "v.timeline()" not in str(plain.findings()) + str(plain.layers())


def test_identical_layers_are_one_place_for_pointwise_ops() -> None:
    model, x = nn.Sequential(*(nn.Sequential(nn.GELU()) for _ in range(3))), torch.randn(256, 256)

    def step() -> None:
        torch.exp(model(x.requires_grad_())).sum().backward()

    (finding,) = found("unfused-pointwise", case(tracefuse.capture(step)))
    assert dict(finding.evidence)["most of it in"].startswith("*.0 (")


def test_an_odd_width_of_float32_counts_where_tensor_cores_multiply_it() -> None:
    x, w = torch.randn(256, 256), torch.randn(1001, 256, requires_grad=True)
    plain = case(tracefuse.capture(lambda: (x @ w.t()).sum().backward()))
    (remark,) = found("unaligned-matmul", plain)
    assert remark.title.endswith("1 matmul over an unaligned dimension of 1,001")
    assert (remark.severity, remark.changes, remark.worth_us) == ("low", None, None)
    assert remark.fix.startswith("pad it in the model before TF32 or half precision is switched on (it is that of `")
    assert "vocab_size" not in remark.fix
    assert "f32[256, 1001]: 1,024 wide" in remark.fix
    assert remark.worth == "nothing without TF32"
    (finding,) = found("unaligned-matmul", known(plain, environment={"tf32": "True"}))
    assert "1,001, which is no multiple of 4" in finding.title


@pytest.mark.parametrize("tf32", ["True", "False"])
def test_a_vocabulary_is_what_a_cross_entropy_is_taken_over_and_is_padded_as_pad_does(tf32: str) -> None:
    x, w = torch.randn(64, 32), torch.randn(50_257, 32, requires_grad=True)
    targets = torch.randint(0, 50_257, (64,))
    head = case(tracefuse.capture(lambda: nn.functional.cross_entropy((x @ w.t()).view(64, -1), targets).backward()))
    (finding,) = found("unaligned-matmul", known(head, environment={"tf32": tf32}))
    padded = max(max(unaligned(node) or (0,)) for node in head.trace.ops)
    assert f"a vocabulary: set vocab_size={padded};" in finding.fix
    assert dict(finding.evidence)["padded"] == f"{padded:,}"


@pytest.mark.parametrize("rows", [8, 13])
def test_an_odd_number_of_rows_leaves_them_aligned(rows: int) -> None:
    x = torch.randn(rows, 64, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(128, 64, dtype=torch.bfloat16, requires_grad=True)
    # A weighted sum, whose gradient has memory of its own: an expanded one has no rows.
    weights = torch.randn(rows, 128, dtype=torch.bfloat16)
    capture = tracefuse.capture(lambda: ((x @ w.t()) * weights).sum().backward())
    assert not found("unaligned-matmul", case(capture))


def test_small_findings_are_counted_and_told_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of a program, each below a hundredth of its step; what passes mend of them is said there too. Where the step waits
    for launches, they are told for those that they spare."""
    x, tables = torch.randn(512, 512, requires_grad=True), torch.arange(8.0)

    def step() -> None:
        table = (tables * 2).sin() + torch.arange(8.0).cos()
        (x @ x @ x @ x).sum().mul(table.sum()).backward()

    capture = tracefuse.capture(step)
    waits = {one.id: one for one in capture.optimize().findings()}
    monkeypatch.setattr("tracefuse.diagnose.diagnose.HOST_US", 0.0)
    found = tracefuse.capture(step).optimize().findings()
    assert found.below
    assert all(waits[one.id].launches >= 0.01 * waits[one.id].launches_of for one in found.below)
    assert str(found).endswith("; `print(v.findings().below)` has them")
    assert repr(found.below) == "\n\n".join(map(str, found.below))
    assert all(one.is_below and one.fix for one in found.below)


def test_a_step_that_its_kernels_take_longer_than_launches_is_not_bound_by_them() -> None:
    x = torch.randn(2048, 2048, requires_grad=True)
    found = tracefuse.capture(lambda: (x @ x @ x).sin().cos().sin().sum().backward()).variant(Config.off()).findings()
    assert found
    assert found.launching == ""


# --- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_findings_are_ordered_and_point_at_what_exists(name: str) -> None:
    capture = tracefuse.capture(programs.PROGRAMS[name](torch.float32).run)
    findings = diagnose(case(capture))
    assert list(findings) == in_order(findings, findings.launches if findings.launching else 0)
    names = {n.name for n in capture.trace.ops}
    for one in findings:
        assert set(one.values) <= names
        assert all((one.title, one.fix, one.worth))
        assert str(one).count("\n") >= 3
        assert 1 <= len(one.evidence) <= 4
        assert all(int(share) <= 100 for share in re.findall(r"(\d+) %", one.worth))


def test_findings_print_as_paragraphs_and_without_any_as_what_was_looked_for() -> None:
    capture = tracefuse.capture(programs.rope_full(torch.float32).run)
    found = capture.variant(Config.off()).findings()
    small = f"{below_text(found.below)}; `print(v.findings().below)` has them"
    last = [found.launching, how_to_measure(found.provenance), *[small] * bool(found.below)]
    assert str(found) == repr(found) == "\n\n".join([*(in_brief(str(one), found.provenance) for one in found), *last])
    assert re.match(
        r"The step is bound by launches: its [\d,]+ kernels are modelled to run [\d.]+ .s, ", found.launching
    )
    nothing = tracefuse.capture(lambda x: x @ x, torch.ones(64, 64)).findings()
    assert str(nothing).startswith("nothing found; looked for: A leaf lies on the CPU")


def test_what_a_fix_gains_by_kernels_is_worked_out_for_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    half = torch.randn(512, 64)
    looked_at = case(tracefuse.capture(lambda: torch.cat([half, half]).sin().exp().sum()))
    formed: list[object] = []
    monkeypatch.setattr(spared, "_spared_by_regions", lambda of: formed.append(of) or 3.0)
    (finding,) = [one for one in concatenations(looked_at) if one.id == "cat-in-forward"]
    assert formed == []
    assert finding.trials[0].worth_us == finding.trials[0].worth_us == 3.0
    assert formed == [looked_at]


def test_of_several_lines_the_one_that_moves_most_is_named() -> None:
    small, large, weight = torch.randn(4, 4), torch.randn(512, 64), nn.Linear(64, 64)

    def joined() -> Tensor:
        first = torch.cat([small, small]).sum()
        return torch.cat([large, large]).sum() + first  # the largest

    (finding,) = found("cat-in-forward", case(tracefuse.capture(joined)))
    assert finding.source.endswith("# the largest")

    def cast() -> Tensor:
        bias = weight.bias.bfloat16()
        return large.bfloat16() @ weight.weight.bfloat16() + bias  # the largest

    (finding,) = found("weights-cast-each-step", case(tracefuse.capture(lambda: cast().sum().backward())))
    assert finding.source.endswith("# the largest")
