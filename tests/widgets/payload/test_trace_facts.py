"""What is kept of a trace: computed once, gone with it, and what a fresh look finds."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import programs
import pytest
import torch

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.optimizers.liveness import lifetimes, live_bytes, peak_bytes, saved_bytes
from tracefuse.optimizers.remat.saved import REASONS
from tracefuse.widgets.payload import facts as trace_facts
from tracefuse.widgets.payload.facts import memory, size
from tracefuse.widgets.payload.program import payload


def captured(name: str = "gpt") -> tracefuse.Capture:
    return tracefuse.capture(programs.PROGRAMS[name](torch.float32).run)


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


@pytest.mark.parametrize("name", ["gpt", "llama", "rope"])
@pytest.mark.parametrize("passes", [{}, {"remat": 0.0}, {"fuse": False}])
def test_what_is_alive_at_the_peak_is_all_that_is(name: str, passes: dict[str, Any]) -> None:
    """Of each side by purpose and, of what is saved, by module and reason: every byte of the peak, once."""
    capture = captured(name)
    variant = capture.optimize(**passes)
    found = payload(variant)["memory"]
    at_peak = found["at_peak"]
    for side, trace in enumerate((variant.baseline.whole_in_place, variant.whole_in_place)):
        live = live_bytes(trace)
        assert sum(purpose[1 + side] for purpose in at_peak["purposes"]) == max(live) == peak_bytes(trace)
        at = trace.ops[live.index(max(live))].name
        assert at_peak["at"][side] == at
        alive = [
            one for one in lifetimes(trace) if one.kind == "saved" and one.start <= live.index(max(live)) <= one.end
        ]
        assert sum(row[2 + side] for row in at_peak["saved"]) == sum(one.nbytes for one in alive)
    assert sum(row[4] for row in at_peak["saved"]) == len(alive)
    assert {row[1] for row in at_peak["saved"]} <= set(REASONS)
    assert {row[5] for row in at_peak["saved"]} <= payload(variant)["values"].keys()


@pytest.mark.parametrize("options", [{}, {"fuse": False}, {"remat": None}])
def test_memory_by_module_is_told_one_way(options: dict[str, Any]) -> None:
    """What is saved and alive at the peak is booked on the modules that have it in the table of layers and in the tree."""
    shown = payload(captured("gpt").optimize(**options))
    layers: dict[str, list[int]] = {}
    for row in shown["layers"]:
        sums = layers.setdefault(row["folded"] or row["module_type"], [0, 0])
        for side in (0, 1):
            sums[side] += row["saved_bytes"][side]
    assert {name: sums for name, *sums in shown["memory"]["modules"]} == {n: s for n, s in layers.items() if any(s)}
    for side in (0, 1):
        alive: dict[str, int] = {}
        for module, _, *nbytes, _, _ in shown["memory"]["at_peak"]["saved"]:
            alive[module] = alive.get(module, 0) + nbytes[side]
        assert all(count <= layers[module][side] for module, count in alive.items())
        assert sum(alive.values()) > 0


def test_alike_modules_share_a_row_of_the_peak() -> None:
    torch.manual_seed(0)
    rows = {}
    for layers in (2, 6):
        model, data = GPT(layers=layers, width=32, heads=2, vocab=61, length=16), batch(61, 2, 12)
        variant = tracefuse.capture(lambda model=model, data=data: model(*data).backward()).optimize()
        rows[layers] = payload(variant)["memory"]["at_peak"]["saved"]
    assert {tuple(row[:2]) for row in rows[2]} == {tuple(row[:2]) for row in rows[6]}
    of = {tuple(row[:2]): row for row in rows[6]}
    assert of["h.*.mlp.up", "activation"][4] == 6
