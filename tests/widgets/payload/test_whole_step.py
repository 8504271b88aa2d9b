"""What is said of a step with an update is said of all of it: one count of ops, and what each pass did to either part."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import tracefuse
from tracefuse.config.configuration import Config
from tracefuse.optimizers.costs.alignment import unaligned
from tracefuse.optimizers.passes import PassRecord
from tracefuse.variant import Variant
from tracefuse.widgets.payload.levers import _nothing_to_pad
from tracefuse.widgets.payload.passes import config_record
from tracefuse.widgets.payload.program import payload
from tracefuse.widgets.view.explorer import Explorer


@cache
def captured(vocab: int = 61, rows: int = 8, width: int = 16) -> tracefuse.Capture:
    """A step of a head of `vocab` classes whose update has ops of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, vocab, bias=False)).bfloat16()
    x, targets = torch.randn(rows, width, dtype=torch.bfloat16), torch.randint(vocab, (rows,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        nn.functional.cross_entropy(model(x), targets).backward()
        optimizer.step()

    step()
    return tracefuse.capture(step)


def row(variant: Variant, name: str) -> dict[str, Any]:
    return next(one for one in payload(variant)["passes"] if one["name"] == name)


# --- one count --------------------------------------------------------------------------------------------------------


def test_ops_are_counted_alike_everywhere() -> None:
    explorer = Explorer(captured().optimize(), "c")
    shown = explorer.payload
    before, after = shown["summary"]["ops"]
    assert after == captured().optimize().whole.op_count
    assert [one["ops"] for one in explorer.board["rows"]] == [before, after]
    pair = [{"capture": 0, "config": one["config"]} for one in explorer.board["rows"]]
    explorer._on_message(None, {"type": "compare", "pair": pair}, [])
    explorer.wait()
    assert explorer.status["error"] is None
    assert [one["ops"] for one in explorer.board["comparison"]["sides"]] == [before, after]
    assert sum(sum(one["ops"][0] for one in (shown[part],)) for part in ("forward", "backward", "update")) == before
    assert sum(one[f"{part}_ops"][1] for one in shown["layers"] for part in ("forward", "backward", "update")) == after


def test_what_the_passes_changed_adds_up_to_what_the_step_changed() -> None:
    shown = payload(captured().optimize())
    before, after = shown["summary"]["ops"]
    assert sum(one["ops"][1] - one["ops"][0] for one in shown["passes"] if one["ops"]) == after - before
    assert shown["update"]["ops"][0] > 0


# --- what a row says --------------------------------------------------------------------------------------------------


def test_pad_says_what_it_left_and_why_beside_an_update_that_it_has_nothing_to_do_in() -> None:
    variant = captured(vocab=1003, rows=128, width=512).optimize(linear_cross_entropy=False)
    left = [one for one in payload(variant)["findings"] if one["id"] == "unaligned-matmul"]
    (record,) = [one for one in variant.passes if one.name == "pad"]
    said = row(variant, "pad")["needs"]
    assert [len(one["values"]) for one in left] == [3] == [len(record.decisions)]
    assert said.startswith("changed none of 3 values: ")
    assert any(decision.reason in said for decision in record.decisions)


def test_pad_says_that_all_is_aligned_only_where_it_is() -> None:
    variant = captured(vocab=64).optimize()
    assert not any(unaligned(node) for node in variant.program.whole.ops)
    assert row(variant, "pad")["needs"] == "all matmuls are aligned"


def test_pad_takes_the_unaligned_matmuls_of_a_head_that_could_be_in_chunks() -> None:
    """Chunks of an unaligned head would be as slow as the whole; the row of the pass that leaves it says so."""
    variant = captured(vocab=10_001, rows=2048, width=256).optimize(logits_memory=2**24)
    pad, chunks = row(variant, "pad"), row(variant, "linear_cross_entropy")
    assert pad["changed"]
    assert pad["needs"] == ""
    assert len(payload(variant)["decisions"]["pad"]) == 3
    assert not chunks["changed"]
    assert chunks["needs"].startswith(
        "changed none of 1 value: matmuls over 10,001 classes are slow in chunks too, and `pad`"
    )


def test_pad_is_told_of_the_passes_before_it_alone_and_of_how_many_they_took() -> None:
    three, none = (captured(vocab=vocab).optimize(linear_cross_entropy=False) for vocab in (10_001, 64))
    (pad,) = [one for one in three.passes if one.name == "pad"]
    (fuse,) = [one for one in three.passes if one.name == "fuse"]
    x = torch.randn(8, 10_001, dtype=torch.bfloat16)
    one_left = tracefuse.capture(lambda: x @ x.T).trace
    taken = replace(pad, name="simplify", after=one_left)
    behind = replace(fuse, before=one_left, after=none.trace)

    def said(*passes: PassRecord) -> str:
        return _nothing_to_pad(SimpleNamespace(program=three.program, passes=passes))  # type: ignore[arg-type]

    assert said(taken, pad, behind) == "simplify replaced 2 of the 3 unaligned matmuls before"
    assert said(taken, behind, pad) == "simplify and fuse replaced the 3 unaligned matmuls before"
    assert said(pad, behind) == "changed none of 3 unaligned matmuls"


def test_a_pass_that_changed_the_update_alone_shows_its_figures() -> None:
    weight, x = nn.Parameter(torch.randn(64)), torch.randn(64)
    optimizer = torch.optim.AdamW([weight], foreach=False)

    def step() -> None:
        torch.dot(weight, x).backward()
        optimizer.step()

    step()
    variant = tracefuse.capture(step).optimize()
    both = {one.name: one for one in variant.passes}, {one.name: one for one in variant.update.passes}  # type: ignore[union-attr]
    changed = {name: [not part[name].is_unchanged for part in both] for name in both[0]}
    assert any(one == [False, True] for one in changed.values()), changed
    for name, parts in changed.items():
        found = row(variant, name)
        assert found["changed"] == any(parts), name
        assert bool(found["needs"]) != any(parts), name


def test_a_row_says_how_many_values_were_left_for_other_reasons() -> None:
    variant = captured().optimize(linear_cross_entropy=False)
    (record,) = [one for one in variant.passes if one.name == "pad"]
    others = len(record.decisions) - max(
        sum(one.reason == other.reason for one in record.decisions) for other in record.decisions
    )
    assert others
    assert row(variant, "pad")["needs"].endswith(f"; {others} for other reasons")


def test_the_configuration_of_a_row_is_the_one_on_show() -> None:
    explorer = Explorer(captured().optimize(), "c")
    assert [one["config"] for one in explorer.board["rows"] if one["is_shown"]] == [
        config_record(explorer.variant.config)
    ]


def test_what_was_captured_counts_where_it_ran_whatever_passes_call_by_its_name() -> None:
    """An op of the update and one that `decompose` makes of a batch norm's backward may have one name."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), torch.randn(4, 3, 16, 16)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step()
    with tracefuse.capture() as c:
        step()

    def captured(shown: dict[str, Any]) -> Counter[tuple[str, ...]]:
        counted = [one for one in shown["values"].values() if one["time_us"][0] is not None]
        return Counter((one["phase"], one["module"], one["source"]) for one in counted)

    on = payload(c.optimize())
    taken = [name for name in on["values"] if name.endswith(" as captured")]
    assert taken
    assert all(on["values"][name]["removed"] for name in taken)
    assert captured(on) == captured(payload(c.variant(Config.off())))
