"""Static memory by hand on small programs, and as laws on all of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import programs
import pytest
import torch
from torch import Tensor, fx

import tracefuse
from tracefuse.optimizers import liveness
from tracefuse.optimizers.facts import storages
from tracefuse.optimizers.liveness import lifetimes, live_bytes, peak_bytes, saved_bytes, saved_values
from tracefuse.optimizers.trace import Trace, phase

KIB = 1024
x = torch.ones(16, 16, requires_grad=True)  # 1 KiB of f32


@functools.cache
def trace_of(name: str) -> Trace:
    return tracefuse.capture(programs.PROGRAMS[name](torch.float64).run).trace


def by_name(trace: Trace) -> dict[str, int]:
    return {n.name: live for n, live in zip(trace.ops, live_bytes(trace), strict=True)}


def test_a_value_dies_after_its_last_reader() -> None:
    def chain(x: Tensor) -> Tensor:
        a = x.sin()
        b = a.cos()
        c = b.exp()
        return c

    live = by_name(tracefuse.capture(chain, x.detach()).trace)
    assert live == {"a": 2 * KIB, "b": 3 * KIB, "c": 3 * KIB}


def test_a_view_keeps_its_base_alive_and_costs_nothing() -> None:
    def through_a_view(x: Tensor) -> Tensor:
        a = x.sin()
        v = a.t()
        b = x.cos()
        c = b * v
        return c

    trace = tracefuse.capture(through_a_view, x.detach()).trace
    assert by_name(trace) == {"a": 2 * KIB, "v": 2 * KIB, "b": 3 * KIB, "c": 4 * KIB}
    assert [life.aliases for life in lifetimes(trace)] == [("x",), ("a", "v"), ("b",), ("c",)]


def test_a_small_slice_keeps_the_whole_storage() -> None:
    def one_row(x: Tensor) -> Tensor:
        a = x.sin()
        row = a[0]
        b = x.cos()
        return b + row

    trace = tracefuse.capture(one_row, x.detach()).trace
    assert by_name(trace)["b"] == 3 * KIB


def test_outputs_that_nobody_reads_die_at_once() -> None:
    def norm(x: Tensor) -> Tensor:
        return torch.native_layer_norm(x, [16], None, None, 1e-5)[0].exp()

    live = live_bytes(tracefuse.capture(norm, x.detach()).trace)
    assert live[0] == 2 * KIB + 2 * 16 * 4
    assert live[-1] == 3 * KIB


def test_inputs_and_returned_values_live_throughout() -> None:
    def early(x: Tensor) -> tuple[Tensor, Tensor]:
        first = x.sin()
        return first, first.sum()

    assert by_name(tracefuse.capture(early, x.detach()).trace) == {"first": 2 * KIB, "loss": 2 * KIB + 4}


def training_step() -> Tensor:
    a = x.sin()
    b = a.exp()
    loss = (b.t() * b).sum()
    loss.backward()
    return loss


def test_saved_values_are_storages_with_their_readers() -> None:
    trace = tracefuse.capture(training_step).trace
    (saved,) = saved_values(trace)
    assert (saved.name, saved.nbytes, saved_bytes(trace)) == ("b", KIB, KIB)
    assert len(saved.readers) >= 3, "exp's backward and both factors' gradients read b or its view"
    assert {phase(trace.node(reader)) for reader in saved.readers} == {"backward"}


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_the_forward_half_holds_what_the_joint_trace_holds_then(name: str) -> None:
    trace = trace_of(name)
    forward, backward = trace.split()
    cotangents = sum(life.nbytes for life in lifetimes(trace) if life.name in cotangents_of(trace))
    joint = live_bytes(trace)
    assert [live + cotangents for live in live_bytes(forward)] == joint[: len(forward.ops)]
    assert peak_bytes(backward) <= peak_bytes(trace)


def cotangents_of(trace: Trace) -> set[str]:
    return {i.name for i in trace.inputs if i.kind == "cotangent"}


def test_the_backward_frees_what_it_was_handed() -> None:
    backward = tracefuse.capture(training_step).trace.split()[1]
    saved = {i.name for i in backward.inputs if i.kind == "saved"}
    ends = {life.end for life in lifetimes(backward) if life.name in saved}
    assert ends
    assert max(ends) < len(backward.ops) - 1


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_laws(name: str) -> None:
    trace = trace_of(name)
    live = live_bytes(trace)
    assert len(live) == len(trace.ops)
    held = sum(life.nbytes for life in lifetimes(trace) if life.is_input)
    everything = sum(life.nbytes for life in lifetimes(trace))
    assert held <= min(live) <= max(live) == peak_bytes(trace) <= everything
    forward = [n for n, life in zip(trace.ops, live, strict=True) if phase(n) == "forward"]
    at_the_seam = live[len(forward) - 1]
    assert held + saved_bytes(trace) <= at_the_seam


def test_a_trace_without_ops_needs_nothing() -> None:
    trace = Trace(fx.Graph(), (), ())
    trace.graph.output(())
    assert (live_bytes(trace), peak_bytes(trace), saved_bytes(trace)) == ([], 0, 0)


def test_a_list_of_many_tensors_is_looked_through_as_often_as_it_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer that works list by list has ops with a result for each parameter, and reads each of them alone."""
    seen = [0]

    class Counted(dict[int, int]):
        def __iter__(self) -> Iterator[int]:
            seen[0] += len(self)
            return super().__iter__()

    def looks(count: int) -> int:
        tensors = [torch.ones(4) for _ in range(count)]
        trace = tracefuse.capture(lambda: [one * 2 for one in torch._foreach_add(tensors, 1.0)]).trace
        seen[0] = 0
        liveness.lifetimes(trace)
        return seen[0]

    monkeypatch.setattr(liveness, "storages", lambda node: Counted(storages(node)))
    few, many = looks(50), looks(200)
    assert many <= 1.3 * 4 * few
