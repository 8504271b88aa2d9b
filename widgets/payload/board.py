"""The part of the wire format that says what was tried: a row for each configuration of each capture on the board, which of
them nothing beats in both time and memory, and what tells two of them apart. Pure: nothing here runs a pass or reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from tracefuse.config.configuration import Config
from tracefuse.measure.overlapped import unbeaten
from tracefuse.measure.timing import Estimate
from tracefuse.optimizers.facts import once_per_trace
from tracefuse.optimizers.overlap.collectives import gathers_parameters
from tracefuse.optimizers.trace import Trace, human_bytes
from tracefuse.tables.compared import ModuleDifference, compared
from tracefuse.tables.folding import folded_paths
from tracefuse.timeline.measurements import Entry, Measurements
from tracefuse.variant import Variant, Variants
from tracefuse.widgets.payload.clock import Clock, kind_beside, modelled_clock, pass_deltas
from tracefuse.widgets.payload.facts import size, step_size
from tracefuse.widgets.payload.kernels import lines_of_calls
from tracefuse.widgets.payload.measured import Measured
from tracefuse.widgets.payload.passes import config_record
from tracefuse.widgets.payload.timing import SHOWN

MOST_MODULES = 40
MOST_LINES = 12


@dataclass(frozen=True)
class Stand:
    """One capture on the board: what it is called there, and what was measured and tried of it."""

    label: str
    capture: Variants
    measured: Measured

    def clock(self) -> Clock:
        """The times of any of its configurations."""
        return self.measured.clocks.clock(self.capture.variant(Config.off()))

    @property
    def tried(self) -> dict[Config, Entry]:
        return self.measured.known.board


def entry_of(variant: Variant, clock: Clock, tried_at: float) -> Entry:
    """What the board keeps of a variant, whose passes run here if they have not."""
    found, kind = step_size(variant), clock.of(variant.whole).kind
    return Entry(tried_at, *found, clock.takes_us(variant.whole), kind, clock.device)


def board_record(stands: Sequence[Stand], shown: int, variant: Variant, clock: Clock) -> dict[str, Any]:
    """All rows, those of each capture in the order in which they were tried; `shown` is the capture on show, `clock` its."""
    rows = [row for at, one in enumerate(stands) for row in _rows(at, one, clock if at == shown else one.clock())]
    for row in rows:
        row["is_shown"] = row["capture"] == shown and row["config"] == config_record(variant.config)
    mine = [row for row in rows if row["capture"] == shown and row["device"] == clock.device]
    for row in unbeaten(mine, lambda row: (row["step_us"], row["peak_bytes"])):
        row["is_best"] = True
    gathers = gathers_any(variant.program.whole)
    labels = [one.label for one in stands]
    return {"capture": shown, "captures": labels, "device": clock.device, "gathers": gathers, "rows": rows}


@once_per_trace
def gathers_any(trace: Trace) -> bool:
    """Whether a step gathers parameters, which it can keep behind the forward or free."""
    return any(map(gathers_parameters, trace.ops))


def outcome(shown: Entry, swept: Mapping[Config, Entry]) -> str:
    """What a sweep came to: whether anything, and whether any of its budgets, beats the configuration on show."""
    wins = {config: one.step_us < shown.step_us or one.peak_bytes < shown.peak_bytes for config, one in swept.items()}
    if not wins:
        return ""
    bounded = [won for config, won in wins.items() if (config.memory_budget, config.peak_budget) != (None, None)]
    if not any(wins.values()):
        what, remedy = f"none of the {len(wins)} that were tried", "keep it"
    elif bounded and not any(bounded):
        what, remedy = f"none of the {len(bounded)} with a budget", "leave the budget out"
    else:
        won, tried = sum(wins.values()), len(wins)
        return f"{won} of {tried} tried here take{'s' * (won == 1)} less time or memory than the one on show"
    return f"{what} takes less time or memory than the one on show: {remedy}"


def _rows(at: int, stand: Stand, clock: Clock) -> list[dict[str, Any]]:
    entries = {config: _fresh(stand, config, entry, clock) for config, entry in stand.tried.items()}
    captured = entries.get(Config.off())
    return [_row(at, stand, config, entry, captured) for config, entry in entries.items()]


def _row(at: int, stand: Stand, config: Config, entry: Entry, captured: Entry | None) -> dict[str, Any]:
    step, beside = measured_record(stand.measured.known, config), to_captured(entry, captured)
    if beside["ratio_kind"] == "measured" and step and step["ratio"] is not None:
        beside["ratio"] = step["ratio"]  # in the same rounds, where there were such
    return {
        "capture": at,
        "name": said(config),
        "call": config.as_code(),
        "config": config_record(config),
        **asdict(entry),
        **beside,
        "forecast_us": _forecast_us(stand, config, entry),
        "measured": step,
        "is_captured": config == Config.off(),
        "is_best": False,
    }


def _fresh(stand: Stand, config: Config, entry: Entry, clock: Clock) -> Entry:
    """The entry by what is known now, where the passes of this configuration have run in this process."""
    made = stand.capture.made(config)
    return entry if made is None else entry_of(made, clock, entry.tried_at)


def _forecast_us(stand: Stand, config: Config, entry: Entry) -> float | None:
    """What was predicted before it was measured; of what was not measured, what is predicted or modelled now."""
    forecast = stand.measured.clocks.forecasts.get(config)
    if forecast is not None:
        return forecast.predicted_us
    return None if entry.kind == "measured" else entry.step_us


def measured_step(known: Measurements, config: Config) -> dict[str, Any] | None:
    """The step as it was timed last, in ms with its interval, and where; None if it was not."""
    for (optimised, pinned), timing in reversed(known.timings.items()):
        beside = pinned or Config.off()
        program = timing.program(SHOWN) if optimised == config else timing.baseline if beside == config else None
        if program is not None:
            return asdict(_step(program.times_ms)) | {"where": timing.device}
    return None


def measured_record(known: Measurements, config: Config) -> dict[str, Any] | None:
    """The step as it was timed last, and its "ratio" to that of the captured program where that was timed on the same device:
    None where it was not. "ratio_how" says in which rounds."""
    step = measured_step(known, config)
    ratio, how = _measured_ratio(known, config) or (None, "")
    return step and step | {"ratio": ratio, "ratio_how": how}


def to_captured(entry: Entry, captured: Entry | None) -> dict[str, Any]:
    """The step of a configuration over that of the captured program, both of one device, and of which kind both times are.
    "ratio" is None, and "ratio_kind" "", where no time of that kind is known of the captured program."""
    is_there = captured is not None and captured.device == entry.device and captured.step_us
    kind = kind_beside(entry.kind, captured.kind) if captured is not None and is_there else ""
    return {"ratio": entry.step_us / captured.step_us if captured is not None and kind else None, "ratio_kind": kind}


def _measured_ratio(known: Measurements, config: Config) -> tuple[float, str] | None:
    """The median ratio of a configuration that was timed beside the captured program; of one that was timed beside another
    one on the same device the ratio of the medians."""
    beside = next((timing for pair, timing in reversed(known.timings.items()) if pair == (config, None)), None)
    if beside is not None and beside.baseline.name == "captured":
        ratio = _step(beside.program(SHOWN).ratios)
        return ratio.median, f"{beside.device}, in the same rounds, 99 % interval {ratio.low:.3f} to {ratio.high:.3f}"
    mine, captured = measured_step(known, config), measured_step(known, Config.off())
    if mine is None or captured is None or mine["where"] != captured["where"]:
        return None
    return mine["median"] / captured["median"], f"{mine['where']}, each in rounds of its own"


def _step(by_phase: Mapping[str, Estimate]) -> Estimate:
    """That of the whole step; of a program without a backward that of its forward."""
    return by_phase.get("step") or list(by_phase.values())[-1]


# --- a configuration in words -----------------------------------------------------------------------------------------


def said(config: Config) -> str:
    """What a configuration is beside the default one, in a few words: "captured", "all passes", "without cat, weight 0"."""
    if config == Config.off():
        return "captured"
    on = [name for name in config.names if config.is_on(name)]
    off = [name for name in config.names if not config.is_on(name) and Config().is_on(name)]
    passes = [] if not off else [f"without {', '.join(off)}"] if len(off) <= len(on) else [f"only {', '.join(on)}"]
    return ", ".join([*passes, *_options(config)]) or "all passes"


def _options(config: Config) -> Iterable[str]:
    default = Config()
    if config.freeze:
        yield f"{', '.join(config.freeze)} frozen"
    if config.linear_cross_entropy and config.logits_memory != default.logits_memory:
        yield f"logits of {human_bytes(config.logits_memory)}"
    if config.overlap is not None:
        yield ", ".join(["collectives moved", *(f"{name} {value}" for name, value in config.overlap)])
    if config.remat is None:
        return
    if config.remat != default.remat:
        yield f"weight {config.remat:g}"
    if config.memory_budget is not None:
        yield f"saves at most {_size(config.memory_budget)}"
    if config.peak_budget is not None:
        yield f"peak at most {human_bytes(config.peak_budget)}"
    for what, names in (("saves", config.save), ("recomputes", config.recompute)):
        if names:
            yield f"{what} {', '.join(names)}"
    yield from (f"{name} {value}" for name, value in config.remat_options)


def _size(budget: float) -> str:
    return f"{budget:.0%}".replace("%", " %") if isinstance(budget, float) and budget <= 1 else human_bytes(int(budget))


# --- two of them ------------------------------------------------------------------------------------------------------


def comparison_record(pair: tuple[tuple[int, Variant], tuple[int, Variant]], stands: Sequence[Stand]) -> dict[str, Any]:
    """What tells two configurations apart, of one capture or of two: their options, what each module takes, what each pass
    changed. Each is given by its capture's place and itself; all times are of one device and of one kind."""
    clocks = _of_one_kind([stands[at].measured.clocks.clock(variant) for at, variant in pair], [v for _, v in pair])
    (_, one), (_, other) = pair
    times = clocks[0].of(one.whole), clocks[1].of(other.whole)
    folds = {**folded_paths(other.program.whole), **folded_paths(one.program.whole)}
    modules = compared(one.whole, other.whole, times, folds, (lines_of_calls(one), lines_of_calls(other)))
    return {
        "sides": [
            {
                "capture": at,
                "label": stands[at].label,
                "name": said(variant.config),
                "call": variant.config.as_code(),
                "step_us": clock.takes_us(variant.whole),
                "kind": time.kind,
                "measured": measured_step(stands[at].measured.known, variant.config),
                "provenance": time.provenance,
                **step_size(variant)._asdict(),
            }
            for (at, variant), time, clock in zip(pair, times, clocks, strict=True)
        ],
        "options": _differing(one.config, other.config),
        "modules": [_module(row) for row in modules[:MOST_MODULES]],
        "left_out": max(0, len(modules) - MOST_MODULES),
        "passes": _passes([(v, clock) for (_, v), clock in zip(pair, clocks, strict=True)]),
    }


