"""The one order of findings, and the line that counts those that are too small to be told."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from findings import case
from torch import Tensor

import tracefuse
from tracefuse.config.configuration import Config
from tracefuse.diagnose.diagnose import Findings
from tracefuse.findings.finding import Finding, Severity
from tracefuse.findings.order import below_text, in_order, told_by_launches, with_launches, with_launches_left
from tracefuse.widgets.payload.program import payload
from tracefuse.widgets.text import to_text


def finding(title: str, share: float | None, severity: Severity = "high", **more: Any) -> Finding:
    of = {"id": "attention-by-hand", "values": (title,)} | more
    return Finding(
        of.pop("id"),
        severity,
        title,
        (),
        of.pop("values"),
        f"a.py:3  {title}",
        "do it",
        "time",
        worth_share=share,
        **of,
    )


def titles(*found: Finding) -> list[str]:
    return [one.title for one in in_order(found)]


def test_what_is_worth_most_leads_by_its_number() -> None:
    assert titles(finding("less", 0.096), finding("more", 0.104), finding("most", 0.6)) == ["most", "more", "less"]


def test_one_without_a_share_counts_for_the_least_that_its_severity_stands_for() -> None:
    small, large = finding("small", 0.012, "low", changes={"fuse": True}), finding("large", 0.3)
    assert titles(finding("reads", None, "low"), small, large) == ["large", "small", "reads"]
    assert titles(small, finding("waits", None), large) == ["large", "waits", "small"]


def test_what_passes_mend_comes_last_and_what_they_leave_counts() -> None:
    mended = finding("mended", 0.9, mended_by=("fuse",), is_mended=True)
    partly = finding("partly", 0.9, mended_by=("fuse",), left="1 ms", left_share=0.05)
    alone = replace(partly, id="unfused-pointwise", title="alone", left_share=0.8)
    other = finding("other", 0.1, "medium")
    assert titles(mended, alone, partly, other) == ["other", "partly", "mended", "alone"]


def test_a_remark_that_no_switch_mends_counts_for_no_more_than_remarks_do() -> None:
    share = finding("share", 0.3, "low")
    error = finding("error", 0.1, "medium")
    assert titles(share, error, finding("small", 0.01, "low")) == ["error", "share", "small"]
    assert titles(replace(share, changes={"optimizer_step": True}), error) == ["share", "error"]


def test_a_remark_without_a_remedy_or_a_worth_stands_behind_all_that_have_them() -> None:
    """Of the update's time nobody knows how much can be spared; a switch that spares some is a remedy."""
    update = finding("update", 0.42, "low", id="update-share")
    small = finding("small", 0.01, "low")
    assert titles(update, finding("little", None, "low"), small) == ["small", "update", "little"]
    assert titles(small, replace(update, changes={"optimizer_step": True})) == ["update", "small"]


def test_in_a_step_that_waits_for_launches_their_number_ranks() -> None:
    many = finding("many", 0.02, "low", values=tuple("abcd"))
    few, matmul = finding("few", 0.3, values=("a",)), finding("matmul", 0.6, id="tf32-off", values=tuple("abcdef"))
    waits = finding("waits", None)
    assert [one.title for one in in_order([few, matmul, many, waits])] == ["matmul", "few", "waits", "many"]
    counted = with_launches([few, matmul, many, waits], {}, 10)
    assert [one.launches for one in counted] == [1, 0, 4, 1]
    assert {one.launches_of for one in counted} == {10}
    assert [one.title for one in in_order(counted, 10)] == ["many", "waits", "few", "matmul"]
    general = finding("general", 0.2, id="unfused-pointwise", values=tuple("abcde"))
    assert [one.title for one in in_order(with_launches([general, many], {}, 10), 10)] == ["many", "general"]
    found = Findings(counted[:3], launching="It waits.", launches=10)
    assert [one.title for one in found] == ["many", "few", "matmul"]
    # Of lists that a GPU makes of many ops.
    lists = with_launches([many, few], dict.fromkeys("abcd", 0.1), 1)
    assert [one.launches for one in lists] == [pytest.approx(0.4), 0.1]


def test_launches_are_those_that_passes_leave() -> None:
    """Kernels that hold several ops are one launch; what no op computes any more is none."""
    loop = finding("loop", 0.1, values=tuple("abcd"), launches=4.0, launches_of=10.0)
    apart = replace(loop, title="apart", values=("e", "f"), launches=2.0)
    partly = replace(loop, title="partly", left="1 ms", launches=3.0, launches_of=5.0)
    mended = replace(loop, title="mended", is_mended=True)
    made_by = {"a": "k", "b": "k", "e": "e", "f": "f", "k": "k", "z": "z"}
    left = with_launches_left([loop, apart, partly, mended], dict.fromkeys("kefz", 1.0), made_by, 5.0)
    assert [(one.launches, one.launches_of) for one in left] == [(1.0, 5.0), (2.0, 5.0), (3.0, 5.0), (4.0, 10.0)]
    assert [one.title for one in in_order(left[:2], 5.0)] == ["apart", "loop"]


