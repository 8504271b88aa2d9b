"""The wire format: what the view shows of a variant, as JSON. Pure functions; nothing here runs or times anything.

`Payload` in `widgets/js/types.d.ts` says what each part is, and the front end is checked against it. What holds throughout:

- Pairs are `[before, after]`: of the pass, or of the whole pipeline, beside what `baseline` says: the capture as it was, or a
  pinned configuration. Peaks are static, modelled from the trace, unless their name says that they were measured.
- Every time stands beside its provenance: "measured on <device>", "modelled", or "not measured". What was not measured is
  null, and so is a difference that is no number, of which a note tells.
- An interval is `{median, low, high, coverage, samples}`, as `tracefuse.measure.timing.Estimate`; a ratio is the variant's
  time over the baseline's, below 1 where the variant is faster.
- Each byte of a storage is counted for one value, whatever shares its memory.

Timelines are no part of this: see `tracefuse.widgets.payload.timeline`. After a switch a live view has the numbers of a
payload before the rest: see `in_two`, and `tracefuse.widgets.view.late` for what that is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from tracefuse.assembly.program import Stepped
from tracefuse.config.configuration import Config
from tracefuse.errors import ExportError, NotSupported, PassError, SessionError
from tracefuse.execution.graphed_program import check_replayable
from tracefuse.execution.one_step import why_no_verdict
from tracefuse.findings.kinds import looked_for
from tracefuse.findings.order import below_text, in_order
from tracefuse.measure.launches import launches
from tracefuse.measure.side_by_side import Ablation
from tracefuse.measure.timing import Timing
from tracefuse.optimizers.gc_pause import uncollected
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.ops import grouped
from tracefuse.optimizers.remat.saved import REASONS
from tracefuse.optimizers.trace import val
from tracefuse.recording.calls import Guard
from tracefuse.steps.steps import Steps
from tracefuse.tables.folding import folded_paths
from tracefuse.tables.layers import Layer, Layers, layers
from tracefuse.tables.saved_rows import by_module, by_reason, saved_rows
from tracefuse.tables.slowest import slowest
from tracefuse.tables.summary import remarks
from tracefuse.timeline.gpu_work import GpuWork
from tracefuse.timeline.measurements import Said, TrialKey
from tracefuse.training.host_numbers import followed_lines
from tracefuse.training.refusals import remedy
from tracefuse.variant import Variant
from tracefuse.widgets.payload.clock import Clock, modelled_clock, pass_deltas
from tracefuse.widgets.payload.facts import (
    at_peak,
    gpu_input_bytes,
    held_throughout,
    least_peak,
    memory,
    roots,
    step_size,
    unused_record,
    update_peak,
)
from tracefuse.widgets.payload.findings import finding_records, widest
from tracefuse.widgets.payload.kernels import (
    Resources,
    aten_records,
    kernel_calls,
    kernel_records,
    line_records,
)
from tracefuse.widgets.payload.levers import lever_record
from tracefuse.widgets.payload.passes import config_record, decision_records, pass_record
from tracefuse.widgets.payload.sentence import Switch, sentence_record, slowest_record
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
from tracefuse.widgets.payload.without import without_record

VERSION = 2


class Rest(Protocol):
    """What makes the fields of a payload that come after its numbers: those of the named parts, by default of all. The field
    `memory` is of two parts: of "values" without what is saved, of "saved" whole."""

    def __call__(self, names: Collection[str] = ...) -> dict[str, Any]: ...


@uncollected()
def payload(*given: Any, **known: Any) -> dict[str, Any]:
    """All that the view shows of a variant; the arguments are those of `in_two`."""
    numbers, rest = in_two(*given, **known)
    return numbers | rest()


@uncollected()
def in_two(
    variant: Variant,
    timed: tuple[Timing, Config] | Timed | None = None,
    name: str | None = "c",
    clock: Clock | None = None,
    inspected: Mapping[str, Resources] | None = None,
    baseline: Variant | None = None,
    shares: tuple[Ablation, Config] | None = None,
    tried: Mapping[TrialKey, Said] | None = None,
    work: GpuWork | None = None,
) -> tuple[dict[str, Any], Rest]:
    """What the view shows of `variant` beside `baseline` (default: the trace as captured), which is "before" everywhere: first
    its numbers, then what makes the rest, part by part. The fields of both together are the payload.

    `timed` are times and the configurations they belong to, which may be other ones, and so are the passes' `shares`;
    `name` is the variable that holds the capture, if there is one. `clock` has the times of all ops (default: modelled),
    `work` is what the GPU did in the replay of `variant`; `inspected` is by kernel what it takes of the device, and `tried`
    what replays said of fixes.
    """
    beside = baseline or variant.baseline
    before, after = beside.whole, variant.whole
    known = Timed(*timed) if timed else None
    stale = known is not None and is_stale(known, variant, baseline)
    timing = known.timing if known and not stale else None
    clock = clock or modelled_clock(variant, baseline)
    op_times, deltas = clock.times, pass_deltas(variant, clock)
    rows = layers(before, after, op_times)
    amounts = op_times[1].us if clock.launches is None else clock.launches[1]
    slow = None if rows.no_verdict else slowest(after, variant.baseline.whole, amounts)
    as_it_ran = clock.of(variant.baseline.whole)
    findings = variant.findings(op_times[1], as_it_ran)
    sizes, stopped = summary(beside, variant, timing), blocked(variant)
    ranked = in_order(findings, findings.launches if clock.launches else 0)
    found = finding_records(ranked, variant, tried or {})
    passes = _pass_records(variant, clock, deltas, shares)
    numbers = {
        "version": VERSION,
        "config": config_record(variant.config),
        "call": variant.config.as_code(name) if name else "",
        "usage": usage(variant, name) if name else "",
        "blocked": stopped,
        "steps": steps_record(variant.capture.steps),
        "no_verdict": why_no_verdict(variant.program.trace.halves()[1], variant.program.in_rounds),
        "roots": sorted(roots(before) | roots(after)),
        "runs_triton": variant.runs_triton,
        "passes": passes,
        "summary": sizes,
        "sentence": sentence_record(
            clock,
            rows,
            slow,
            found,
            variant.runs_triton,
            deltas,
            bool(stopped),
            baseline is not None,
            switches_of(passes, variant.config),
            "" if stopped else graph_call(variant, name),
            None if rows.no_verdict else widest(variant, slow, found, op_times[1].us),
        ),
        "slowest": slowest_record(slow, is_of_launches=clock.launches is not None),
        "clock": clock.record(),
        "times": {"before": op_times[0].provenance, "after": op_times[1].provenance},
        "unused": unused_record(variant.capture.dropped),
        "findings": found,
        "below": below_text(findings.below),
        "small": finding_records(findings.below, variant, tried or {}),
        "looked_for": list(looked_for()),
        "baseline": baseline_record(baseline, name),
        "timing": timing_record(known, stale, None if stale else work) if known else None,
        "notes": notes(variant, timing),
        "environment": {str(k): str(v) for k, v in variant.capture.environment.items()},
    }
    return numbers, _rest(variant, beside, rows, clock, inspected)


def _rest(
    variant: Variant, beside: Variant, rows: Layers, clock: Clock, inspected: Mapping[str, Resources] | None
) -> Rest:
    after, times = variant.whole, clock.times

    def alive() -> dict[str, Any]:
        return {"before": memory(beside.whole_in_place), "after": memory(variant.whole_in_place)}

    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "values": lambda: {
            "values": values(beside.whole, after, times, line_records(variant)),
            "memory": alive(),
            "layers": [layer_record(layer) for layer in rows],
            "decisions": decision_records(variant),
        },
        "code": lambda: code_records(beside, variant),
        "kernels": lambda: {
            "kernels": kernel_records(variant, times[1], clock.peaks, inspected, clock.of),
            "aten": aten_records(variant, times[1], clock.peaks),
        },
        "saved": lambda: {"memory": alive() | saved_record(beside, variant)},
    }

    @uncollected()
    def rest(names: Collection[str] = parts.keys()) -> dict[str, Any]:
        return {field: one for name in parts if name in names for field, one in parts[name]().items()}

    return rest


def _pass_records(
    variant: Variant,
    clock: Clock,
    deltas: Mapping[str, float | None],
    shares: tuple[Ablation, Config] | None,
) -> list[dict[str, Any]]:
    """A row for each pass: what it did, what its switch changes by each way to know it, and what it could do."""
    return [
        pass_record(one, variant)
        | {"delta_ms": share_record(one, variant.config, shares), "delta_us": deltas.get(one)}
        | {"without": without_record(one, variant, clock)}
        | lever_record(one, variant, clock)
        for one in variant.config.names
    ]


def switches_of(passes: Iterable[Mapping[str, Any]], config: Config) -> list[Switch]:
    """The passes of which it is known what the step takes without them."""
    now = config_record(config)
    found = []
    for one in passes:
        if one["enabled"] and (without := one["without"]):
            new = config_record(config.switched(one["name"]))
            changes = {name: new[name] for name in new if new[name] != now.get(name)}
            found.append(Switch(one["name"], without["step_us"], without["kind"], changes))
    return found


def steps_record(steps: Steps | None) -> dict[str, Any] | None:
    """Which of a loop's steps is shown; None of a program that is one step, or of which that is not known."""
    return None if steps is None or len(steps) < 2 else {"said": steps.headline, "each": str(steps)}


