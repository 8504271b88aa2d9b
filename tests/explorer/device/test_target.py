"""One machine for all prices: chosen, here, or an example, and every price says which."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import tracefuse
from tracefuse.device import target as targets
from tracefuse.errors import OptionError
from tracefuse.measure.op_times import modelled
from tracefuse.optimizers.costs.cost import H100_SXM_DATASHEET
from tracefuse.optimizers.costs.datasheets import DATASHEETS, TARGETS, datasheet_of


@pytest.fixture(autouse=True)
def unchosen() -> Iterator[None]:
    targets.target("here")
    yield
    targets.target("here")


def captured(dtype: torch.dtype = torch.bfloat16) -> tracefuse.Capture:
    x, w = torch.randn(512, 515, dtype=dtype, requires_grad=True), torch.randn(515, 1027, dtype=dtype)
    return tracefuse.capture(lambda: (x @ w).cos().sum().backward())


def test_without_a_choice_and_a_gpu_it_is_an_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert str(tracefuse.target()) == "H100 (an example, since no GPU is here and none was chosen)"


def test_a_gpu_that_is_here_comes_before_the_example_and_a_choice_before_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert str(tracefuse.target()) == "H200 (the GPU that is here)"
    assert str(tracefuse.target("l4")) == "L4 (chosen)"
    assert str(tracefuse.target()) == "L4 (chosen)", "for the process"
    assert str(tracefuse.target("here")) == "H200 (the GPU that is here)"


@pytest.mark.parametrize("text", ["RTX 4090", "rtx4090", "rtx-4090", "RTX_4090"])
def test_names_are_read_whatever_their_case_and_spaces(text: str) -> None:
    assert tracefuse.target(text).name == "RTX 4090"


def test_an_unknown_one_says_what_there_is() -> None:
    with pytest.raises(OptionError, match=r"no target 'H20O': did you mean H200\? choose from A100, H100"):
        tracefuse.target("H20O")


@pytest.mark.parametrize("name", TARGETS)
def test_every_price_is_the_targets(name: str) -> None:
    tracefuse.target(name)
    capture, sheet = captured(), TARGETS[name]
    variant = capture.optimize(memory_budget=0.9)
    assert capture.datasheet == sheet.peaks(tf32=False)
    assert variant.op_times.provenance == f"modelled: roofline of the {sheet.source}, not of the CPU that it ran on"
    remat = next(step for step in variant.passes if step.name == "remat")
    assert any(f"by the {sheet.source}" in d.reason for d in remat.decisions)
    assert capture.frozen_costs().peaks.source == sheet.source
    assert all(sheet.source in one.worth for one in variant.findings() if "roofline" in one.worth)
    assert variant.capture.machine.pad.peaks.source == sheet.source


def test_a_smaller_gpu_is_slower_and_the_variant_is_made_anew() -> None:
    capture = captured()
    times = {}
    for name in ("B200", "H200", "L4"):
        tracefuse.target(name)
        times[name] = sum(capture.optimize().op_times.us.values())
    assert times["B200"] < times["H200"] < times["L4"]
    tracefuse.target("H200")
    assert sum(capture.optimize().op_times.us.values()) == times["H200"]


def test_padding_is_priced_by_the_target() -> None:
    capture, said = captured(), {}
    for name in ("H200", "L4"):
        tracefuse.target(name)
        pad = next(step for step in capture.optimize().passes if step.name == "pad")
        said[name] = pad.decisions[0].reason
    assert "modelled" in said["H200"]
    assert said["H200"] != said["L4"]


def test_float32_matmuls_cost_what_they_do_without_tensor_cores() -> None:
    tracefuse.target("H100")
    trace = captured(torch.float32).trace
    us = max(modelled(trace).us.values())
    assert us == pytest.approx(2e6 * 512 * 515 * 1027 / 67e12)


def test_the_sheets_are_of_the_gpus_that_torch_names() -> None:
    assert {one.source for one in DATASHEETS.values()} >= {one.source for one in TARGETS.values()}
    found = datasheet_of("NVIDIA GeForce RTX 4090")
    assert found is not None
    assert found.source == "RTX 4090 datasheet"
    assert TARGETS["H100"].source == H100_SXM_DATASHEET.source
    assert all(one.fp64 < one.fp32 <= one.tf32 < one.bf16 for one in TARGETS.values())
