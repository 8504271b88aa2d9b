"""The part of the wire format that says what each Triton kernel is, how fast it ran, and what it takes of a GPU.

A kernel's time is that of one call in the mean, all its launches together; it was measured op by op, as those of ATen's
operators are. They are set beside what the same GPU does at best, measured (`tracefuse.measure.peaks`), else beside the
datasheet where that GPU's is known.
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
from tracefuse.optimizers.costs.cost import Peaks, bytes_read, bytes_written
from tracefuse.optimizers.costs.datasheets import datasheet_of
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.kernels.lists import ListKernel
from tracefuse.optimizers.kernels.long_sum import LongSum
from tracefuse.optimizers.kernels.text import kernel_source
from tracefuse.optimizers.lowering.layouts import GUESS, Tuning
from tracefuse.optimizers.ops import op_name
from tracefuse.optimizers.trace import Trace
from tracefuse.timeline.kernel_times import KernelRow, Reached, kernel_rows
from tracefuse.variant import Variant

NOT_MEASURED = "not measured"
MAX_ATEN = 64
"""ATen operators that are listed: those below take next to nothing of a step."""
Resources = dict[str, Any]
"""What `inspect_kernel` found: {registers, shared_bytes, spills, target}."""


def kernel_records(
    variant: Variant,
    times: OpTimes | None = None,
    peaks: Peaks | None = None,
    inspected: Mapping[str, Resources] | None = None,
) -> list[dict[str, Any]]:
    """The kernels of a variant in the order of their first launch. `times` are those of its ops; where ATen's operators run in
    the kernels' place, they say nothing of the kernels. `inspected` are resources by kernel."""
    known = times if times is not None and times.is_measured and variant.runs_triton else None
    peaks = peaks or _promised(known)
    rows = {row.name: row for row in kernel_rows(variant.whole, known.us, peaks)} if known else {}
    return [
        kernel_record(kernel, calls, owner_of(kernel.name, variant))
        | _speed_record(rows.get(kernel.name), known, peaks)
        | {"resources": (inspected or {}).get(kernel.name)}
        for kernel, calls in kernel_calls(variant.whole)
    ]


def owner_of(name: str, variant: Variant) -> Variant:
    """The variant that a kernel is of: this one, or that of its update."""
    is_own = variant.update is None or any(kernel.name == name for kernel in variant.kernels)
    return variant if is_own or variant.update is None else variant.update


def kernel_calls(trace: Trace) -> list[tuple[Kernel, int]]:
    """The Triton kernels of a trace in the order of their first launch, and how often each is launched."""
    counts = Counter(node.target for node in trace.ops if isinstance(node.target, Kernel))
    return [(kernel, count) for kernel, count in counts.items() if isinstance(kernel, Kernel)]


def mean_bytes(kernel: Kernel, trace: Trace) -> tuple[int, int]:
    """Bytes that a call of the kernel reads and writes; of one that serves any number of tensors, in the mean."""
    if not isinstance(kernel, (LongSum, ListKernel)):
        return kernel.nbytes_read, kernel.nbytes_written
    calls = [node for node in trace.ops if node.target == kernel]
    return sum(map(bytes_read, calls)) // len(calls), sum(map(bytes_written, calls)) // len(calls)


def kernel_record(kernel: Kernel, calls: int, variant: Variant) -> dict[str, Any]:
    """What one kernel is; one that cannot run here has the source of its ATen operators."""
    nbytes_read, nbytes_written = mean_bytes(kernel, variant.trace)
    tuning, refused = variant.tunings.get(kernel.name, GUESS), variant.fallbacks.get(kernel.name)
    return {
        "name": kernel.name,
        "calls": calls,
        "ops": [op_name(node).removeprefix("aten.") for node in kernel.body.ops],
        "nbytes_read": nbytes_read,
        "nbytes_written": nbytes_written,
        "blocks": "guess" if tuning.is_guess else "tuned",
        "source": _source(kernel, tuning, refused),
    }


@functools.lru_cache(maxsize=1024)
def _source(kernel: Kernel, tuning: Tuning, refused: str | None) -> str:
    """A kernel's text; most kernels survive a toggle."""
    return kernel_source(kernel, tuning, refused)


# --- how fast ---------------------------------------------------------------------------------------------------------


def _promised(times: OpTimes | None) -> Peaks | None:
    """The datasheet's peaks of the GPU that was measured, where they are known."""
    return None if times is None else datasheet_of(times.device)


def _speed_record(row: KernelRow | None, times: OpTimes | None, peaks: Peaks | None) -> dict[str, Any]:
    """What a call takes and what it reaches; nulls and "" without a time."""
    found = row.reached if row else Reached()
    is_shown = peaks is not None and found.share is not None
    return {
        "time_us": row.time_us if row else None,
        "provenance": times.provenance if row and times else NOT_MEASURED,
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
    if times is None or not times.is_measured:
        return []
    peaks = peaks or _promised(times)
    rows = (row for row in kernel_rows(variant.whole, times.us, peaks) if not row.is_triton)
    return [
        {"name": row.name, "calls": row.calls, "nbytes": row.nbytes, **_speed_record(row, times, peaks)}
        for row in sorted(rows, key=lambda row: -row.total_us)[:MAX_ATEN]
    ]


def inspect_kernel(variant: Variant, name: str) -> Resources:
    """Registers per thread, shared memory and spills, in bytes, of one program of the variant's kernel called `name`.

    Compiled for this machine's GPU, or for Hopper where there is none: `target` says which. Raises `OptionError` for a
    name that is no kernel's, `BuildError` where Triton refuses it.
    """
    variant = owner_of(name, variant)
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
