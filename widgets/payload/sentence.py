"""The part of the wire format that says what a step takes, where, and what to mend first: three short sentences at most. Pure.

A step takes 10.4 ms on H200, measured, 28 % of it in h.*.attn ×12 (gpt.py:18 alone 9 %); 31 ms before the passes. Its backward
takes 1.9 times as long as its forward; 20 % of the step is in lm_head (50,257 wide, not aligned; gpt.py:81). First to mend:
rows of the head's matmul are not aligned (2.1 ms, 20 %).

All their times are of one clock, and all shares of the step. Where launching its kernels takes longer than they do, these are
counted in place of their time: so many of the step, and of them so many in a module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tracefuse.device.target import chosen
from tracefuse.findings.finding import LOW, MEDIUM
from tracefuse.findings.kinds import KINDS
from tracefuse.findings.order import NOTHING
from tracefuse.measure.launches import HOST_US, launching_us
from tracefuse.tables.layers import Layers
from tracefuse.tables.slowest import Slowest
from tracefuse.text import share_text, time_text
from tracefuse.widgets.payload.clock import DEFAULT, Clock
from tracefuse.widgets.payload.findings import Wide

MOST_ACTIONS = 3
MOST_BRIEF = 32
"""The letters of what to do in a few words."""
LEAST = 0.005
"""The least share of the step that is told as a change."""
BOUND = "a CUDA graph launches all at once, and a larger batch takes no longer until the kernels fill the GPU"
"""What else helps a step that waits for launches, where there is room to say so."""


class Switch(NamedTuple):
    """A pass that is on: what the step takes without it, how that is known, and the `changes` of options that switch it."""

    name: str
    step_us: float
    kind: str
    changes: dict[str, Any]


def sentence_record(
    clock: Clock,
    rows: Layers,
    slow: Slowest | None,
    findings: Sequence[Mapping[str, Any]],
    is_on_gpu: bool,
    deltas: Mapping[str, float | None],
    is_blocked: bool = False,
    is_pinned: bool = False,
    switches: Sequence[Switch] = (),
    as_graph: str = "",
    wide: Wide | None = None,
) -> dict[str, Any]:
    """`slow` is what is told to be slow, by launches of a step that waits for these, and `wide` where matmuls are not aligned.
    `said` are the sentences, the first of which leads, and `head` those before the levers; where all that is left `is_small`,
    none of it is the answer.

    `actions` are the findings that lead, each with what it is worth and the passes that pull it already: the one that passes
    gain more by than what is left of the first one, then what is left, in the order of `findings`, then what else passes mend,
    then trifles. Where the step waits for launches they stand in the order of what they spare, a CUDA graph behind the first
    of them, or before it where all is small, and last what comes next, two as one, if it is large to kernels or to launches;
    `as_graph` is the graph's code, "" where there is none. Where the passes make the step longer, that of `switches` leads
    that spares most of it, unless what is left of the first finding is worth more.

    Where it `is_blocked`, the step is neither compiled nor measured; where it `is_pinned`, the step before is that of the
    pinned configuration."""
    left = [one for one in findings if _is_left(one) and not str(one["worth"]).startswith(NOTHING)]
    is_bound = clock.launches is not None
    if is_bound:
        left.sort(key=lambda one: -_left_us(one, clock))
    gained, still = (_launches_gained, _launches_of) if is_bound else (_gained, _share_left)
    pulled = max((one for one in findings if one["mended_by"] and gained(one)), key=gained, default=None)
    if pulled is not None and left and still(left[0]) >= gained(pulled):
        pulled = None
    rest = [one for one in left if one is not pulled]
    head = (
        _of_launches(clock, slow, is_on_gpu and not is_blocked, is_pinned, wide)
        if is_bound
        else _of_time(clock, slow, is_on_gpu, rows, is_pinned, wide)
    )
    switch = None if is_pinned else _to_switch(switches, clock, is_on_gpu, _left_us(rest[0], clock) if rest else 0.0)
    graph = _graphed(clock, as_graph, is_on_gpu) if is_bound and as_graph else []
    is_small = bool(rest) and switch is None and all(_is_small(one, is_bound) for one in rest)
    at, is_small = int(bool(rest) and not is_small), is_small and not graph
    done, actions = _mended(pulled, _beside(findings, pulled)), [_action(one, _left(one), _kind(one)) for one in rest]
    # A CPU that times the step runs no kernel.
    is_gained = is_on_gpu or clock.times[1].kind == "modelled" or not any("fuse" in one["by"] for one in done)
    if is_bound or not is_gained:
        done = [one | {"worth": "", "kind": ""} for one in done]
        pulled = pulled and {**pulled, "worth": ""}
    lead = graph[0] if graph and at == 0 else None
    lever = _lever(pulled, rest, lead, deltas, is_small, lambda worth, kind: _amount(worth, kind, clock, is_on_gpu))
    if is_bound:
        actions = [_in_launches(one, findings, clock, is_lead=n < at) for n, one in enumerate(actions)]
        actions = [*actions[:at], *graph, *actions[at:]]
    first = [] if switch is None else [_switched(switch, clock)]
    if first:
        lever = f"First {first[0]['title']}: {first[0]['worth']}."
    most = MOST_ACTIONS - is_small
    levers = actions if is_bound else _trifles_last(actions, rest, done if not pulled else [])
    levers = [*(done if pulled else []), *levers, *(done if is_bound and not pulled else [])]
    shown = (_with_next([*first, *actions], rest, most) if is_bound else []) or [*first, *levers][:most]
    return {
        "said": " ".join([*_with_remedy(head, is_bound and not is_blocked, wide is not None), lever]),
        "lead": head[0].partition(";")[0],
        "head": " ".join(head),
        "is_small": is_small,
        "actions": shown,
    }


def _trifles_last(
    actions: Sequence[dict[str, Any]], rest: Sequence[Mapping[str, Any]], done: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The actions of what is left, then what is `done`, then those that spare too little to stand before it."""
    trifles = {one["key"] for one in rest[1:] if one["worth_share"] is not None and _share_left(one) < LOW}
    large, small = ([one for one in actions if (one["key"] in trifles) == is_trifle] for is_trifle in (False, True))
    return [*large, *done, *small]


