"""The part of the wire format that says what a step takes, where, and what to mend first: three short sentences at most. Pure.

A step takes 10.4 ms on H200, measured, 28 % of it in h.*.attn ×12 (gpt.py:18 alone 9 %); 31 ms before the passes. Its backward
takes 1.9 times as long as its forward. First to mend: rows of the head's matmul are not aligned (2.1 ms, 20 %).

All their times are of one clock, and all shares of the step. Where launching its kernels takes longer than they do, these are
counted in place of their time: so many of the step, and of them so many in a module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tracefuse.device.target import chosen
from tracefuse.findings.kinds import KINDS
from tracefuse.tables.layers import Layers
from tracefuse.tables.slowest import Slowest
from tracefuse.text import share_text, time_text
from tracefuse.widgets.payload.clock import DEFAULT, Clock

MOST_ACTIONS = 3
LEAST = 0.005
"""The least share of the step that is told as a change."""


def sentence_record(
    clock: Clock,
    rows: Layers,
    slow: Slowest | None,
    findings: Sequence[Mapping[str, Any]],
    ops: tuple[int, int],
    is_on_gpu: bool,
    deltas: Mapping[str, float | None],
    is_blocked: bool = False,
) -> dict[str, Any]:
    """`slow` is what is told to be slow, by kernels of a step that waits for their launches. `said` are the sentences, `head`
    those before the levers. `actions` are the findings that lead, each with what it is worth and the passes that pull it
    already: the one that passes gain more by than what is left of the first one, then what is left, in the order of
    `findings`. `ops` are counted before and after the passes. Where it `is_blocked`, the step is only shown, and neither
    compiled nor measured."""
    left = list(filter(_is_left, findings))
    pulled = max((one for one in findings if one["mended_by"]), key=_gained, default=None)
    if pulled is not None and left and _share_left(left[0]) >= _gained(pulled):
        pulled = None
    rest = [one for one in left if one is not pulled]
    if clock.launch_us is None:
        head = [_step(clock, slow, is_on_gpu), *_halves(rows)]
    else:
        head = _launches(clock, slow, ops, is_on_gpu and not is_blocked)
    lever = _lever(pulled, rest, deltas, lambda worth, kind: _amount(worth, kind, clock, is_on_gpu))
    done = [] if pulled is None else [_action(pulled, str(pulled["worth"]), str(pulled["kind"]), pulled["mended_by"])]
    actions = [_action(one, _left(one), _kind(one)) for one in rest]
    if clock.launch_us is not None:
        done, actions = ([_in_launches(one, findings, ops[0]) for one in some] for some in (done, actions))
    return {
        "said": " ".join([*head, lever]),
        "head": " ".join(head),
        "actions": [*done, *actions][:MOST_ACTIONS],
    }


def _action(finding: Mapping[str, Any], worth: str, kind: str, by: Sequence[str] = ()) -> dict[str, Any]:
    return {"key": finding["key"], "title": finding["title"], "worth": in_short(worth), "kind": kind, "by": list(by)}


def _in_launches(action: dict[str, Any], findings: Sequence[Mapping[str, Any]], captured: int) -> dict[str, Any]:
    """The action with what it is about in launches, since its kernels' time is none of the step's."""
    finding = next(one for one in findings if one["key"] == action["key"])
    count = len(finding["values"])
    if not count or not action["kind"]:
        return action
    of = f"of {captured:,} launches"
    worth = f"{count if KINDS[finding['id']].spares_launches else 0:,} {of}"
    return action | {"worth": worth, "kind": ""}


def _step(clock: Clock, slow: Slowest | None, is_on_gpu: bool) -> str:
    before, after = clock.times
    us, is_same = time_text(after.step_us), abs(before.step_us - after.step_us) <= LEAST * before.step_us
    why = ", whose kernels need a GPU" if after.step_us > before.step_us and not is_on_gpu else ""
    was = "" if is_same else f"; {time_text(before.step_us)} before the passes{why}"
    where = _where(slow)
    if after.kind != "modelled":
        return f"A step takes {us} on {clock.device}, {after.kind}{where}{was}."
    takes = "takes" if is_on_gpu else "would take"
    return f"A step {takes} at least {us} on {_place(clock)}, modelled{where}{was}."


def _where(slow: Slowest | None) -> str:
    """`, 28 % of it in h.*.attn ×12 (gpt.py:18 alone 9 %)`; "" where nothing is told to be slow."""
    if slow is None:
        return ""
    share = share_text(slow.amount, slow.of)
    if not slow.paths:
        return f", {share} of it at {slow.label}"
    alone = "" if slow.is_one_line else f" alone {share_text(slow.line_amount, slow.of)}"
    return f", {share} of it in {slow.label}{f' ({slow.place}{alone})' * bool(slow.place)}"


def _place(clock: Clock) -> str:
    return f"an example GPU ({clock.device})" if clock.chosen == DEFAULT and chosen() is None else clock.device


def _launches(clock: Clock, slow: Slowest | None, ops: tuple[int, int], can_be_graphed: bool) -> list[str]:
    """That the step is bound by launches: no kernel's time shortens it then, fewer kernels do, and a CUDA graph."""
    before, after = ops
    us, launching = time_text(clock.times[1].step_us), time_text(clock.launch_us or 0.0)
    modelled = f"would take about {launching} to launch and {us} to run, modelled on {_place(clock)}"
    if after == 1:
        return [f"The launch is slow here: the one kernel {modelled}."]
    was = f" ({before:,} before the passes)" if before > after else ""
    graph = ", and cuda_graph=True launches all at once" if can_be_graphed else ""
    first, then = f"Launches are slow here: {after:,} kernels{was} {modelled}.", f"fewer kernels help most{graph}."
    return [first, f"{_whose(slow)}; {then}" if slow else f"F{then[1:]}"]