def _of_one_kind(clocks: Sequence[Clock], variants: Sequence[Variant]) -> list[Clock]:
    """The clocks as they are, where both tell of one device and both by measuring or both by a model; else models of the
    first one's device."""
    same_device = len({one.device for one in clocks}) == 1
    if same_device and len({one.times[1].kind == "modelled" for one in clocks}) == 1:
        return list(clocks)
    peaks = modelled_clock(variants[0]).peaks
    models = [modelled_clock(one) for one in variants]
    return models if all(one.peaks == peaks for one in models) else [replace(one, of=models[0].of) for one in models]


def _module(row: ModuleDifference) -> dict[str, Any]:
    found = {f.name: getattr(row, f.name) for f in fields(row)}
    return found | {"lines": [asdict(line) for line in row.lines[:MOST_LINES]]}


def _differing(one: Config, other: Config) -> list[list[str]]:
    """Options that are not equal: the name, and either value as Python writes it."""
    records = config_record(one), config_record(other)
    return [
        [name, repr(records[0].get(name)), repr(records[1].get(name))]
        for name in dict.fromkeys([*records[0], *records[1]])
        if records[0].get(name) != records[1].get(name)
    ]


def _passes(sides: Sequence[tuple[Variant, Clock]]) -> list[dict[str, Any]]:
    """What each pass changed of the step and of what is saved, on either side; None where it did not run."""
    deltas = [pass_deltas(variant, clock) for variant, clock in sides]
    saved = [
        {one.name: size(one.after).saved_bytes - size(one.before).saved_bytes for one in variant.passes}
        for variant, _ in sides
    ]
    names = dict.fromkeys(name for variant, _ in sides for name in variant.config.names)
    return [
        {
            "name": name,
            "states": [variant.config.state(name) if name in variant.config.names else "off" for variant, _ in sides],
            "delta_us": [one.get(name) for one in deltas],
            "saved_bytes": [one.get(name) for one in saved],
        }
        for name in names
    ]
