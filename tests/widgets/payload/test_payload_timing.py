"""What was measured in the wire format: times of ops, memory, differences, each only where it belongs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache

import cuda_traces
import programs
import pytest
import torch

import tracefuse
from tracefuse.config.configuration import Config
from tracefuse.measure.op_times import OpTimes, modelled
from tracefuse.measure.timing import Difference, ProgramTiming, Rounding, Timing, estimate
from tracefuse.optimizers.trace import does_work
from tracefuse.variant import Variant
from tracefuse.widgets.payload.clock import Clock
from tracefuse.widgets.payload.facts import gpu_input_bytes
from tracefuse.widgets.payload.program import payload
from tracefuse.widgets.payload.timing import measured_peak_bytes
from tracefuse.widgets.view.explorer import Explorer

NEAR = Rounding("result 0", 0.0625, 1.0, "bfloat16", 0.05, True)
ONE_MS = {"step": estimate([1.0] * 8)}


@cache
def variant() -> Variant:
    return tracefuse.capture(programs.PROGRAMS["gpt"](torch.float32).run).optimize()


def timing(difference: Difference | None = None, peaks: tuple[int | None, int | None] = (None, None)) -> Timing:
    captured = ProgramTiming("captured", ONE_MS, ONE_MS, 1.0, peaks[0])
    optimised = ProgramTiming("optimised", ONE_MS, ONE_MS, 1.0, peaks[1], difference)
    graph = ProgramTiming("CUDA graph", ONE_MS, ONE_MS, 1.0, 7, Difference(9.0, 9.0))
    return Timing("measured on a GPU", (captured, optimised, graph), 6, 1, "six rounds")


# --- memory and differences -------------------------------------------------------------------------------------------


def test_measured_memory_and_differences_are_those_of_the_shown_program() -> None:
    found = payload(variant(), (timing(Difference(1e-6, 2e-5), (300, 200)), variant().config))["summary"]
    assert found["measured_peak_bytes"] == [300, 200]
    assert (found["difference"]["results"], found["difference"]["gradients"]) == (1e-6, 2e-5)
    assert (found["difference"]["is_same"], found["difference"]["delta"]) == (None, 2e-5), "not told, as in an old file"


@pytest.mark.parametrize(
    ("difference", "is_same", "brief"),
    [
        (Difference(0.0, 0.0), True, "in every number"),
        (Difference(0.0625, 0.01, None, NEAR), True, "to 1 bf16 rounding"),
        (
            Difference(1.0, 0.01, None, replace(NEAR, delta=1.0, steps=16.0, is_near=False)),
            False,
            "by 16 bf16 roundings",
        ),
    ],
)
def test_what_differences_come_to_is_a_verdict_with_the_number_behind_it(
    difference: Difference, is_same: bool, brief: str
) -> None:
    found = payload(variant(), (timing(difference), variant().config))["summary"]["difference"]
    assert (found["is_same"], found["brief"], found["delta"]) == (is_same, brief, difference.results)
    assert f"results {difference.results:.3g}, gradients {difference.gradients:.3g}" in found["said"]
    if difference.rounding:
        assert f"{'Within' if is_same else 'Beyond'} the tolerance of the exported file's check, 0.05" in found["said"]


def test_new_values_that_are_others_are_told_before_results_that_are_the_same() -> None:
    difference = Difference(0.0625, 0.01, 999.0, NEAR, updated_near=False)
    found = payload(variant(), (timing(difference), variant().config))["summary"]["difference"]
    assert (found["is_same"], found["brief"], found["delta"]) == (False, "new values", 999.0)
    assert "the same to 1 bf16 rounding (0.0625); new values apart by up to 999" in found["said"]


def test_inputs_count_where_they_lie() -> None:
    """The allocator counts what a replay adds; a GPU's inputs were there before it, and a CPU's lie elsewhere."""
    assert measured_peak_bytes(timing(peaks=(300, 200)), (50, 40)) == [350, 240]
    tensors = variant().capture.example_inputs
    inputs = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
    trace = variant().capture.trace
    assert gpu_input_bytes(trace) == 0
    assert gpu_input_bytes(cuda_traces.on_cuda(trace)) == inputs


@pytest.mark.parametrize(
    "timed", [None, (timing(Difference(0.0, 0.0), (3, 2)), Config.of(cat=False)), (timing(), Config())]
)
def test_what_was_not_measured_of_the_shown_configuration_is_null(timed: tuple[Timing, Config] | None) -> None:
    found = payload(variant(), timed)["summary"]
    assert (found["measured_peak_bytes"], found["difference"]) == (None, None)


@pytest.mark.parametrize(("results", "gradients"), [(math.nan, 0.0), (0.0, math.inf), (math.nan, math.nan)])
def test_a_difference_that_is_no_number_is_said_in_words(results: float, gradients: float) -> None:
    shown = payload(variant(), (timing(Difference(results, gradients)), variant().config))
    json.dumps(shown, allow_nan=False)
    texts = [note["text"] for note in shown["notes"]]
    expected = [name for name, one in (("results", results), ("gradients", gradients)) if not math.isfinite(one)]
    assert shown["summary"]["difference"] is None
    assert [text.split()[1] for text in texts] == expected


# --- times of ops -----------------------------------------------------------------------------------------------------


def test_times_are_those_of_the_clock_and_modelled_without_one() -> None:
    v = variant()
    names = [node.name for node in v.trace.ops if does_work(node)]
    measured = OpTimes({name: float(at + 1) for at, name in enumerate(names)}, "measured on a GPU")
    shown = payload(v, clock=Clock((measured, measured), "a GPU", modelled))
    assert shown["times"] == {"before": "measured on a GPU", "after": "measured on a GPU"}
    after = {name: value["time_us"][1] for name, value in shown["values"].items()}
    assert {name: us for name, us in after.items() if us is not None} == measured.us
    assert payload(v)["times"]["after"].startswith("modelled")


def test_parts_of_a_kernels_result_take_no_time() -> None:
    explorer = Explorer(variant(), budget_s=0.01)
    explorer.measure()
    explorer.show_times_of("here")
    values = explorer.payload["values"]
    parts = [name for name, value in values.items() if value["op"] == "getitem" and not value["removed"]]
    assert parts
    assert {values[name]["time_us"][1] for name in parts} == {None}
    kernels = [value["time_us"][1] for value in values.values() if value["kernel"] and value["op"] != "getitem"]
    assert all(us is not None and us > 0 for us in kernels)
