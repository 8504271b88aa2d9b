"""What a device does at best: measured once, kept on disk, measured again where that is damaged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_clock import FakeClock

import tracefuse
from tracefuse.build import cache
from tracefuse.build.cache_folders import versioned
from tracefuse.cli import command as cli
from tracefuse.measure import peaks
from tracefuse.measure.op_times import modelled, roofline_of
from tracefuse.measure.peaks import DevicePeaks, known_peaks, measure_peaks, peaks_of
from tracefuse.measure.timing import estimate
from tracefuse.optimizers.costs.cost import Peaks, flops, roofline_seconds
from tracefuse.optimizers.costs.datasheets import TARGETS
from tracefuse.optimizers.trace import Trace


class Ticking(FakeClock):
    """Ten ms pass between any two marks."""

    def mark(self) -> float:
        self.now_ms += 10
        return self.now_ms


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEFUSE_CACHE", str(tmp_path))
    monkeypatch.setattr(peaks, "_known", {})


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Peaks of a device that is quick to measure, and the names of what was measured."""
    told: list[str] = []
    real = measure_peaks

    def quick(device: str, budget_s: float | None, progress=None) -> DevicePeaks:
        told.append(device)
        return real(device, 0.01, sizes={"fp32": 16}, copy_nbytes=1 << 12, progress=progress)

    monkeypatch.setattr(peaks, "measure_peaks", quick)
    return told


def made_up(scale: float = 1.0) -> DevicePeaks:
    rates = {"bf16": 600e12, "tf32": 300e12, "fp32": 50e12}
    found = {name: estimate([scale * rate] * 8) for name, rate in rates.items()}
    return DevicePeaks("measured on NVIDIA H200", estimate([scale * 4e12] * 8), found)


def test_a_copy_counts_what_it_reads_and_writes_and_a_matmul_its_multiply_adds() -> None:
    texts: list[str] = []
    found = measure_peaks(
        "cpu",
        clock=Ticking(),
        sizes={"fp32": 64, "bf16": 32},
        copy_nbytes=1 << 20,
        progress=lambda _, t: texts.append(t),
    )
    assert found.bytes_per_s.median == pytest.approx(2 * (1 << 20) / 0.010)
    assert found.flops_per_s["fp32"].median == pytest.approx(2 * 64**3 / 0.010)
    assert list(found.flops_per_s) == ["fp32", "bf16"]
    assert texts == [f"measuring this device's peaks: {name}" for name in ("copy", "fp32", "bf16")]
    assert str(found).startswith("measured on CPU (")
    assert "TFLOP/s" in str(found)


def test_tensor_cores_are_allowed_for_tf32_alone_and_left_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul, seen = torch.backends.cuda.matmul, {}
    before, real = matmul.allow_tf32, peaks.measure

    def watched(programs, **given):
        seen[next(iter(programs))] = matmul.allow_tf32
        return real(programs, **given)

    monkeypatch.setattr(peaks, "measure", watched)
    measure_peaks("cpu", clock=Ticking(), sizes={"tf32": 8, "fp32": 8}, copy_nbytes=64)
    assert seen == {"copy": False, "tf32": True, "fp32": False}
    assert matmul.allow_tf32 == before


def test_they_are_measured_once_and_found_again_by_the_next_session(
    small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert known_peaks("cpu") is None
    found = peaks_of("cpu")
    assert (peaks_of("cpu"), known_peaks("cpu"), small) == (found, found, ["cpu"])
    monkeypatch.setattr(peaks, "_known", {})
    assert known_peaks("cpu") == found
    assert peaks_of("cpu", again=True).device == found.device
    assert small == ["cpu", "cpu"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: {**kept, "bytes_per_s": [1.0, 2.0]},
        lambda kept: {**kept, "bytes_per_s": {**kept["bytes_per_s"], "low": 0.0}},
        lambda kept: {**kept, "flops_per_s": {"fp32": "fast"}},
        lambda kept: {**kept, "flops_per_s": {"fp7": kept["bytes_per_s"]}},
        lambda kept: {**kept, "flops_per_s": {}},
        lambda kept: [kept],
        lambda kept: {"bytes_per_s": kept["bytes_per_s"]},
    ],
)
def test_what_is_kept_and_not_whole_is_measured_again(small: list[str], damage, monkeypatch) -> None:
    peaks_of("cpu")
    key = peaks._key("cpu")
    cache.write_json(key, damage(cache.read_json(key)))
    monkeypatch.setattr(peaks, "_known", {})
    assert known_peaks("cpu") is None
    peaks_of("cpu")
    assert small == ["cpu", "cpu"]


