"""The part of the wire format that says what was timed: the table of times, memory and differences."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from tracefuse.config.configuration import Config
from tracefuse.measure.side_by_side import Ablation
from tracefuse.measure.timing import Estimate, ProgramTiming, Row, Timing, over
from tracefuse.text import counted, figure
from tracefuse.timeline.gpu_work import GpuWork
from tracefuse.variant import Variant

SHOWN = "optimised"
"""What `Variant.measure` calls the program that the view shows."""


class Timed(NamedTuple):
    """Times, the configuration that they are of, and the pinned one that it was timed against (None: the captured program)."""

    timing: Timing
    config: Config
    baseline: Config | None = None


def is_stale(timed: Timed, shown: Variant, baseline: Variant | None) -> bool:
    """Whether the times are of other configurations than `shown` beside `baseline`."""
    return (timed.config, timed.baseline) != (shown.config, baseline and baseline.config)


def beside_itself(timing: Timing) -> Timing:
    """The shown program's times beside themselves: what is known of it right after it was pinned."""
    mine = timing.program(SHOWN)
    same = {phase: Estimate(1.0, 1.0, 1.0, 1.0, time.samples) for phase, time in mine.times_ms.items()}
    programs = tuple(replace(mine, name=name, ratios=same) for name in ("pinned", SHOWN))
    return replace(timing, programs=programs, failed={}, notes=("the shown program is the pinned one",))


def beside_pinned(shown: Timing, pinned: Timing) -> Timing:
    """The shown program beside the pinned one, where each was timed beside the captured one alone."""
    mine, base = shown.program(SHOWN), pinned.program(SHOWN)
    ratios = {phase: over(ratio, base.ratios[phase]) for phase, ratio in mine.ratios.items() if phase in base.ratios}
    programs = replace(base, name="pinned", ratios={}), replace(mine, ratios=ratios, excess_ms={})
    said = "each was timed beside the captured program, in rounds of its own: measure again to have them in the same rounds"
    return replace(shown, programs=programs, rounds=min(shown.rounds, pinned.rounds), failed={}, notes=(said,))


def timing_record(timed: Timed, stale: bool, work: GpuWork | None = None) -> dict[str, Any]:
    """The table of times; the rows of the program that is shown come first, by their phases alone. `work` is what a replay of
    that one consists of, where it ran on a GPU. Of another program than the pinned one, which alone was measured, the rows
    have no time."""
    timing, measured, against = timed
    is_known = not stale or measured != against
    replays = counted(timing.inner, "replay")
    pinned = [f"beside {against.as_code()}, pinned when this was measured"] if against else []
    return {
        "provenance": timing.device,
        "stale": stale,
        "is_pinned": against is not None,
        "config": measured.as_code(),
        "rows": [_timing_row(row, is_known) for row in sorted(timing.rows, key=lambda row: row.program != SHOWN)],
        "work": [] if work is None else _work_rows(work, timing),
        "notes": [
            *([work.note] if work else []),
            f"{counted(timing.rounds, 'round')} of {replays}, interleaved; stopped: {timing.stopped}",
            *pinned,
            *(f"{name} did not run: {reason}" for name, reason in timing.failed.items()),
            *timing.notes,
        ],
    }


def _work_rows(work: GpuWork, timing: Timing) -> list[dict[str, Any]]:
    rows = work.rows(timing.program(SHOWN).times_ms["step"].median, timing.rounds)
    return [dict(zip(("label", "calls", "us", "note"), row, strict=True)) for row in rows]


def _timing_row(row: Row, is_known: bool) -> dict[str, Any]:
    label = row.label if row.program == SHOWN else f"{row.label} ({row.program})"
    told = asdict(row) | {"label": label, "phase": row.label, "verdict": row.verdict}
    return told if is_known else told | {"variant_ms": None, "ratio": None, "verdict": "not measured"}


def share_record(name: str, shown: Config, shares: tuple[Ablation, Config] | None) -> dict[str, Any] | None:
    """What the pass called `name` alone adds to a step; stale where the others were others then."""
    delta = shares and shares[0].delta_ms.get(name)
    if not shares or delta is None:
        return None
    found, measured = shares
    how = "the same program without it" if name in found.same else counted(found.rounds, "round")
    return asdict(delta) | {"provenance": f"{found.device}: {how}", "stale": measured != shown}


def measured_peak_bytes(timing: Timing, input_bytes: tuple[int, int]) -> list[int] | None:
    """Peak memory (`tracefuse.tables.memory`) of the baseline and the shown program on a GPU: the added peak of a
    replay, and the `input_bytes` of each that lay there before it. None on a CPU."""
    shown = _shown(timing)
    peaks = [timing.baseline.peak_nbytes, shown.peak_nbytes if shown else None]
    known = [peak + inputs for peak, inputs in zip(peaks, input_bytes, strict=True) if peak is not None]
    return known if len(known) == len(peaks) else None


def difference_record(timing: Timing) -> dict[str, Any] | None:
    """The shown program's largest differences, and what they come to; None where they are not known, or no numbers: see
    `difference_notes`."""
    shown = _shown(timing)
    if shown is None or shown.difference is None or difference_notes(timing):
        return None
    found, rounding = shown.difference, shown.difference.rounding
    largest = {name: delta for name, delta in _differences(timing).items() if delta is not None}
    each = ", ".join(f"{'new values' if name == 'updated' else name} {delta:.3g}" for name, delta in largest.items())
    is_same, said = found.is_same, f"Max |Δ|: {each}"
    if found.updated_near is False:
        return largest | {
            "delta": found.updated,
            "is_same": is_same,
            "brief": "new values",
            "said": f"{found.said}. {said}",
        }
    if rounding is None:
        delta, brief = max(found.results, found.gradients), "in every number" if is_same else ""
        return largest | {"delta": delta, "is_same": is_same, "brief": brief, "said": said}
    steps = (
        ""
        if rounding.steps is None
        else f", {figure(rounding.steps)} steps between neighbours of {rounding.dtype} there"
    )
    where = (
        "Within" if rounding.is_near else "It may be a program that magnifies rounding: its own `check()` tells. Beyond"
    )
    said = (
        f"Furthest is {rounding.of}: by {rounding.delta:.3g}{steps}. {where} the "
        f"tolerance of the exported file's check, {rounding.allowed:g} of the norm. {said}"
    )
    by = "" if rounding.steps is None else "to " if rounding.is_near else "by "
    return largest | {"delta": rounding.delta, "is_same": is_same, "brief": by + rounding.brief, "said": said}


def _differences(timing: Timing) -> dict[str, float | None]:
    shown = _shown(timing)
    found = None if shown is None else shown.difference
    return {} if found is None else {"results": found.results, "gradients": found.gradients, "updated": found.updated}


def difference_notes(timing: Timing) -> list[str]:
    """A sentence for the results, one for the gradients and one for new values, if they differ by what JSON has no number
    for."""
    return [
        f"The {'new values' if name == 'updated' else name} of the shown program differ from the captured one's by "
        f"{difference}: look for overflow."
        for name, difference in _differences(timing).items()
        if difference is not None and not math.isfinite(difference)
    ]


def _shown(timing: Timing) -> ProgramTiming | None:
    return next((one for one in timing.programs if one.name == SHOWN), None)