def _whose(slow: Slowest) -> str:
    """`228 of them are in h.*.attn ×12, 72 at gpt.py:18`."""
    count = f"{slow.amount:,.0f} of them are"
    if not slow.paths:
        return f"{count} at {slow.label}"
    at = f" ({slow.place})" if slow.is_one_line else f", {slow.line_amount:,.0f} at {slow.place}"
    return f"{count} in {slow.label}{at * bool(slow.place)}"


def _halves(rows: Layers) -> list[str]:
    forward, backward = (sum(getattr(row, f"{half}_us")[1] for row in rows) for half in ("forward", "backward"))
    if not forward or not backward or rows.no_verdict:
        return []
    return [f"Its backward takes {backward / forward:.1f} times as long as its forward."]


def slowest_record(slow: Slowest | None, kernels: int | None) -> dict[str, Any] | None:
    """What is slow, and where: the row of the tree that the first sentence names, by the same numbers. `kernels` are those of
    a step that waits for their launches."""
    if slow is None:
        return None
    amount = (
        f"{share_text(slow.amount, slow.of)} of step"
        if kernels is None
        else f"{slow.amount:,.0f} of {kernels:,} kernels"
    )
    said = f"{'slowest' if kernels is None else 'most kernels'}: {slow.label}, {amount}"
    return {"name": slow.name, "paths": list(slow.paths), "said": said, "line": slow.line}


def _lever(
    pulled: Mapping[str, Any] | None,
    rest: Sequence[Mapping[str, Any]],
    deltas: Mapping[str, float | None],
    amount: Callable[[str, str], str],
) -> str:
    """What to mend first, behind what passes mend already where that is worth more; without findings what a pass gains."""
    first = f"{rest[0]['title']}{amount(_left(rest[0]), _kind(rest[0]))}" if rest else ""
    if pulled is not None:
        verb = f"mend{'s' * (len(pulled['mended_by']) == 1)}{'' if pulled['is_mended'] else ' a part of'}"
        by, worth = " and ".join(pulled["mended_by"]), amount(str(pulled["worth"]), str(pulled["kind"]))
        next_one = f"next: {first}" if rest else "nothing else is left to mend"
        return f"{by} {verb} the largest finding already, {pulled['title']}{worth}; {next_one}."
    if rest:
        return f"First to mend: {first}."
    name, us = min(((name, us or 0.0) for name, us in deltas.items()), key=lambda one: one[1], default=("", 0.0))
    if us >= 0:
        return "Nothing was found that slows it down."
    return f"The pass {name} gains most{amount(time_text(-us), '')}; nothing else was found that slows it down."


def _amount(worth: str, kind: str, clock: Clock, is_on_gpu: bool) -> str:
    """` (2.1 ms, 20 %)`, marked where it is known in another way than the step; "" of another clock than the step's: of
    kernels where their launches take longer, of a GPU where the step was timed on a CPU."""
    of_step = clock.times[1].kind
    is_other = kind == "modelled" != of_step
    if clock.launch_us is not None or not worth or (is_other and not is_on_gpu):
        return ""
    return f" ({in_short(worth)}{f', {kind}' * (kind not in ('', of_step))})"


def _is_left(finding: Mapping[str, Any]) -> bool:
    """Whether there is something to do about it: what passes leave of what they alone can mend stays."""
    return not finding["is_mended"] and not (finding["mended_by"] and KINDS[finding["id"]].by_passes_alone)


def _share_left(finding: Mapping[str, Any]) -> float:
    """The share of a step that is left of it; 0 where its worth is no time."""
    return finding["left_share" if finding["left"] else "worth_share"] or 0.0


def _gained(finding: Mapping[str, Any]) -> float:
    """The share of a step that passes gain by it already; 0 where its worth is no time."""
    left = finding["left_share"] or 0.0
    return max(0.0, (finding["worth_share"] or 0.0) - left) if finding["mended_by"] else 0.0


def _left(finding: Mapping[str, Any]) -> str:
    """The finding's worth in its own words, where passes are on already what they leave of it."""
    return str(finding["left"] or finding["worth"]).partition(" (")[0]


def _kind(finding: Mapping[str, Any]) -> str:
    return str(finding["left_kind"] or finding["kind"])


def in_short(worth: str) -> str:
    """A worth as an amount and its share of the step: "2.1 ms, 20 %". How that is known, the finding says."""
    said = worth.partition(" (")[0]
    amount = re.match(r"(?:at most |about |part of )?[\d.,]+(?:e-?\d+)? \S+", said)
    share = re.search(r", (\d+ %)", said)
    return f"{amount[0]}, {share[1]}" if amount and share else said.partition(";")[0]
