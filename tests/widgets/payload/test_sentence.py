"""The sentences on top of the view, and what a pass that changes nothing would need."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tracefuse
from tracefuse.config.configuration import Config
from tracefuse.demo import GPT, batch
from tracefuse.measure.launches import HOST_US
from tracefuse.measure.op_times import OpTimes, modelled
from tracefuse.tables.layers import layers
from tracefuse.tables.slowest import Slowest
from tracefuse.text import time_text
from tracefuse.variant import Variant
from tracefuse.widgets.payload.clock import Clock, modelled_clock
from tracefuse.widgets.payload.program import payload, switches_of
from tracefuse.widgets.payload.sentence import BOUND, Switch, in_short, sentence_record
from tracefuse.widgets.text import to_text

ROOT = Path(__file__).parents[3]


@cache
def variant() -> Variant:
    torch.manual_seed(0)
    model, data = GPT(layers=2, width=32, heads=2, vocab=61, length=16), batch(61, 2, 12)
    return tracefuse.capture(lambda: model(*data).backward()).optimize()


@cache
def tiny_ops(rounds: int, size: int) -> Variant:
    x, weight = torch.randn(size, size), torch.randn(size, size, requires_grad=True)

    def step() -> None:
        y = x
        for _ in range(rounds):
            y = (y @ weight).tanh()
        y.sum().backward()

    return tracefuse.capture(step).optimize()


def clock(kind: str) -> Clock:
    def of(trace: Any) -> OpTimes:
        return OpTimes({name: 1e3 * us for name, us in modelled(trace).us.items()}, f"{kind} a GPU", device="a GPU")

    return Clock((of(variant().baseline.whole), of(variant().whole)), "a GPU", of)


def finding(key: str, worth: str, share: float | None = None, **mended: Any) -> dict[str, Any]:
    plain = {"kind": "", "left_kind": "", "mended": "", "is_mended": False, "mended_by": [], "values": [key]}
    plain |= {"id": "attention-by-hand", "severity": "high", "changes": None, "fix": "", "code": ""}
    plain |= {"worth_share": share, "left": "", "left_share": None}
    return plain | {"key": key, "title": key, "worth": worth, "source": f"a.py:3  {key}"} | mended


def said_of(
    findings: list[dict[str, Any]], deltas: dict[str, float | None] | None = None, is_on_gpu: bool = True
) -> dict[str, Any]:
    """The sentences and the actions of a step that was measured."""
    rows = layers(variant().baseline.whole, variant().whole, clock("measured on").times)
    return sentence_record(clock("measured on"), rows, None, findings, is_on_gpu, deltas or {})


def needs(shown: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["needs"] for one in shown["passes"]}


def step_us(shown: dict[str, Any]) -> float:
    parts = ("forward_us", "backward_us", "update_us")
    return sum(row[part][1] for row in shown["layers"] for part in parts)


# --- the sentence -----------------------------------------------------------------------------------------------------


def test_it_says_what_a_step_takes_and_where() -> None:
    shown = payload(variant(), clock=clock("measured on"))
    before, after = shown["clock"]["step_us"]
    said = shown["sentence"]["said"]
    where = rf"A step takes {time_text(after)} on a GPU, measured, (\d+) % of it in (\S+) ×2 \((\S+):\d+(?: alone \d+ %)?\); "
    told = re.match(rf"{where}{time_text(before)} before the passes\. Its backward takes \d\.\d times as long as", said)
    assert told
    assert told[3] == "demo.py"
    slow = shown["slowest"]
    assert slow["said"] == f"slowest: {told[2]} ×2, {told[1]} % of step"
    # It is the tree's row, with all that is in these modules, and its share is of the step as all others are.
    inside = tuple(f"{path}." for path in slow["paths"])
    assert [re.sub(r"\d+", "*", path) for path in slow["paths"]] == [told[2]] * 2
    rows = [row for row in shown["layers"] if f"{row['path']}.".startswith(inside)]
    parts = ("forward_us", "backward_us", "update_us")
    us = sum(row[part][1] for row in rows for part in parts)
    assert int(told[1]) == pytest.approx(100 * us / step_us(shown), abs=1)


def test_on_a_cpu_that_passes_made_slower_it_says_why() -> None:
    fast, slow = (OpTimes({"y": us}, "measured on a CPU", device="a CPU") for us in (5.3e6, 10.3e6))
    for times, is_on_gpu, said in (
        ((fast, slow), False, "; 5.3 s before the passes, whose kernels need a GPU."),
        ((fast, slow), True, "; 5.3 s before the passes."),
        ((slow, fast), False, "; 10.3 s before the passes."),
    ):
        one = replace(clock("measured on"), times=times)
        head = sentence_record(one, [], None, [], is_on_gpu, {})["head"]
        assert head.endswith(said)


def test_without_a_gpu_all_times_are_modelled_for_an_example() -> None:
    said = payload(tiny_ops(2, 2048))["sentence"]["said"]
    assert re.match(
        r"A step would take at least [\d.]+ ms on an example GPU \(H100 SXM\), modelled, \d+ % of it at ", said
    )
    of_target = payload(tiny_ops(2, 2048), clock=modelled_clock(tiny_ops(2, 2048), gpu="L4"))["sentence"]["said"]
    assert re.match(r"A step would take at least [\d.]+ ms on L4, modelled, \d+ % of it at ", of_target)


def test_the_example_takes_what_the_gpu_of_its_name_takes() -> None:
    of_float32 = tiny_ops(2, 2048)
    example, chosen = (modelled_clock(of_float32, gpu=gpu).record() for gpu in ("", "H100"))
    assert example["step_us"] == chosen["step_us"]


@pytest.mark.parametrize("passes", [{}, {"fuse": False}])
def test_there_are_three_short_sentences_at_most(passes: dict[str, Any]) -> None:
    for one in (variant(), tiny_ops(200, 8), tiny_ops(2, 2048)):
        for shown in (payload(one.with_config(**passes)), payload(variant(), clock=clock("measured on"))):
            said = shown["sentence"]["said"]
            sentences = re.findall(r"[^.]+(?:\.(?! |$)[^.]*)*\.(?= |$)", said)
            assert "".join(sentences) == said
            assert 1 <= len(sentences) <= 3
            assert all(len(sentence.split()) <= 36 for sentence in sentences)


def test_a_step_of_many_small_kernels_is_said_to_be_bound_by_their_launches() -> None:
    shown = payload(tiny_ops(200, 8))
    before, after = shown["summary"]["ops"]
    assert before > 800
    host_us = HOST_US * after
    assert host_us > 1000 > 100 > shown["clock"]["step_us"][1]
    assert shown["clock"]["takes_us"] == [pytest.approx(HOST_US * before), pytest.approx(host_us)]
    assert shown["clock"]["launches"] == [before, after]
    told = r" ([\d,]+) of those [\d,]+ are at (test_sentence\.py:\d+); "
    most, place = re.findall(told, shown["sentence"]["head"])[0]
    assert after / 2 < int(most.replace(",", "")) <= after
    assert shown["slowest"]["said"] == f"most launches: {place}, {most} of {after:,}"
    us = time_text(shown["clock"]["step_us"][0])
    bound = f"The GPU waits for launches: on an example GPU (H100 SXM), modelled, {before:,} launches take "
    bound += f"{time_text(HOST_US * before)}, their kernels {us}; the passes leave {after:,} launches and "
    bound += f"{time_text(host_us)}. "
    bound += f"{most} of those {after:,} are at {place}; fewer launches help most."
    assert bound.startswith(shown["sentence"]["lead"])
    said, head = shown["sentence"]["said"], shown["sentence"]["head"]
    assert head == bound
    assert said.startswith(f"{bound.removesuffix('.')}; {BOUND}. ")
    assert bound.removesuffix(".") in to_text(shown)
    assert " %" not in said.replace(shown["sentence"]["actions"][0]["title"], ""), "a share of kernels' time"


def test_beside_a_pinned_configuration_launches_are_those_as_pinned() -> None:
    optimised = tiny_ops(200, 8)
    plain = optimised.capture.variant(Config.off())
    shown = payload(plain, baseline=optimised)
    pinned, now = shown["clock"]["launches"]
    assert pinned < now
    lead = shown["sentence"]["lead"]
    assert f" modelled, {now:,} launches take " in lead
    assert f"; as pinned, {pinned:,} launches take " in shown["sentence"]["head"]
    assert "the passes" not in lead
    graph, *others = sorted(shown["sentence"]["actions"], key=lambda one: one["key"] != "cuda graph")
    assert graph["worth"].endswith(f" of {time_text(now * HOST_US)}")
    spared = [one["worth"] for one in others if one["worth"].startswith("spares")]
    assert spared
    assert all(one.endswith(f" of {now:,} launches") for one in spared)


def slow(line_amount: float, **more: Any) -> Slowest:
    paths = ("h.0.attn", "h.1.attn")
    return replace(Slowest("h.*.attn", paths, 30.0, 120.0, "src/gpt.py:18  scores = q @ k", line_amount), **more)


@pytest.mark.parametrize(
    ("found", "of_time", "of_launches"),
    [
        (
            slow(12.0),
            ", 25 % of it in h.*.attn ×2 (gpt.py:18 alone 10 %)",
            "30 of those 120 are in h.*.attn ×2",
        ),
        (slow(30.0), ", 25 % of it in h.*.attn ×2 (gpt.py:18)", "30 of those 120 are in h.*.attn ×2"),
        (slow(12.0, line=""), ", 25 % of it in h.*.attn ×2", "30 of those 120 are in h.*.attn ×2"),
        (
            slow(30.0, paths=(), name="src/gpt.py:18  x"),
            ", 25 % of it at gpt.py:18",
            "30 of those 120 are at gpt.py:18",
        ),
        (None, "", "Fewer"),
    ],
)
def test_the_first_sentence_says_what_is_slow_and_at_which_line(
    found: Slowest | None, of_time: str, of_launches: str
) -> None:
    rows = layers(variant().baseline.whole, variant().whole, clock("measured on").times)
    said = sentence_record(clock("measured on"), rows, found, [], True, {})["head"]
    assert re.search(rf", measured{re.escape(of_time)}(; .* before the passes)?$", said.partition(". ")[0])
    bound = replace(clock("modelled for"), each=(dict.fromkeys(range(1200), 1.0), dict.fromkeys(range(900), 1.0)))
    said = sentence_record(bound, rows, found, [], True, {})["head"]
    first, then = said.split(". ")
    took, left = (time_text(count * HOST_US) for count in (1200, 900))
    on = r"The GPU waits for launches: on an example GPU \(a GPU\), modelled, 1,200 launches"
    assert re.fullmatch(rf"{on} take {took}, their kernels .*; the passes leave 900 launches and {left}", first)
    said = "Fewer" if found is None else f"{of_launches}; fewer"
    assert then == f"{said} launches help most, and cuda_graph=True launches all at once."


def test_which_side_waits_for_launches_is_told() -> None:
    """Passes free a step of launches, or leave so few bytes that launches are what is left."""
    few, many, short, long = ({"y": 1.0}, dict.fromkeys(range(100), 1.0), 2.0, 500.0)

    def head(before: tuple[float, Any], after: tuple[float, Any]) -> tuple[str, list[float]]:
        times = (OpTimes({"y": us}, "modelled: x") for us in (before[0], after[0]))
        one = Clock(tuple(times), "X", clock("modelled for").of, "X", each=(before[1], after[1]))
        return sentence_record(one, [], None, [], True, {})["head"], one.record()["takes_us"]

    freed, takes = head((short, many), (long, few))
    assert (
        freed == "A step takes at least 500 µs on X, modelled; 870 µs before the passes, since it waited for launches."
    )
    assert takes == [pytest.approx(100 * HOST_US), long]
    left, takes = head((2000.0, many), (short, many))
    assert left.startswith("The GPU waits for launches: on X, modelled, 100 launches take 870 µs, their kernels 2 µs.")
    assert takes == [2000.0, pytest.approx(100 * HOST_US)]
    left, _ = head((2000.0, many), (short, {"a": 1.0, "b": 1.0}))
    said = "with the passes 2 launches take 17.4 µs, their kernels 2 µs; before them kernels run 2 ms."
    helps = "Fewer launches help most, and cuda_graph=True launches all at once."
    assert left == f"The GPU waits for launches: on X, modelled, {said} {helps}"


@pytest.mark.parametrize(("before", "after"), [(169, 216), (169, 170), (216, 169)])
def test_whether_passes_add_launches_or_leave_fewer_is_told(before: int, after: int) -> None:
    each = dict.fromkeys(range(before), 1.0), dict.fromkeys(range(after), 1.0)
    times = OpTimes({"y": 2.0}, "modelled: x"), OpTimes({"y": 1.0}, "modelled: x")
    said = sentence_record(Clock(times, "X", clock("modelled for").of, "X", each=each), [], None, [], True, {})["head"]
    takes = time_text(after * HOST_US)
    assert (f"; the passes leave {after} launches and {takes}. " in said) == (after < before)
    assert (f"; the passes add {after - before} launch{'es' * (after - before > 1)}: {takes}. " in said) == (
        after > before
    )


def test_where_passes_make_a_step_longer_the_switch_that_spares_most_leads() -> None:
    times = OpTimes({"y": 2000.0}, "modelled: x"), OpTimes({"y": 3000.0}, "modelled: x")
    switches = [
        Switch(name, us, "modelled", {name: False}) for name, us in (("cat", 2900.0), ("channels_last", 2500.0))
    ]
    found = [finding("other", "1 ms of 10 ms a step, 10 % (modelled)", 0.1)]

    def of(*steps: OpTimes, **more: bool) -> dict[str, Any]:
        of_clock = Clock(steps, "X", clock("modelled for").of, "X")
        return sentence_record(of_clock, [], None, found, True, {}, switches=switches, **more)

    shown = of(*times)
    first, then = shown["actions"]
    assert (first["title"], first["worth"]) == ("switch channels_last off", "\N{MINUS SIGN}500 µs of 3 ms")
    assert first["instead"]["changes"] == {"channels_last": False}
    assert shown["said"].endswith(" First switch channels_last off: \N{MINUS SIGN}500 µs of 3 ms.")
    assert then["key"] == "other"
    for one in (of(*times[::-1]), of(*times, is_pinned=True)):
        assert [action["key"] for action in one["actions"]] == ["other"]
    found[0]["worth_share"] = 0.2  # 600 us of 3 ms
    assert [action["key"] for action in of(*times)["actions"]] == ["other"]


def test_the_switch_that_is_offered_switches_the_pass() -> None:
    off = variant().config.switched("fuse")
    _ = variant().capture.variant(off).passes
    offered = {one.name: one for one in switches_of(payload(variant())["passes"], variant().config)}
    assert variant().config.changed(**offered["fuse"].changes) == off


def test_what_is_worth_nothing_is_no_lever() -> None:
    found = [
        finding("unaligned", "nothing without TF32"),
        finding("attention", "nothing on a GPU: the modelled step counts 1 ms too much for it (modelled)"),
        finding("other", "1 ms of 10 ms a step, 10 % (modelled)", 0.1),
    ]
    assert [one["key"] for one in said_of(found)["actions"]] == ["other"]


def test_a_cuda_graph_is_the_remedy_only_where_one_can_be_made() -> None:
    rows = layers(variant().baseline.whole, variant().whole, clock("modelled for").times)
    bound = replace(clock("modelled for"), each=(dict.fromkeys(range(1200), 1.0), dict.fromkeys(range(900), 1.0)))
    for is_on_gpu, is_blocked in ((True, False), (False, False), (True, True)):
        said = sentence_record(bound, rows, None, [], is_on_gpu, {}, is_blocked)["said"]
        assert ("cuda_graph=True" in said) == (is_on_gpu and not is_blocked)
        assert (BOUND in said) == (not is_blocked)


def test_a_step_that_is_only_shown_is_told_no_way_to_run_it() -> None:
    """A gradient penalty is neither compiled nor measured, as a CUDA graph neither."""
    weight = torch.randn(8, 8, requires_grad=True)

    def step() -> None:
        y = torch.randn(8, 8)
        for _ in range(40):
            y = (y @ weight).tanh()
        (gradient,) = torch.autograd.grad(y.sum(), weight, create_graph=True)
        (y.sum() + gradient.square().sum()).backward()

    shown = payload(tracefuse.capture(step).optimize())
    assert shown["blocked"]
    assert ", their kernels " in shown["sentence"]["head"]
    assert "cuda_graph" not in shown["sentence"]["said"]


def test_a_step_of_large_kernels_is_not_and_one_that_was_measured_says_what_it_took() -> None:
    large = tiny_ops(2, 2048)
    assert payload(large)["clock"]["launches"] is None
    assert "launching" not in payload(large)["sentence"]["said"]
    assert "launching" not in payload(variant(), clock=clock("measured on"))["sentence"]["said"]


def test_a_launch_costs_what_was_measured_on_a_gpu() -> None:
    record = json.loads((ROOT / "tests" / "bench" / "results" / "launch_h200.json").read_text())
    of_two_ops, *_ = record["host_us"]["one launch"]["eager"]["forward"]
    assert pytest.approx(of_two_ops / 2, abs=0.05) == HOST_US


def test_the_findings_that_lead_are_the_first_actions() -> None:
    shown = payload(variant().with_config(fuse=False))
    left = [one for one in shown["findings"] if not one["is_mended"]]
    actions = shown["sentence"]["actions"]
    assert {one["title"] for one in actions if "instead" not in one} <= {one["title"] for one in left}
    assert f" First to mend: {actions[0]['title']}" in shown["sentence"]["said"]
    (first,) = [one for one in left if one["title"] == actions[0]["title"]]
    # The step is bound by launches: a share of its kernels' time would tell nothing.
    count = len(first["values"])
    whole = shown["clock"]["launches"][1]
    spared = f"{time_text(HOST_US * count)} of {time_text(HOST_US * whole)}"
    assert actions[0]["worth"] == f"spares up to {spared}: {count} of {whole} launches"
    assert "(" not in actions[0]["worth"]


def test_the_first_findings_lead_in_their_order() -> None:
    said = said_of([finding(at, "6 ms of 10 ms a step, 60 % (measured on a GPU)", 0.6) for at in "abcd"])
    assert [one["key"] for one in said["actions"]] == ["a", "b", "c"]
    assert said["said"].endswith(" First to mend: a (6 ms, 60 %).")


def test_where_all_that_is_left_is_small_nothing_is_told_as_the_answer() -> None:
    small = [finding(at, "0.3 ms of 10 ms a step, 3 % (measured on a GPU)", 0.03) for at in "abc"]
    said = said_of(small)
    assert said["is_small"]
    assert said["said"].endswith(" Nothing big is left; first to mend: a (0.3 ms, 3 %).")
    assert [one["key"] for one in said["actions"]] == ["a", "b"]
    pulled = said_of([*small, finding("loop", LOOP, 0.6, **BY_FUSE)])
    assert pulled["said"].endswith("; nothing big is left; next: a (0.3 ms, 3 %).")
    assert [one["key"] for one in pulled["actions"]] == ["loop", "a"]
    waits = finding("waits", "not known from one run: measure without it", severity="medium")
    for found in (
        [finding("large", "1 ms of 10 ms a step, 10 % (measured on a GPU)", 0.1), *small],
        [waits, *small],
        [],
    ):
        assert not said_of(found)["is_small"]


def test_in_a_step_that_waits_for_launches_it_is_small_that_spares_few_of_them() -> None:
    bound = replace(clock("modelled for"), each=(dict.fromkeys(range(1200), 1.0), dict.fromkeys(range(900), 1.0)))
    for count, is_small in ((44.0, True), (45.0, False)):
        one = finding("loop", "6 ms of 10 ms a step, 60 % (modelled)", 0.6, launches=count, launches_of=900.0)
        said = sentence_record(bound, [], None, [one], True, {})
        assert said["is_small"] == is_small
        assert ("Nothing big is left" in said["said"]) == is_small


def test_a_cuda_graph_comes_behind_the_first_finding_and_before_small_ones() -> None:
    bound = replace(clock("modelled for"), each=(dict.fromkeys(range(1200), 1.0), dict.fromkeys(range(900), 1.0)))
    code = "c.optimize(cat=False).compile(cuda_graph=True)"

    def of(*counts: float, is_on_gpu: bool = True) -> dict[str, Any]:
        found = [
            finding(f"loop {count}", "6 ms of 10 ms a step, 60 % (modelled)", 0.6, launches=count, launches_of=900.0)
            for count in counts
        ]
        return sentence_record(bound, [], None, found, is_on_gpu, {}, as_graph=code)

    large, small, alone = of(450.0, 9.0), of(9.0), of()
    assert [one["key"] for one in large["actions"]] == ["loop 450.0", "cuda graph", "loop 9.0"]
    assert "First to mend: loop 450.0" in large["said"]
    for said in (small, alone):
        graph = said["actions"][0]
        assert graph["key"] == "cuda graph"
        assert graph["instead"]["code"] == code
        assert not said["is_small"]
        assert said["said"].endswith(" First of all: launch it all at once: compile(cuda_graph=True).")
    assert of(is_on_gpu=False)["actions"][0]["title"].startswith("on a GPU, ")


def test_behind_the_first_two_stands_what_is_large_to_launches_or_kernels_as_one() -> None:
    """A small GPT's head that is not aligned spares no launch, and is told beside an attention that does."""
    bound = replace(clock("modelled for"), each=(dict.fromkeys(range(1200), 1.0), dict.fromkeys(range(900), 1.0)))

    def of(key: str, launches: float, share: float, **more: Any) -> dict[str, Any]:
        told = f"{share:.2g} ms of 1 ms a step, {share:.0%} (modelled)".replace("%", " %")
        return finding(key, told, share, launches=launches, launches_of=900.0, kind="modelled", **more)

    def shown(*found: dict[str, Any]) -> list[tuple[str, str]]:
        actions = sentence_record(bound, [], None, found, True, {}, as_graph="c.compile(cuda_graph=True)")["actions"]
        return [(one["title"], one["worth"]) for one in actions]

    pulled = of("ops alone", 600.0, 0.5, is_mended=True, mended_by=["fuse"])
    casts, attention, head, trifle = (
        of("casts", 300, 0.1),
        of("attention", 100, 0.02),
        of("head", 0, 0.2),
        of("a", 9, 0.02),
    )
    assert shown(pulled, casts, trifle)[0][0] == "ops alone"
    both = shown(pulled, casts, attention, trifle, head)
    assert [title for title, _ in both] == [
        "casts",
        "launch it all at once: compile(cuda_graph=True)",
        "attention; head",
    ]
    assert both[2][1] == ""
    mended = of("mended", 0, 0.1, is_mended=True, mended_by=["pad"])
    assert shown(pulled, mended, casts)[0][0] == "ops alone; mended"
    alone = shown(pulled, casts, trifle, head)
    assert alone[2] == ("head", "0.2 ms of kernels, no launch")


