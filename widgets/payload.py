"""The wire format: what the view shows of a variant, as JSON. Pure functions; nothing here runs or times anything.

    payload = {
      version: 2,
      config:   {simplify, freeze, cat, decompose, remat, memory_budget, ...} as `Config`, `remat_options` as an object and the
                user's own passes by their names: false, true, or an object of options; null or false is off
      call:     "c.optimize(...)"                             the same choice in Python; "" if no name holds the capture
      blocked:  null, or why this variant can be neither measured nor exported
      runs_triton: bool                                       false on a CPU, where kernels run as ATen operators
      passes:   [{name, help, enabled, state, ops, saved_bytes, peak_bytes, seconds, options, decisions, error}]   all, in
                pipeline order
      summary:  {ops, saved_bytes, peak_bytes, kernels: {unique, launches}}
      forward, backward: {lines: [{code, comment, value, kind, diff}], ops, added, removed}
      values:   {name: {op, type, stride, nbytes, phase, module, module_type, source, reads, uses, twins, saved, removed,
                storage, kernel, of, time_us}}
      times:    {before, after}                               the provenance of each value's `time_us`
      memory:   {before, after}                               each {ops, live, peak, at, alive}: bytes alive while each op runs
      kernels:  [{name, calls, ops, nbytes_read, nbytes_written, time_us, provenance, blocks, source}]
      layers:   [{path, module_type, forward_ops, backward_ops, forward_us, backward_us, saved_bytes, cause}]   own ops only
      findings: [{name, severity, title, evidence, values, source, fix, worth, changes, fixed}]   the gravest first
      baseline: {is_pinned, call}                             what "before" is
      timing:   null, or {provenance, stale, config, rows: [{label, baseline_ms, variant_ms, ratio, verdict}], notes}
      notes:    [{kind: "guard" | "note", text}]
      environment: {str: str}
    }

`ops`, `saved_bytes` and `peak_bytes` (static: modelled from the trace) are `[before, after]`: of the pass, or of the whole
pipeline. A value's `time_us` is `[before, after]` too, null where its op is not in that trace or takes no time; `storage` are
other values in the same memory, `kernel` the Triton kernel that computes it, `of` the parameter that an input is, or whose
gradient an output is. An interval is `{median, low, high}`,
the bounds those of the median's 95 % confidence interval; `ratio` is the variant's median over the baseline's, below 1 where
the variant is faster, and `verdict` what it lets one say ("faster", "slower", or why neither); `time_us` is the mean over a
kernel's launches, `blocks` is "tuned" where its block sizes are not the "guess". Every time stands beside its `provenance`:
"measured on <device>" or "not measured". A pass's `state` is "on", "off", or says what it needs: "off: needs fuse".
`options` are those without a control of their own, `{name, kind: "switch" | "number" | "text", value, default, help}`, value
and default as `tracefuse.pass_options.written` has them. `decisions` are grouped: `{action, reason, nbytes, values}`.
`lines[].diff` is against the capture as it was, before any pass.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import fx

from tracefuse.config import Config
from tracefuse.errors import ExportError
from tracefuse.op_times import OpTimes, modelled
from tracefuse.optimizers.kernel import Kernel
from tracefuse.optimizers.layout import GUESS, Tuning
from tracefuse.optimizers.liveness import lifetimes, live_bytes, peak_bytes, saved_bytes, saved_values
from tracefuse.optimizers.long_sum_kernel import LongSum
from tracefuse.optimizers.ops import op_name, producer
from tracefuse.optimizers.passes import Decision, Step, uncollected
from tracefuse.optimizers.trace import Trace, nbytes, origin, phase, tensor_type
from tracefuse.optimizers.triton import kernel_source
from tracefuse.pass_options import PassOption, written
from tracefuse.profile import Profile
from tracefuse.summary import remarks, summarise
from tracefuse.timing import Estimate, Row, Timing
from tracefuse.variant import PassError, Variant
from tracefuse.widgets.diff import Line, diff, lines_of

VERSION = 2
NOT_MEASURED = "not measured"
# More twins or readers of one value than anybody follows by hand.
MAX_NAMES = 64
# Beyond these, single storages are small beside the peak.
MAX_ALIVE = 16


@uncollected()
def payload(
    variant: Variant,
    timed: tuple[Timing, Config] | None = None,
    profile: Profile | None = None,
    name: str | None = "c",
) -> dict[str, Any]:
    """What the view shows of `variant`.

    `timed` are times and the configuration they belong to, which may be another one; `profile` has this variant's kernels;
    `name` is the variable that holds the capture, if there is one.
    """
    before, after = variant.capture.trace, variant.trace
    times = modelled(before), modelled(after)
    return {
        "version": VERSION,
        "config": config_record(variant.config),
        "call": variant.config.as_code(name) if name else "",
        "blocked": blocked(variant),
        "runs_triton": variant.runs_triton,
        "passes": [pass_record(name, variant.config, variant.steps) for name in variant.config.names],
        "summary": summary(before, after),
        "forward": half(before.split()[0], variant.forward),
        "backward": half(before.split()[1], variant.backward),
        "values": values(before, after, times),
        "times": dict(zip(("before", "after"), (one.provenance for one in times), strict=True)),
        "memory": {"before": memory(before), "after": memory(after)},
        "kernels": [
            kernel_record(
                kernel, calls, profile, variant.fallbacks.get(kernel.name), variant.tunings.get(kernel.name, GUESS)
            )
            | {"nbytes_read": mean_bytes_read(kernel, after)}
            for kernel, calls in kernel_calls(after)
        ],
        "layers": [asdict(layer) for layer in variant.layers()],
        "findings": findings(variant),
        "baseline": {"is_pinned": False, "call": "the trace as captured"},
        "timing": timing_record(*timed, variant.config) if timed else None,
        "notes": notes(variant),
        "environment": {str(k): str(v) for k, v in variant.capture.environment.items()},
    }


def summary(before: Trace, after: Trace) -> dict[str, Any]:
    """Operators, bytes kept for the backward, kernels: of the capture, and with the passes."""
    old, new = summarise(before), summarise(after)
    return {
        "ops": [old.forward_ops + old.backward_ops, new.forward_ops + new.backward_ops],
        "saved_bytes": [old.saved_nbytes, new.saved_nbytes],
        "peak_bytes": [old.peak_nbytes, new.peak_nbytes],
        "measured_peak_bytes": None,
        "difference": None,
        "kernels": {"unique": new.unique_kernels, "launches": new.kernel_calls},
    }


def blocked(variant: Variant) -> str | None:
    """Why `variant` can be neither measured nor exported, with the remedy; None if it can."""
    try:
        variant.check().check_exportable()
    except PassError as error:
        return str(error)
    except ExportError as error:
        late = _after_backward(variant.backward)
        return f"{_SEVERAL_STEPS}: {late} in the same cell. {_MOVE_IT}" if late else str(error)
    return None


_SEVERAL_STEPS = "This cell does more than one forward and one backward"
_MOVE_IT = "Move it to another cell to measure and export."


def _after_backward(backward: Trace) -> str:
    """The lines, at most two, of what is computed from gradients and is none; where no line is known, the names."""
    late = [
        (out, node) for out, node in zip(backward.outputs, backward.returned, strict=True) if out.kind != "gradient"
    ]
    sources = [(out, origin(node).source) for out, node in late]
    found = list(dict.fromkeys(source.text.strip() if source else out.of for out, source in sources))
    return " and ".join(found[:2])


# --- passes -----------------------------------------------------------------------------------------------------------


def pass_record(name: str, config: Config, steps: Sequence[Step]) -> dict[str, Any]:
    """One row of the passes column; the numbers are null while the pass is off."""
    step = next((s for s in steps if s.name == name), None)
    state = config.state(name)
    return {
        "name": name,
        "help": config.help(name),
        "enabled": state == "on",
        "state": state,
        "ops": [step.before.op_count, step.after.op_count] if step else None,
        "saved_bytes": [saved_bytes(step.before), saved_bytes(step.after)] if step else None,
        "peak_bytes": [peak_bytes(step.before), peak_bytes(step.after)] if step else None,
        "seconds": step.seconds if step else None,
        "options": [option_record(option, value) for option, value in config.options(name) if option.is_text],
        "decisions": grouped(step.decisions) if step else [],
        "error": step.error if step else None,
        "delta_ms": None,
    }


def option_record(option: PassOption, value: Any) -> dict[str, Any]:
    """One option of a pass, as the view edits it."""
    shown = {"value": written(value), "default": written(option.default)}
    return {"name": option.name, "kind": option.kind, **shown, "help": option.help}


def config_record(config: Config) -> dict[str, Any]:
    """A configuration by its options' names, each what `configure` takes back."""
    found = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "own"}
    found["remat_options"] = _written(dict(config.remat_options))
    return found | {one.name: _written(one.given) for one in config.own}


