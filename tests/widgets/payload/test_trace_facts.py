"""What is kept of a trace: computed once, gone with it, and what a fresh look finds."""

from __future__ import annotations

import gc
import weakref

import programs
import pytest
import torch

import tracefuse
from tracefuse.optimizers.liveness import live_bytes, peak_bytes, saved_bytes
from tracefuse.optimizers.trace import Trace
from tracefuse.widgets.payload import facts as trace_facts
from tracefuse.widgets.payload.facts import memory, per_trace, size
from tracefuse.widgets.payload.program import payload


def captured(name: str = "gpt") -> tracefuse.Capture:
    return tracefuse.capture(programs.PROGRAMS[name](torch.float32).run)


def test_a_trace_is_looked_at_once() -> None:
    seen: list[Trace] = []
    count = per_trace(lambda trace: seen.append(trace) or trace.op_count)
    first, second = captured().trace, captured("rope").trace
    assert [count(one) for one in (first, second, first)] == [first.op_count, second.op_count, first.op_count]
    assert seen == [first, second]


def test_what_is_kept_goes_with_the_trace() -> None:
    capture = captured("rope")
    payload(capture.optimize())
    gone = weakref.ref(capture.trace)
    del capture
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("name", ["gpt", "rope", "conv_batchnorm"])
def test_the_numbers_are_those_of_the_trace(name: str) -> None:
    for trace in (captured(name).trace, captured(name).optimize().trace):
        assert size(trace) == (trace.op_count, saved_bytes(trace), peak_bytes(trace))
        found = memory(trace)
        assert found["live"] == live_bytes(trace)
        assert found["ops"] == [node.name for node in trace.ops]
        assert max(found["live"]) == found["peak"] == found["live"][found["ops"].index(found["at"])]


def test_a_payload_leaves_what_is_kept_as_it_is() -> None:
    variant = captured().optimize()
    first = payload(variant)
    assert payload(variant) == first
    assert all("time_us" not in record for record in trace_facts.values(variant.trace).values())


@pytest.mark.parametrize("name", ["gpt", "rope", "residual_chain", "conv_batchnorm"])
def test_no_budget_gets_the_peak_below_the_least(name: str) -> None:
    variant = tracefuse.capture(programs.PROGRAMS[name](torch.float32).run).optimize()
    for fuse in (True, False):
        low = variant.with_config(peak_budget=2, fuse=fuse)
        least = trace_facts.least_peak(low.trace)
        assert 0 < least <= trace_facts.size(low.trace).peak_bytes
        assert trace_facts.least_peak(variant.with_config(fuse=fuse).trace) == least  # whatever is recomputed
