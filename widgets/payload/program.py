"""The wire format: what the view shows of a variant, as JSON. Pure functions; nothing here runs or times anything.

    payload = {
      version: 2,
      config:   {simplify, freeze, cat, decompose, pad, remat, ...} as `Config`, `remat_options` as an object and the user's
                own passes by their names: false, true, or an object of options; null or false is off
      call:     "c.optimize(...)"                             the same choice in Python; "" if no name holds the capture
      blocked:  null, or why this variant can be neither measured nor exported
      no_verdict: "", or why no ratio and no slowest module is told
      runs_triton: bool                                       false on a CPU, where kernels run as ATen operators
      passes:   [{name, help, enabled, state, note, changed, ops, saved_bytes, peak_bytes, seconds, options, decisions,
                error}]: all, in pipeline order; `changed`: it ran, and left another program
      summary:  {ops, saved_bytes, peak_bytes, measured_peak_bytes, difference, kernels: {unique, launches}}
      forward, backward: {lines: [{code, comment, value, kind, diff}], ops, added, removed}
      values:   {name: {op, type, stride, nbytes, phase, module, module_type, source, reads, uses, twins, saved_bytes,
                removed, storage, kernel, of, time_us}}
      times:    {before, after}                               the provenance of each value's `time_us`
      memory:   {before, after, reasons, modules, why}        before and after: {ops, live, peak, at, alive, inputs, storages},
                bytes alive while each op runs; reasons, modules: [[name, bytes before, bytes after, sentence]] of what is
                saved for the backward; why: {value: reason} with the passes
      kernels:  [{name, calls, ops, nbytes_read, nbytes_written, time_us, provenance, blocks, source, gb_per_s, tflop_per_s,
                least_us, peak_share, peak_source, bound, resources}]
      aten:     [{name, calls, time_us, nbytes, provenance, gb_per_s, tflop_per_s, least_us, peak_share, peak_source, bound}]
                ATen's operators by the types of their operands, with times that were measured op by op; else none
      layers:   [{path, folded, module_type, forward_ops, backward_ops, forward_us, backward_us, saved_bytes, cause,
                backward_kinds, flops}]   own ops only; `folded` is the path with "*" for the numbers of modules alike,
                `backward_kinds` are {kind: us} before and after, `flops` (forward, backward) before and after
      findings: [...]                                         the gravest first: see `tracefuse.widgets.payload.findings`
      looked_for: [str]                                       by the detectors of findings
      baseline: {is_pinned, call}                             what "before" is
      timing:   null, or {provenance, stale, is_pinned, config, notes, work: [{label, calls, us, note}],
                rows: [{label, program, phase, baseline_ms, variant_ms, ratio, verdict}]}
      notes:    [{kind: "guard" | "note", text}]
      environment: {str: str}
    }

`ops`, `saved_bytes` and `peak_bytes` (static: modelled from the trace) are `[before, after]`: of the pass, or of the whole
pipeline. `measured_peak_bytes`, peak memory by the allocator of a GPU, are `[before, after]` too, and `difference` is the
largest absolute one of the shown program's `{results, gradients}` from the captured one's; both are null where the shown
configuration was not measured, and a difference that is no number is null, with a note.

A value's `time_us` is `[before, after]`, null where its op is not in that trace or takes no time; `times` says of each side
whether it was measured ("measured on <device>, op by op, …") or modelled. `saved_bytes` are those of its
memory where that is kept for the backward, each counted for one value; else 0. `storage` are other values in the same
memory, `kernel` the Triton kernel that computes it, `of` the parameter that an input is, or whose gradient an output is. An
interval is `{median, low, high, coverage, samples}`, as `tracefuse.measure.timing.Estimate`; `ratio` is the variant's time
over the baseline's, below 1 where the variant is faster, with its 99 % interval, and `verdict` what it lets one say ("faster",
"slower", or why neither).

A kernel's `time_us` is the mean over its calls, all launches of a call together; `blocks` is "tuned" where its block sizes
are not the "guess". `gb_per_s` counts the bytes that it must move, `tflop_per_s` a matmul's arithmetic. `least_us` is what the
roof allows that is its `bound`, "memory" or "compute", and `peak_share` what is reached of that; `peak_source` names whose
roof: measured on the same device, else the datasheet's. All are null without a time, the last also where no peaks are known.
`bound` is "launch" for a kernel that is over before the next launch. `resources`, null until it was asked for, is `{registers,
shared_bytes, spills, target}`. Every time stands beside its `provenance`: "measured on <device>" or "not measured".

A pass's `state` is "on", "off", or says what it needs: "off: needs fuse"; `note` is what to know beside other passes, or "".
`options` are those without a control of their own, `{name, kind: "switch" | "number" | "text", value, default, help}`, value
and default as `tracefuse.config.pass_options.written` has them. `decisions` are grouped: `{action, reason, nbytes, values}`.
`lines[].diff` is against what `baseline` says: the capture as it was, before any pass, or a pinned configuration; and so is
every `before` but those of `passes`. A pass's `delta_ms` is what it alone adds to a step, once that was measured. Timelines
are no part of this: see `tracefuse.widgets.payload.timeline`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tracefuse.config.configuration import Config
from tracefuse.diagnose.diagnose import DETECTORS
from tracefuse.errors import ExportError, PassError, SessionError
from tracefuse.execution.one_step import computed_from_gradients, is_second_order, lines_of, why_no_verdict
from tracefuse.measure.op_times import OpTimes, modelled
from tracefuse.measure.side_by_side import Ablation
from tracefuse.measure.timing import Timing
from tracefuse.optimizers.costs.cost import Peaks
from tracefuse.optimizers.gc_pause import uncollected
from tracefuse.optimizers.remat.saved import REASONS
from tracefuse.optimizers.trace import Trace
from tracefuse.tables.layers import Layer, layers
from tracefuse.tables.saved_rows import by_module, by_reason, saved_rows
from tracefuse.tables.summary import remarks
from tracefuse.timeline.gpu_work import GpuWork
from tracefuse.timeline.measurements import Said, TrialKey
from tracefuse.variant import Variant
from tracefuse.widgets.payload.facts import gpu_input_bytes, memory, size
from tracefuse.widgets.payload.findings import finding_records
from tracefuse.widgets.payload.kernels import Resources, aten_records, kernel_calls, kernel_records
from tracefuse.widgets.payload.passes import config_record, pass_record
from tracefuse.widgets.payload.timing import (
    Timed,
    difference_notes,
    difference_record,
    is_stale,
    measured_peak_bytes,
    share_record,
    timing_record,
)
from tracefuse.widgets.payload.values import half, values

VERSION = 2


@uncollected()
def payload(
    variant: Variant,
    timed: tuple[Timing, Config] | Timed | None = None,
    name: str | None = "c",
    times: tuple[OpTimes | None, OpTimes | None] = (None, None),
    own_times: OpTimes | None = None,
    peaks: Peaks | None = None,
    inspected: Mapping[str, Resources] | None = None,
    baseline: Variant | None = None,
    shares: tuple[Ablation, Config] | None = None,
    tried: Mapping[TrialKey, Said] | None = None,
    work: GpuWork | None = None,
) -> dict[str, Any]:
    """What the view shows of `variant` beside `baseline` (default: the trace as captured), which is "before" everywhere.

    `timed` are times and the configurations they belong to, which may be other ones, and so are the passes' `shares`;
    `name` is the variable that holds the capture, if there is one. `times` are those of the ops before and after, where
    both were measured, `own_times` those of `variant`, `work` what the GPU did in its replay; `peaks` are those measured of
    the device, `inspected` by kernel what it takes of one, and `tried` what replays said of fixes.
    """
    before, after = (baseline or variant.baseline).trace, variant.trace
    known = Timed(*timed) if timed else None
    stale = known is not None and is_stale(known, variant, baseline)
    timing = known.timing if known and not stale else None
    op_times = times[0] or modelled(before), times[1] or modelled(after)
    return {
        "version": VERSION,
        "config": config_record(variant.config),
        "call": variant.config.as_code(name) if name else "",
        "blocked": blocked(variant),
        "no_verdict": why_no_verdict(variant.capture.backward),
        "runs_triton": variant.runs_triton,
        "passes": [
            pass_record(one, variant.config, variant.steps) | {"delta_ms": share_record(one, variant.config, shares)}
            for one in variant.config.names
        ],
        "summary": summary(before, after, timing),
        "forward": half(before.split()[0], variant.forward),
        "backward": half(before.split()[1], variant.backward),
        "values": values(before, after, op_times),
        "times": {"before": op_times[0].provenance, "after": op_times[1].provenance},
        "memory": {
            "before": memory(before),
            "after": memory(after),
            **saved_record(baseline or variant.baseline, variant),
        },
        "kernels": kernel_records(variant, own_times, peaks, inspected),
        "aten": aten_records(variant, own_times, peaks),
        "layers": [layer_record(layer) for layer in layers(before, after, op_times)],
        "findings": finding_records(baseline or variant.baseline, variant, op_times, tried or {}),
        "looked_for": list(DETECTORS),
        "baseline": baseline_record(baseline, name),
        "timing": timing_record(known, stale, None if stale else work) if known else None,
        "notes": notes(variant, timing),
        "environment": {str(k): str(v) for k, v in variant.capture.environment.items()},
    }


def baseline_record(baseline: Variant | None, name: str | None) -> dict[str, Any]:
    """What "before" is."""
    if baseline is None:
        return {"is_pinned": False, "call": "the trace as captured"}
    return {"is_pinned": True, "call": baseline.config.as_code(name or "c")}


def saved_record(before: Variant, after: Variant) -> dict[str, Any]:
    """What is saved for the backward, by reason and by module, and for each value why."""
    rows = saved_rows(before.trace, after.trace, after.steps, before.steps)
    return {
        "reasons": [[group.name, *group.nbytes, REASONS[group.name]] for group in by_reason(rows)],
        "modules": [[group.name, *group.nbytes] for group in by_module(rows)],
        "why": {row.name: row.reason for row in rows if row.nbytes.after},
    }


def layer_record(layer: Layer) -> dict[str, Any]:
    """One row of the layers table; of its many times four digits."""
    kinds = [{kind: float(f"{us:.4g}") for kind, us in side.items()} for side in layer.backward_kinds]
    record = asdict(layer) | {"backward_kinds": kinds}
    return {name: value for name, value in record.items() if name != "count"}


def summary(before: Trace, after: Trace, timing: Timing | None = None) -> dict[str, Any]:
    """Operators, bytes kept for the backward, memory, kernels: before the passes, and after; `timing` is of these two."""
    old, new = size(before), size(after)
    calls = [count for _, count in kernel_calls(after)]
    return {
        "ops": [old.ops, new.ops],
        "saved_bytes": [old.saved_bytes, new.saved_bytes],
        "peak_bytes": [old.peak_bytes, new.peak_bytes],
        "measured_peak_bytes": measured_peak_bytes(timing, (gpu_input_bytes(before), gpu_input_bytes(after)))
        if timing
        else None,
        "difference": difference_record(timing) if timing else None,
        "kernels": {"unique": len(calls), "launches": sum(calls)},
    }


def blocked(variant: Variant) -> str | None:
    """Why `variant` can be neither measured nor exported, with the remedy; None if it can."""
    try:
        variant.check().check_exportable()
    except (PassError, SessionError) as error:
        return str(error)
    except ExportError as error:
        late = "" if is_second_order(variant.backward) else lines_of(computed_from_gradients(variant.backward))
        return f"{_SEVERAL_STEPS}: {late} in the same cell. {_MOVE_IT}" if late else str(error)
    return None


_SEVERAL_STEPS = "This cell does more than one forward and one backward"
_MOVE_IT = "Move it to another cell, or capture one step by `with tracefuse.capture():`, to measure and export."


def notes(variant: Variant, timing: Timing | None = None) -> list[dict[str, str]]:
    """What the reader must know before trusting the trace: Python values that are baked into it, whether a replay gives what
    the run gave, what was asked of passes and not done, kernels that cannot run, kernels whose block sizes are this GPU's,
    numbers that differ beyond all measure."""
    tuned = sum(not tuning.is_guess for tuning in variant.tunings.values())
    tuning = f"{tuned} of {len(variant.kernels)} kernels run with tuned block sizes: the comment above each says more."
    unfused = [f"{name} runs as ATen operators, unfused: {why}." for name, why in variant.fallbacks.items()]
    apart = difference_notes(timing) if timing else []
    guards = Counter(map(_guard, variant.capture.guards))
    checked = [] if variant.capture.agreement is None else [str(variant.capture.agreement)]
    return [
        *({"kind": "guard", "text": _counted(text, count)} for text, count in guards.items()),
        *(
            {"kind": "note", "text": text}
            for text in [*checked, *remarks(variant), *unfused, *[tuning] * bool(tuned), *apart]
        ),
    ]


def _counted(text: str, count: int) -> str:
    return text if count == 1 else f"{count} times: {text}"


def _guard(guard: Any) -> str:
    place = f", line {guard.source.line}: {guard.source.text.strip()}" if guard.source else ""
    return f"The cell read {guard.value!r} from a tensor ({guard.op}{place}); the trace holds for this value only."