def test_a_damaged_file_is_measured_again_with_a_warning(small: list[str], monkeypatch) -> None:
    peaks_of("cpu")
    (file,) = (versioned() / "facts").iterdir()
    assert json.loads(file.read_text())["key"].startswith("peaks ")
    file.write_text("{")
    monkeypatch.setattr(peaks, "_known", {})
    with pytest.warns(UserWarning, match="is damaged"):
        peaks_of("cpu")
    assert small == ["cpu", "cpu"]


def test_the_command_prints_them(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for flags in ([], [], ["--again"]):
        assert cli.main(["peaks", "--device", "cpu", *flags]) == 0
    assert small == ["cpu", "cpu"]
    out = capsys.readouterr().out
    assert out.count("copy, read and written") == 3
    assert cli.main(["peaks", "--device", "tpu"]) == 2
    with pytest.raises(SystemExit):
        cli.main(["peaks", "--agian"])
    assert "did you mean --again? see tracefuse peaks --help" in capsys.readouterr().err


# --- the models -------------------------------------------------------------------------------------------------------


def test_matmuls_stand_under_the_roof_of_their_precision() -> None:
    strict, loose = made_up().roofline(), made_up().roofline(tf32=True)
    assert [p.flops_rate(torch.float32) for p in (strict, loose)] == [50e12, 300e12]
    assert strict.flops_rate(torch.bfloat16) == 600e12
    assert strict.flops_rate(torch.float16) == 600e12  # not measured: the highest
    assert [p.flops_rate(torch.float32, in_convolution=True) for p in (strict, loose)] == [300e12, 300e12]
    assert made_up().roofline(convolutions=False).flops_rate(torch.float32, in_convolution=True) == 50e12
    assert strict.source == "measured peaks of NVIDIA H200"
    assert hash(strict) != hash(loose)


def products(dtype: torch.dtype) -> Trace:
    a = torch.ones(256, 256, dtype=dtype)
    return tracefuse.capture(lambda x: x @ x, a).trace


def test_an_op_is_modelled_by_the_rate_of_its_dtype() -> None:
    peaks_ = Peaks(1e30, 1e12, "made up", ((torch.float32, 1e9),))
    for dtype, rate in ((torch.float32, 1e9), (torch.float64, 1e12)):
        (node,) = (n for n in products(dtype).ops if flops(n))
        assert roofline_seconds(node, peaks_) == pytest.approx(2 * 256**3 / rate)


@pytest.mark.parametrize("convolutions", [True, False])
def test_convolutions_of_float32_are_modelled_on_tensor_cores_where_torch_lets_them(convolutions: bool) -> None:
    x, weight = torch.ones(2, 64, 32, 32), torch.ones(64, 64, 3, 3)
    trace = tracefuse.capture(lambda: torch.conv2d(x, weight, padding=1)).trace
    (node,) = (n for n in trace.ops if flops(n))
    sheet = TARGETS["H100"]
    alone = replace(sheet.peaks(False, convolutions), bytes_per_s=1e30)
    assert roofline_seconds(node, alone) == pytest.approx(flops(node) / (sheet.tf32 if convolutions else sheet.fp32))


def test_a_cpu_program_is_modelled_by_the_datasheet_and_says_so() -> None:
    sheet = TARGETS["H100"].peaks(torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    assert roofline_of(products(torch.float32)) == sheet
    assert modelled(products(torch.float32)).provenance.startswith("modelled: roofline of the H100 SXM datasheet")


def test_a_gpu_program_is_modelled_by_the_gpus_own_peaks_once_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = products(torch.float32)
    monkeypatch.setattr("tracefuse.measure.op_times.is_on_gpu", lambda trace: True)
    monkeypatch.setattr("tracefuse.measure.op_times.known_peaks", lambda device: None)
    before = modelled(trace)
    assert modelled(trace) is before
    monkeypatch.setattr("tracefuse.measure.op_times.known_peaks", lambda device: made_up())
    after = modelled(trace)
    assert after.provenance == "modelled: roofline of the measured peaks of NVIDIA H200"
    assert after.us != before.us


@pytest.mark.gpu
def test_the_peaks_of_a_gpu() -> None:
    found = peaks_of("cuda")
    assert list(found.flops_per_s) == ["bf16", "fp16", "tf32", "fp32", "fp64"]
    assert found.flops_per_s["bf16"].median > found.flops_per_s["tf32"].median > found.flops_per_s["fp32"].median
    assert found.bytes_per_s.median > 1e11
    assert peaks_of("cuda") is found