def code_records(beside: Variant, variant: Variant) -> dict[str, Any]:
    """The columns of code: both halves, and the update, None where the step has none."""
    halves = map(half, beside.trace.halves(), variant.trace.halves())
    old, new = beside.update, variant.update
    update = None if old is None or new is None else half(old.trace, new.trace)
    return {**dict(zip(("forward", "backward"), halves, strict=True)), "update": update}


def baseline_record(baseline: Variant | None, name: str | None) -> dict[str, Any]:
    """What "before" is."""
    if baseline is None:
        return {"is_pinned": False, "call": "the trace as captured", "config": config_record(Config.off())}
    return {"is_pinned": True, "call": baseline.config.as_code(name or "c"), "config": config_record(baseline.config)}


def saved_record(before: Variant, after: Variant) -> dict[str, Any]:
    """What is saved for the backward, by reason and by module, for each value why, and what of it is alive at the peak."""
    rows = saved_rows(before.trace, after.trace, after.passes, before.passes)
    whys = tuple({row.name: row.reason for row in rows if row.nbytes[side]} for side in (0, 1))
    return {
        "reasons": [[group.name, *group.nbytes, REASONS[group.name]] for group in by_reason(rows)],
        "modules": [[group.name, *group.nbytes] for group in by_module(rows)],
        "why": whys[1],
        "at_peak": at_peak((before.whole_in_place, after.whole_in_place), whys, folded_paths(before.whole)),
    }


