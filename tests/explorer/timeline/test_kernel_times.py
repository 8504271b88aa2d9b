"""What each kernel reaches of the roof that lies nearest, by measured times only."""

from __future__ import annotations

import pytest
import torch

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.measure.peaks import peaks_of
from tracefuse.optimizers.costs.cost import Peaks
from tracefuse.optimizers.costs.datasheets import sheet_of
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.ops import does_work
from tracefuse.timeline.kernel_times import (
    AT_PEAK,
    LAUNCH_US,
    KernelRow,
    KernelTimes,
    Reached,
    called,
    kernel_rows,
    reached,
)

PEAKS = Peaks(1e12, 100e12, "made up", ((torch.float32, 10e12), (torch.bfloat16, 100e12)))


@pytest.fixture(scope="module")
def variant() -> tracefuse.Variant:
    torch.manual_seed(0)
    model, data = GPT(layers=2, width=32, heads=2, vocab=61, length=16), batch(61, 2, 12)
    return tracefuse.capture(lambda: model(*data).backward()).optimize()


@pytest.mark.parametrize(
    ("nbytes", "work", "dtype", "bound", "least_us"),
    [
        (10**8, 0, None, "memory", 100),
        (10**8, 10**8, torch.bfloat16, "memory", 100),
        (10**6, 10**10, torch.bfloat16, "compute", 100),
        (10**6, 10**10, torch.float32, "compute", 1000),
    ],
)
def test_the_bound_is_the_roof_that_takes_longer(nbytes, work, dtype, bound, least_us) -> None:
    found = reached(2000, nbytes, work, dtype, PEAKS)
    assert (found.bound, found.least_us, found.share) == (
        bound,
        pytest.approx(least_us),
        pytest.approx(least_us / 2000),
    )
    assert found.gb_per_s == pytest.approx(nbytes / 2000e-6 / 1e9)
    assert found.tflop_per_s == (pytest.approx(work / 2000e-6 / 1e12) if work else None)


def test_nothing_is_said_of_a_share_of_a_peak_that_nobody_measured() -> None:
    found = reached(2000, 10**6, 10**10, torch.float64, PEAKS)
    assert (found.share, found.least_us, found.bound) == (None, None, "")
    assert found.tflop_per_s == pytest.approx(5)
    assert reached(2000, 10**6, 0, torch.float64, PEAKS).bound == "memory"


def test_what_is_over_before_the_next_launch_is_bound_by_launching_on_a_gpu() -> None:
    assert reached(LAUNCH_US - 0.1, 10**6, peaks=PEAKS).bound == "launch"
    assert reached(LAUNCH_US, 10**6, peaks=PEAKS).bound == "memory"
    assert reached(LAUNCH_US - 0.1, 10**6, peaks=PEAKS, is_launched=False).bound == "memory"


def test_without_a_time_or_peaks_little_is_said() -> None:
    assert set(vars(reached(None, 10**6, peaks=PEAKS)).values()) == {None, ""}
    found = reached(100, 10**6)
    assert (found.gb_per_s, found.share, found.bound) == (pytest.approx(10), None, "")


def test_calls_on_operands_of_one_type_share_a_row(variant: tracefuse.Variant) -> None:
    work = [node for node in variant.trace.ops if does_work(node)]
    rows = kernel_rows(variant.trace, {node.name: 3.0 for node in work}, PEAKS)
    assert sum(row.calls for row in rows) == len(work)
    assert {row.name for row in rows if row.is_triton} == {kernel.name for kernel in variant.kernels}
    linear = next(row for row in rows if row.name == "addmm f32[96] f32[24, 32] f32[32, 96]")
    assert (linear.calls, linear.flops) == (2, 2 * 24 * 32 * 96)
    assert linear.nbytes == 4 * (96 + 24 * 32 + 32 * 96 + 24 * 96)
    kernel = next(node for node in work if isinstance(node.target, Kernel))
    row = next(row for row in rows if row.name == called(kernel))
    assert row.nbytes == kernel.target.nbytes