def test_a_loop_that_fuse_has_taken_the_launches_of_stands_behind_what_has_more_left() -> None:
    """Before the passes the first line has most launches; fused, they are a few."""
    x, weights = torch.randn(8, 8, requires_grad=True), [torch.randn(8, 8, requires_grad=True) for _ in range(12)]

    def step() -> None:
        y = x
        for _ in range(6):
            y = ((y * 0.5 + 0.1).sin() * 0.3).cos()
        torch.stack([y @ weight for weight in weights]).sum().backward()

    capture = tracefuse.capture(step)
    ran, left = capture.variant(Config.off()).findings(), capture.optimize().findings()
    launched = {one.launches_of for one in left if not one.is_mended}
    assert launched == {left.launches}
    assert left.launches < ran.launches
    order = [one.launches for one in left if not one.mended_by]
    assert order == sorted(order, reverse=True)
    assert all(one.launches <= left.launches for one in left if not one.is_mended)


def test_where_launches_count_none_is_too_small_that_spares_a_hundredth_of_them() -> None:
    small = finding("small", 0.001, "low", is_below=True)
    for launches, of, is_below in ((3, 300, True), (4, 300, False), (1, 20, True), (2, 20, False)):
        (one,) = told_by_launches([replace(small, launches=launches, launches_of=of)])
        assert one.is_below == is_below


def test_those_below_are_counted_in_one_line() -> None:
    small = [finding(str(at), 0.001, "low", is_below=True) for at in range(2)]
    cat = finding("cat", 0.002, "low", is_below=True, id="cat-in-forward")
    assert below_text([*small, cat]) == (
        "3 more below 1 % of the step: attention-by-hand \N{MULTIPLICATION SIGN}2, cat-in-forward"
    )
    assert below_text([]) == ""
    found = Findings([*small, finding("told", 0.5)], looked_for=["all"])
    assert [one.title for one in found] == ["told"]
    assert len(found.below) == 2
    line = "2 more below 1 % of the step: attention-by-hand \N{MULTIPLICATION SIGN}2"
    assert str(found).endswith(f"\n\n{line}; `print(v.findings().below)` has them")


@pytest.mark.parametrize("width", [16, 512])
def test_a_mistake_that_is_small_beside_the_rest_is_counted_in_every_form(width: int) -> None:
    """Attention by hand is told where the step is small, and counted where a product beside it takes most of the step."""
    torch.manual_seed(0)
    q, weight = torch.randn(1, 2, 32, 16, requires_grad=True), torch.randn(8 * width, 8 * width, requires_grad=True)

    def step() -> Tensor:
        scores = (q @ q.transpose(-1, -2) / 4).softmax(-1)
        loss = (scores @ q).square().sum() + (weight @ weight).sum()
        loss.backward()
        return loss

    variant = tracefuse.capture(step).optimize()
    found, shown = variant.findings(), payload(variant)
    told, counted = {one.id for one in found}, [one.id for one in found.below]
    assert ("attention-by-hand" in told) == (width == 16)
    assert ("attention-by-hand" in counted) == (width == 512)
    assert [one["key"] for one in shown["findings"]] == [one.key for one in found]
    assert shown["below"] == below_text(found.below)
    for text in (str(found), str(variant.baseline.findings()), to_text(shown)):
        assert "attention-by-hand" in text
        assert all(id in text for id in counted)
    actions = [one["key"] for one in shown["sentence"]["actions"] if not (one["by"] or "instead" in one)]
    in_tab = [one["key"] for one in shown["findings"]]
    assert actions == sorted(actions, key=in_tab.index)


def test_a_time_of_several_ops_is_the_same_to_the_last_digit_in_whatever_order() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    looked_at = case(tracefuse.capture(lambda: (x.sin() @ x).cos().sum().backward()))
    ops = [node for node in looked_at.trace.ops if node.name in looked_at.times.us]
    times = {node.name: amount for node, amount in zip(ops, itertools.cycle([0.1, 1e9, 0.3, 1e-7]), strict=False)}
    timed = replace(looked_at, times=replace(looked_at.times, us=times))
    assert len({sum(times[node.name] for node in some) for some in itertools.permutations(ops[:5])}) > 1
    assert len({timed.us(some) for some in itertools.permutations(ops[:5])}) == 1
