"""The part of the wire format that says what was timed: the table of times, memory and differences."""

from __future__ import annotations

import math
from typing import Any

from tracefuse.config import Config
from tracefuse.timing import Estimate, ProgramTiming, Row, Timing

SHOWN = "optimised"
"""What `Variant.measure` calls the program that the view shows."""


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


def measured_peak_bytes(timing: Timing) -> list[int] | None:
    """What a replay adds to the allocated GPU memory, of the captured program and of the shown one; None on a CPU."""
    shown = _shown(timing)
    peaks = [timing.baseline.peak_nbytes, shown.peak_nbytes if shown else None]
    known = [peak for peak in peaks if peak is not None]
    return known if len(known) == len(peaks) else None


def difference_record(timing: Timing) -> dict[str, float] | None:
    """The shown program's largest differences; None where they are not known, or no numbers: see `difference_notes`."""
    shown = _shown(timing)
    if shown is None or shown.difference is None or difference_notes(timing):
        return None
    return {"results": shown.difference.results, "gradients": shown.difference.gradients}


def difference_notes(timing: Timing) -> list[str]:
    """A sentence for the results, and one for the gradients, if they differ by what JSON has no number for."""
    shown = _shown(timing)
    found = {} if shown is None or shown.difference is None else vars(shown.difference)
    return [
        f"The {name} of the shown program differ from the captured one's by {difference}: look for overflow."
        for name, difference in found.items()
        if not math.isfinite(difference)
    ]


def _shown(timing: Timing) -> ProgramTiming | None:
    return next((one for one in timing.programs if one.name == SHOWN), None)
