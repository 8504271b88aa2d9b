"""The peaks of this machine, measured: how fast it copies, and how fast it multiplies matrices, by precision.

They are measured when a machine first needs them, in a few seconds, then read from the disk cache.

Measured, because datasheets promise more than a copy or a matmul gets and do not know every model's name. What was measured
holds for a device: its model, its driver, its clocks' and power's limits, and this torch. A matmul of other sizes may get a
few percent more, or a copy that a cache holds: then a share of the peak is above 100 %: `at peak`.
"""

from __future__ import annotations

import functools
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tracefuse.build import cache
from tracefuse.device.clocks import Clock, clock_of, device_label
from tracefuse.errors import SessionError
from tracefuse.execution.program import Replays
from tracefuse.measure.rounds import Progress, measure
from tracefuse.measure.timing import Estimate
from tracefuse.optimizers.costs.cost import Peaks
from tracefuse.optimizers.formats.plain_data import read, written
from tracefuse.text import aligned

COPY_NBYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
"""Read and written: far above what caches hold."""
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "tf32": torch.float32,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
"""Precisions of a matmul, as people call them."""
MATMULS = {"cuda": {"bf16": 8192, "fp16": 8192, "tf32": 8192, "fp32": 4096, "fp64": 4096}, "cpu": {"fp32": 512}}
"""Rows and columns of both operands by precision."""
BUDGET_S = {"cuda": 3.0, "cpu": 1.0}
"""Of timed runs, all of a device together."""


@dataclass(frozen=True)
class DevicePeaks:
    """Bytes read plus bytes written per second of a large copy, FLOP/s of large square matmuls by precision ("bf16", "tf32",
    …), and where they were measured: `device` begins with "measured on"."""

    device: str
    bytes_per_s: Estimate
    flops_per_s: Mapping[str, Estimate]

    def roofline(self, tf32: bool = False, convolutions: bool = True) -> Peaks:
        """The peaks as the models take them; with `tf32` the tensor cores multiply float32, as a program may have allowed, and
        with `convolutions` they convolve it, as torch allows by default.

        At best, which is what the intervals end with: a neighbour on a CPU that is shared takes from the medians.
        """
        rates = {name: rate.high for name, rate in self.flops_per_s.items()}
        convolved = rates.get("tf32" if convolutions else "fp32")
        rates.pop("fp32" if tf32 and "tf32" in rates else "tf32", None)
        by_dtype = tuple((DTYPES[name], rate) for name, rate in rates.items())
        source = f"measured peaks of {self.device.removeprefix('measured on ')}"
        return Peaks(self.bytes_per_s.high, max(rates.values()), source, by_dtype, convolved, convolutions)

    def __str__(self) -> str:
        rows = [("copy, read and written", _interval(self.bytes_per_s, 1e9), "GB/s")]
        rows += [(f"{name} matmul", _interval(rate, 1e12), "TFLOP/s") for name, rate in self.flops_per_s.items()]
        return f"{self.device}\n{aligned([('peak', 'median [95 % interval]', ''), *rows])}"


def _interval(rate: Estimate, unit: float) -> str:
    return str(Estimate(rate.median / unit, rate.low / unit, rate.high / unit, rate.coverage, rate.samples))


# --- measuring --------------------------------------------------------------------------------------------------------


def measure_peaks(
    device: str | torch.device,
    budget_s: float | None = None,
    clock: Clock | None = None,
    progress: Progress | None = None,
    sizes: Mapping[str, int] | None = None,
    copy_nbytes: int | None = None,
) -> DevicePeaks:
    """Measure `device`, "cpu" or "cuda", in `budget_s` seconds (default: `BUDGET_S`) and what warming up takes.

    `sizes` are rows by precision, `copy_nbytes` the bytes that a copy reads. Raises `NotSupported` for other devices, and
    `torch.OutOfMemoryError` where the operands do not fit beside what is allocated.
    """
    kind = torch.device(device).type
    clock, report = clock or clock_of(device), progress or (lambda fraction, text: None)
    sizes = MATMULS[kind] if sizes is None else sizes
    budget_s = budget_s or BUDGET_S[kind]
    made: dict[str, Callable[[], tuple[Replays, int]]] = {
        "copy": lambda: _copy(copy_nbytes or COPY_NBYTES[kind], device)
    }
    made |= {name: functools.partial(_matmul, size, DTYPES[name], device) for name, size in sizes.items()}
    rates: dict[str, Estimate] = {}
    for count, (name, make) in enumerate(made.items()):
        report(count / len(made), f"measuring this device's peaks: {name}")
        program, amount = make()
        with _tensor_cores(name == "tf32"):
            found = measure({name: program}, device=device, clock=clock, budget_s=budget_s / len(made))
        rates[name] = _rate(amount, found.baseline.times_ms["forward"])
    return DevicePeaks(device_label(device), rates.pop("copy"), rates)


