"""The part of the wire format that says what each kernel of the step is and stands for, how long it takes, and what binds it.

A time is that of one call in the mean, on the clock of the view (`tracefuse.widgets.payload.clock`): Triton's kernels and the
operators that a library computes are rows of one table, which sums to the step. What was measured is set beside what the same
GPU does at best, measured (`tracefuse.measure.peaks`), else beside the datasheet where that GPU's is known. A
figure here is shown by a column of `widgets/js/kernels/panel.js`.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from tracefuse.build.kernels import this_gpu
from tracefuse.build.modules import HOPPER, resources
from tracefuse.errors import OptionError
from tracefuse.measure.op_times import OpTimes, modelled
from tracefuse.optimizers.costs.cost import H100_SXM_DATASHEET, Peaks, bytes_moved, bytes_read, bytes_written
from tracefuse.optimizers.costs.datasheets import datasheet_of
from tracefuse.optimizers.facts import once_per_trace
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.kernels.lists import ListKernel
from tracefuse.optimizers.kernels.long_sum import LongSum
from tracefuse.optimizers.kernels.text import kernel_source
from tracefuse.optimizers.lowering.layouts import GUESS, Tuning
from tracefuse.optimizers.ops import op_name
from tracefuse.optimizers.origins import Source
from tracefuse.optimizers.trace import Trace, origin, phase, recomputes
from tracefuse.tables.folding import folded_paths
from tracefuse.tables.replaced import (
    Replaced,
    captured_ops,
    kernel_said,
    library_said,
    lines_of,
    placed,
    replaced,
    said,
    share_of_each,
)
from tracefuse.timeline.kernel_times import KernelRow, Reached, calls_by_kernel, kernel_rows
from tracefuse.variant import Variant

NOT_MEASURED = "not measured"
MAX_ATEN = 64
"""ATen operators that have a row of their own: those below take next to nothing of a step."""
MAX_VALUES = 24
"""Calls that are named: more than anybody follows by hand."""
MOST_LINES = 8
"""Lines of one kernel that are named: the others have small parts of it."""
WHOLE = 1 - 1e-6
"""The share of an op that a kernel has to do for the op's time to be its own."""
Stood = Mapping[str, Sequence[tuple[fx.Node, float]]]
Resources = dict[str, Any]
"""What `inspect_kernel` found: {registers, shared_bytes, spills, target}."""


def kernel_records(
    variant: Variant,
    times: OpTimes | None = None,
    peaks: Peaks | None = None,
    inspected: Mapping[str, Resources] | None = None,
    of: Callable[[Trace], OpTimes] = modelled,
) -> list[dict[str, Any]]:
    """The Triton kernels of a variant in the order of their first launch. `times` are those of its ops, `of` tells those of
    any trace, such as that in which a kernel's ops stood by themselves. `inspected` are resources by kernel."""
    peaks = peaks or _promised(times)
    whole = variant.whole
    rows = {row.name: row for row in kernel_rows(whole, times.us, peaks)} if times else {}
    calls, folds = calls_by_kernel(whole), folded_paths(variant.baseline.whole)
    found, stood = replaced_in(variant), stood_for(variant)
    parameters = {entry.name: entry.source for entry in whole.inputs if entry.kind == "parameter"}
    return [
        kernel_record(kernel, count, owner_of(kernel.name, variant))
        | speed_record(rows.get(kernel.name), times, peaks, calls[kernel.name], variant.runs_triton)
        | {"said": _said(calls[kernel.name], found, folds, parameters), "part": calls[kernel.name][0].name}
        | {"replaces": _replaces(calls[kernel.name], found, stood, of(variant.baseline.whole))}
        | {"resources": (inspected or {}).get(kernel.name)}
        for kernel, count in kernel_calls(whole)
    ]


