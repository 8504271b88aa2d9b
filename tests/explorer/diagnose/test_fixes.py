"""Fixes: what each makes of a program, that the numbers stay, and what a replay of it says."""

from __future__ import annotations

import functools
from dataclasses import replace
from functools import cache
from pathlib import Path

import cuda_traces
import programs
import pytest
import torch
from torch import nn

import tracefuse
from tracefuse.config.configuration import Config
from tracefuse.diagnose.diagnose import diagnose
from tracefuse.diagnose.fixes import NO_GPU, fixed_trace, why_not
from tracefuse.errors import Cancelled, FixError
from tracefuse.findings.finding import Case, Finding, Fix
from tracefuse.measure.op_times import modelled
from tracefuse.optimizers.trace import Trace, val
from tracefuse.optimizers.verify import verify
from tracefuse.tables.folding import work
from tracefuse.timeline.measurements import Said

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")


def finding(name: str, found: tuple[Finding, ...]) -> Finding:
    (one,) = [one for one in found if one.id == name]
    return one


# --- a leaf on the CPU, without a GPU ---------------------------------------------------------------------------------


@cache
def rope_of_a_cpu_leaf() -> tuple[Trace, tuple[Finding, ...]]:
    input_ts = torch.randn(64, 2, 4, 32, requires_grad=True)
    freqs, tangent = torch.randn(64, 1, 1, 32, dtype=torch.float64), torch.randn(64, 2, 4, 32, dtype=torch.float64)
    with tracefuse.capture() as c:
        out = programs.apply_rope(input_ts.double(), freqs)
        out.backward(tangent)
    trace = cuda_traces.with_leaf_on_the_cpu(c.trace, "input_ts")
    return trace, diagnose(Case(c.program, trace, modelled(trace)))


def moves(trace: Trace) -> list[str]:
    return [n.name for n in trace.ops if work(n) == "device copy"]


def test_a_leaf_on_the_gpu_is_moved_neither_there_nor_back() -> None:
    trace, found = rope_of_a_cpu_leaf()
    text = trace.code
    one = finding("cpu-leaf", found)
    fixed = fixed_trace(trace, one.trials[0])
    verify(fixed)
    assert len(moves(trace)) == 2
    assert moves(fixed) == []
    gradient = fixed.returned[[out.kind for out in fixed.outputs].index("gradient")]
    assert val(gradient).device.type == val(fixed.node("input_ts")).device.type == "cuda"
    assert fixed.inputs == trace.inputs
    assert fixed.outputs == trace.outputs
    assert trace.code == text, "the captured trace was edited"


def test_a_leaf_on_the_gpu_is_worth_its_moves_and_those_of_its_gradient() -> None:
    _, found = rope_of_a_cpu_leaf()
    back, there = (finding(name, found) for name in ("cpu-leaf", "moved-each-step"))
    assert back.worth_us is not None
    assert there.worth_us is not None
    both = back.worth_us + there.worth_us
    assert back.trials[0].worth_us == there.trials[0].worth_us == pytest.approx(both)


def test_a_gradient_for_pinned_memory_is_copied_without_waiting() -> None:
    trace, found = rope_of_a_cpu_leaf()
    fixed = fixed_trace(trace, finding("cpu-leaf", found).trials[1])
    (copy,) = [n for n in fixed.ops if n.name == moves(trace)[1]]
    assert copy.kwargs["non_blocking"] is True
    assert moves(fixed) == moves(trace)


def test_pinned_inputs_are_moved_without_waiting() -> None:
    trace, found = rope_of_a_cpu_leaf()
    there, pinned = finding("moved-each-step", found).trials
    assert moves(fixed_trace(trace, there)) == []
    (copy,) = [n for n in fixed_trace(trace, pinned).ops if n.name == moves(trace)[0]]
    assert copy.kwargs["non_blocking"] is True


def test_gradients_that_the_cpu_adds_up_are_added_on_the_gpu() -> None:
    """Moved twice, copied back twice: what is float32 lies on the CPU, what is float64 on the GPU."""
    leaf = torch.ones(4, requires_grad=True)
    with tracefuse.capture() as c:
        out = leaf.double().sin().sum() + leaf.view(2, 2).double().exp().sum()
        out.backward()
    trace = cuda_traces.on_cuda(c.trace)
    for node in (n for n in trace.graph.nodes if n.op != "output" and val(n).dtype == torch.float32):
        node.meta["val"] = val(c.trace.node(node.name))
    for node in (n for n in trace.ops if n.target is torch.ops.aten._to_copy.default):
        device = "cpu" if val(node).dtype == torch.float32 else "cuda:0"
        node.kwargs = {**node.kwargs, "device": torch.device(device)}
    assert len(moves(trace)) == 4
    fixed = fixed_trace(trace, Fix("on device", "leaf on the GPU", ("leaf",)))
    assert moves(fixed) == []
    assert {val(n).device.type for n in fixed.graph.nodes if n.op != "output"} == {"cuda"}
    with pytest.raises(FixError, match="the CPU goes on computing"):
        fixed_trace(trace, Fix("pinned gradient", "its gradient in pinned memory", ("leaf",)))