def _copy(nbytes: int, device: str | torch.device) -> tuple[Replays, int]:
    """One copy of `nbytes`, and the bytes that it reads and writes."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Replays(lambda: ((target.copy_(source),),), compared=False), 2 * nbytes


def _matmul(size: int, dtype: torch.dtype, device: str | torch.device) -> tuple[Replays, int]:
    """One product of two square matrices, and its FLOPs. Of normal numbers: zeros draw less power and run faster."""
    chance = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, device=device, generator=chance).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    return Replays(lambda: ((torch.mm(a, b, out=product),),), compared=False), 2 * size**3


@contextmanager
def _tensor_cores(allowed: bool) -> Iterator[None]:
    """Whether float32 matmuls use them, as TF32."""
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, allowed
    try:
        yield
    finally:
        matmul.allow_tf32 = before


def _rate(amount: int, time_ms: Estimate) -> Estimate:
    """`amount` per second; the longest time gives the lowest rate."""
    rates = (amount / (ms * 1e-3) for ms in (time_ms.median, time_ms.high, time_ms.low))
    return Estimate(*rates, time_ms.coverage, time_ms.samples)


# --- remembering ------------------------------------------------------------------------------------------------------

_known: dict[str, DevicePeaks] = {}


def known_peaks(device: str | torch.device = "cuda") -> DevicePeaks | None:
    """The peaks that this session or an earlier one measured of this device; None without any, or without such a device."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        return None
    key = _key(device)
    if key not in _known:
        found = _read(cache.read_json(key))
        if found is None:
            return None
        _known[key] = found
    return _known[key]


def peaks_of(
    device: str | torch.device = "cuda",
    again: bool = False,
    progress: Progress | None = None,
    budget_s: float | None = None,
) -> DevicePeaks:
    """The peaks of this device: known ones or, with `again` and where nothing is known, measured now and kept on disk.

    Raises what `measure_peaks` raises.
    """
    found = None if again else known_peaks(device)
    if found is None:
        try:
            found = measure_peaks(device, budget_s, progress=progress)
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # a GiB or two that nobody else should miss
        _known[_key(device)] = found
        cache.write_json(_key(device), written(found))
    return found


def peaks_if_there_is_room(device: str | torch.device, progress: Progress | None = None) -> DevicePeaks | None:
    """The peaks that `peaks_of` gives; None where the GPU's memory is too full to measure."""
    try:
        return peaks_of(device, progress=progress)
    except torch.OutOfMemoryError:
        return None


def _read(kept: Any) -> DevicePeaks | None:
    """What the disk cache holds; None for what is not whole, which is then measured again."""
    try:
        found: DevicePeaks = read(DevicePeaks, kept, "peaks")
    except SessionError:
        return None
    are_rates = all(0 < one.low <= one.median <= one.high for one in (found.bytes_per_s, *found.flops_per_s.values()))
    return found if are_rates and found.flops_per_s and found.flops_per_s.keys() <= DTYPES.keys() else None


def _key(device: str | torch.device) -> str:
    found = torch.device(device)
    if found.type == "cuda":
        index = torch.cuda.current_device() if found.index is None else found.index
        return f"peaks {_gpu(index)} torch {torch.__version__}"
    return f"peaks {_cpu_model()} {torch.get_num_threads()} threads torch {torch.__version__}"


@functools.cache
def _gpu(index: int) -> str:
    """What tells GPUs apart that are not equally fast: a slice of one, another driver, lower limits."""
    properties = torch.cuda.get_device_properties(index)
    shape = f"{properties.name} {properties.multi_processor_count} SMs {properties.total_memory} bytes"
    return f"{shape} {_driver_and_limits(f'GPU-{properties.uuid}')}"


def _driver_and_limits(uuid: str) -> str:
    """What `nvidia-smi` says of the driver and its limits; "" where it is not there, or does not know this device."""
    asked = "--query-gpu=driver_version,power.limit,clocks.max.sm,clocks.max.memory"
    command = ["nvidia-smi", asked, "--format=csv,noheader", f"--id={uuid}"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


@functools.cache
def _cpu_model() -> str:
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{found[0] if found else platform.processor()} {len(found)} cores"