def test_a_step_whose_kernels_run_nearly_as_long_as_their_launches_waits_for_none() -> None:
    """Then its times are those of kernels, in the header as in the tree."""
    for times, is_bound in ((1.2, False), (1.3, True)):
        ran = OpTimes({"y": HOST_US * 900 / times}, "modelled for a GPU", device="a GPU")
        each = dict.fromkeys(range(1000), 1.0), dict.fromkeys(range(900), 1.0)
        shown = replace(clock("modelled for"), times=(ran, ran), each=each)
        assert (shown.launches is not None) == is_bound
        assert shown.steps_us[1] == (HOST_US * 900 if is_bound else ran.step_us)
        said = sentence_record(shown, [], None, [], True, {})["said"]
        assert said.startswith("The GPU waits for launches") == is_bound


def test_what_spares_kernels_too_leads_where_these_take_nearly_as_long_as_launches() -> None:
    """A graph spares what kernels leave; an attention by hand spares of both."""
    us = HOST_US * 900 / 1.3
    times = OpTimes({"y": us}, "modelled for a GPU", device="a GPU")
    bound = replace(
        clock("modelled for"),
        times=(times, times),
        each=(dict.fromkeys(range(1200), 1.0), dict.fromkeys(range(900), 1.0)),
    )
    told = "1 ms of 7 ms a step (modelled)"
    casts = finding("casts", told, 0.01, launches=300.0, launches_of=900.0, kind="modelled")
    attention = finding("attention", told, 0.4, launches=240.0, launches_of=900.0, kind="modelled")
    first, _, last = sentence_record(bound, [], None, [casts, attention], True, {}, as_graph="c.compile()")["actions"]
    assert (first["key"], last["key"]) == ("attention", "casts")
    assert (
        first["worth"] == f"spares up to {time_text(HOST_US * 240)} of {time_text(HOST_US * 900)}: 240 of 900 launches"
    )
    assert last["worth"].startswith(f"spares up to {time_text(HOST_US * 900 - 0.99 * us)} of ")