def _written(given: Any) -> Any:
    return {name: written(value) for name, value in given.items()} if isinstance(given, dict) else given


def grouped(decisions: Iterable[Decision]) -> list[dict[str, Any]]:
    """Decisions with the same action and reason as one, in the order of their first; `nbytes` is their sum."""
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for one in decisions:
        new = {"action": one.action, "reason": one.reason, "nbytes": 0, "values": []}
        group = groups.setdefault((one.action, one.reason), new)
        group["nbytes"] += one.nbytes
        group["values"].append(one.value)
    return list(groups.values())


# --- code -------------------------------------------------------------------------------------------------------------


def half(before: Trace, after: Trace) -> dict[str, Any]:
    """One column of code: the half `after` the passes, marked against the same half `before` them."""
    lines = diff(lines_of(before), lines_of(after))
    marks = Counter(line.mark for line in lines)
    return {
        "lines": [_line(line) for line in lines],
        "ops": [before.op_count, after.op_count],
        "added": marks["+"] + marks["~"],
        "removed": marks["-"],
    }


def _line(line: Line) -> dict[str, str]:
    return {"code": line.code, "comment": line.comment, "value": line.value, "kind": line.kind, "diff": line.mark}


def values(before: Trace, after: Trace, times: tuple[OpTimes, OpTimes]) -> dict[str, dict[str, Any]]:
    """Every value by name, those included that the passes removed."""
    left = {n.name for n in after.graph.nodes}
    removed = [n for n in before.ops if n.name not in left]
    found = {}
    for trace, nodes in ((before, removed), (after, [*after.placeholders, *after.ops])):
        around = _Around(trace)
        for node in nodes:
            us = [one.us.get(node.name) for one in times]
            found[node.name] = _value(node, around) | {"removed": trace is before, "time_us": us}
    return found


