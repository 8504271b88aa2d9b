"""Laws that hold for every pass, alone and together, on every program.

A trace that a pass returns is well formed, computes eager's results and gradients (dropout on), is not changed by a second
run, and the pass leaves its input as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import programs
import pytest
import torch
from padded import TAKES_ALL
from traces import TOLERANCE, assert_types_are_true, coarsest

import tracefuse
from tracefuse.config.configuration import Config
from tracefuse.optimizers.liveness import saved_bytes
from tracefuse.optimizers.passes import final, run_pipeline
from tracefuse.optimizers.trace import Trace

CHOICES = {
    "simplify": {"simplify": True},
    "freeze": {"freeze": True},
    "merge_matmuls": {"merge_matmuls": True},
    "cat": {"cat": True},
    "linear_cross_entropy": {"linear_cross_entropy": True},
    "decompose": {"decompose": True, "fuse": True},
    "channels_last": {"channels_last": True},
    "pad": {"pad": True},
    "remat": {"remat": 0.5},
    "remat of all": {"remat": 0.0},
    "remat to half": {"remat": 0.5, "memory_budget": 0.5},
    "remat to nothing": {"remat": 0.5, "memory_budget": 0.0},
    "remat to the least peak": {"remat": 0.5, "peak_budget": 2},
    "fuse": {"fuse": True},
    "remat of all, fused": {"simplify": True, "remat": 0.0, "fuse": True},
    "channels_last, fused": {"decompose": True, "channels_last": True, "fuse": True},
    "merge_matmuls, fused": {"simplify": True, "merge_matmuls": True, "cat": True, "fuse": True},
    "pad, fused": {"decompose": True, "pad": True, "fuse": True},
    "all": dict.fromkeys(
        (
            "simplify",
            "freeze",
            "merge_matmuls",
            "cat",
            "linear_cross_entropy",
            "decompose",
            "channels_last",
            "pad",
            "fuse",
        ),
        True,
    )
    | {"remat": 0.5},
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
    passes = Config.off().changed(**CHOICES[choice]).passes(TAKES_ALL)
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
    passes = Config.off().changed(simplify=True, freeze=True, merge_matmuls=True, cat=True).passes()
    trace, kept = capture.trace, saved_bytes(capture.trace)
    for step in run_pipeline(trace, passes):
        assert saved_bytes(step.after) <= kept, step.name
        kept = saved_bytes(step.after)


def test_no_pass_searches_the_trace_for_a_name(monkeypatch):
    """A search looks at every node, so that one per input takes quadratic time."""

    def search(self: Trace, name: str) -> None:
        raise AssertionError(f"a pass looks for {name}")

    monkeypatch.setattr(Trace, "node", search)
    monkeypatch.setattr(Trace, "input_of", search)
    capture, _, _ = eager("gpt")
    options = CHOICES["all"] | {"freeze": ("*mlp*",)}
    steps = run_pipeline(capture.trace, Config.off().changed(**options).passes(TAKES_ALL))
    assert steps[1].removed


# --- programs that overwrite what they read ---------------------------------------------------------------------------


@dataclass
class Mutating:
    """A program whose `run` also overwrites `buffers`."""

    program: programs.Program
    buffers: list[torch.Tensor]

    def observed(self, run: Callable[[], torch.Tensor]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """The buffers after `run` and its gradients; the buffers then have their old contents again."""
        before = [b.clone() for b in self.buffers]
        self.program.fresh()
        run()
        after = [b.clone() for b in self.buffers]
        with torch.no_grad():
            for buffer, old in zip(self.buffers, before, strict=True):
                buffer.copy_(old)
        return after, self.program.gradients()


def _mutating(
    step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.float64
) -> Mutating:
    """`step(buffer, w)` mutates the buffer and returns what is summed and differentiated."""
    buffer = torch.arange(1.0, 7.0, dtype=dtype).view(2, 3)
    w = torch.linspace(0.5, 2.0, 6, dtype=torch.float64).view(2, 3).requires_grad_()

    def run() -> torch.Tensor:
        loss = step(buffer, w).sum()
        loss.backward()
        return loss

    return Mutating(programs.Program(run, {"w": w}), [buffer])


def _batch_norm() -> Mutating:
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(3).double()
    program = programs.of_module(norm, torch.randn(4, 3, dtype=torch.float64, requires_grad=True))
    return Mutating(program, list(norm.buffers()))


def _times_copy(buffer: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = buffer.clone() * w
    buffer.add_(1.0)
    return y


def _times_view_of_copy(buffer: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = buffer.clone().t() * w.t()
    buffer.mul_(2.0)
    return y


def _times_slice_of_cat(buffer: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.cat([buffer, w.detach()])[:2] * w
    buffer.zero_()
    return y


def _times_cat_of_slices(buffer: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.cat([buffer[:1], buffer[1:]]) * w
    buffer.zero_()
    return y


class RoundTrip(torch.autograd.Function):
    """b * w, which casts b up for the forward and down again for the backward."""

    @staticmethod
    def forward(ctx, b, w):  # type: ignore[no-untyped-def]
        wide = b.double()
        ctx.save_for_backward(wide)
        return wide * w

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return None, ctx.saved_tensors[0].float() * grad


def _times_round_trip(buffer: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = RoundTrip.apply(buffer, w)
    buffer.zero_()
    return y


def _matmul(buffer: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = buffer.clone().t() @ w
    buffer.zero_()
    return y


def _times_new(buffer: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    buffer.mul_(0.9).add_(w.detach() * 0.1)
    return buffer * w.exp()


def _after_the_backward() -> Mutating:
    """The backward reads `x`, as it was, directly and through a view; `x` and the weight change when it is done."""
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.float64)
    w, v = (torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def run() -> torch.Tensor:
        loss = ((x @ w.t()).sin() @ v).square().mean() + (x[:, None].expand(3, 4, 4) * v).square().sum()
        loss.backward()
        with torch.no_grad():
            x.add_(1.0)
            w.mul_(0.5)
            v.mul_(0.5)
        return loss

    return Mutating(programs.Program(run, {"w": w, "v": v}), [x, w, v])


MUTATING = {
    "batch norm": _batch_norm,
    "copy": lambda: _mutating(_times_copy),
    "view of copy": lambda: _mutating(_times_view_of_copy),
    "slice of cat": lambda: _mutating(_times_slice_of_cat),
    "cat of slices": lambda: _mutating(_times_cat_of_slices),
    "cast": lambda: _mutating(_times_round_trip, torch.float32),
    "after the backward": _after_the_backward,
    "new value": lambda: _mutating(_times_new),
    "matmul over unaligned rows": lambda: _mutating(_matmul),
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", MUTATING)
def test_every_compiled_pass_mutates_like_eager(name, choice, monkeypatch):
    """The forward overwrites its inputs before the backward runs, which a replay of the joint trace cannot tell."""
    mutating = MUTATING[name]()
    expected = mutating.observed(mutating.program.run)
    captures: list[tracefuse.Capture] = []
    monkeypatch.setattr(tracefuse.Capture, "machine", TAKES_ALL)
    mutating.observed(lambda: captures.append(tracefuse.capture(mutating.program.run)))
    step = captures[0].variant(Config.off().changed(**CHOICES[choice])).check().compile()

    found = mutating.observed(lambda: step().backward())

    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert len(expected[1]) == len(mutating.program.leaves)
    changed = [not torch.equal(a, b) for a, b in zip(expected[0], mutating.buffers, strict=True)]
    assert all(changed), "the program overwrites nothing"