def test_what_leads_says_why_it_is_slow_and_a_card_what_to_do() -> None:
    """A figure behind the colon is one of kernels, and no launch."""
    bound = replace(clock("modelled for"), each=(dict.fromkeys(range(1200), 1.0), dict.fromkeys(range(900), 1.0)))
    told = {"launches_of": 900.0, "kind": "modelled"}
    why, count = "3 attentions by hand: the scores go through memory", "Adam computes tensor by tensor: 1500 ops"

    def titles(*findings: dict[str, Any]) -> list[str]:
        found = [one | {"title": one["key"]} for one in findings]
        return [one["title"] for one in sentence_record(bound, [], None, found, True, {})["actions"]]

    first, then = (finding(why, "1 ms", 0.4, launches=launches, **told) for launches in (300.0, 200.0))
    assert titles(first, then) == [why, "3 attentions by hand"]
    assert titles(finding(count, "1 ms", 0.4, launches=300.0, **told)) == ["Adam computes tensor by tensor"]


@pytest.mark.parametrize(
    ("id", "fix", "code", "brief"),
    [
        ("attention-by-hand", "`y = f(q)` does", "y = f(q)", "F.scaled_dot_product_attention"),
        ("attention-by-hand", "no call computes the same", "", "no call computes the same"),
        ("tf32-off", "switch it on", "set(1)", 'set_float32_matmul_precision("high")'),
        ("host-sync", "print once: every step waits", "", "print once"),
        ("host-sync", "what is told in more letters than a card has", "", ""),
    ],
)
def test_what_to_do_is_told_in_a_few_words(id: str, fix: str, code: str, brief: str) -> None:
    (action,) = said_of([finding("a", "1 ms", 0.4, id=id, fix=fix, code=code)])["actions"]
    assert action["brief"] == brief