class _Around:
    """What a value's record says of its place in the trace: its twins, who shares its memory, whose gradient it is."""

    def __init__(self, trace: Trace) -> None:
        self.twins = _twins(trace)
        self.saved = {s.name for s in saved_values(trace)}
        self.aliases = {name: life.aliases for life in lifetimes(trace) for name in life.aliases}
        gradients = zip(trace.returned, trace.outputs, strict=True)
        self.of = {node.name: out.of for node, out in gradients if out.kind == "gradient"}
        self.of |= {i.name: i.source for i in trace.inputs if i.kind == "parameter"}


def _value(node: fx.Node, around: _Around) -> dict[str, Any]:
    where = origin(node)
    source = where.source
    other = "backward" if phase(node) == "forward" else "forward"
    value = node.meta.get("val")
    target = producer(node).target
    return {
        "op": op_name(node),
        "type": tensor_type(value),
        "stride": list(value.stride()) if isinstance(value, torch.Tensor) else None,
        "nbytes": nbytes(node),
        "phase": phase(node),
        "module": where.module,
        "module_type": where.module_type,
        "source": f"{source.line}: {source.text.strip()}" if source else "",
        "reads": [n.name for n in node.all_input_nodes][:MAX_NAMES],
        "uses": [n.name for n in node.users if n.op == "call_function"][:MAX_NAMES],
        "twins": [] if where.seq is None else around.twins.get((other, where.seq), [])[:MAX_NAMES],
        "saved": node.name in around.saved,
        "storage": [name for name in around.aliases.get(node.name, ()) if name != node.name][:MAX_NAMES],
        "kernel": target.name if isinstance(target, Kernel) else "",
        "of": around.of.get(node.name, ""),
    }


