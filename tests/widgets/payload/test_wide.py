"""What the first sentences say of matmuls over rows that are not aligned, such as those of a head."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.measure.op_times import OpTimes, modelled
from tracefuse.optimizers.ops import does_work
from tracefuse.optimizers.trace import line_of, origin
from tracefuse.tables.slowest import Slowest
from tracefuse.variant import Variant
from tracefuse.widgets.payload.clock import Clock
from tracefuse.widgets.payload.findings import UNALIGNED, Wide, widest
from tracefuse.widgets.payload.program import payload

SLOW = Slowest("h.*.mlp", ("h.0.mlp", "h.1.mlp"), 40.0, 100.0, "gpt.py:18  x", 40.0)


@cache
def variant() -> Variant:
    """A head of 4,001 columns, in float32 without TF32."""
    torch.manual_seed(0)
    model, data = GPT(layers=2, width=32, heads=2, vocab=4001, length=16), batch(4001, 2, 12)
    return tracefuse.capture(lambda: model(*data).backward()).optimize()


def measured() -> Clock:
    """Times of a GPU whose step does not wait for launches."""

    def of(trace: Any) -> OpTimes:
        return OpTimes({name: 1e3 * us for name, us in modelled(trace).us.items()}, "measured on a GPU", device="a GPU")

    return Clock((of(variant().baseline.whole), of(variant().whole)), "a GPU", of)


def share_of_head(shown: dict[str, Any]) -> int:
    us = {row["path"]: row["forward_us"][1] + row["backward_us"][1] for row in shown["layers"]}
    return round(100 * us["head"] / sum(us.values()))


def test_a_step_that_waits_for_launches_is_told_where_its_kernels_are_wide() -> None:
    shown = payload(variant())
    said = "; ".join(shown["sentence"]["head"].split(". ")[1:])
    told = re.search(
        r" (?:are|is) in \S+ ×2, (\d+) % of kernels' time in head \((.*)\); fewer launches help most\.$", said
    )
    assert told
    assert int(told[1]) == pytest.approx(share_of_head(shown), abs=1)
    assert re.fullmatch(r"4,001 wide, not aligned for TF32, which is off; demo\.py:\d+", told[2])


def test_the_words_of_such_a_sentence_stay_few() -> None:
    """What else helps is told in short beside it."""
    for sentence in re.split(r"(?<=[a-z)])\. ", payload(variant())["sentence"]["said"]):
        assert len(sentence.split()) <= 36
    assert "a CUDA graph launches all at once. " in payload(variant())["sentence"]["said"]


def test_of_a_step_that_is_slowest_there_the_second_sentence_says_why() -> None:
    said = payload(variant(), clock=measured())["sentence"]["head"]
    assert f" {share_of_head(payload(variant(), clock=measured()))} % of it in head (demo.py:" in said
    assert said.endswith(" times as long as its forward; head is 4,001 wide, not aligned for TF32, which is off.")


def found(slow: Slowest | None = SLOW, module: str = "head", us: float = 1.0, **more: Any) -> Wide | None:
    """Of a finding about the first op of `module`, whose ops each take `us`, and all others 1."""
    whole = variant().baseline.whole
    node = next(one for one in variant().baseline.trace.ops if origin(one).module == module and does_work(one))
    plain = {
        "id": UNALIGNED,
        "evidence": (("dimension", "61"),),
        "worth": "1 ms of 9 ms a step",
        "mended_by": (),
        "is_mended": False,
    }
    finding = plain | {"values": [node.name], "source": line_of(node)} | more
    times = {one.name: us if origin(one).module == module else 1.0 for one in whole.ops}
    return widest(variant().baseline, slow, [finding], times)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "61 wide, not aligned"),
        ({"worth": "nothing without TF32"}, "61 wide, not aligned for TF32, which is off"),
        (
            {"worth": "nothing without TF32", "is_mended": True, "mended_by": ("pad",)},
            "61 wide, not aligned for TF32, which is off",
        ),
        ({"is_mended": True, "mended_by": ("pad",)}, "61 wide, not aligned: pad mends it"),
        ({"is_mended": True, "mended_by": ("pad", "cat")}, "61 wide, not aligned: pad and cat mend it"),
    ],
)
def test_it_says_how_wide_they_are_and_what_that_means(more: dict[str, Any], said: str) -> None:
    wide = found(us=9.0, **more)
    assert wide is not None
    assert wide.said == said
    assert re.fullmatch(rf"\d+ % of the step is in head \({said}; demo\.py:\d+\)", wide.told("the step is"))


def test_what_is_slowest_is_not_named_as_if_it_were_another_one() -> None:
    wide = found(replace(SLOW, name="head", paths=("head",)), us=9.0)
    assert wide is not None
    assert wide.told("the step is") == "head is 61 wide, not aligned"


def test_a_part_of_what_is_slowest_and_what_takes_little_is_not_told() -> None:
    assert found(replace(SLOW, name="h.*.attn", paths=("h.0.attn", "h.1.attn")), module="h.0.attn", us=9.0) is None
    assert found(module="h.0.attn", us=9.0) is not None
    assert found(us=0.001) is None
    assert found(id="attention-by-hand") is None


def test_at_a_line_of_a_module_that_others_are_in_it_is_told_by_the_line() -> None:
    wide = found(module="h.0.attn", us=9.0)
    assert wide is not None
    assert re.fullmatch(r"\d+ % of the step is at demo\.py:\d+ \(61 wide, not aligned\)", wide.told("the step is"))