def test_the_code_for_a_cuda_graph_is_that_of_the_configuration() -> None:
    (graph,) = [
        one for one in payload(tiny_ops(200, 8), name="kept")["sentence"]["actions"] if one["key"] == "cuda graph"
    ]
    assert graph["instead"]["code"] == "kept.optimize().compile(cuda_graph=True)"


def test_a_findings_share_is_that_of_its_words() -> None:
    found = [one for of in (variant(), variant().baseline) for one in of.findings()]
    told = [one for one in found if re.search(r" a step, \d", one.worth)]
    assert told
    for one in told:
        assert one.worth_share is not None
        assert f" a step, {one.worth_share:.0%}".replace("%", " %") in one.worth


LOOP = "at most 6 ms a step, 60 %, if the GPU waits for the host (modelled)"
BY_FUSE = {"kind": "modelled", "mended_by": ["fuse"], "is_mended": True, "mended": "mended by `fuse`"}


def test_a_lever_that_a_pass_pulls_already_is_told_as_that_before_what_is_left() -> None:
    said = said_of(
        [finding("small", "1 ms of 10 ms a step, 10 % (measured on a GPU)", 0.1), finding("loop", LOOP, 0.6, **BY_FUSE)]
    )
    assert [(one["key"], one["by"], one["kind"]) for one in said["actions"]] == [
        ("loop", ["fuse"], "modelled"),
        ("small", [], ""),
    ]
    lever = " fuse mends the largest finding already, loop (at most 6 ms, 60 %, modelled); next: small (1 ms, 10 %)."
    assert said["said"].endswith(lever)


