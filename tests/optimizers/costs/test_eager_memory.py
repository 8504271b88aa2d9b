"""When eager frees: by hand on small programs, and beside what the CPU's allocator counts."""

from __future__ import annotations

import functools
import gc

import programs
import pytest
import torch
from torch import Tensor, nn

import tracefuse
from tracefuse.optimizers.costs.eager_memory import eager_lifetimes, eager_peak_bytes
from tracefuse.optimizers.liveness import lifetimes, peak_bytes
from tracefuse.optimizers.ops import is_view
from tracefuse.optimizers.trace import phase
from tracefuse.tables.allocator import added_peak

KIB = 1024


def test_an_autograd_node_releases_what_it_read_when_it_is_done() -> None:
    x, w = torch.ones(8, 8, requires_grad=True), torch.ones(8, 8, requires_grad=True)

    def step() -> None:
        a, b = x.exp(), w.exp()
        (a @ b).cos().sum().backward()

    trace = tracefuse.capture(step).trace
    products = [at for at, node in enumerate(trace.ops) if node.name.startswith("mm_")]
    assert len(products) == 2, "the matmul's node computes two gradients"
    (given,) = {a for at in products for a in trace.ops[at].all_input_nodes if phase(a) == "backward"} - {
        view for at in products for view in trace.ops[at].all_input_nodes if is_view(view)
    }
    first = {life.name: life.end for life in lifetimes(trace)}
    eager = {life.name: life.end for life in eager_lifetimes(trace)}
    assert eager[given.name] >= max(products)
    assert all(eager[name] >= end for name, end in first.items())


def test_a_modules_argument_lives_until_it_returns() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            first = x.sin()
            second = first.cos()
            return second.tan()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.exp())

    model, x = Outer(), torch.ones(4)
    with torch.no_grad():
        capture = tracefuse.capture(model, x)
    names = [node.name for node in capture.trace.ops]
    exp, inside = names[0], names[1:]
    by_trace, by_eager = (
        {life.name: life.end for life in lives(capture.trace)} for lives in (lifetimes, eager_lifetimes)
    )
    assert (by_trace[exp], by_eager[exp]) == (1, len(inside))
    assert by_eager[names[1]] == by_trace[names[1]], "a variable inside is not followed"


def test_what_a_variable_holds_lives_to_the_end() -> None:
    x = torch.ones(16, 16, requires_grad=True)

    def holding() -> None:
        logits = x * 2
        logits.sum().backward()
        assert logits.shape

    def dropping() -> None:
        (x * 2).sum().backward()

    held, dropped = tracefuse.capture(holding).trace, tracefuse.capture(dropping).trace
    assert eager_peak_bytes(held) - peak_bytes(held) == eager_peak_bytes(dropped) - peak_bytes(dropped) + KIB


def test_without_ops_there_is_no_peak() -> None:
    trace = tracefuse.capture(lambda x: x * 1, torch.ones(2)).optimize().trace
    assert eager_peak_bytes(trace) == peak_bytes(trace)


@pytest.mark.parametrize("name", ["gpt", "llama", "frozen_stack", "residual_chain"])
def test_it_is_what_the_allocator_counts(name: str) -> None:
    program = programs.PROGRAMS[name](torch.float64)
    capture = tracefuse.capture(program.run)
    inputs = sum(life.nbytes for life in lifetimes(capture.trace) if life.is_input)
    free(capture)
    counted = added_peak(functools.partial(run, program), "cpu")
    assert eager_peak_bytes(capture.trace) - inputs == pytest.approx(counted, rel=0.05)


def free(capture: tracefuse.Capture) -> None:
    for tensor in capture.live_inputs:
        tensor.grad = None
    gc.collect()


def run(program: programs.Program) -> object:
    return program.run()


def test_what_is_written_in_place_has_no_memory_of_its_own() -> None:
    x = torch.ones(16, 16)

    def program(x: Tensor) -> Tensor:
        a = x.sin()
        a.add_(1).mul_(2)
        return a

    capture = tracefuse.capture(program, x)
    assert peak_bytes(capture.trace) == 3 * KIB, "the trace is functional"
    assert eager_peak_bytes(capture.trace) == 2 * KIB


def test_an_optimizer_updates_in_place() -> None:
    model = nn.Linear(64, 64, bias=False)
    update = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        model(torch.ones(4, 64)).sum().backward()
        update.step()

    step()
    model.zero_grad()
    counted = added_peak(step, "cpu")
    model.zero_grad()
    whole = tracefuse.capture(step).program.whole
    inputs = sum(life.nbytes for life in lifetimes(whole) if life.is_input)
    assert eager_peak_bytes(whole) - inputs == pytest.approx(counted, rel=0.05)
    assert peak_bytes(whole) > eager_peak_bytes(whole), "as a functional program it needs more"
