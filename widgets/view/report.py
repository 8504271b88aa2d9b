"""The report is what a view shows as one JSON document, for scripts and CI.

`tracefuse FILE --json PATH` and `explorer.save_report(path)` write it:

    report = {
      format: "tracefuse report", version: 2, tracefuse, torch       versions, as text
      target: {name, why}                                            the GPU that modelled numbers are for
      findings: [{id, severity, source, evidence, fix, worth, kind}] kind of `worth`: "measured", "modelled" or "unknown"
      below:    [{id, source, worth_share}]                          those below 1 % of the step, which are counted only
      ignored:  [{id, source}]                                       findings that a comment on their line hides
      tried:    [{changes, call, ratio, difference_ms, verdict}]     what `--try` measured beside the shown configuration
      code:   {captured: {forward, backward}, optimised: {forward, backward}}     the traces as Python
      timing: null, or all of `Timing.to_json()` for the shown configuration: per program and phase median and interval
      ablation: null, or {config, ...} what each pass is worth by itself, as `Ablation` has it
      …                                                              the rest as `Payload` in widgets/js/types.d.ts
    }

`report.schema.json`, beside this file, is its JSON Schema (draft 2020-12). The rest: `config`, `call`, `blocked`, `passes`
(with each decision's reason), `summary`, `memory`, `kernels` (with their source), `layers`, `baseline`, `notes`,
`environment`, and what later versions of the payload add. Times that are not of the shown configuration are left out.

The version counts changes that a reader must know; additions are none. In version 2 a finding's `id` is its kind, a key of
`tracefuse.findings.kinds.KINDS`, and `key` tells two of a kind apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from importlib.metadata import version
from importlib.resources import files
from typing import Any, Protocol

import torch

from tracefuse.device.target import target
from tracefuse.measure.timing import plain
from tracefuse.measure.tried import Tried
from tracefuse.variant import Variant
from tracefuse.widgets.payload.measured import Measured

VERSION = 2
_OF_THE_SCREEN = (
    "version", "values", "forward", "backward", "update", "decisions", "timing", "runs_triton", "looked_for",
)  # fmt: skip
"""What only the view draws, or what the report has in another form."""


_KIND = {"predicted": "modelled", "": "unknown"}
"""What a report calls the kinds of a worth that it has no word of its own for."""


class Shown(Protocol):
    """What a view shows: a variant, the one that it is compared with, what was measured, and the payload of all that."""

    variant: Variant
    baseline: Variant | None
    measured: Measured
    name: str | None
    payload: Any
    held: Callable[[Variant], dict[str, Any]]
    board: dict[str, Any]


def schema() -> dict[str, Any]:
    """The JSON Schema of reports of this version."""
    return json.loads(files(__package__).joinpath("report.schema.json").read_text(encoding="utf-8"))


def report(shown: Shown, tried: Iterable[Tried] = ()) -> dict[str, Any]:
    """The shown configuration as JSON, beside what the view compares it with, and what was `tried` beside it."""
    variant, measured = shown.variant, shown.measured
    before, found = shown.baseline or variant.baseline, variant.findings()
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
        "target": {"name": target().name, "why": target().why},
        "code": {
            "captured": _code(before),
            "optimised": _code(variant),
        },
        "timing": timed.timing.to_json() if timed is not None and is_shown else None,
        "ablation": _ablation(shown),
        **{name: part for name, part in shown.payload.items() if name not in _OF_THE_SCREEN},
        "passes": [one | {"decisions": shown.payload["decisions"][one["name"]]} for one in shown.payload["passes"]],
        "findings": [one | {"kind": _KIND.get(one["kind"], one["kind"])} for one in shown.payload["findings"]],
        "below": [{"id": one.id, "source": one.source, "worth_share": one.worth_share} for one in found.below],
        "ignored": [{"id": one.id, "source": one.source} for one in found.ignored],
        "tried": [one.to_json() for one in tried],
    }


def _code(variant: Variant) -> dict[str, str]:
    update = {} if variant.update is None else {"update": variant.update.trace.code}
    return {"forward": variant.forward.code, "backward": variant.backward.code} | update


def _ablation(shown: Shown) -> dict[str, Any] | None:
    if shown.measured.shares is None:
        return None
    found, config = shown.measured.shares
    return {"config": config.as_code(), **plain(asdict(found) | {"same": sorted(found.same)})}