def test_what_is_left_leads_where_it_is_worth_more_than_what_passes_pull() -> None:
    left = finding("large", "7 ms of 10 ms a step, 70 % (measured on a GPU)", 0.7)
    said = said_of([finding("loop", LOOP, 0.6, **BY_FUSE), left])
    assert [(one["key"], one["by"]) for one in said["actions"]] == [("large", []), ("loop", ["fuse"])]
    assert said["actions"][0]["worth"] == "7 ms of 10 ms", "the step that it is a part of: others are of another one"
    assert " mends " not in said["said"]
    assert "First to mend: large" in said["said"]


def test_a_lever_that_is_pulled_in_part_says_what_is_left_of_it() -> None:
    partly = BY_FUSE | {"is_mended": False, "left": "0.5 ms of 4 ms a step, 12 % (modelled)", "left_share": 0.12}
    said = said_of([finding("loop", LOOP, 0.6, **partly)])
    assert "fuse mends a part of the largest finding already, loop (at most 6 ms, 60 %, modelled)" in said["said"]
    assert said["said"].endswith("; nothing else is left to mend.")
    assert [one["worth"] for one in said["actions"]] == ["at most 6 ms, 60 %"]


@pytest.mark.parametrize(
    ("kind", "by", "told"),
    [("modelled", "cat", ""), ("measured", "cat", " (at most 6 ms, 60 %)"), ("measured", "fuse", "")],
)
def test_beside_a_step_that_was_timed_on_a_cpu_no_time_of_a_gpu_is_told(kind: str, by: str, told: str) -> None:
    """Nor what kernels would gain, which it does not run."""
    found = finding("loop", LOOP, 0.6, **BY_FUSE | {"kind": kind, "mended_by": [by]})
    said = said_of([found], is_on_gpu=False)
    assert f"the largest finding already, loop{told}; " in said["said"]
    assert bool(said["actions"][0]["worth"]) is (by == "cat")


