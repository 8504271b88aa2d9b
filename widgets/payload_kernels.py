"""The part of the wire format that says what each Triton kernel is, how fast it ran, and what it takes of a GPU.

A kernel's time is that of one call, all its launches together, from the profiler. It is set beside the bandwidth of copying
on the same GPU, measured in this process, else beside the datasheet where that GPU's is known.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

from tracefuse.bandwidth import Bandwidth
from tracefuse.build import this_gpu
from tracefuse.compile import HOPPER, resources
from tracefuse.errors import OptionError
from tracefuse.optimizers.cost import H100_SXM_DATASHEET
from tracefuse.optimizers.kernel import Kernel
from tracefuse.optimizers.layout import GUESS, Tuning
from tracefuse.optimizers.long_sum_kernel import LongSum
from tracefuse.optimizers.ops import op_name
from tracefuse.optimizers.trace import Trace
from tracefuse.optimizers.triton import kernel_source
from tracefuse.profile import Profile
from tracefuse.variant import Variant

NOT_MEASURED = "not measured"
LAUNCH_US = 5.0
"""A kernel that takes less ends before the host has launched the next one."""
MOVING = 0.5
"""The share of the copy's bandwidth from which a kernel's time is, for the greater part, that of moving its bytes."""

Resources = dict[str, Any]
"""What `inspect_kernel` found: {registers, shared_bytes, spills, target}."""


def kernel_records(
    variant: Variant,
    profile: Profile | None = None,
    bandwidth: Bandwidth | None = None,
    inspected: Mapping[str, Resources] | None = None,
) -> list[dict[str, Any]]:
    """The kernels of a variant in the order of their first launch; `inspected` are resources by kernel."""
    records = []
    for kernel, calls in kernel_calls(variant.trace):
        tuning, refused = variant.tunings.get(kernel.name, GUESS), variant.fallbacks.get(kernel.name)
        record = kernel_record(kernel, calls, profile, refused, tuning)
        record["nbytes_read"] = mean_bytes_read(kernel, variant.trace)
        record |= speed(record["nbytes_read"] + record["nbytes_written"], record["time_us"], profile, bandwidth)
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
    nbytes: int, time_us: float | None, profile: Profile | None = None, bandwidth: Bandwidth | None = None
) -> dict[str, Any]:
    """What a call that moves `nbytes` in `time_us` reaches, and what holds it back; null and "" where that is not known."""
    if not time_us:
        return {"gb_per_s": None, "peak_share": None, "peak_source": "", "bound": ""}
    reached = nbytes / (time_us * 1e-6)
    peak, source = _peak(profile, bandwidth)
    share = reached / peak if peak else None
    bound = "launch" if time_us < LAUNCH_US else "memory" if share and share >= MOVING else ""
    return {"gb_per_s": reached / 1e9, "peak_share": share, "peak_source": source, "bound": bound}


def _peak(profile: Profile | None, bandwidth: Bandwidth | None) -> tuple[float | None, str]:
    """Bytes per second that the profiled GPU can move, and who says so."""
    if bandwidth is not None:
        return bandwidth.bytes_per_s.median, str(bandwidth)
    if profile is not None and "H100" in profile.device and "HBM3" in profile.device:
        promised = H100_SXM_DATASHEET.bytes_per_s
        return promised, f"{promised / 1e12:.3g} TB/s, {H100_SXM_DATASHEET.source}, not measured"
    return None, ""


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
