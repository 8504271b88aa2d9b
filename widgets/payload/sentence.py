"""The part of the wire format that says in one sentence what a step takes, where, and what would shorten it most. Pure.

A step takes 10.4 ms on an H200, measured; its backward 1.9 times its forward; h.*.mlp ×12 takes 43 % of that. Most is gained
by: rows of the head's matmul are not aligned (2.1 ms of 10.4 ms a step, 20 %).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tracefuse.optimizers.trace import human_bytes
from tracefuse.tables.layers import Layers
from tracefuse.text import counted, share_text, time_text
from tracefuse.widgets.payload.clock import DEFAULT, Clock

MOST_ACTIONS = 3
LEAST = 0.005
"""The least share of the step that is told as a change."""


def sentence_record(
    clock: Clock,
    rows: Layers,
    findings: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    is_on_gpu: bool,
    deltas: Mapping[str, float | None],
) -> dict[str, Any]:
    """`said` is the sentence, `actions` are the findings that lead, the most worth first, each with what it is worth."""
    left = sorted((one for one in findings if not one["is_mended"]), key=_share, reverse=True)
    parts = [_step(clock, summary, is_on_gpu), *_where(rows), *_lever(left, deltas, clock.times[1].kind)]
    actions = [
        {"key": one["key"], "title": one["title"], "worth": worth_of(one), "kind": _kind(one)}
        for one in left[:MOST_ACTIONS]
    ]
    return {"said": f"{'; '.join(parts)}.", "actions": actions}


def _step(clock: Clock, summary: Mapping[str, Any], is_on_gpu: bool) -> str:
    before, after = clock.times
    us, is_same = time_text(after.step_us), abs(before.step_us - after.step_us) < LEAST * before.step_us
    was = "" if is_same else f", {time_text(before.step_us)} before the passes"
    if after.kind != "modelled":
        return f"A step takes {us} on {clock.device}, {after.kind}{was}"
    what = f"{counted(summary['ops'][1], 'op')} and keeps {human_bytes(summary['saved_bytes'][1])} for its backward"
    if is_on_gpu:
        return f"A step takes at least {us} on {clock.device}, modelled{was}: press Measure"
    example = ", an example," if clock.chosen == DEFAULT else ""
    return f"A step is {what}; on {clock.device}{example} it would take at least {us}, modelled{was}"


def _where(rows: Layers) -> list[str]:
    forward, backward = (sum(getattr(row, f"{half}_us")[1] for row in rows) for half in ("forward", "backward"))
    if not backward or rows.no_verdict:
        return []
    parts = [f"its backward takes {backward / forward:.1f} times its forward"] if forward else []
    worst = rows.worst()
    if worst is not None:
        times = f" ×{worst.count}" if worst.count > 1 else ""
        parts.append(f"{worst.name}{times} takes {share_text(worst.backward_us[1], backward)} of the backward")
    return parts


def _lever(left: Sequence[Mapping[str, Any]], deltas: Mapping[str, float | None], of_step: str) -> list[str]:
    """The finding or the pass that gains most, marked where it is known in another way than the step is."""
    if not left:
        name, us = min(((name, us or 0.0) for name, us in deltas.items()), key=lambda one: one[1], default=("", 0.0))
        gained = [f"most is gained by the pass {name}: {time_text(-us)}"] if us < 0 else []
        return [*gained, "nothing else was found that slows it down"]
    worth, kind = worth_of(left[0]), _kind(left[0])
    worth += f", {kind}" if worth and kind not in ("", of_step) else ""
    return [f"first to mend: {left[0]['title']}{f' ({worth})' if worth else ''}"]


def _share(finding: Mapping[str, Any]) -> tuple[bool, float]:
    """What orders findings: the share of a step that one is worth, below all others without one. Of equal ones the graver one
    comes first already."""
    share = re.search(r" a step, (\d+) %", _left(finding))
    return share is not None, float(share[1]) if share else 0.0


def _left(finding: Mapping[str, Any]) -> str:
    """The finding's worth in its own words, where passes are on already what they leave of it."""
    return (str(finding.get("mended", "")).partition("left: ")[2] or str(finding["worth"])).partition(" (")[0]


def _kind(finding: Mapping[str, Any]) -> str:
    return str(finding["left_kind"] or finding["kind"])


def worth_of(finding: Mapping[str, Any]) -> str:
    """What it is worth, and of which share of a step: "2.1 ms, 20 %". How that is known, the finding says."""
    said = _left(finding)
    amount = re.match(r"(?:at most |part of )?[\d.,]+(?:e-?\d+)? \S+", said)
    share = re.search(r", (\d+ %)", said)
    return f"{amount[0]}, {share[1]}" if amount and share else said
