"""The part of the wire format that says what each Triton kernel is, how fast it ran, and what it takes of a GPU.

A kernel's time is that of one call, all its launches together, from the profiler; those of ATen's operators are measured op
by op. They are set beside what the same GPU does at best, measured (`tracefuse.measure.peaks`), else beside the
datasheet where that
GPU's is known.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

from tracefuse.build.kernels import this_gpu
from tracefuse.build.modules import HOPPER, resources
from tracefuse.errors import OptionError
from tracefuse.measure.op_times import OpTimes
from tracefuse.measure.profile import Profile
from tracefuse.optimizers.costs.cost import Peaks
from tracefuse.optimizers.costs.datasheets import datasheet_of
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.kernels.long_sum import LongSum
from tracefuse.optimizers.kernels.text import kernel_source
from tracefuse.optimizers.lowering.layouts import GUESS, Tuning
from tracefuse.optimizers.ops import op_name
from tracefuse.optimizers.trace import Trace
from tracefuse.timeline.kernel_times import Reached, kernel_rows, reached
from tracefuse.variant import Variant

NOT_MEASURED = "not measured"
MAX_ATEN = 64
"""ATen operators that are listed: those below take next to nothing of a step."""
Resources = dict[str, Any]
"""What `inspect_kernel` found: {registers, shared_bytes, spills, target}."""


def kernel_records(
    variant: Variant,
    profile: Profile | None = None,
    peaks: Peaks | None = None,
    inspected: Mapping[str, Resources] | None = None,
) -> list[dict[str, Any]]:
    """The kernels of a variant in the order of their first launch; `inspected` are resources by kernel."""
    records = []
    for kernel, calls in kernel_calls(variant.trace):
        tuning, refused = variant.tunings.get(kernel.name, GUESS), variant.fallbacks.get(kernel.name)
        record = kernel_record(kernel, calls, profile, refused, tuning)
        record["nbytes_read"] = mean_bytes_read(kernel, variant.trace)
        record |= speed(record["nbytes_read"] + record["nbytes_written"], record["time_us"], profile, peaks)
        record["resources"] = (inspected or {}).get(kernel.name)
        records.append(record)
    return records


def kernel_calls(trace: Trace) -> list[tuple[Kernel, int]]:
    """The Triton kernels of a trace in the order of their first launch, and how often each is launched."""
    counts = Counter(node.target for node in trace.ops if isinstance(node.target, Kernel))
    return [(kernel, count) for kernel, count in counts.items() if isinstance(kernel, Kernel)]


def mean_bytes_read(kernel: Kernel, trace: Trace) -> int:
    """Bytes that a call of the kernel reads; of a long sum, whose calls differ, what they read in the mean."""
    if not isinstance(kernel, LongSum):
        return kernel.nbytes_read
    operands = [len(node.args) for node in trace.ops if node.target == kernel]
    return kernel.nbytes_written * sum(operands) // len(operands)


def kernel_record(
    kernel: Kernel, calls: int, profile: Profile | None = None, refused: str | None = None, tuning: Tuning = GUESS
) -> dict[str, Any]:
    """One kernel; `refused` says why it cannot run here, and then its source is that of its ATen ops."""
    time_us = profile and _call_us(kernel, profile)
    return {
        "name": kernel.name,
        "calls": calls,
        "ops": [op_name(node).removeprefix("aten.") for node in kernel.body.ops],
        "nbytes_read": kernel.nbytes_read,
        "nbytes_written": kernel.nbytes_written,
        "time_us": time_us,
        "provenance": f"{profile.device}, profiled once" if profile and time_us else NOT_MEASURED,
        "blocks": "guess" if tuning.is_guess else "tuned",
        "source": _source(kernel, tuning, refused),
        **speed(0, None),
        "resources": None,
    }


@functools.lru_cache(maxsize=1024)
def _source(kernel: Kernel, tuning: Tuning, refused: str | None) -> str:
    """A kernel's text; most kernels survive a toggle."""
    return kernel_source(kernel, tuning, refused)


# --- how fast ---------------------------------------------------------------------------------------------------------


def _call_us(kernel: Kernel, profile: Profile) -> float | None:
    """Mean over the kernel's calls in the profiled run: of `<name>_kernel`, and `<name>_finish` if there is one."""
    mine = [k for k in profile.kernels if k.name.startswith((f"{kernel.name}_kernel", f"{kernel.name}_finish"))]
    return sum(k.total_us / k.calls for k in mine) or None


def speed(
    nbytes: int, time_us: float | None, profile: Profile | None = None, peaks: Peaks | None = None
) -> dict[str, Any]:
    """What a call that moves `nbytes` in `time_us` reaches, and what holds it back; null and "" where that is not known."""
    peaks = peaks or _promised(profile)
    return _speed_record(reached(time_us, nbytes, peaks=peaks), peaks)


def _promised(profile: Profile | None) -> Peaks | None:
    """The datasheet's peaks of the profiled GPU, where they are known."""
    return datasheet_of(profile.device.removeprefix("measured on ")) if profile is not None else None


def _speed_record(found: Reached, peaks: Peaks | None) -> dict[str, Any]:
    is_shown = peaks is not None and found.share is not None
    return {
        "gb_per_s": found.gb_per_s,
        "tflop_per_s": found.tflop_per_s,
        "least_us": found.least_us,
        "peak_share": found.share,
        "peak_source": peak_source(peaks) if is_shown else "",
        "bound": found.bound,
    }


def peak_source(peaks: Peaks) -> str:
    """Bytes per second that the device can move, and who says so."""
    measured = "" if peaks.source.startswith("measured") else ", not measured"
    return f"{peaks.bytes_per_s / 1e12:.3g} TB/s, {peaks.source}{measured}"


def aten_records(variant: Variant, times: OpTimes | None, peaks: Peaks | None) -> list[dict[str, Any]]:
    """ATen's operators by the types of their operands, those that take longest first; none without measured times."""
    if times is None or not times.provenance.startswith("measured on"):
        return []
    rows = (row for row in kernel_rows(variant.trace, times.us, peaks) if not row.is_triton)
    return [
        {"name": row.name, "calls": row.calls, "time_us": row.time_us, "nbytes": row.nbytes}
        | {"provenance": times.provenance, **_speed_record(row.reached, peaks)}
        for row in sorted(rows, key=lambda row: -row.total_us)[:MAX_ATEN]
    ]


# --- what it takes ----------------------------------------------------------------------------------------------------


def inspect_kernel(variant: Variant, name: str) -> Resources:
    """Registers per thread, shared memory and spills, in bytes, of one program of the variant's kernel called `name`.

    Compiled for this machine's GPU, or for Hopper where there is none: `target` says which. Raises `OptionError` for a
    name that is no kernel's, `BuildError` where Triton refuses it.
    """
    kernel = next((one for one in variant.kernels if one.name == name), None)
    if kernel is None:
        raise OptionError(f"these passes make no kernel {name!r}: select one of those that are listed")
    gpu = this_gpu()
    arch = int(gpu.arch) if gpu else HOPPER
    found = resources(kernel, arch, variant.tunings.get(name, GUESS))
    where = "this GPU" if gpu else "no GPU here"
    return {
        "registers": found.registers,
        "shared_bytes": found.shared_bytes,
        "spills": found.spills,
        "target": f"sm_{arch}, {where}",
    }
