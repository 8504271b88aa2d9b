"""The diff of two versions of a half trace: on small lists of lines, and on real programs."""

from __future__ import annotations

from functools import cache

import programs
import pytest
import torch

import tracefuse
from tracefuse.variant import Variant
from tracefuse.widgets.payload.values import Line, diff, lines_of, sides


@cache
def captured(name: str) -> tracefuse.Capture:
    return tracefuse.capture(programs.PROGRAMS[name](torch.float32).run)


def variant(name: str) -> Variant:
    return captured(name).optimize()


def lines(*ops: str) -> list[Line]:
    made = [Line("def f(x):", "", "", "signature"), Line("", "# x: f32[2]", "x", "input")]
    made += [Line(op, "", op.split(" = ")[0], "op") if " = " in op else Line("", op, "", "group") for op in ops]
    return [*made, Line("return (a,)", "", "", "return")]


def marks(before: list[Line], after: list[Line]) -> list[str]:
    return [f"{line.mark}{line.code or line.comment}" for line in diff(before, after)]


def test_equal_traces_have_no_marks() -> None:
    one = lines("# line 1", "a = f(x)", "b = g(a)")
    assert marks(one, one) == [" def f(x):", " # x: f32[2]", " # line 1", " a = f(x)", " b = g(a)", " return (a,)"]


def test_added_removed_and_changed_values() -> None:
    found = marks(lines("a = f(x)", "b = g(a)", "c = h(b)"), lines("a = f(x)", "c = h(a)", "d = k(c)"))
    assert found[2:-1] == [" a = f(x)", "-b = g(a)", "-c = h(b)", "~c = h(a)", "+d = k(c)"]


def test_a_moved_value_is_removed_and_added() -> None:
    found = marks(lines("a = f(x)", "b = g(x)", "c = h(x)"), lines("b = g(x)", "c = h(x)", "a = f(x)"))
    assert found[2:-1] == ["-a = f(x)", " b = g(x)", " c = h(x)", "+a = f(x)"]


def test_a_removed_group_keeps_its_header_and_precedes_the_next_one() -> None:
    before = lines("# line 1", "a = f(x)", "# line 2", "b = g(a)", "# line 3", "c = h(b)")
    after = lines("# line 1", "a = f(x)", "# line 3", "c = h(a)")
    assert marks(before, after)[2:] == [
        " # line 1", " a = f(x)", "-# line 2", "-b = g(a)", " # line 3", "-c = h(b)", "~c = h(a)", " return (a,)",
    ]  # fmt: skip


def test_a_removed_line_waits_for_the_end_of_a_group_that_is_not_its_own() -> None:
    before = lines("# line 1", "a = f(x)", "# line 2", "b = g(a)", "# line 1", "c = h(b)")
    after = lines("# line 1", "a = f(x)", "c = h(a)", "# line 3", "d = k(c)")
    assert marks(before, after)[2:] == [
        " # line 1", " a = f(x)", "-c = h(b)", "~c = h(a)", "-# line 2", "-b = g(a)", " # line 3", "+d = k(c)",
        " return (a,)",
    ]  # fmt: skip


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_every_removed_line_stands_under_its_own_header(name: str) -> None:
    for before, after in zip(
        captured(name).trace.split(), (variant(name).forward, variant(name).backward), strict=True
    ):
        old, above = {}, ""
        for line in lines_of(before):
            above = line.comment if line.kind == "group" else above
            old[line.key] = above
        shown = ""
        for line in diff(lines_of(before), lines_of(after)):
            shown = line.comment if line.kind == "group" else shown
            if line.mark == "-" and line.kind == "op" and old[line.key]:
                assert shown == old[line.key], line


@pytest.mark.parametrize("name", ["gpt", "rope", "conv_batchnorm"])
def test_a_diff_holds_both_versions(name: str) -> None:
    before = lines_of(captured(name).trace.split()[1])
    after = lines_of(variant(name).backward)
    merged = diff(before, after)
    assert [(x.code, x.comment) for x in merged if x.mark != "-"] == [(x.code, x.comment) for x in after]
    gone = {line.value for line in merged if line.mark == "-" and line.kind == "op"}
    kept = {line.value for line in merged if line.mark == " " and line.kind == "op"}
    assert gone | kept == {line.value for line in before if line.kind == "op"}


@pytest.mark.parametrize("name", ["gpt", "llama", "rope"])
def test_two_texts_are_each_the_whole_of_their_own(name: str) -> None:
    """What is unmarked before is what is unmarked after, in one order; all else is "-" before and "+" or "~" after."""
    for record in variant(name).passes:
        for before, after in zip(record.before.split(), record.after.split(), strict=True):
            found = sides(before, after)
            text = [(line["code"], line["comment"]) for line in found["before"]]
            assert text == [(line.code, line.comment) for line in lines_of(before)]
            ops = [[line for line in found[part] if line["kind"] == "op"] for part in ("before", "lines")]
            kept = [[(line["value"], line["code"]) for line in part if line["diff"] == " "] for part in ops]
            assert kept[0] == kept[1]
            gone = [sorted(line["code"] for line in part if line["diff"] == "-") for part in ops]
            assert gone[0] == gone[1]