def layer_record(layer: Layer) -> dict[str, Any]:
    """One row of the layers table; of its many times four digits."""
    kinds = [{kind: float(f"{us:.4g}") for kind, us in side.items()} for side in layer.backward_kinds]
    return {name: value for name, value in vars(layer).items() if name != "count"} | {"backward_kinds": kinds}


def kernel_counts(variant: Variant) -> dict[str, int]:
    """How many Triton kernels there are, and how many launches they are, counted as those of the whole step."""
    stepped = () if variant.program.update is None else variant.program.update.stepped
    each = launches(variant.whole, stepped)
    count = sum(each[node.name] for node in variant.whole.ops if isinstance(node.target, Kernel))
    return {"unique": len(kernel_calls(variant.whole)), "launches": round(count)}


def summary(beside: Variant, variant: Variant, timing: Timing | None = None) -> dict[str, Any]:
    """Operators, bytes kept for the backward, memory, kernels: before the passes, and after; `timing` is of these two."""
    old, new = step_size(beside), step_size(variant)
    inputs = gpu_input_bytes(beside.whole), gpu_input_bytes(variant.whole)
    beside_budget = held_throughout(variant.whole_in_place) - held_throughout(variant.trace)
    return {
        "ops": [old.ops, new.ops],
        "saved_bytes": [old.saved_bytes, new.saved_bytes],
        "peak_bytes": [old.peak_bytes, new.peak_bytes],
        "beside_budget": beside_budget,
        "least_peak": max(least_peak(variant.trace) + beside_budget, update_peak(variant.whole_in_place)),
        "measured_peak_bytes": measured_peak_bytes(timing, inputs) if timing else None,
        "difference": difference_record(timing) if timing else None,
        "kernels": kernel_counts(variant),
    }


def usage(variant: Variant, name: str) -> str:
    """Lines of Python that run `variant`, where `name` holds the capture: on what was captured, with the model as it is."""
    names = [one.name for one in variant.program.trace.inputs if one.kind == "input"]
    given = f"other data goes by name: {', '.join(names)}" if names else "it takes no data"
    if variant.program.update is not None:
        did = f"# forward, backward and update of the live model; {given}"
        return f"step = {variant.config.as_code(name)}.compile()\nresult = step()  {did}"
    results = [one for one in variant.program.trace.outputs if one.kind == "result"]
    made = "result" if len(results) == 1 else "results"
    text = f"program = {variant.config.as_code(name)}.compile()\n{made} = program()  # on the captured data; {given}"
    return f"{text}\nresult.backward()" if is_differentiated(variant) and made == "result" else text


