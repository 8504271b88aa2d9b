"""The part of the wire format that says in one sentence what a step takes, where, and what would shorten it most. Pure.

A step takes 10.4 ms on an H200, measured (31 ms before the passes); its backward takes 1.9 times its forward, 43 % of it in
h.*.mlp ×12; fuse pulls the biggest lever, at most 7.4 ms, 23 %, modelled: a loop launches 512 kernels, at train.py:12, now 3
ops; left to mend: rows of the head's matmul are not aligned (2.1 ms, 20 %).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tracefuse.findings.finding import MEDIUM
from tracefuse.findings.kinds import KINDS
from tracefuse.measure.launches import HOST_US
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
    becomes: Callable[[Sequence[str]], int],
    is_blocked: bool = False,
) -> dict[str, Any]:
    """`said` is the sentence, `head` its part before the levers. `actions` are the findings that lead, each with what it is
    worth and the passes that pull it already: the one that passes gain more by than what is left of any other, then what is
    left, the most worth first. `becomes` counts the ops that do the work of the captured ops of these names now. Where it
    `is_blocked`, the step is only shown, and neither compiled nor measured."""
    left = sorted(filter(_is_left, findings), key=share_left, reverse=True)
    pulled = max((one for one in findings if one["mended_by"]), key=_gained, default=None)
    if pulled is not None and max([0.0, *(share_left(one)[1] for one in left)]) >= _gained(pulled):
        pulled = None
    of_step, rest = clock.times[1].kind, [one for one in left if one is not pulled]
    where = " for a GPU" if clock.times[1].kind != "modelled" and not is_on_gpu else ""
    did = [] if pulled is None else [_pulled(pulled, becomes, where)]
    head = [_step(clock, summary, is_on_gpu), *_launches(clock, summary, is_blocked), *_where(rows)]
    levers = [*did, *_lever(rest, deltas, of_step, pulled is not None)]
    if clock.launch_us is not None:
        levers[0] = f"by its kernels' time {levers[0]}"
    done = [] if pulled is None else [_action(pulled, str(pulled["worth"]), str(pulled["kind"]), pulled["mended_by"])]
    actions = [_action(one, _left(one), _kind(one)) for one in rest]
    return {
        "said": f"{'; '.join([*head, *levers])}.",
        "head": f"{'; '.join(head)}.",
        "actions": [*done, *actions][:MOST_ACTIONS],
    }


def _action(finding: Mapping[str, Any], worth: str, kind: str, by: Sequence[str] = ()) -> dict[str, Any]:
    return {"key": finding["key"], "title": finding["title"], "worth": in_short(worth), "kind": kind, "by": list(by)}


def _step(clock: Clock, summary: Mapping[str, Any], is_on_gpu: bool) -> str:
    before, after = clock.times
    us, is_same = time_text(after.step_us), abs(before.step_us - after.step_us) < LEAST * before.step_us
    was = "" if is_same else f" ({time_text(before.step_us)} before the passes)"
    if after.kind != "modelled":
        return f"A step takes {us} on {clock.device}, {after.kind}{was}"
    what = f"{counted(summary['ops'][1], 'op')}, keeps {human_bytes(summary['saved_bytes'][1])} for its backward"
    if is_on_gpu:
        return f"A step takes at least {us} on {clock.device}, modelled{was}: press Measure"
    example = ", an example" if clock.chosen == DEFAULT else ""
    return f"A step is {what}, and takes at least {us} on {clock.device}{example}, modelled{was}"


def _launches(clock: Clock, summary: Mapping[str, Any], is_blocked: bool) -> list[str]:
    """That the step is bound by launches: no kernel's time shortens it then, fewer kernels do, and a CUDA graph."""
    if clock.launch_us is None:
        return []
    before, after = summary["ops"]
    was = f" ({time_text(HOST_US * before)} before)" * (before != after)
    verb = "take" if after != 1 else "takes"
    needs = f"{counted(after, 'kernel')} {verb} the host about {time_text(clock.launch_us)}{was}"
    return [f"launch-bound: {needs} to launch{', use cuda_graph=True' * (not is_blocked)}"]


def _where(rows: Layers) -> list[str]:
    forward, backward = (sum(getattr(row, f"{half}_us")[1] for row in rows) for half in ("forward", "backward"))
    if not backward or rows.no_verdict:
        return []
    worst = rows.worst()
    share = "" if worst is None else share_text(worst.backward_us[1], backward)
    name = "" if worst is None else f"{worst.name}{f' ×{worst.count}' * (worst.count > 1)}"
    if not forward:
        return [f"{name} takes {share} of the backward"] if name else []
    return [f"its backward takes {backward / forward:.1f} times its forward{f', {share} of it in {name}' * bool(name)}"]


def _pulled(finding: Mapping[str, Any], becomes: Callable[[Sequence[str]], int], where: str) -> str:
    """The lever that passes pull already: which do, what it is worth, of a model `where` that is not the step's clock, what it
    was at which line, and what they made of it."""
    by, count = finding["mended_by"], becomes(finding["values"])
    passes = f"{' and '.join(by)} pull{'s' * (len(by) == 1)}"
    worth = f"{in_short(str(finding['worth']))}, {finding['kind']}{where * (finding['kind'] == 'modelled')}"
    left = "" if finding["is_mended"] else f", {in_short(_left(finding))} left"
    place = str(finding["source"]).partition("  ")[0]
    was = f"{finding['title']}{f', at {place}' * bool(place)}"
    now = f", now {counted(count, 'op')}" if count else ""
    return f"{passes} the biggest lever, {worth}{left}: {was}{now}"


def _lever(
    left: Sequence[Mapping[str, Any]], deltas: Mapping[str, float | None], of_step: str, is_pulled: bool
) -> list[str]:
    """The finding or the pass that gains most of what is left, marked where it is known in another way than the step is."""
    if not left:
        if is_pulled:
            return ["nothing else is left to mend"]
        name, us = min(((name, us or 0.0) for name, us in deltas.items()), key=lambda one: one[1], default=("", 0.0))
        gained = [f"most is gained by the pass {name}: {time_text(-us)}"] if us < 0 else []
        return [*gained, "nothing else was found that slows it down"]
    worth, kind = in_short(_left(left[0])), _kind(left[0])
    worth += f", {kind}" if worth and kind not in ("", of_step) else ""
    return [f"{'left' if is_pulled else 'first'} to mend: {left[0]['title']}{f' ({worth})' if worth else ''}"]


def _is_left(finding: Mapping[str, Any]) -> bool:
    """Whether there is something to do about it: what passes leave of what they alone can mend stays."""
    return not finding["is_mended"] and not (finding["mended_by"] and KINDS[finding["id"]].by_passes_alone)


def share_left(finding: Mapping[str, Any]) -> tuple[bool, float]:
    """What orders findings: the share of a step that is left of one, below all others without one. Of equal ones the graver
    one comes first already. A remark that no switch mends counts for no more than remarks do."""
    share = finding["left_share" if finding["left"] else "worth_share"]
    is_remark = finding["severity"] == "low" and not finding["changes"]
    return share is not None, min(share or 0.0, MEDIUM if is_remark else 1.0)


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
    return f"{amount[0]}, {share[1]}" if amount and share else said