def test_an_op_that_was_not_timed_has_no_row(variant: tracefuse.Variant) -> None:
    (first, *_) = (node for node in variant.trace.ops if does_work(node))
    (row,) = kernel_rows(variant.trace, {first.name: 3.0}, PEAKS)
    assert isinstance(row, KernelRow)
    assert (row.name, row.time_us) == (called(first), 3.0)


def test_a_long_name_is_cut_in_the_table() -> None:
    rows = tuple(KernelRow("k" * length, True, 1, 2.0, 8, 0, reached(2.0, 8)) for length in (60, 61))
    whole, cut = str(KernelTimes("measured on a test", "", rows)).splitlines()[3:]
    assert (whole.split()[0], cut.split()[0]) == ("k" * 60, "k" * 59 + "…")


@pytest.mark.parametrize(
    ("share", "said"), [(0.974, "97%"), (1.0, "100%"), (1.004, "100%"), (1.02, "at peak"), (1.6, "at peak")]
)
def test_nothing_reaches_more_than_the_peak(share: float, said: str) -> None:
    row = KernelRow("k", True, 1, 2.0, 8, 0, Reached(share=share, bound="memory"))
    lines = str(KernelTimes("measured on a test", "", (row,))).splitlines()
    assert said in lines[3]
    assert (AT_PEAK in lines) == (said == "at peak")


def test_on_a_cpu_the_table_says_what_ran_and_whose_peaks_they_are(
    variant: tracefuse.Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, texts = torch.get_rng_state(), []
    found = variant.kernel_times(progress=lambda _, text: texts.append(text))
    assert torch.equal(torch.get_rng_state(), state)
    assert found.provenance.startswith("measured on CPU (")
    assert found.peaks.startswith("measured peaks of CPU (")
    assert "launch" not in {row.reached.bound for row in found.rows}
    assert [row.total_us for row in found.rows] == sorted((row.total_us for row in found.rows), reverse=True)
    lines = str(found).splitlines()
    assert lines[2].split() == [
        "kernel",
        "calls",
        "µs",
        "each",
        "share",
        "moves",
        "GB/s",
        "TFLOP/s",
        "of",
        "peak",
        "bound",
    ]
    assert lines[-1].startswith("On a CPU a Triton kernel is the ATen operators")
    monkeypatch.setattr("tracefuse.timeline.kernel_times.peaks_if_there_is_room", lambda device, progress: None)
    assert "peaks: not known" in str(variant.kernel_times())


@pytest.mark.gpu
@pytest.mark.alone  # what else the GPU does lowers peaks, or lengthens kernels
def test_on_a_gpu_no_large_kernel_passes_its_roof() -> None:
    """What is measured is the roof of a copy. The datasheet's is that of a kernel that only reads, as a sum does."""
    peaks_of("cuda", again=True)  # those that a test measured beside others are too low
    sheet = sheet_of(torch.cuda.get_device_name())
    if sheet is None:
        pytest.skip("the datasheet of this GPU is not known")
    # 512 MiB each: a cache of 50 MiB may still hold the end of what the kernel before wrote. That is a tenth of the
    # bytes of a kernel that only reads one of them, and a twentieth where it also writes one.
    a = torch.randn(16384, 16384, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    found = tracefuse.capture(lambda: ((a @ a).relu().exp()).sum().backward()).optimize().kernel_times()
    large = [row for row in found.rows if row.time_us > 10]
    assert {row.reached.bound for row in large} == {"compute", "memory"}
    assert min(row.reached.share for row in large) > 0.1
    assert max(row.reached.gb_per_s for row in large) < 1.12 * sheet.bytes_per_s / 1e9
    assert max(row.reached.tflop_per_s or 0 for row in large) < sheet.bf16 / 1e12
