"""The sentence on top of the view, and what a pass that changes nothing would need."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.measure.launches import HOST_US
from tracefuse.measure.op_times import OpTimes, modelled
from tracefuse.tables.layers import layers
from tracefuse.text import time_text
from tracefuse.variant import Variant
from tracefuse.widgets.payload.clock import Clock
from tracefuse.widgets.payload.program import payload
from tracefuse.widgets.payload.sentence import in_short, sentence_record
from tracefuse.widgets.text import to_text

ROOT = Path(__file__).parents[3]


@cache
def variant() -> Variant:
    torch.manual_seed(0)
    model, data = GPT(layers=2, width=32, heads=2, vocab=61, length=16), batch(61, 2, 12)
    return tracefuse.capture(lambda: model(*data).backward()).optimize()


def clock(kind: str) -> Clock:
    def of(trace: Any) -> OpTimes:
        return OpTimes({name: 1e3 * us for name, us in modelled(trace).us.items()}, f"{kind} a GPU", device="a GPU")

    return Clock((of(variant().baseline.whole), of(variant().whole)), "a GPU", of)


def finding(key: str, worth: str, share: float | None = None, **mended: Any) -> dict[str, Any]:
    plain = {"kind": "", "left_kind": "", "mended": "", "is_mended": False, "mended_by": [], "values": [key]}
    plain |= {"id": "attention-by-hand", "severity": "high", "changes": None}
    plain |= {"worth_share": share, "left": "", "left_share": None}
    return plain | {"key": key, "title": key, "worth": worth, "source": f"a.py:3  {key}"} | mended


def said_of(
    findings: list[dict[str, Any]], deltas: dict[str, float | None] | None = None, is_on_gpu: bool = True
) -> dict[str, Any]:
    """The sentence and the actions of a step that was measured; passes made two ops of any finding's values."""
    rows = layers(variant().baseline.whole, variant().whole, clock("measured on").times)
    summary = {"ops": (3, 3), "saved_bytes": (0, 0)}
    return sentence_record(clock("measured on"), rows, findings, summary, is_on_gpu, deltas or {}, lambda _: 2)


def needs(shown: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["needs"] for one in shown["passes"]}


# --- the sentence -----------------------------------------------------------------------------------------------------


def test_it_says_what_a_step_takes_and_where() -> None:
    shown = payload(variant(), clock=clock("measured on"))
    before, after = shown["clock"]["step_us"]
    said = shown["sentence"]["said"]
    assert said.startswith(
        f"A step takes {time_text(after)} on a GPU, measured ({time_text(before)} before the passes); "
    )
    assert "its backward takes " in said
    assert " times its forward, " in said
    assert " % of it in h.*." in said


def test_without_a_gpu_it_begins_with_what_a_cpu_can_know() -> None:
    shown = payload(variant())
    ops = shown["summary"]["ops"][1]
    assert shown["sentence"]["said"].startswith(f"A step is {ops} ops, keeps ")
    assert " µs on H100 SXM, an example, modelled (" in shown["sentence"]["said"]


def tiny_ops(rounds: int, size: int) -> Variant:
    x, weight = torch.randn(size, size), torch.randn(size, size, requires_grad=True)

    def step() -> None:
        y = x
        for _ in range(rounds):
            y = (y @ weight).tanh()
        y.sum().backward()

    return tracefuse.capture(step).optimize()


def test_a_step_of_many_small_kernels_is_said_to_be_bound_by_their_launches() -> None:
    shown = payload(tiny_ops(200, 8))
    before, after = shown["summary"]["ops"]
    assert before > 800
    host_us = (HOST_US * before, HOST_US * after)
    assert host_us[1] > 1000 > 100 > shown["clock"]["step_us"][1]
    assert shown["clock"]["launch_us"] == pytest.approx(host_us[1])
    bound = f"; launch-bound: {after} kernels take the host about {time_text(host_us[1])} "
    bound += f"({time_text(host_us[0])} before) to launch, use cuda_graph=True; "
    for text in (shown["sentence"]["said"], shown["sentence"]["head"], to_text(shown)):
        assert bound in text
    assert "; by its kernels' time " in shown["sentence"]["said"]
    assert shown["sentence"]["said"].startswith(shown["sentence"]["head"].removesuffix("."))


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
    assert " to launch" in shown["sentence"]["head"]
    assert "cuda_graph" not in shown["sentence"]["said"]