def _with_next(levers: Sequence[dict[str, Any]], rest: Sequence[Mapping[str, Any]], most: int) -> list[dict[str, Any]]:
    """The first levers of a step that waits for launches, and as the last action what comes next and is large to its kernels
    or its launches; [] where nothing is."""
    told = {one["key"] for one in rest if _share_left(one) >= MEDIUM or not _is_small(one, is_bound=True)}
    big = [one for one in levers[most - 1 :] if one["key"] in told]
    return [*levers[: most - 1], _joined(big[:2])] if big else []


def _mended(*findings: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """What passes mend, as one action."""
    found = [one for one in findings if one is not None]
    if len(found) < 2:
        return [_action(one, str(one["worth"]), str(one["kind"]), one["mended_by"]) for one in found]
    by = dict.fromkeys(name for one in found for name in one["mended_by"])
    titles = "; ".join(one["title"].partition(": ")[0] for one in found)
    return [_action(found[0], "", "", tuple(by)) | {"title": titles}]


def _beside(findings: Sequence[Mapping[str, Any]], pulled: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The largest finding, but for what is `pulled`, that passes mend, that is no trifle and that the code could mend too."""
    others = [
        one
        for one in findings
        if one is not pulled and one["is_mended"] and _gained(one) >= LOW and not KINDS[one["id"]].by_passes_alone
    ]
    return max(others, key=_gained, default=None)


def _graphed(clock: Clock, code: str, is_on_gpu: bool) -> list[dict[str, Any]]:
    """The action that launches all kernels at once, where that spares time. No finding is about it, as in `_switched`."""
    assert clock.launches is not None
    takes, runs = launching_us(clock.launches[1]), clock.times[1].step_us
    if takes - runs <= LEAST * takes:
        return []
    where = "" if is_on_gpu else "on a GPU, "
    told = {"key": "cuda graph", "title": f"{where}launch it all at once: compile(cuda_graph=True)", "brief": ""}
    fix = f"`{code}` records the step as a CUDA graph, whose inputs keep their shapes"
    instead = told | {"source": "", "fix": fix, "code": code, "changes": None, "is_mended": False}
    worth = f"spares up to {time_text(takes - runs)} of {time_text(takes)}"
    return [told | {"worth": worth, "kind": "modelled", "by": [], "instead": instead}]


def _joined(actions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Actions as one, which has the key of the first of them."""
    if len(actions) == 1:
        return actions[0]
    title = "; ".join(one["title"].partition(": ")[0] for one in actions)
    return actions[0] | {"title": title, "worth": "", "kind": ""}


def _with_remedy(head: list[str], is_told: bool, is_short: bool) -> list[str]:
    remedy = BOUND.partition(",")[0] if is_short else BOUND
    return [*head[:-1], f"{head[-1].removesuffix('.')}; {remedy}."] if is_told and len(head) > 1 else head


def _to_switch(switches: Sequence[Switch], clock: Clock, is_on_gpu: bool, least_us: float) -> Switch | None:
    """The pass without which the step is shortest, where the passes make it longer and it spares more than `least_us`; a CPU
    does not run their kernels."""
    was_us, is_us = clock.steps_us
    if is_us - was_us <= LEAST * was_us or (clock.times[1].kind != "modelled" and not is_on_gpu):
        return None
    best = min(switches, key=lambda one: one.step_us, default=None)
    return None if best is None or is_us - best.step_us <= max(LEAST * is_us, least_us) else best


def _switched(switch: Switch, clock: Clock) -> dict[str, Any]:
    """The action that switches a pass off. No finding is about it: `instead` is what the view knows of one."""
    us = clock.steps_us[1]
    told = {"key": f"switch {switch.name}", "title": f"switch {switch.name} off", "brief": ""}
    fix = f"the step takes {time_text(switch.step_us)} without it and {time_text(us)} with it, all others kept"
    instead = told | {"source": "", "fix": fix, "code": "", "changes": switch.changes, "is_mended": False}
    worth = f"\N{MINUS SIGN}{time_text(us - switch.step_us)} of {time_text(us)}"
    return told | {"worth": worth, "kind": switch.kind, "by": [], "instead": instead}


def _action(finding: Mapping[str, Any], worth: str, kind: str, by: Sequence[str] = ()) -> dict[str, Any]:
    said = _of_step(worth)
    told = said if kind == "measured" else said.removeprefix("about ")  # the mark of its kind says so
    brief = _brief(finding)
    return {
        "key": finding["key"],
        "title": finding["title"],
        "brief": brief,
        "worth": told,
        "kind": kind,
        "by": list(by),
    }


def _brief(finding: Mapping[str, Any]) -> str:
    """What to do in a few words: the call that mends it, or how the fix begins; "" where that takes more."""
    call, begin = KINDS[finding["id"]].by_calling, re.split("[:;]|, ", finding["fix"])[0]
    return call if call and finding["code"] else begin if len(begin) <= MOST_BRIEF else ""


def _in_launches(
    action: dict[str, Any], findings: Sequence[Mapping[str, Any]], clock: Clock, is_lead: bool
) -> dict[str, Any]:
    """The action with what it spares of the step and in launches, and not what it is worth to kernels, of which figures in its
    title may speak; with the kernels' time where it spares no launch. What leads has room for why it is slow."""
    finding = next(one for one in findings if one["key"] == action["key"])
    if not action["kind"]:
        return action
    if count := round(finding["launches"]):
        whole = round(finding["launches_of"])
        spared = _spared(count, whole, _share_left(finding), clock)
        worth = f"spares up to {spared}{count:,} of {whole:,} launch{'es' * (whole > 1)}"
        title, _, why = action["title"].partition(": ")
        title = action["title"] if is_lead and not re.search(r"\d", why) else title
        return action | {"title": title, "worth": worth, "kind": "modelled"}
    minor = "" if _share_left(finding) >= MEDIUM else "minor: "
    return action | {"worth": f"{minor}{action['worth'].partition(', ')[0].partition(' of ')[0]} of kernels, no launch"}


def _spared(count: int, whole: int, share: float, clock: Clock) -> str:
    """`706 µs of 3.14 ms: `; "" where neither fewer launches nor shorter kernels spare time."""
    takes, left = _takes_us(count, whole, share, clock)
    return f"{time_text(takes - left)} of {time_text(takes)}: " if left < takes else ""


def _takes_us(count: int, whole: int, share: float, clock: Clock) -> tuple[float, float]:
    """What a step of `whole` launches takes, and what it takes without `count` of them and this share of its kernels' time."""
    assert clock.launches is not None
    is_after = whole == round(sum(clock.launches[1].values()))
    running = clock.times[1 if is_after else 0].step_us
    return max(HOST_US * whole, running), max(HOST_US * (whole - count), running * (1 - share))


def _left_us(finding: Mapping[str, Any], clock: Clock) -> float:
    """What mending all that is left of it spares of the step at most; 0 where its worth is no time."""
    share = _share_left(finding)
    if clock.launches is None:
        return share * clock.steps_us[1]
    takes, left = _takes_us(round(finding["launches"]), round(finding["launches_of"]), share, clock)
    return takes - left


def _of_time(
    clock: Clock, slow: Slowest | None, is_on_gpu: bool, rows: Layers, is_pinned: bool, wide: Wide | None
) -> list[str]:
    then = "; ".join([*_halves(rows), *([] if wide is None else [wide.told("the step is")])])
    return [_step(clock, slow, is_on_gpu, is_pinned), *([f"{then}."] if then else [])]


def _step(clock: Clock, slow: Slowest | None, is_on_gpu: bool, is_pinned: bool) -> str:
    before, after = clock.times
    was_us, is_us = clock.steps_us
    us, is_same = time_text(is_us), abs(was_us - is_us) <= LEAST * was_us
    why = ", whose kernels need a GPU" if is_us > was_us and after.kind != "modelled" and not is_on_gpu else ""
    waited = ", since it waited for launches" if was_us > before.step_us else ""
    was = "" if is_same else f"; {time_text(was_us)} {'as pinned' if is_pinned else 'before the passes'}{why}{waited}"
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


def _of_launches(
    clock: Clock, slow: Slowest | None, can_be_graphed: bool, is_pinned: bool, wide: Wide | None
) -> list[str]:
    """That the step is bound by launches: no kernel's time shortens it then, fewer kernels do, and a CUDA graph."""
    assert clock.launches is not None
    counts = [round(sum(one.values())) for one in clock.launches]
    launching = [launching_us(one) for one in clock.launches]
    running = [one.step_us for one in clock.times]
    waited = clock.steps_us[0] > running[0]
    first = f"The GPU waits for launches: on {_place(clock)}, modelled, "
    was, now = (_takes(*one) for one in zip(counts, launching, running, strict=True))
    if counts[0] == counts[1]:
        first += f"{now}."
    elif is_pinned:
        first += f"{now}; as pinned, {was}."
    elif waited and counts[1] > counts[0]:
        more = counts[1] - counts[0]
        first += f"{was}; the passes add {more:,} launch{'es' * (more > 1)}: {time_text(launching[1])}."
    elif waited:
        left = f"{counts[1]:,} launches and" if counts[1] > 1 else "one launch and"
        first += f"{was}; the passes leave {left} {time_text(launching[1])}."
    else:
        first += f"with the passes {now}; before them {_running(counts[0])} {time_text(running[0])}."
    graph = "cuda_graph=True launches all at once" * can_be_graphed
    helps = (
        f"fewer launches help most{f', and {graph}' * (can_be_graphed and wide is None)}" if counts[1] > 1 else graph
    )
    where = [_whose(slow) if slow and counts[1] > 1 else "", "" if wide is None else wide.told("kernels' time")]
    then = "; ".join(filter(None, [", ".join(filter(None, where)), helps]))
    return [first, f"{then[0].upper()}{then[1:]}."] if then else [first]


def _takes(count: int, launching: float, running: float) -> str:
    """`639 launches take 5.37 ms, their kernels 301 µs`"""
    took, ran = time_text(launching), time_text(running)
    if count == 1:
        return f"one launch takes {took}, its kernel {ran}"
    return f"{count:,} launches take {took}, their kernels {ran}"


def _running(count: int) -> str:
    return "one kernel runs" if count == 1 else "kernels run"


def _whose(slow: Slowest) -> str:
    """`228 of those 373 are in h.*.attn ×12`; the levers have lines."""
    verb = "is" if round(slow.amount) == 1 else "are"
    return f"{slow.amount:,.0f} of those {slow.of:,.0f} {verb} {'in' if slow.paths else 'at'} {slow.label}"


def _halves(rows: Layers) -> list[str]:
    forward, backward = (sum(getattr(row, f"{half}_us")[1] for row in rows) for half in ("forward", "backward"))
    if not forward or not backward or rows.no_verdict:
        return []
    return [f"Its backward takes {backward / forward:.1f} times as long as its forward"]


def slowest_record(slow: Slowest | None, is_of_launches: bool) -> dict[str, Any] | None:
    """What is slow, and where: the row of the tree that the first sentences name, by the same numbers."""
    if slow is None:
        return None
    if is_of_launches:
        said = f"most launches: {slow.label}, {slow.amount:,.0f} of {slow.of:,.0f}"
    else:
        said = f"slowest: {slow.label}, {share_text(slow.amount, slow.of)} of step"
    return {"name": slow.name, "paths": list(slow.paths), "said": said, "line": slow.line}


def _lever(
    pulled: Mapping[str, Any] | None,
    rest: Sequence[Mapping[str, Any]],
    lead: Mapping[str, Any] | None,
    deltas: Mapping[str, float | None],
    is_small: bool,
    amount: Callable[[str, str], str],
) -> str:
    """What to mend first, the action `lead` where there is one, behind what passes mend already where that is worth more;
    without findings what a pass gains."""
    first = f"{rest[0]['title']}{amount(_left(rest[0]), _kind(rest[0]))}" if rest else ""
    first = first if lead is None else str(lead["title"])  # what it is worth stands with it
    if pulled is not None:
        verb = f"mend{'s' * (len(pulled['mended_by']) == 1)}{'' if pulled['is_mended'] else ' a part of'}"
        by, worth = " and ".join(pulled["mended_by"]), amount(str(pulled["worth"]), str(pulled["kind"]))
        next_one = f"{'nothing big is left; ' * is_small}next: {first}" if first else "nothing else is left to mend"
        return f"{by} {verb} the largest finding already, {pulled['title']}{worth}; {next_one}."
    if first:
        return f"{'Nothing big is left; first' if is_small else 'First'} {'to mend' if lead is None else 'of all'}: {first}."
    name, us = min(((name, us or 0.0) for name, us in deltas.items()), key=lambda one: one[1], default=("", 0.0))
    if us >= 0:
        return "Nothing was found that slows it down."
    return f"The pass {name} gains most{amount(time_text(-us), '')}; nothing else was found that slows it down."


def _amount(worth: str, kind: str, clock: Clock, is_on_gpu: bool) -> str:
    """` (2.1 ms, 20 %)`, marked where it is known in another way than the step; "" of another clock than the step's: of
    kernels where their launches take longer, of a GPU where the step was timed on a CPU."""
    of_step = clock.times[1].kind
    is_other = kind == "modelled" != of_step
    if clock.launches is not None or not worth or (is_other and not is_on_gpu):
        return ""
    return f" ({in_short(worth)}{f', {kind}' * (kind not in ('', of_step))})"


def _is_left(finding: Mapping[str, Any]) -> bool:
    """Whether there is something to do about it: what passes leave of what they alone can mend stays."""
    return not finding["is_mended"] and not (finding["mended_by"] and KINDS[finding["id"]].by_passes_alone)


def _is_small(finding: Mapping[str, Any], is_bound: bool) -> bool:
    """Whether mending all that is left of it is worth too little to be the answer; where nobody knows, its severity says."""
    if finding["worth_share"] is None and finding["severity"] != "low":
        return False
    if is_bound:
        return bool(finding["launches"] < MEDIUM * finding["launches_of"])
    return _share_left(finding) < MEDIUM


def _share_left(finding: Mapping[str, Any]) -> float:
    """The share of a step that is left of it; 0 where its worth is no time."""
    return finding["left_share" if finding["left"] else "worth_share"] or 0.0


def _gained(finding: Mapping[str, Any]) -> float:
    """The share of a step that passes gain by it already; 0 where its worth is no time."""
    left = finding["left_share"] or 0.0
    return max(0.0, (finding["worth_share"] or 0.0) - left) if finding["mended_by"] else 0.0


def _launches_of(finding: Mapping[str, Any]) -> float:
    return float(finding["launches"])


def _launches_gained(finding: Mapping[str, Any]) -> float:
    """The launches that passes spare, which leave nothing of it."""
    return _launches_of(finding) if finding["is_mended"] else 0.0


def _left(finding: Mapping[str, Any]) -> str:
    """The finding's worth in its own words, where passes are on already what they leave of it."""
    return str(finding["left"] or finding["worth"]).partition(" (")[0]


def _kind(finding: Mapping[str, Any]) -> str:
    return str(finding["left_kind"] or finding["kind"])


def _of_step(worth: str) -> str:
    """A worth as an amount of the step that it is a part of, which is the captured one or the shown one: "2.1 ms of 10 ms"."""
    step = re.search(r" of ([\d.,]+ \S+) a step", worth)
    return re.sub(r", \d+ %$", f" of {step[1]}", in_short(worth)) if step else in_short(worth)


def in_short(worth: str) -> str:
    """A worth as an amount and its share of the step: "2.1 ms, 20 %". How that is known, the finding says."""
    said = worth.partition(" (")[0]
    amount = re.match(r"(?:at most |about |part of )?[\d.,]+(?:e-?\d+)? \S+", said)
    share = re.search(r", (\d+ %)", said)
    return f"{amount[0]}, {share[1]}" if amount and share else said.partition(";")[0]