def _said(
    calls: Sequence[fx.Node], found: Mapping[str, Replaced], folds: Mapping[str, str], parameters: Mapping[str, str]
) -> str:
    first = found.get(calls[0].name)
    ops = first.ops if first else calls[0].target.body.ops  # type: ignore[union-attr]
    return f"{kernel_said(ops)}{_of_parameters(calls, folds, parameters)}{placed(calls, folds)}"


def _of_parameters(calls: Sequence[fx.Node], folds: Mapping[str, str], parameters: Mapping[str, str]) -> str:
    """Whose update it is, where no module runs it: " of h.*.mlp.up.weight", " of 16 parameters"."""
    if any(origin(call).module for call in calls) or phase(calls[0]) != "update":
        return ""
    read = [parameters[one.name] for call in calls for one in call.all_input_nodes if one.name in parameters]
    paths = dict.fromkeys(_folded(source, folds) for source in read)
    return "" if not paths else f" of {next(iter(paths))}" if len(paths) == 1 else f" of {len(set(read))} parameters"


def _folded(source: str, folds: Mapping[str, str]) -> str:
    module, _, name = source.rpartition(".")
    return f"{folds[module]}.{name}" if folds.get(module) else source


# --- what it stands for ---


def replaced_in(variant: Variant) -> dict[str, Replaced]:
    """By the name of each call of a kernel in the whole step what it replaced."""
    found = replaced(variant.passes)
    if variant.update is None:
        return found
    in_whole = variant.names_in_whole
    return found | {in_whole[name]: one for name, one in replaced(variant.update.passes).items() if name in in_whole}


def stood_for(variant: Variant) -> dict[str, list[tuple[fx.Node, float]]]:
    """By the name of each call of a kernel in the whole step the captured ops that it does the work of, each with the share of
    it that it does."""
    parts = [(replaced(variant.passes), captured_ops(variant.baseline.trace, variant.passes), {})]
    if variant.update is not None and variant.baseline.update is not None:
        steps, late = variant.update.passes, variant.baseline.update.trace
        parts.append((replaced(steps), captured_ops(late, steps), variant.names_in_whole))
    nodes = [{n.name: n for n in variant.baseline.whole.ops}, _late_nodes(variant.baseline)]
    return {
        renamed.get(name, name): [(named[op], share) for op, share in shares.items()]
        for (found, captured, renamed), named in zip(parts, nodes, strict=False)
        for name, shares in zip(found, share_of_each(found.values(), captured, model_us), strict=True)
    }


def _late_nodes(captured: Variant) -> dict[str, fx.Node]:
    """The ops of the captured whole step by their names in its update."""
    there = {node.name: node for node in captured.whole.ops}
    return {name: there[other] for name, other in captured.names_in_whole.items()}


@once_per_trace
def model_us(trace: Trace) -> Mapping[str, float]:
    """What each op takes of one roofline, alone: what parts of one time are told apart by, whatever GPU is shown."""
    return modelled(trace, H100_SXM_DATASHEET).us


def lines_of_calls(variant: Variant) -> dict[str, dict[str, tuple[Source | None, float]]]:
    """By the name of each call of a kernel that does the work of several lines: those, with the share of the call's time that
    each has by the model."""
    found = {name: lines_of(one, model_us) for name, one in replaced_in(variant).items()}
    return {name: lines for name, lines in found.items() if len(lines) > 1}


def line_records(variant: Variant) -> dict[str, list[list[Any]]]:
    """The same for the view: each line as values have their own, and its share."""
    return {
        name: [[str(one or ""), round(share, 4)] for one, share in lines.values()][:MOST_LINES]
        for name, lines in lines_of_calls(variant).items()
    }


