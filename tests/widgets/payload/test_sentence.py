"""The sentence on top of the view, and what a pass that changes nothing would need."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.measure.op_times import OpTimes, modelled
from tracefuse.tables.layers import layers
from tracefuse.text import time_text
from tracefuse.variant import Variant
from tracefuse.widgets.payload.clock import Clock
from tracefuse.widgets.payload.program import payload
from tracefuse.widgets.payload.sentence import sentence_record, worth_of


@cache
def variant() -> Variant:
    torch.manual_seed(0)
    model, data = GPT(layers=2, width=32, heads=2, vocab=61, length=16), batch(61, 2, 12)
    return tracefuse.capture(lambda: model(*data).backward()).optimize()


def clock(kind: str) -> Clock:
    def of(trace: Any) -> OpTimes:
        return OpTimes({name: 1e3 * us for name, us in modelled(trace).us.items()}, f"{kind} a GPU", device="a GPU")

    return Clock((of(variant().baseline.whole), of(variant().whole)), "a GPU", of)


def needs(shown: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["needs"] for one in shown["passes"]}


# --- the sentence -----------------------------------------------------------------------------------------------------


def test_it_says_what_a_step_takes_and_where() -> None:
    shown = payload(variant(), clock=clock("measured on"))
    before, after = shown["clock"]["step_us"]
    said = shown["sentence"]["said"]
    assert said.startswith(
        f"A step takes {time_text(after)} on a GPU, measured, {time_text(before)} before the passes; "
    )
    assert "its backward takes " in said
    assert " of the backward; " in said


def test_without_a_gpu_it_begins_with_what_a_cpu_can_know() -> None:
    shown = payload(variant())
    ops = shown["summary"]["ops"][1]
    assert shown["sentence"]["said"].startswith(f"A step is {ops} ops and keeps ")
    assert "on H100 SXM, an example, it would take at least " in shown["sentence"]["said"]


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
    worths = {
        "reads": "nothing on a CPU; on a GPU the host would wait",
        "small": "0.1 ms of 10 ms a step, 1 % (measured on a GPU)",
        "large": "6 ms of 10 ms a step, 60 % (measured on a GPU)",
        "most": "at most 2 ms of 10 ms a step, 20 % (measured on a GPU)",
    }
    findings = [
        {"key": at, "title": at, "worth": worth, "kind": "", "left_kind": "", "is_mended": False}
        for at, worth in worths.items()
    ]
    summary = {"ops": (3, 3), "saved_bytes": (0, 0)}
    rows = layers(variant().baseline.whole, variant().whole, clock("measured on").times)
    said = sentence_record(clock("measured on"), rows, findings, summary, True, {})
    assert [one["key"] for one in said["actions"]] == ["large", "most", "small"]
    assert "first to mend: large" in said["said"]


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
    assert worth_of({"worth": worth}) == shown


def test_without_findings_the_pass_that_gains_most_is_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    shown = payload(tracefuse.capture(lambda: model(x).sum().backward()).optimize())
    if any(not one["is_mended"] for one in shown["findings"]):
        pytest.skip("something was found")
    assert "most is gained by the pass fuse" in shown["sentence"]["said"]


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
    amount, unit = said.split()
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