def test_what_reads_the_leaf_on_the_cpu_beside_another_value_there_keeps_it_there() -> None:
    leaf, other = torch.ones(4, requires_grad=True), torch.ones(4)
    with tracefuse.capture() as c:
        out = leaf.double().sum() + (leaf * other).sum()
        out.backward()
    trace = c.trace.copy()
    move = next(n for n in trace.ops if n.target is torch.ops.aten._to_copy.default)
    move.kwargs = {**move.kwargs, "device": torch.device("cuda:0")}
    move.meta["val"] = val(cuda_traces.on_cuda(c.trace).node(move.name))
    with pytest.raises(FixError, match="cannot take such operands"):
        fixed_trace(trace, Fix("on device", "leaf on the GPU", ("leaf",)))


def test_a_fix_of_another_program_is_refused() -> None:
    capture = tracefuse.capture(programs.rope(torch.float32).run)
    with pytest.raises(FixError, match="no value 'nothing'"):
        capture.with_fix(Fix("on device", "`nothing` on the GPU", ("nothing",)))
    with pytest.raises(FixError, match="0 devices"):
        capture.with_fix(Fix("on device", "`t` on the GPU", ("t",)))


@needs_no_gpu
def test_what_needs_a_gpu_says_so_where_there_is_none() -> None:
    trace, found = rope_of_a_cpu_leaf()
    x = torch.randn(4, requires_grad=True)
    capture = tracefuse.capture(lambda: x.double().sum().backward())
    of_a_gpu = tracefuse.Capture(functools.partial(replace, capture.program, trace=trace))
    variant = of_a_gpu.variant(Config.off())
    assert why_not(of_a_gpu.program) == NO_GPU
    assert why_not(capture.program) == ""
    for fix in finding("cpu-leaf", found).trials:
        with pytest.raises(FixError, match="torch sees none"):
            variant.try_fix(fix)
    with pytest.raises(FixError, match="torch sees none"):
        of_a_gpu.with_fix(finding("cpu-leaf", found))


# --- weights ----------------------------------------------------------------------------------------------------------


@cache
def autocast() -> tracefuse.Capture:
    return tracefuse.capture(programs.autocast_step())


def casts(variant: tracefuse.Variant) -> Finding:
    return finding("weights-cast-each-step", variant.findings())


def test_weights_as_they_are_cast_give_the_same_numbers() -> None:
    plain = autocast().variant(Config.off())
    mended = autocast().with_fix(casts(plain))
    assert "weights-cast-each-step" not in {one.id for one in mended.variant(Config.off()).findings()}
    kinds = {i.source: t.dtype for i, t in zip(mended.trace.inputs, mended.example_inputs, strict=True)}
    assert kinds["0.weight"] == kinds["2.bias"] == torch.bfloat16
    assert kinds["1.weight"] == torch.float32, "layer norm is computed in full precision"
    for mine, theirs in zip(mended.replay(), autocast().replay(), strict=True):
        assert torch.equal(mine.double(), theirs.double())


@pytest.mark.parametrize("config", [Config.off(), Config()], ids=["captured", "all passes"])
def test_a_trial_times_both_programs_and_compares_their_numbers(config: Config) -> None:
    texts: list[str] = []
    variant = autocast().variant(config)
    one = casts(autocast().variant(Config.off()))
    trial = variant.try_fix(one, progress=lambda _, text: texts.append(text), budget_s=0.3)
    assert [p.name for p in trial.timing.programs] == ["as it is", "fixed"]
    assert trial.ratio.low <= trial.ratio.median <= trial.ratio.high
    assert trial.difference.gradients == 0
    assert f"{trial.before_ms.median:.3g} → {trial.after_ms.median:.3g} ms a step" in str(trial)
    assert "\n  measured on CPU" in str(trial)
    assert ("no Triton kernel runs" in trial.said) == bool(variant.kernels)
    assert trial.verdict in str(trial)
    assert "measured" in texts[-1]