def test_a_step_of_large_kernels_is_not_and_one_that_was_measured_says_what_it_took() -> None:
    large = tiny_ops(2, 4096)
    assert payload(large)["clock"]["launch_us"] is None
    assert "launch-bound" not in payload(large)["sentence"]["said"]
    assert "launch-bound" not in payload(variant(), clock=clock("measured on"))["sentence"]["said"]


def test_a_launch_costs_what_was_measured_on_a_gpu() -> None:
    record = json.loads((ROOT / "tests" / "bench" / "results" / "launch_h200.json").read_text())
    of_two_ops, *_ = record["host_us"]["one launch"]["eager"]["forward"]
    assert pytest.approx(of_two_ops / 2, abs=0.05) == HOST_US


def test_the_findings_that_lead_are_the_first_actions() -> None:
    shown = payload(variant().with_config(fuse=False))
    left = [one for one in shown["findings"] if not one["is_mended"]]
    actions = shown["sentence"]["actions"]
    assert {one["title"] for one in actions} <= {one["title"] for one in left}
    assert f"first to mend: {actions[0]['title']}" in shown["sentence"]["said"]
    (first,) = [one for one in left if one["title"] == actions[0]["title"]]
    amount = first["worth"].partition(" of ")[0]
    assert actions[0]["worth"].startswith(amount)
    assert "(" not in actions[0]["worth"]


def test_what_is_worth_most_leads_and_what_is_worth_nothing_here_comes_last() -> None:
    worths: dict[str, tuple[str, float | None]] = {
        "reads": ("nothing on a CPU; on a GPU the host would wait", None),
        "small": ("0.1 ms of 10 ms a step, 1 % (measured on a GPU)", 0.01),
        "large": ("6 ms of 10 ms a step, 60 % (measured on a GPU)", 0.6),
        "most": ("at most 2 ms of 10 ms a step, 20 % (measured on a GPU)", 0.2),
    }
    said = said_of([finding(at, *worth) for at, worth in worths.items()])
    assert [one["key"] for one in said["actions"]] == ["large", "most", "small"]
    assert "first to mend: large" in said["said"]


def test_the_order_is_by_numbers_and_not_by_their_words() -> None:
    """Of one share in whole percent the larger leads, and so does a worth that is told in other words."""
    less = finding("less", "0.96 ms of 10 ms a step, 10 % (measured on a GPU)", 0.096)
    more = finding("more", "1.04 ms of 10 ms a step, 10 % (measured on a GPU)", 0.104)
    told = finding("told", "a tenth and a half of each step", 0.15)
    assert [one["key"] for one in said_of([less, more, told])["actions"]] == ["told", "more", "less"]


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
    lever = "; fuse pulls the biggest lever, at most 6 ms, 60 %, modelled: loop, at a.py:3, now 2 ops"
    assert f"{lever}; left to mend: small (1 ms, 10 %)" in said["said"]


def test_what_is_left_leads_where_it_is_worth_more_than_what_passes_pull() -> None:
    left = finding("large", "7 ms of 10 ms a step, 70 % (measured on a GPU)", 0.7)
    said = said_of([finding("loop", LOOP, 0.6, **BY_FUSE), left])
    assert [one["key"] for one in said["actions"]] == ["large"]
    assert "pulls" not in said["said"]
    assert "first to mend: large" in said["said"]


def test_a_lever_that_is_pulled_in_part_says_what_is_left_of_it() -> None:
    partly = BY_FUSE | {"is_mended": False, "left": "0.5 ms of 4 ms a step, 12 % (modelled)", "left_share": 0.12}
    said = said_of([finding("loop", LOOP, 0.6, **partly)])
    assert "fuse pulls the biggest lever, at most 6 ms, 60 %, modelled, 0.5 ms, 12 % left: loop" in said["said"]
    assert said["said"].endswith("; nothing else is left to mend.")
    assert [one["worth"] for one in said["actions"]] == ["at most 6 ms, 60 %"]


@pytest.mark.parametrize(("kind", "told"), [("modelled", "modelled for a GPU"), ("measured", "measured")])
def test_on_a_cpu_only_what_is_modelled_is_for_a_gpu(kind: str, told: str) -> None:
    said = said_of([finding("loop", LOOP, 0.6, **BY_FUSE | {"kind": kind})], is_on_gpu=False)
    assert f"60 %, {told}: loop" in said["said"]