def memory(trace: Trace) -> dict[str, Any]:
    """Bytes alive while each op runs, by the static rules of `tracefuse.optimizers.liveness`; the peak, the op it is at, and
    the largest storages that are alive there."""
    live = live_bytes(trace)
    peak = max(live, default=0)
    names = [node.name for node in trace.ops]
    at = live.index(peak) if live else -1
    alive = sorted((one for one in lifetimes(trace) if one.start <= at <= one.end), key=lambda one: -one.nbytes)
    largest = [[one.name, one.nbytes] for one in alive[:MAX_ALIVE]]
    return {"ops": names, "live": live, "peak": peak, "at": names[at] if live else "", "alive": largest}


def _twins(trace: Trace) -> dict[tuple[str, int], list[str]]:
    """Names of the ops of each phase by autograd's sequence number, which an op shares with its twin in the other phase."""
    found: dict[tuple[str, int], list[str]] = {}
    for node in trace.ops:
        seq = origin(node).seq
        if seq is not None:
            found.setdefault((phase(node), seq), []).append(node.name)
    return found


# --- kernels and times ------------------------------------------------------------------------------------------------


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
    time_us = profile and _mean_us(kernel, profile)
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
        "gb_per_s": None,
        "peak_share": None,
        "peak_source": "",
        "bound": "",
        "resources": None,
    }


@functools.lru_cache(maxsize=1024)
def _source(kernel: Kernel, tuning: Tuning, refused: str | None) -> str:
    """A kernel's text; most kernels survive a toggle."""
    return kernel_source(kernel, tuning, refused)


def _mean_us(kernel: Kernel, profile: Profile) -> float | None:
    """Mean over the kernel's launches in the profiled run; its `@triton.jit` function is called `<name>_kernel`."""
    mine = [k for k in profile.kernels if k.name.startswith(f"{kernel.name}_kernel")]
    calls = sum(k.calls for k in mine)
    return sum(k.total_us for k in mine) / calls if calls else None


def timing_record(timing: Timing, measured: Config, shown: Config) -> dict[str, Any]:
    """Times of the configuration `measured`; stale where another one is `shown`."""
    several = len(timing.programs) > 2
    replays = "1 replay" if timing.inner == 1 else f"{timing.inner} replays"
    return {
        "provenance": timing.device,
        "stale": measured != shown,
        "config": measured.as_code(),
        "rows": [_timing_row(row, several) for row in timing.rows],
        "notes": [f"{timing.rounds} rounds of {replays}, interleaved; stopped: {timing.stopped}"],
    }


def _timing_row(row: Row, several: bool) -> dict[str, Any]:
    return {
        "label": f"{row.label} ({row.program})" if several else row.label,
        "baseline_ms": _interval(row.baseline_ms),
        "variant_ms": _interval(row.variant_ms),
        "ratio": _interval(row.ratio),
        "verdict": row.verdict,
    }


def _interval(time: Estimate) -> dict[str, float]:
    return {"median": time.median, "low": time.low, "high": time.high}


def findings(variant: Variant) -> list[dict[str, Any]]:
    """Those of the trace as captured; `fixed` are those that are gone with the passes that are on."""
    left = {one.name for one in variant.findings()}
    return [asdict(one) | {"fixed": one.name not in left} for one in variant.baseline.findings()]


def notes(variant: Variant) -> list[dict[str, str]]:
    """What the reader must know before trusting the trace: Python values that are baked into it, what was asked of passes and
    not done, kernels that cannot run, kernels whose block sizes are this GPU's."""
    tuned = sum(not tuning.is_guess for tuning in variant.tunings.values())
    tuning = f"{tuned} of {len(variant.kernels)} kernels run with tuned block sizes: the comment above each says more."
    unfused = [f"{name} runs as ATen operators, unfused: {why}." for name, why in variant.fallbacks.items()]
    return [
        *({"kind": "guard", "text": _guard(guard)} for guard in variant.capture.guards),
        *({"kind": "note", "text": text} for text in [*remarks(variant), *unfused, *[tuning] * bool(tuned)]),
    ]


def _guard(guard: Any) -> str:
    place = f", line {guard.source.line}: {guard.source.text.strip()}" if guard.source else ""
    return f"The cell read {guard.value!r} from a tensor ({guard.op}{place}); the trace holds for this value only."
