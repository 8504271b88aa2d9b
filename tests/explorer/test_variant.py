"""A variant is one capture under one configuration: cached, checked, measured, and on a GPU equal to eager."""

from __future__ import annotations

import itertools

import programs
import pytest
import torch

import tracefuse
from tracefuse.config.names import OFF_BY_DEFAULT, PASSES
from tracefuse.demo import GPT, batch
from tracefuse.errors import PassError


@pytest.fixture(scope="module")
def captured() -> tracefuse.Capture:
    torch.manual_seed(0)
    model, (tokens, targets) = GPT(layers=2, width=32, heads=2, vocab=61, length=16), batch(61, 2, 12)
    with tracefuse.capture() as c:
        loss = model(tokens, targets)
        loss.backward()
    return c


def test_equal_configurations_share_a_variant_and_variants_share_steps(captured):
    both = captured.optimize()
    assert captured.optimize() is both
    other = both.with_config(remat=0.25)
    assert [s is t for s, t in zip(both.passes, other.passes, strict=True)] == [True] * 8 + [False] * 3
    assert other.with_config(remat=0.5) is both


def test_steps_follow_the_pipeline_and_take_time(captured):
    steps = captured.optimize().passes
    assert [s.name for s in steps] == [name for name in PASSES if name not in OFF_BY_DEFAULT]
    assert all(s.seconds > 0 for s in steps)
    assert steps[0].before is captured.trace
    assert all(a.after is b.before for a, b in itertools.pairwise(steps))


def test_no_pass_is_the_captured_trace(captured):
    baseline = captured.optimize().baseline
    assert baseline.trace is captured.trace
    assert baseline.passes == ()
    assert baseline.kernels == ()


def test_freezing_what_if_drops_gradients(captured):
    frozen = captured.optimize(freeze=["h.*.mlp.*"])
    gradients = [out.of for out in frozen.backward.outputs]
    assert "h_0_attn_qkv_weight" in gradients
    assert not any("mlp" in name for name in gradients)
    assert len(frozen.trace.ops) < len(captured.optimize().trace.ops)


def test_a_pass_that_fails_raises_from_the_api_and_stays_off_in_the_record(captured):
    with pytest.raises(PassError, match="freeze: "):
        captured.optimize(freeze=["no.such.parameter"])
    variant = captured.optimize().with_config(freeze=("no.such.parameter",))
    failed = next(s for s in variant.passes if s.name == "freeze")
    assert "no.such.parameter" in failed.error
    assert failed.after is failed.before
    assert variant.passes[-1].error is None


def test_measuring_compares_with_the_captured_program(captured):
    seen = []
    timing = captured.optimize().measure(progress=lambda done, what: seen.append((done, what)), budget_s=1)
    assert seen
    assert seen[-1][0] == 1.0
    assert "captured" in str(timing)
    assert "measured on CPU" in str(timing)
    assert captured.optimize().timing is timing


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_the_compiled_program_has_eagers_numbers_on_the_gpu(name, dtype):
    with torch.backends.cudnn.flags(enabled=name != "conv_batchnorm"):
        program = programs.PROGRAMS[name](dtype, "cuda").fresh()
        torch.manual_seed(7)
        c = tracefuse.capture(program.run)
        eager = {leaf: gradient.clone() for leaf, gradient in program.gradients().items()}
        program.fresh()
        torch.manual_seed(7)
        results = c.optimize().compile()()
        torch.autograd.backward(results)
    # Autocast computes in bfloat16, LLaMA's norms in float32 whatever the model's dtype is.
    precision = (
        {"autocast": torch.bfloat16, "llama": torch.float32}.get(name, dtype) if dtype is torch.float64 else dtype
    )
    rtol, atol = {torch.float64: (1e-8, 1e-10), torch.float32: (1e-3, 1e-6), torch.bfloat16: (0.1, 2e-2)}[precision]
    assert program.gradients().keys() == eager.keys()
    exact = in_float64(name, program) if name == "residual_block" and dtype is torch.bfloat16 else None
    for leaf, gradient in program.gradients().items():
        if exact is None:
            torch.testing.assert_close(gradient, eager[leaf], rtol=rtol, atol=atol)
        else:  # Norms over 105 elements: in halves eager itself is as far from the truth as from us.
            ours, theirs = ((g.double() - exact[leaf]).abs().max() for g in (gradient, eager[leaf]))
            is_noise = exact[leaf].abs().max() < 1e-9  # of a bias before a norm
            assert ours <= (4 if is_noise else 2) * theirs, leaf


def in_float64(name: str, program: programs.Program) -> dict[str, torch.Tensor]:
    """The gradients of the same program in float64, with the numbers that the leaves of `program` have."""
    exact = programs.PROGRAMS[name](torch.float64, "cuda").fresh()
    with torch.no_grad():
        for leaf, value in program.leaves.items():
            exact.leaves[leaf].copy_(value)
    exact.run()
    return exact.gradients()


@pytest.mark.gpu
def test_a_leaf_on_the_cpu_is_timed_by_the_gpus_clock() -> None:
    """What a program computes on decides, not what its first input lies on: without a wait, launches would be timed."""
    leaf, factor = torch.randn(1 << 22, requires_grad=True), torch.randn(1 << 22, device="cuda")
    capture = tracefuse.capture(lambda: (leaf.cuda() * factor).sum().backward())
    variant = capture.optimize()
    assert capture.device.type == "cuda"
    assert variant.runs_triton
    assert "CPU" not in variant.measure(budget_s=0.5).device


def test_what_is_compiled_already_costs_a_loop_nothing(captured, monkeypatch):
    variant = captured.optimize(simplify=False)
    step = variant.compile()

    def waits(*_: object) -> None:
        raise AssertionError("a second call waits for what is there")

    monkeypatch.setattr(tracefuse.variant, "Waiting", waits)
    monkeypatch.setattr(tracefuse.distributed.operators, "is_recorded", waits)
    assert variant.compile() is step