def test_what_passes_mend_that_the_code_could_is_told_beside_what_they_gain_most_by() -> None:
    """As rows of a head that are not aligned, beside ops that run alone: one place, since there are three."""
    head = finding("head", "450 us of 6 ms a step, 8 % (modelled)", 0.08, **BY_FUSE | {"mended_by": ["pad"]})
    said = said_of([finding("loop", LOOP, 0.6, **BY_FUSE), head, finding("other", LOOP, 0.3)])
    done, other = said["actions"]
    assert (done["key"], done["by"], done["title"]) == ("loop", ["fuse", "pad"], "loop; head")
    assert other["key"] == "other"


def test_a_planted_loop_leads_whether_fuse_is_on_or_off() -> None:
    x = torch.randn(32, 64, requires_grad=True)

    def step() -> None:
        y = x.sin()
        for _ in range(256):
            y = y * 0.99 + 0.01
        y.sum().backward()

    capture = tracefuse.capture(step)
    on, off = payload(capture.optimize()), payload(capture.optimize(fuse=False))
    title = "a loop launches 512 kernels in the forward and 256 in the backward"
    assert f"fuse mends the largest finding already, {title}" in on["sentence"]["said"]
    assert on["sentence"]["actions"][0]["by"] == ["fuse"]
    assert f"First to mend: {title}" in off["sentence"]["said"]


