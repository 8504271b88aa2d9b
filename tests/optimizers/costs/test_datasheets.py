"""Figures that nothing measured name the datasheet that they are from: that of the GPU on which the program ran."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import tracefuse
from tracefuse.assembly.program import CapturedProgram
from tracefuse.optimizers.costs.cost import H100_SXM_DATASHEET
from tracefuse.optimizers.costs.datasheets import DATASHEETS, TARGETS, datasheet_of, promised

UNKNOWN = "H100 SXM datasheet (unknown device: NVIDIA T4)"


def captured() -> tracefuse.Capture:
    x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 32)
    return tracefuse.capture(lambda: (x @ w).cos().sum().backward())


def reasons(capture: tracefuse.Capture) -> str:
    step = next(s for s in capture.optimize(memory_budget=0.9).passes if s.name == "remat")
    return "\n".join(d.reason for d in step.decisions)


@pytest.mark.parametrize(
    ("device", "source"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM datasheet"),
        ("NVIDIA H100 PCIe", "H100 PCIe datasheet"),
        ("NVIDIA H200", "H200 datasheet"),
        ("A100-SXM4-80GB", "A100 SXM 80 GB datasheet"),
        ("NVIDIA T4", UNKNOWN),
    ],
)
def test_a_gpu_is_priced_by_its_own_figures(device: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = captured()
    monkeypatch.setattr(CapturedProgram, "device", torch.device("cuda"))
    monkeypatch.setitem(capture.environment, "device", device)
    assert f"by the {source}" in reasons(capture)
    assert capture.frozen_costs().peaks.source == source


def test_a_program_on_a_cpu_is_priced_by_an_example_whatever_gpu_lies_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = captured()
    monkeypatch.setitem(capture.environment, "device", "NVIDIA H200")
    assert "by the H100 SXM datasheet" in reasons(capture)


def test_peaks_that_are_given_come_first() -> None:
    capture, own = captured(), promised("NVIDIA H200")
    step = next(
        s for s in capture.optimize(memory_budget=0.9, remat_options={"peaks": own}).passes if s.name == "remat"
    )
    assert any("by the H200 datasheet" in d.reason for d in step.decisions)


def test_what_is_not_known_is_said_and_not_guessed() -> None:
    assert datasheet_of("NVIDIA T4") is None
    assert promised("NVIDIA T4").source == UNKNOWN
    assert promised("NVIDIA T4").bytes_per_s == H100_SXM_DATASHEET.bytes_per_s
    assert len({one.source for one in DATASHEETS.values()}) == len(DATASHEETS)


def test_the_example_is_the_gpu_of_its_name() -> None:
    """No matrices of float32 are multiplied at the rate of bf16 there, whether the H100 is the example or was chosen."""
    for tf32, convolutions in product((True, False), repeat=2):
        assert promised(None, tf32, convolutions) == TARGETS["H100"].peaks(tf32, convolutions)
