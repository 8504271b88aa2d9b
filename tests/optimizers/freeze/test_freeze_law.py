"""The law of freezing: pruning an all-trainable capture gives the program that `requires_grad=False` would have recorded."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from freeze_programs import CASES, FOLDED, Frozen, gpt_lora
from isomorphism import assert_isomorphic
from traces import TOLERANCE, Tried, captured, coarsest, demanded, ops, tried

import tracefuse
from tracefuse.optimizers.freeze import Freeze
from tracefuse.optimizers.passes import run_pipeline
from tracefuse.optimizers.simplify import Simplify
from tracefuse.optimizers.trace import Trace


@functools.cache
def both(name: str) -> tuple[Tried, Tried]:
    """The all-trainable capture pruned and simplified; the frozen one simplified."""
    case = (CASES | FOLDED)[name]
    return pruned(case), really(case)


def pruned(case: Frozen) -> Tried:
    program = case.program(freeze=False)
    torch.manual_seed(3)
    return tried([Freeze(case.patterns), Simplify()], captured(program.run))


def really(case: Frozen) -> Tried:
    program = case.program(freeze=True)
    torch.manual_seed(3)
    return tried(Simplify(), captured(program.run))


def replayed(trace: Trace, capture: tracefuse.Capture) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Results, and gradients by the user's name."""
    values = demanded(trace, tracefuse.replay(trace, capture.example_inputs, capture.rng_states))
    gradients = {trace.input_of(of).source: v for (kind, of), v in values.items() if kind == "gradient"}
    return [v for (kind, _), v in values.items() if kind == "result"], gradients


@pytest.mark.parametrize("name", CASES)
def test_pruning_gives_the_frozen_program(name):
    mine, other = both(name)
    assert len(mine.after.outputs) < len(mine.captured.trace.outputs), "something is frozen"
    assert_isomorphic(mine.after, other.after)
    assert ops(mine.after) == ops(other.after), "in the same order, too"


@pytest.mark.parametrize("name", CASES)
def test_thawing_and_pruning_gives_the_frozen_program(name):
    """As above, but what is frozen was frozen when captured, with `train_all`."""
    case, (_, other) = CASES[name], both(name)
    torch.manual_seed(3)
    thawed = tracefuse.capture(case.program(freeze=True).run, train_all=True)
    assert_isomorphic(tried([Freeze(case.patterns), Simplify()], thawed).after, other.after)
    as_written = tried([Freeze(thawed.thawed), Simplify()], thawed)
    assert_isomorphic(as_written.after, other.after)


@pytest.mark.parametrize("name", CASES | FOLDED)
def test_what_is_left_has_eagers_gradients(name):
    """Against a run without any recorder from the same seed."""
    mine, _ = both(name)
    program = (CASES | FOLDED)[name].program(freeze=True)
    torch.manual_seed(3)
    loss = program.run()
    result, gradients = replayed(mine.after, mine.captured)
    tolerance = TOLERANCE[coarsest(mine.after)]
    torch.testing.assert_close(result, [loss], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradients, program.gradients(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_every_pass_after_freezing_keeps_eagers_gradients(name):
    """What `decompose` takes apart and `fuse` generates are narrowed ops: norms without weight gradients, and so on."""
    case = CASES[name]
    program = case.program(freeze=False)
    torch.manual_seed(3)
    variant = captured(program.run).optimize(freeze=case.patterns)
    _, gradients = replayed(variant.trace, variant.capture)
    frozen = case.program(freeze=True)
    torch.manual_seed(3)
    frozen.run()
    tolerance = TOLERANCE[coarsest(variant.trace)]
    torch.testing.assert_close(gradients, frozen.gradients(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", FOLDED)
def test_eager_folds_a_matmul_for_a_trained_weight_only(name):
    """The exception: `matmul` of a 3-d input that does not lie in order with a 2-d weight.

    If the weight requires a gradient, ATen copies the input in order and folds it to two dimensions, so that the weight's
    gradient is one product; if not, it expands the weight and runs bmm without the copy (`should_fold` in ATen's
    LinearAlgebra.cpp). Freezing drops what the gradient needs and leaves the forward's way of multiplying as it was
    captured. Nothing else differs.
    """
    mine, other = (Counter(ops(side.after)) for side in both(name))
    assert mine - other == Counter(clone=1, _unsafe_view=2, mm=1)
    assert other - mine == Counter(expand=1, bmm=1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("patterns", [("*", "!*.lora_*"), ("*", "!h.1.*.lora_*")], ids=["all", "last block"])
def test_pruning_gives_the_frozen_program_on_a_gpu(patterns, dtype):
    """There attention has several kernels, and those of frozen blocks keep no log-sum-exp."""
    case, captures = Frozen(gpt_lora, patterns), []
    for freeze in (False, True):
        program = case.program(freeze, "cuda", dtype)
        torch.manual_seed(3)
        captures.append(captured(program.run))
    mine = run_pipeline(captures[0].trace, [Freeze(patterns), Simplify()])[-1].after
    assert_isomorphic(mine, run_pipeline(captures[1].trace, [Simplify()])[-1].after)