@pytest.mark.parametrize(
    ("worth", "shown"),
    [
        ("2.1 ms of 10.4 ms a step, 20 % (measured on a GPU)", "2.1 ms, 20 %"),
        ("at most 4.29 µs of 7.69 µs a step, 56 % (modelled: roofline)", "at most 4.29 µs, 56 %"),
        ("part of 1.41 µs of 21 µs a step, 6 % (modelled: roofline)", "part of 1.41 µs, 6 %"),
        ("64 KiB of a static peak of 4.993 MiB, 1 %; 0.0383 µs a step (modelled)", "64 KiB, 1 %"),
        ("a wait in every step", "a wait in every step"),
        ("nothing on a CPU; on a GPU the host would wait", "nothing on a CPU"),
    ],
)
def test_an_action_says_its_worth_in_short(worth: str, shown: str) -> None:
    assert in_short(worth) == shown


def test_of_a_net_of_images_it_is_told_first_what_their_order_is_worth() -> None:
    net, x = nn.Conv2d(8, 8, 3, padding=1), torch.randn(32, 8, 128, 128, requires_grad=True)
    capture = tracefuse.capture(lambda: net(x).square().mean().backward())
    on, off = payload(capture.optimize()), payload(capture.optimize(channels_last=False))
    for shown in (on, off):
        assert "cuDNN copies images around 1 of 1 convolution" in shown["sentence"]["actions"][0]["title"]
        assert re.fullmatch(r"[\d.]+ .s, \d\d %", shown["sentence"]["actions"][0]["worth"])
    assert on["sentence"]["actions"][0]["by"] == ["channels_last"]
    gained = next(one["delta_us"] for one in on["passes"] if one["name"] == "channels_last")
    assert gained < -0.1 * on["clock"]["step_us"][0]


def test_without_findings_the_pass_that_gains_most_is_named() -> None:
    said = said_of([], {"cat": -1.0, "fuse": -3.0, "pad": 2.0, "freeze": None})["said"]
    assert said.endswith(" The pass fuse gains most (3 µs); nothing else was found that slows it down.")
    assert said_of([])["said"].endswith(" Nothing was found that slows it down.")