def _replaces(
    calls: Sequence[fx.Node],
    found: Mapping[str, Replaced],
    stood: Stood,
    captured: OpTimes,
) -> dict[str, Any] | None:
    """The captured ops that all calls of a kernel did away with: how many, of which kinds, their time and bytes, of an op that
    several kernels share the part that is theirs; and how many ops it computes again. The time is None where most of it is
    such parts, which nobody timed apart. None of a kernel that no pass made."""
    if any(call.name not in found for call in calls):
        return None
    ops = [one for call in calls for one in stood[call.name]]
    named = {node.name: node for node, _ in ops}
    kinds = Counter(map(said, named.values()))
    shares: defaultdict[str, float] = defaultdict(float)
    for node, share in ops:
        shares[node.name] += share
    us = {name: share * captured.us.get(name, 0.0) for name, share in shares.items()}
    total_us, known_us = sum(us.values()), sum(us[name] for name, share in shares.items() if share > WHOLE)
    return {
        "ops": [[name, count] for name, count in kinds.most_common()],
        "launches": len(named),
        "again": sum(recomputes(node) is not None for call in calls for node in found[call.name].ops),
        "us": total_us if known_us >= total_us / 2 else None,
        "nbytes": round(sum(share * bytes_moved(node) for node, share in ops)),
    }


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


def speed_record(
    row: KernelRow | None, times: OpTimes | None, peaks: Peaks | None, calls: Sequence[fx.Node], runs_triton: bool
) -> dict[str, Any]:
    """What a call takes, of which kind that is, and what it reaches; nulls and "" without a time. A modelled time is what the
    peaks allow, and a CPU runs a kernel's operators in its place: of neither is there a share of a peak."""
    found = row.reached if row else Reached()
    kind = "" if times is None or row is None else times.kind
    if kind == "measured" and times and any(call.name in times.predicted for call in calls):
        kind = "predicted"
    is_shown = peaks is not None and found.share is not None and kind in ("measured", "predicted") and runs_triton
    return {
        "time_us": row.time_us if row else None,
        "kind": kind,
        "provenance": times.provenance if row and times else NOT_MEASURED,
        "gb_per_s": found.gb_per_s,
        "tflop_per_s": found.tflop_per_s,
        "least_us": found.least_us,
        "peak_share": found.share if is_shown else None,
        "peak_source": peak_source(peaks) if is_shown and peaks else "",
        "bound": found.bound,
    }


def peak_source(peaks: Peaks) -> str:
    """Bytes per second that the device can move, and who says so."""
    measured = "" if peaks.source.startswith("measured") else ", not measured"
    return f"{peaks.bytes_per_s / 1e12:.3g} TB/s, {peaks.source}{measured}"


def aten_records(variant: Variant, times: OpTimes | None, peaks: Peaks | None) -> list[dict[str, Any]]:
    """The operators that a library computes, by the types of their operands, those that take longest first; those beyond
    `MAX_ATEN` in one row, so that the rows and the kernels sum to the step."""
    if times is None:
        return []
    peaks = peaks or _promised(times)
    calls, folds = calls_by_kernel(variant.whole), folded_paths(variant.baseline.whole)
    rows = [row for row in kernel_rows(variant.whole, times.us, peaks) if not row.is_triton]
    rows.sort(key=lambda row: -row.total_us)
    records = [
        {"name": row.name, "said": f"{library_said(calls[row.name][0])}{placed(calls[row.name], folds)}"}
        | {"calls": row.calls, "nbytes": row.nbytes, "values": [node.name for node in calls[row.name][:MAX_VALUES]]}
        | speed_record(row, times, peaks, calls[row.name], variant.runs_triton)
        for row in rows[:MAX_ATEN]
    ]
    return records + ([_rest(rows[MAX_ATEN:], times)] if rows[MAX_ATEN:] else [])


def _rest(rows: Sequence[KernelRow], times: OpTimes) -> dict[str, Any]:
    count = sum(row.calls for row in rows)
    mean = sum(row.total_us for row in rows) / count
    row = KernelRow("", False, count, mean, sum(row.calls * row.nbytes for row in rows) // count, 0, Reached())
    return {"name": "", "said": f"{len(rows)} more operators ×{count}", "calls": count, "nbytes": row.nbytes} | {
        "values": [],
        **speed_record(row, times, None, (), False),
    }


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
