"""Laws that hold for every pass, alone and together, on every program.

A trace that a pass returns is well formed, computes eager's results and gradients (dropout on), is not changed by a second
run, and the pass leaves its input as it was.
"""

from __future__ import annotations

import functools

import programs
import pytest
import torch
from traces import TOLERANCE, assert_types_are_true, coarsest

import tracefuse
from tracefuse.optimizers.freeze import saved_memory
from tracefuse.optimizers.passes import final, run_pipeline
from tracefuse.optimizers.trace import Trace
from tracefuse.options import Config

CHOICES = {
    "simplify": {"simplify": True},
    "freeze": {"freeze": True},
    "cat": {"cat": True},
    "remat": {"remat": 0.5},
    "remat of all": {"remat": 0.0},
    "fuse": {"fuse": True},
    "all": {"simplify": True, "freeze": True, "cat": True, "remat": 0.5, "fuse": True},
}


@functools.cache
def eager(name: str) -> tuple[tracefuse.Capture, list[torch.Tensor], dict[int, torch.Tensor]]:
    """The program captured; then run again from the same seed without a recorder: its results, its gradients by leaf."""
    program = programs.PROGRAMS[name](torch.float64).fresh()
    torch.manual_seed(7)
    capture = tracefuse.capture(program.run)
    assert capture.trace.outputs
    torch.manual_seed(7)
    results = program.fresh().run()
    gradients = {id(program.leaves[n]): g for n, g in program.gradients().items()}
    return capture, list(results) if isinstance(results, tuple) else [results], gradients


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_every_pass_keeps_every_program(name, choice):
    capture, results, gradients = eager(name)
    passes = Config.off().changed(**CHOICES[choice]).passes()
    before = capture.trace.code

    after = final(capture.trace, run_pipeline(capture.trace, passes))  # which verifies
    assert_types_are_true(after, capture)

    tolerance = TOLERANCE[coarsest(capture.trace)]
    outputs = tracefuse.replay(after, capture.example_inputs, capture.rng_states)
    leaves = {i.name: id(t) for i, t in zip(after.inputs, capture.example_inputs, strict=True)}
    pairs = list(zip(after.outputs, outputs, strict=True))
    found = {leaves[out.of]: value for out, value in pairs if out.kind == "gradient"}
    torch.testing.assert_close([v for out, v in pairs if out.kind == "result"], results, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found, gradients, rtol=tolerance, atol=tolerance)

    again = final(after, run_pipeline(after, passes))
    assert again.code == after.code, "a second run changes the trace"
    assert capture.trace.code == before, "the pass edited its input"


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_rewrites_never_make_the_forward_keep_more(name):
    capture, _, _ = eager(name)
    passes = Config.off().changed(simplify=True, freeze=True, cat=True).passes()
    trace, kept = capture.trace, kept_nbytes(capture.trace)
    for step in run_pipeline(trace, passes):
        assert kept_nbytes(step.after) <= kept, step.name
        kept = kept_nbytes(step.after)


def kept_nbytes(trace: Trace) -> int:
    return sum(count for _, count in saved_memory(trace).values())