def test_what_is_fixed_is_a_capture_like_any_other(tmp_path: Path) -> None:
    mended = autocast().with_fix(casts(autocast().variant(Config.off())))
    program = mended.optimize().compile()
    program().backward()
    weight = dict(zip((i.source for i in mended.trace.inputs), mended.live_inputs, strict=True))["0.weight"]
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
    assert mended.optimize().measure(budget_s=0.1).programs[1].difference is not None
    assert mended.variant(Config.off()) is not autocast().variant(Config.off())
    assert "2.weight', (64, 64), (64, 1), torch.bfloat16" in mended.optimize().export(tmp_path / "step.py").read_text()
    assert mended.explore().payload["blocked"] is None
    again = tracefuse.load(mended.save(tmp_path / "a.tfz", inputs=True))
    for mine, theirs in zip(again.replay(), mended.replay(), strict=True):
        assert torch.equal(mine, theirs)
    assert (mended.environment, mended.rng_states) == (autocast().environment, autocast().rng_states)


# --- passes -----------------------------------------------------------------------------------------------------------


def test_passes_are_tried_on_the_same_capture() -> None:
    capture = tracefuse.capture(programs.rope_full(torch.float32).run)
    plain = capture.variant(Config.off())
    one = finding("unfused-pointwise", plain.findings())
    assert capture.with_fix(one) is capture
    trial = plain.try_fix(one, budget_s=0.2)
    assert trial.difference.results < 1e-4
    assert capture.measurements.trials[plain.config, one.key, 0] == Said(trial.verdict, trial.said)
    with pytest.raises(FixError, match="changes nothing"):
        capture.variant(Config()).try_fix(one)


def test_a_finding_that_no_replay_can_test_says_so() -> None:
    one = Finding("anomaly-mode", "medium", "a mode was on", (), (), "", "switch it off", "unknown")
    with pytest.raises(FixError, match="switch it off"):
        tracefuse.capture(lambda: torch.ones(3).exp()).optimize().try_fix(one)


def test_a_trial_is_cancelled_before_it_has_anything_to_show() -> None:
    with pytest.raises(Cancelled):
        autocast().optimize().try_fix(casts(autocast().variant(Config.off())), is_cancelled=lambda: True)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.alone  # a verdict needs eight rounds within the budget
@pytest.mark.parametrize("choice", [0, 1])
def test_on_a_gpu_a_cpu_leaf_is_fixed_in_both_ways(choice: int) -> None:
    input_ts, freqs = torch.randn(256, 8, 8, 128, requires_grad=True), torch.randn(256, 1, 1, 128, device="cuda")
    tangent = torch.randn(256, 8, 8, 128, device="cuda")
    with tracefuse.capture() as c:
        out = programs.apply_rope(input_ts.cuda(), freqs)
        out.backward(tangent)
    variant = c.variant(Config.off())
    trial = variant.try_fix(finding("cpu-leaf", variant.findings()).trials[choice], budget_s=4)
    assert trial.difference.results == trial.difference.gradients == 0
    assert trial.verdict == "faster"


@pytest.mark.gpu
@pytest.mark.alone  # a verdict needs eight rounds within the budget
def test_on_a_gpu_an_input_in_pinned_memory_is_moved_faster() -> None:
    x, w = torch.randn(1 << 24), torch.randn(1 << 24, device="cuda", requires_grad=True)
    c = tracefuse.capture(lambda: (x.cuda() * w).sum().backward())
    variant = c.variant(Config.off())
    there, pinned = finding("pageable-copy", variant.findings()).trials
    assert variant.try_fix(pinned, budget_s=4).verdict == "faster"
    assert variant.try_fix(there, budget_s=2).difference.results == 0
    mended = c.with_fix(pinned)
    assert mended.program.pinned == {"x"}


def test_a_weight_that_the_program_returns_keeps_its_dtype() -> None:
    w, x = nn.Parameter(torch.randn(64, 64)), torch.randn(4, 64)

    def step(returned: bool) -> object:
        with torch.autocast("cpu", torch.bfloat16):
            loss = (x @ w).float().square().sum()
        loss.backward()
        return (loss, w.detach().t()) if returned else loss

    (of_weight,) = [i.name for i in tracefuse.capture(step, False).trace.inputs if i.trainable]
    plain, returning = (tracefuse.capture(step, returned).trace for returned in (False, True))
    assert val(fixed_trace(plain, Fix("as cast", "held as cast", (of_weight,))).node(of_weight)).dtype is torch.bfloat16
    with pytest.raises(FixError, match="uncast too"):
        fixed_trace(returning, Fix("as cast", "held as cast", (of_weight,)))