def test_what_a_pass_left_of_what_it_alone_can_mend_is_nothing_to_do() -> None:
    partly = BY_FUSE | {"is_mended": False, "left": "3 ms of 10 ms a step, 30 % (modelled)", "left_share": 0.3}
    by_hand = finding("by hand", "4 ms of 10 ms a step, 40 % (modelled)", 0.4, **partly)
    alone = finding("alone", "4 ms of 10 ms a step, 40 % (modelled)", 0.4, **partly | {"id": "unfused-pointwise"})
    off = finding("off", "4 ms of 10 ms a step, 40 % (modelled)", 0.4, id="unfused-pointwise")
    assert [one["key"] for one in said_of([alone, by_hand])["actions"] if not one["by"]] == ["by hand"]
    assert [one["key"] for one in said_of([off])["actions"]] == ["off"]


def test_in_a_step_that_waits_for_launches_what_spares_most_leads() -> None:
    """An update of 10 fused kernels takes most of the kernels' time, and sparing any of them is nobody's to do."""
    torch.manual_seed(0)
    weight, x = nn.Parameter(torch.randn(64, 64)), torch.randn(4, 64)
    large = nn.Parameter(torch.randn(512, 512))
    optimizer = torch.optim.AdamW([weight, large], fused=True)
    with tracefuse.capture_step(n=2) as c:
        for _ in range(3):
            optimizer.zero_grad()
            y = x
            for _ in range(64):
                y = y * 0.99 + 0.01
            (y @ weight).square().mean().add(large.mean()).backward()
            optimizer.step()
    shown = payload(c.optimize(fuse=False))
    assert shown["clock"]["launches"]
    first, graph, *_ = shown["sentence"]["actions"]
    assert first["title"].startswith("a loop launches")
    assert re.fullmatch(r"spares up to [\d.]+ .s of [\d.]+ ms: \d+ of \d+ launches", first["worth"])
    assert graph["key"] == "cuda graph"
    assert "compile(cuda_graph=True)" in graph["instead"]["code"]
    assert next(one["title"] for one in shown["findings"] if not one["is_mended"]) == first["title"]


# --- what a pass would need -------------------------------------------------------------------------------------------


def test_every_pass_that_changed_nothing_says_what_it_would_need() -> None:
    shown = payload(variant())
    for one in shown["passes"]:
        assert bool(one["needs"]) == (not one["changed"]), one["name"]
    assert needs(shown)["optimizer_step"] == "no optimizer in this step: call optimizer.step() in what is captured"
    assert needs(payload(variant().with_config(fuse=False)))["decompose"] == "off: needs fuse"


def test_a_step_that_is_not_cut_at_its_optimizer_is_not_said_to_have_none() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tracefuse.capture() as c:
        model(x).square().mean().backward()
        optimizer.step()
        model(x).square().mean().backward()
    said = needs(payload(c.optimize()))["optimizer_step"]
    assert "no optimizer" not in said
    assert "not told apart from the step: the program goes on" in said


def test_freezing_says_what_it_would_save_and_does() -> None:
    shown = payload(variant())
    (row,) = [one for one in shown["passes"] if one["name"] == "freeze"]
    assert row["suggests"] == ["*", "!h.1.*"]
    frozen = variant().with_config(freeze=row["suggests"], fuse=False, decompose=False, remat=None, cat=False)
    off = frozen.with_config(freeze=[])
    saved = modelled(off.whole).step_us - modelled(frozen.whole).step_us
    said = row["needs"].removeprefix("type a pattern; freezing all but h.1.* would save ")
    amount, unit = said.removesuffix(" of the captured step").split()
    assert float(amount) * {"µs": 1, "ms": 1e3}[unit] == pytest.approx(saved, rel=0.05)


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.lora_a, self.lora_b = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


@pytest.mark.parametrize("is_frozen", [False, True])
def test_adapters_are_what_stays_trained(is_frozen: bool) -> None:
    model, x = Adapted(), torch.randn(4, 8)
    model.base.requires_grad_(not is_frozen)
    shown = payload(tracefuse.capture(lambda: model(x).sum().backward()).optimize())
    (row,) = [one for one in shown["passes"] if one["name"] == "freeze"]
    assert row["suggests"] == ([] if is_frozen else ["*", "!*lora_*"])
    would_save = "freezing all but *lora_* would save "
    says = "all but *lora_* are frozen already, or need no gradient" if is_frozen else would_save
    assert row["needs"].startswith(f"type a pattern; {says}")


def test_of_one_layer_there_is_nothing_to_freeze_beside_another() -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    shown = payload(tracefuse.capture(lambda: model(x).sum().backward()).optimize())
    (row,) = [one for one in shown["passes"] if one["name"] == "freeze"]
    assert row["suggests"] == []
    assert "type a pattern" in row["needs"]


def test_of_one_kernel_fewer_are_no_help() -> None:
    x = torch.randn(3)
    said = payload(tracefuse.capture(x.exp).optimize())["sentence"]
    text = str(said)
    assert "one launch takes 8.7 µs, its kernel <1 ns." in text
    assert "fewer kernels" not in text


def test_passes_that_change_nothing_of_a_step_without_kernels_are_not_told() -> None:
    x = torch.randn(4)
    assert "before the passes" not in payload(tracefuse.capture(lambda: x.view(2, 2)).optimize())["sentence"]["said"]