def graph_call(variant: Variant, name: str | None) -> str:
    """The call that compiles `variant` to one CUDA graph, where `name` holds the capture; "" where a GPU makes none."""
    if variant.runs_triton:
        try:
            check_replayable(variant.whole, overwrites=variant.program.update is not None)
        except NotSupported:
            return ""
    return f"{variant.config.as_code(name or 'c')}.compile(cuda_graph=True)"


def is_differentiated(variant: Variant) -> bool:
    """Whether the one result is a number whose gradient the program computed."""
    trace = variant.program.trace
    results = [node for one, node in trace.output_pairs if one.kind == "result"]
    return len(results) == 1 and val(results[0]).numel() == 1 and any(o.kind == "gradient" for o in trace.outputs)


def blocked(variant: Variant) -> str | None:
    """Why `variant` can be neither measured nor exported, with the remedy; None if it can."""
    try:
        variant.check().check_exportable()
    except (PassError, SessionError, ExportError) as error:
        return str(error)
    return None


def notes(variant: Variant, timing: Timing | None = None) -> list[dict[str, str]]:
    """What the reader must know before trusting the trace: Python values that are baked into it, whether a replay gives what
    the run gave, what was asked of passes and not done, kernels that cannot run, kernels whose block sizes are this GPU's,
    numbers that differ beyond all measure."""
    tuned = sum(not tuning.is_guess for tuning in variant.tunings.values())
    tuning = f"{tuned} of {len(variant.kernels)} kernels run with tuned block sizes: the comment above each says more."
    unfused = [f"{name} runs as ATen operators, unfused: {why}." for name, why in variant.fallbacks.items()]
    apart = difference_notes(timing) if timing else []
    update = variant.program.update
    stepped = () if update is None else update.stepped
    followed = followed_lines(variant.program)
    guards = Counter(said for group in _alike(variant.capture.guards) for said in _guards(group, stepped, followed))
    checked = [] if variant.capture.agreement is None else [str(variant.capture.agreement)]
    return [
        *({"kind": "guard", "text": f"{count} times: {one}" if count > 1 else one} for one, count in guards.items()),
        *(
            {"kind": "note", "text": text}
            for text in [*checked, *remarks(variant), *unfused, *[tuning] * bool(tuned), *apart]
        ),
    ]


MOST_VALUES = 3
"""How many values that one line read are told."""


def _alike(guards: Iterable[Guard]) -> Iterable[Sequence[Guard]]:
    """The guards of each line by themselves, those of its optimizer apart."""
    return grouped(guards, lambda one: (one.op, str(one.source), _place(one), one.in_optimizer)).values()


def _place(guard: Guard) -> str:
    """The line of the user's project that read the value, also where an installed library did it for that line."""
    return "" if guard.source is None else str(guard.source.called or guard.source)


def _guards(group: Sequence[Guard], stepped: Sequence[Stepped], followed: Collection[str]) -> list[str]:
    """What is said of the guards of one line: of several values one sentence, which counts with how often it was read."""
    values = list(dict.fromkeys(repr(one.value) for one in group))
    if group[0].in_optimizer or len(values) == 1:
        return [_guard(one, stepped, followed) for one in group]
    more = f" and {len(values) - MOST_VALUES} more values" * (len(values) > MOST_VALUES)
    said = _guard(group[0], stepped, followed).replace(values[0], f"{', '.join(values[:MOST_VALUES])}{more}", 1)
    return [said.replace("this value only", "these values only")] * len(group)


def _guard(guard: Guard, stepped: Sequence[Stepped], followed: Collection[str]) -> str:
    """What is said of one guard; `followed` are the lines of optimizers whose counts a compiled step raises itself."""
    place = f", {at}" if (at := _place(guard)) else ""
    if guard.in_optimizer and not isinstance(guard.value, bool):
        line = f" ({guard.source.text.strip()})" if guard.source else ""
        how = f" To compile the step, {todo}." if (todo := remedy("", guard.source, stepped)) else ""
        how = " A compiled step counts by itself." if str(guard.source) in followed else how
        return f"{guard.value!r} is the step count of the optimizer{line}, read by the host.{how}"
    return f"The program read {guard.value!r} from a tensor ({guard.op}{place}); the trace holds for this value only."
