"""Kernels in the wire format: their times, what those reach of the GPU's bandwidth, and what a kernel takes of a GPU."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

import programs
import pytest
import torch
from torch import Tensor, nn

import tracefuse
from tracefuse.build.modules import resources
from tracefuse.demo import GPT, batch
from tracefuse.errors import OptionError
from tracefuse.measure.op_times import OpTimes, modelled
from tracefuse.optimizers.costs.cost import Peaks
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.kernels.long_sum import LongSum
from tracefuse.optimizers.lowering.layouts import Tuning
from tracefuse.optimizers.ops import does_work
from tracefuse.optimizers.trace import line_of
from tracefuse.timeline.kernel_times import calls_by_kernel
from tracefuse.variant import Variant
from tracefuse.widgets.payload import kernels
from tracefuse.widgets.payload.clock import Clock
from tracefuse.widgets.payload.kernels import (
    aten_records,
    inspect_kernel,
    kernel_calls,
    kernel_records,
    mean_bytes,
    replaced_in,
    stood_for,
)
from tracefuse.widgets.payload.program import payload

GPU = "measured on NVIDIA H100 80GB HBM3"
THREE_TB_S = Peaks(3e12, 7e14, "measured peaks of a GPU")


@cache
def variant() -> Variant:
    return tracefuse.capture(programs.PROGRAMS["gpt"](torch.float32).run).optimize()


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Variant, "runs_triton", True)


def times_of(us: Mapping[str, float], device: str = "NVIDIA H100 80GB HBM3") -> OpTimes:
    return OpTimes(us, f"measured on {device}, op by op", device=device)


def calls_of(kernel: Kernel) -> list[str]:
    return [node.name for node in variant().trace.ops if node.target == kernel]


def first_record(times: OpTimes, peaks: Peaks | None = None) -> dict[str, Any]:
    return kernel_records(variant(), times, peaks)[0]


def bytes_moved() -> int:
    record = kernel_records(variant())[0]
    return record["nbytes_read"] + record["nbytes_written"]


# --- times ------------------------------------------------------------------------------------------------------------


def test_a_kernel_time_is_the_mean_over_its_own_calls(on_gpu: None) -> None:
    kernel, count = max(kernel_calls(variant().trace), key=lambda one: one[1])
    mine = calls_of(kernel)
    assert len(mine) == count > 1
    us = {node.name: 99.0 for node in variant().trace.ops} | {name: 4.0 + at for at, name in enumerate(mine)}
    (record,) = [one for one in kernel_records(variant(), times_of(us)) if one["name"] == kernel.name]
    assert (record["calls"], record["time_us"]) == (count, pytest.approx(4 + (count - 1) / 2))
    assert record["provenance"] == f"{GPU}, op by op"


def test_where_atens_operators_run_in_its_place_a_kernel_reaches_nothing_of_a_peak() -> None:
    us = {node.name: 2.0 for node in variant().trace.ops}
    assert {one["peak_share"] for one in kernel_records(variant(), times_of(us), THREE_TB_S)} == {None}


def test_a_modelled_kernel_has_a_time_and_a_bound_and_no_share_of_the_peak(on_gpu: None) -> None:
    for record in kernel_records(variant(), modelled(variant().trace, THREE_TB_S), THREE_TB_S):
        assert record["time_us"] == pytest.approx((record["nbytes_read"] + record["nbytes_written"]) / 3e6)
        assert (record["kind"], record["bound"], record["peak_share"]) == ("modelled", "memory", None)


def test_a_kernel_stands_for_the_captured_ops_whatever_passes_made_of_them() -> None:
    captured = {node.name: node for node in variant().baseline.whole.ops if does_work(node)}
    parts = stood_for(variant())
    done: Counter[str] = Counter()
    for stood in parts.values():
        for node, share in stood:
            assert captured[node.name] is node
            assert 0 < share <= 1 + 1e-9
            done[node.name] += share
    assert all(share <= 1 + 1e-9 for share in done.values())
    # Decomposed into several ops, which lie in several kernels, they are one op each.
    losses = [name for name, node in captured.items() if "nll_loss" in str(node.target)]
    assert losses
    assert all(done[name] == pytest.approx(1) for name in losses)
    assert sum(sum(node.name in losses for node, _ in stood) for stood in parts.values()) > len(losses)


def test_a_kernel_stands_beside_the_captured_ops_with_their_own_times() -> None:
    captured = {node.name: 10.0 for node in variant().baseline.whole.ops if does_work(node)}
    parts, calls = stood_for(variant()), calls_by_kernel(variant().whole)
    for record in kernel_records(variant(), of=lambda _: times_of(captured)):
        found, mine = record["replaces"], [one for call in calls[record["name"]] for one in parts[call.name]]
        assert sum(count for _, count in found["ops"]) == found["launches"] == len({node.name for node, _ in mine})
        assert found["us"] is None or found["us"] == pytest.approx(10 * sum(share for _, share in mine))
        assert not {name for name, _ in found["ops"]} & {"exp", "logsumexp", "gather", "rsqrt"}  # what decompose makes


def test_a_kernel_that_does_a_part_of_an_op_has_no_time_to_be_held_against() -> None:
    """A decomposed loss counts its targets apart, and nothing says what that took within `nll_loss`."""
    torch.manual_seed(0)
    model, x, targets = nn.Linear(16, 5), torch.randn(8, 16), torch.randint(5, (8,))
    step = tracefuse.capture(lambda: nn.functional.cross_entropy(model(x), targets).backward()).optimize()
    captured = {node.name: 10.0 for node in step.baseline.whole.ops if does_work(node)}
    parts, calls = stood_for(step), calls_by_kernel(step.whole)
    records = kernel_records(step, times_of({n.name: 1.0 for n in step.whole.ops}), of=lambda _: times_of(captured))
    shares = {one["name"]: [share for call in calls[one["name"]] for _, share in parts[call.name]] for one in records}
    alone = [one for one in records if all(share < 0.999 for share in shares[one["name"]])]
    whole = [one for one in records if all(share > 0.999 for share in shares[one["name"]])]
    assert alone
    assert {name for one in alone for name, _ in one["replaces"]["ops"]} <= {
        "nll_loss",
        "nll_loss backward",
        "log_softmax",
    }
    assert {one["replaces"]["us"] for one in alone} == {None}
    assert all(one["replaces"]["us"] == pytest.approx(10 * len(shares[one["name"]])) for one in whole)
    assert whole


def test_a_kernel_names_every_line_whose_work_it_does() -> None:
    shown = payload(variant())
    several = {name: value["lines"] for name, value in shown["values"].items() if value["lines"]}
    found = replaced_in(variant())
    assert several
    for name, lines in several.items():
        assert {text for text, _ in lines} == {line_of(node) for node in found[name].ops}
        assert sum(share for _, share in lines) == pytest.approx(1, abs=1e-3)
        assert [share for _, share in lines] == sorted((share for _, share in lines), reverse=True)


def test_the_calls_of_a_long_sum_read_its_operands_in_the_mean() -> None:
    def fn(*operands: Tensor) -> tuple[Tensor, Tensor]:
        few, many = sum(operands[1:8], operands[0]), sum(operands[1:12], operands[0] * 2 @ operands[0])
        return few @ few, many @ many

    trace = tracefuse.capture(fn, *(torch.randn(4, 4) for _ in range(12))).optimize(fuse=True, simplify=False).trace
    kernel = next(n.target for n in trace.ops if isinstance(n.target, LongSum))
    counts = [len(n.args) for n in trace.ops if n.target == kernel]
    assert sorted(counts) == [8, 12]
    assert mean_bytes(kernel, trace) == (10 * 64, 64)


# --- how fast ---------------------------------------------------------------------------------------------------------


def test_without_a_time_nothing_is_said_of_speed(on_gpu: None) -> None:
    for times in (None, times_of({})):
        for record in kernel_records(variant(), times, THREE_TB_S):
            said = {"time_us", "gb_per_s", "tflop_per_s", "least_us", "peak_share", "peak_source", "bound"}
            assert {record[name] for name in said} == {None, ""}
            assert record["provenance"] == "not measured"


def test_speed_is_set_beside_the_copy_that_was_measured(on_gpu: None) -> None:
    least_us = bytes_moved() / 3e6
    us = dict.fromkeys(calls_of(variant().kernels[0]), 100 + least_us)
    found = first_record(times_of(us), THREE_TB_S)
    assert found["gb_per_s"] == pytest.approx(bytes_moved() / (100 + least_us) / 1e3)
    assert found["peak_share"] == pytest.approx(least_us / (100 + least_us))
    assert found["peak_source"] == "3 TB/s, measured peaks of a GPU"
    assert (found["bound"], found["least_us"]) == ("memory", pytest.approx(least_us))


def test_without_a_measured_copy_it_is_the_datasheet_that_says_so(on_gpu: None) -> None:
    us = dict.fromkeys(calls_of(variant().kernels[0]), 100.0)
    found = first_record(times_of(us))
    assert found["peak_share"] == pytest.approx(bytes_moved() / 3.35e6 / 100)
    assert found["peak_source"] == "3.35 TB/s, H100 SXM datasheet, not measured"


def test_of_a_gpu_that_nothing_is_known_of_there_is_no_share(on_gpu: None) -> None:
    us = dict.fromkeys(calls_of(variant().kernels[0]), 100.0)
    found = first_record(times_of(us, "NVIDIA T4"))
    assert found["gb_per_s"] == pytest.approx(bytes_moved() / 1e5)
    assert (found["peak_share"], found["peak_source"]) == (None, "")


def test_operators_of_libraries_are_listed_with_their_times() -> None:
    v = variant()
    us = {node.name: 2.0 for node in v.trace.ops if does_work(node)}
    assert aten_records(v, None, THREE_TB_S) == []
    found = aten_records(v, OpTimes(us, f"{GPU}, op by op"), THREE_TB_S)
    assert sum(one["calls"] for one in found) == sum(
        does_work(node) and not isinstance(node.target, Kernel) for node in v.trace.ops
    )
    product = next(one for one in found if one["name"].startswith("mm "))
    assert product["tflop_per_s"] > 0
    assert product["provenance"] == f"{GPU}, op by op"
    times = OpTimes(us, f"{GPU}, op by op")
    assert payload(v, clock=Clock((times, times), GPU, modelled, peaks=THREE_TB_S))["aten"] == found


def test_what_has_no_row_of_its_own_is_in_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    v = variant()
    times = modelled(v.trace)
    whole = sum(one["time_us"] * one["calls"] for one in aten_records(v, times, None))
    monkeypatch.setattr(kernels, "MAX_ATEN", 3)
    found = aten_records(v, times, None)
    assert len(found) == 4
    assert found[-1]["said"].endswith(f"more operators ×{found[-1]['calls']}")
    assert sum(one["time_us"] * one["calls"] for one in found) == pytest.approx(whole)


# --- what it takes ----------------------------------------------------------------------------------------------------


def test_a_kernel_is_inspected_when_asked() -> None:
    kernel = variant().kernels[0]
    found, expected = inspect_kernel(variant(), kernel.name), resources(kernel)
    assert (found["registers"], found["shared_bytes"], found["spills"]) == (
        expected.registers, expected.shared_bytes, expected.spills,
    )  # fmt: skip
    assert found["registers"] > 0
    assert found["target"].startswith("sm_")
    shown = {k["name"]: k["resources"] for k in payload(variant(), inspected={kernel.name: found})["kernels"]}
    assert shown.pop(kernel.name) == found
    assert set(shown.values()) == {None}


def test_it_is_inspected_under_the_block_sizes_that_it_runs_with() -> None:
    capture = tracefuse.capture(lambda x: x.exp().sin().sum(-1), torch.ones(64, 2048))
    tuned = capture.optimize()
    kernel, tuning = tuned.kernels[0], Tuning(warps=2)
    tuned.tunings = {kernel.name: tuning}
    assert resources(kernel, tuning=tuning).num_warps != resources(kernel).num_warps
    assert inspect_kernel(tuned, kernel.name)["registers"] == resources(kernel, tuning=tuning).registers


def test_a_kernel_that_is_not_there_cannot_be_inspected() -> None:
    with pytest.raises(OptionError, match="'nope'"):
        inspect_kernel(variant(), "nope")


def test_kernels_of_an_update_are_called_after_what_they_update() -> None:
    """All of them compute the same: without the parameter nothing would tell their rows apart."""
    torch.manual_seed(0)
    model, data = GPT(layers=2, width=32, heads=2, vocab=61, length=16), batch(61, 2, 12)
    optimizer = torch.optim.AdamW(model.parameters())
    with tracefuse.capture_step(n=2) as c:
        for _ in range(3):
            optimizer.zero_grad()
            model(*data).backward()
            optimizer.step()
    said = [row["said"] for row in payload(c.optimize())["kernels"] if "lerp" in row["said"]]
    assert len(said) == len(set(said)) > 3
    assert any(re.search(r" of h\.\*\.mlp\.up\.weight ×2$", one) for one in said)
    assert any(re.search(r" of \d+ parameters ×\d+$", one) for one in said)
