"""The report is what a view shows as one JSON document, for scripts and CI.

`tracefuse FILE --json PATH` and `explorer.save_report(path)` write it:

    report = {
      format: "tracefuse report", version: 1, tracefuse, torch       versions, as text
      code:   {captured: {forward, backward}, optimised: {forward, backward}}     the traces as Python
      timing: null, or all of `Timing.to_json()` for the shown configuration: per program and phase median and interval
      ablation: null, or {config, ...} what each pass is worth by itself, as `Ablation` has it
      …                                                              the rest as `Payload` in widgets/js/types.d.ts
    }

The rest: `config`, `call`, `blocked`, `passes` (with each decision's reason), `summary`, `memory`, `kernels` (with their
source), `layers`, `findings`, `baseline`, `notes`, `environment`, and what later versions of the payload add. Times that are
not those of the shown configuration are left out. The version counts changes that a reader must know; additions are none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from typing import Any, Protocol

import torch

from tracefuse.measure.timing import plain
from tracefuse.variant import Variant
from tracefuse.widgets.payload.measured import Measured

VERSION = 1
_OF_THE_SCREEN = ("version", "values", "forward", "backward", "update", "timing", "runs_triton", "looked_for")
"""What only the view draws, or what the report has in another form."""


class Shown(Protocol):
    """What a view shows: a variant, the one that it is compared with, what was measured, and the payload of all that."""

    variant: Variant
    baseline: Variant | None
    measured: Measured
    name: str | None
    payload: Any
    held: Callable[[Variant], dict[str, Any]]


def report(shown: Shown) -> dict[str, Any]:
    """The shown configuration as JSON, beside what the view compares it with."""
    variant, measured = shown.variant, shown.measured
    before = shown.baseline or variant.baseline
    timed = measured.timed(variant, shown.baseline)
    is_shown = timed is not None and (timed.config, timed.baseline) == (
        variant.config,
        shown.baseline and before.config,
    )
    return {
        "format": "tracefuse report",
        "version": VERSION,
        "tracefuse": version("tracefuse"),
        "torch": torch.__version__,
        "code": {
            "captured": _code(before),
            "optimised": _code(variant),
        },
        "timing": timed.timing.to_json() if timed is not None and is_shown else None,
        "ablation": _ablation(shown),
        **{name: part for name, part in shown.payload.items() if name not in _OF_THE_SCREEN},
    }


def _code(variant: Variant) -> dict[str, str]:
    update = {} if variant.update is None else {"update": variant.update.trace.code}
    return {"forward": variant.forward.code, "backward": variant.backward.code} | update


def _ablation(shown: Shown) -> dict[str, Any] | None:
    if shown.measured.shares is None:
        return None
    found, config = shown.measured.shares
    return {"config": config.as_code(), **plain(asdict(found) | {"same": sorted(found.same)})}