def test_a_planted_loop_leads_whether_fuse_is_on_or_off() -> None:
    x = torch.randn(32, 64, requires_grad=True)

    def step() -> None:
        y = x.sin()
        for _ in range(256):
            y = y * 0.99 + 0.01
        y.sum().backward()

    capture = tracefuse.capture(step)
    on, off = payload(capture.optimize()), payload(capture.optimize(fuse=False))
    kernels = capture.optimize().whole.op_count  # nothing but the loop does work here
    title = "a loop launches 512 kernels in the forward and 256 in the backward"
    assert "; by its kernels' time fuse pulls the biggest lever, at most " in on["sentence"]["said"]
    assert f" %, modelled: {title}" in on["sentence"]["said"]
    assert f", now {kernels} ops; " in on["sentence"]["said"]
    assert on["sentence"]["actions"][0]["by"] == ["fuse"]
    assert f"first to mend: {title}" in off["sentence"]["said"]


@pytest.mark.parametrize(
    ("worth", "shown"),
    [
        ("2.1 ms of 10.4 ms a step, 20 % (measured on a GPU)", "2.1 ms, 20 %"),
        ("at most 4.29 µs of 7.69 µs a step, 56 % (modelled: roofline)", "at most 4.29 µs, 56 %"),
        ("part of 1.41 µs of 21 µs a step, 6 % (modelled: roofline)", "part of 1.41 µs, 6 %"),
        ("64 KiB of a static peak of 4.993 MiB, 1 %; 0.0383 µs a step (modelled)", "64 KiB, 1 %"),
        ("a wait in every step", "a wait in every step"),
    ],
)
def test_an_action_says_its_worth_in_short(worth: str, shown: str) -> None:
    assert in_short(worth) == shown


def test_without_findings_the_pass_that_gains_most_is_named() -> None:
    said = said_of([], {"cat": -1.0, "fuse": -3.0, "pad": 2.0, "freeze": None})["said"]
    assert "most is gained by the pass fuse: 3 µs; nothing else was found that slows it down" in said


def test_what_a_pass_left_of_what_it_alone_can_mend_is_nothing_to_do() -> None:
    partly = BY_FUSE | {"is_mended": False, "left": "3 ms of 10 ms a step, 30 % (modelled)", "left_share": 0.3}
    by_hand = finding("by hand", "4 ms of 10 ms a step, 40 % (modelled)", 0.4, **partly)
    alone = finding("alone", "4 ms of 10 ms a step, 40 % (modelled)", 0.4, **partly | {"id": "unfused-pointwise"})
    off = finding("off", "4 ms of 10 ms a step, 40 % (modelled)", 0.4, id="unfused-pointwise")
    assert [one["key"] for one in said_of([alone, by_hand])["actions"] if not one["by"]] == ["by hand"]
    assert [one["key"] for one in said_of([off])["actions"]] == ["off"]


def test_a_remark_that_no_switch_mends_does_not_lead() -> None:
    share = finding("share", "3 ms of 10 ms a step, 30 % (modelled)", 0.3, severity="low", id="update-share")
    switched = share | {"key": "switched", "changes": {"optimizer_step": True}}
    error = finding("error", "1 ms of 10 ms a step, 10 % (modelled)", 0.1, severity="medium")
    small = finding("small", "0.1 ms of 10 ms a step, 1 % (modelled)", 0.01, severity="low")
    assert [one["key"] for one in said_of([share, small, error])["actions"]] == ["error", "share", "small"]
    assert said_of([switched, error])["actions"][0]["key"] == "switched"


# --- what a pass would need -------------------------------------------------------------------------------------------


def test_every_pass_that_changed_nothing_says_what_it_would_need() -> None:
    shown = payload(variant())
    for one in shown["passes"]:
        assert bool(one["needs"]) == (not one["changed"]), one["name"]
    assert needs(shown)["optimizer_step"] == "no optimizer in this step: call optimizer.step() in the cell"
    assert needs(payload(variant().with_config(fuse=False)))["decompose"] == "off: needs fuse"


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


def test_adapters_are_what_stays_trained() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(8, 8)
            self.lora_a, self.lora_b = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.lora_b(self.lora_a(x))

    model, x = Adapted(), torch.randn(4, 8)
    shown = payload(tracefuse.capture(lambda: model(x).sum().backward()).optimize())
    (row,) = [one for one in shown["passes"] if one["name"] == "freeze"]
    assert row["suggests"] == ["*", "!*lora_*"]
    assert row["needs"].startswith("type a pattern; freezing all but *lora_* would save ")


def test_of_one_layer_there_is_nothing_to_freeze_beside_another() -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    shown = payload(tracefuse.capture(lambda: model(x).sum().backward()).optimize())
    (row,) = [one for one in shown["passes"] if one["name"] == "freeze"]
    assert row["suggests"] == []
    assert "type a pattern" in row["needs"]