# --- casts, copies and values that need not be ------------------------------------------------------------------------


class Rounds(nn.Module):
    """A layer whose activation and norm are computed in float32, of a copy; `is_mended` computes in half precision."""

    def __init__(self, is_mended: bool) -> None:
        super().__init__()
        self.is_mended = is_mended
        self.read, self.norm, self.out = nn.Linear(256, 64), nn.LayerNorm(64), nn.Linear(64, 128)
        self.place = nn.Parameter(torch.randn(1, 4, 256))

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.is_mended:
            h = self.norm(torch.nn.functional.silu(self.read(x + self.place)))
            return torch.nn.functional.cross_entropy(self.out(h.transpose(0, 1)).flatten(0, 1), targets)
        h = torch.nn.functional.silu(self.read(x.clone() + self.place.repeat(len(x), 1, 1)).float()).to(x.dtype)
        h = self.norm(h.float()).to(x.dtype)
        return torch.nn.functional.cross_entropy(
            self.out(h.transpose(0, 1).contiguous()).flatten(0, 1).float(), targets
        )


@pytest.mark.parametrize(
    "name", ["cast-round-trip", "norm-in-float32", "logits-in-float32", "needless-copy", "repeat-not-expand"]
)
def test_without_what_need_not_be_the_numbers_are_those_of_the_step_written_well(name: str) -> None:
    torch.manual_seed(0)
    model, x = Rounds(is_mended=False).to(torch.bfloat16), torch.randn(8, 4, 256, dtype=torch.bfloat16)
    targets = torch.randint(128, (32,))
    model.norm.float()
    mended = Rounds(is_mended=True).to(torch.bfloat16)
    mended.load_state_dict(model.state_dict())
    loss = mended(x, targets)
    loss.backward()
    capture = tracefuse.capture(lambda: model(x, targets).backward())
    ones = [one for one in capture.findings() if one.id == name]
    assert ones
    for one in ones:
        fixed = capture.with_fix(one)
        verify(fixed.trace)
        assert fixed.trace.op_count < capture.trace.op_count
        assert name not in {left.id for left in fixed.findings() if left.source == one.source}
        found = dict(zip(((out.kind, out.of) for out in fixed.trace.outputs), fixed.replay(), strict=True))
        sources = {entry.name: entry.source for entry in fixed.trace.inputs}
        for (kind, of), value in found.items():
            theirs = mended.get_parameter(sources[of]).grad if kind == "gradient" else loss.detach()
            assert theirs is not None
            torch.testing.assert_close(value.float(), theirs.float(), rtol=0.05, atol=0.02)


def test_what_is_computed_once_has_the_same_numbers_and_the_ops_of_a_step_without_checkpoints() -> None:
    layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(3))
    x = torch.randn(512, 64, requires_grad=True)

    def step(is_checkpointed: bool) -> None:
        h = x
        for layer in layers:
            h = torch.utils.checkpoint.checkpoint(layer, h, use_reentrant=False) if is_checkpointed else layer(h)
        h.square().mean().backward()

    twin, capture = (tracefuse.capture(step, on) for on in (False, True))
    one = finding("checkpoint-not-needed", capture.findings())
    fixed = capture.with_fix(one)
    assert capture.trace.op_count > fixed.trace.op_count == twin.trace.op_count
    for mine, theirs in zip(fixed.replay(), capture.replay(), strict=True):
        assert torch.equal(mine, theirs)
    trial = capture.variant(Config.off()).try_fix(one, budget_s=0.3)
    assert trial.gained_ms.low <= trial.gained_ms.median <= trial.gained_ms.high
    assert trial.difference.gradients == 0


def test_a_fix_of_passes_is_tried_with_the_update() -> None:
    model, x = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)), torch.randn(64, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with tracefuse.capture_step() as c:
        for _ in range(3):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    variant = c.variant(Config.off())
    trial = variant.try_fix(Fix("passes", "with fuse", changes={"fuse": True}), budget_s=0.3)
    assert [list(one.times_ms) for one in trial.timing.programs] == [["forward", "backward", "update", "step"]] * 2
    assert trial.difference.updated is not None
    assert trial.difference.updated < 1e-4


def test_a_value_that_is_returned_is_not_left_out() -> None:
    x = torch.randn(8, 8, dtype=torch.bfloat16, requires_grad=True)
    capture = tracefuse.capture(x.float)
    (cast,) = [n for n in capture.trace.ops if work(n) == "cast"]
    with pytest.raises(FixError, match="is returned"):
        capture.with_fix(Fix("left out", "the cast left out", (cast.name,)))
