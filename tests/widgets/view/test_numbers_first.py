"""A switch is answered in three parts: its numbers, which are a small message, what else is on show, then all of it, once it
is read or nobody clicks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Set
from typing import Any

import programs
import pytest
import torch
from ipywidgets import Widget

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.widgets.payload.program import in_two, payload
from tracefuse.widgets.view import keeping, telling
from tracefuse.widgets.view.explorer import Explorer
from tracefuse.widgets.view.late import PARTS, READ_BY, late_parts, late_tabs

VALUES, HALVES, KERNELS, SAVED = (
    {"values", "layers", "decisions", "before", "after"},
    {"forward", "backward", "update"},
    {"kernels", "aten"},
    {"why", "reasons", "modules", "at_peak"},
)
SWITCH = {"type": "configure", "changes": {"cat": False}}


@pytest.fixture
def explorer() -> Iterator[Explorer]:
    made = Explorer(tracefuse.capture(programs.rope(torch.float32).run).optimize())
    yield made
    made._settler.stop()


@pytest.fixture
def told(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What the view is told, in order: its messages by their kinds, and its payloads."""
    found: list[tuple[str, Any]] = []
    monkeypatch.setattr(explorer, "send", lambda message: found.append((message["type"], message)))
    explorer.observe(lambda change: found.append(("payload", change["new"])), "payload")
    return found


def switched(
    explorer: Explorer, told: list[tuple[str, Any]], tab: str = "", selected: str = ""
) -> list[dict[str, Any]]:
    """The numbers that the view has first of a switch, while that tab is open and that value selected, and what follows."""
    explorer.tab, explorer.selected = tab, selected
    explorer._on_message(explorer, SWITCH, [])
    return [message["numbers"] for kind, message in told if kind == "numbers"]


def test_the_numbers_come_before_the_payload_which_has_all_of_them(
    explorer: Explorer, told: list[tuple[str, Any]]
) -> None:
    numbers, shown = switched(explorer, told)
    assert [kind for kind, _ in told] == ["numbers", "numbers", "answered"]
    assert numbers["late"] == list(READ_BY)
    assert shown.keys() == {"values", "layers", "decisions", "memory", "late"}
    assert shown["late"] == [tab for tab, parts in READ_BY.items() if parts - {"values"}]
    whole = explorer.payload
    assert [kind for kind, _ in told] == ["numbers", "numbers", "answered", "payload"]
    assert whole == payload(explorer.variant, name=None)
    assert "late" not in whole
    alike = numbers.keys() - {"late"}
    assert {name: numbers[name] for name in alike} == {name: whole[name] for name in alike}
    assert all(shown[name] == whole[name] for name in ("values", "layers", "decisions"))
    assert shown["memory"].items() <= whole["memory"].items()
    assert whole.keys() - alike == {*HALVES, *KERNELS, "values", "layers", "decisions", "memory"}


def test_numbers_are_a_small_part_of_a_payload_whatever_the_number_of_ops() -> None:
    """A browser reads and draws them in a moment."""
    model, data = GPT(layers=6, width=16, heads=2, vocab=31, length=8), batch(31, 1, 8)
    numbers, rest = in_two(tracefuse.capture(lambda: model(*data).backward()).optimize())
    assert 30 * len(json.dumps(numbers)) < len(json.dumps(numbers | rest()))


def test_the_numbers_leave_the_kernel_before_the_rest_is_made(
    explorer: Explorer, told: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that sends them would wait while it is made."""

    def noted(*arguments: Any) -> Any:
        numbers, rest = found(*arguments)
        return numbers, lambda names: told.append(("made", names)) or rest(names)

    found = explorer.measured.in_two
    monkeypatch.setattr(explorer.measured, "in_two", noted)
    monkeypatch.setattr(telling, "published", lambda: told.append(("left", None)))
    switched(explorer, told)
    assert [kind for kind, _ in told] == ["numbers", "left", "made", "numbers", "answered"]


def test_numbers_whose_payload_fails_are_taken_back(
    explorer: Explorer, told: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: Any) -> Any:
        numbers, _ = found(*arguments)
        return numbers, lambda _: 1 // 0

    found = explorer.measured.in_two
    monkeypatch.setattr(explorer.measured, "in_two", failing)
    with pytest.raises(ZeroDivisionError):
        explorer.configure(SWITCH["changes"])
    assert [message["numbers"] is None for _, message in told] == [False, True]


def test_the_next_switch_supersedes_the_payload_that_is_not_made_yet(
    explorer: Explorer, told: list[tuple[str, Any]]
) -> None:
    switched(explorer, told)
    explorer._on_message(explorer, {"type": "configure", "changes": {"cat": True, "fuse": False}}, [])
    assert explorer.payload == payload(explorer.variant, name=None)
    assert [one["config"]["fuse"] for kind, one in told if kind == "payload"] == [False]


def test_a_switch_that_supersedes_one_stops_what_is_made_for_it(
    explorer: Explorer, told: list[tuple[str, Any]]
) -> None:
    switched(explorer, told)
    lacking = explorer._unsettled
    assert lacking is not None
    looks: list[int] = []
    count = len(lacking.parts)
    explorer.settle(lambda: bool(looks.append(0)) or len(looks) > 4)
    assert (len(lacking.parts), explorer._unsettled) == (count - 2, lacking)
    assert "payload" not in {kind for kind, _ in told}
    assert explorer.payload == payload(explorer.variant, name=None), "what was made is of use"


def test_the_payload_comes_once_nothing_was_asked_for_a_while(
    explorer: Explorer, told: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "SETTLED_S", 0.0)
    came = threading.Event()
    explorer.observe(lambda _: came.set(), "payload")
    switched(explorer, told)
    assert came.wait(20)
    assert explorer._unsettled is None


def test_a_payload_that_fails_behind_its_numbers_says_why(
    explorer: Explorer, told: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: Any) -> Any:
        numbers, rest = found(*arguments)
        return numbers, lambda names: rest(names) if names == {"values"} else 1 // 0

    found = explorer.measured.in_two
    monkeypatch.setattr(explorer.measured, "in_two", failing)
    switched(explorer, told)
    explorer._settle_unasked()
    assert [message["numbers"] is None for kind, message in told if kind == "numbers"] == [False, False, True]
    error = explorer.status["error"]
    assert error["panel"] == "passes"
    assert "ZeroDivisionError" in error["message"]


def test_numbers_behind_which_a_switch_fails_are_taken_back(
    explorer: Explorer, told: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    switched(explorer, told)
    monkeypatch.setattr(explorer.measured, "in_two", lambda *_: 1 // 0)
    explorer._on_message(explorer, {"type": "configure", "changes": {"fuse": False}}, [])
    assert [message["numbers"] is None for kind, message in told if kind == "numbers"] == [False, False, True]
    assert explorer._unsettled is None


def test_a_click_stops_what_is_made_behind_the_one_before(
    explorer: Explorer, told: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the part that is being made."""
    made: list[str] = []
    begun = threading.Event()

    def slow(*arguments: Any) -> Any:
        numbers, rest = found(*arguments)

        def made_slowly(names: Set[str]) -> dict[str, Any]:
            if names != {"values"}:
                made.extend(names)
                begun.set()
                time.sleep(0.2)
            return rest(names)

        return numbers, made_slowly

    found = explorer.measured.in_two
    monkeypatch.setattr(explorer.measured, "in_two", slow)
    monkeypatch.setattr(keeping, "SETTLED_S", 60.0)
    switched(explorer, told)
    explorer._settler.touch(0.0)
    assert begun.wait(20)
    monkeypatch.setattr(explorer.measured, "in_two", found)
    explorer._on_message(explorer, {"type": "configure", "changes": {"fuse": False}}, [])
    assert made == ["saved"]
    assert explorer.payload == payload(explorer.variant, name=None)


def test_what_is_interrupted_is_made_when_it_is_read_again(
    explorer: Explorer, told: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    switched(explorer, told)
    lacking = explorer._unsettled
    assert lacking is not None
    with monkeypatch.context() as patched:
        patched.setattr(lacking, "rest", interrupt)
        with pytest.raises(KeyboardInterrupt):
            _ = explorer.payload
    assert explorer.payload == payload(explorer.variant, name=None)


def test_the_state_for_another_front_end_is_of_one_configuration(
    explorer: Explorer, told: list[tuple[str, Any]]
) -> None:
    explorer._foresee(lambda: False)
    assert explorer.anew
    switched(explorer, told)
    state = explorer.get_state()
    assert (state["payload"]["config"]["cat"], state["anew"]) == (False, {})


def test_numbers_of_what_is_on_show_already_are_taken_back(explorer: Explorer, told: list[tuple[str, Any]]) -> None:
    """The payload is the one that the view has."""
    explorer.configure(SWITCH["changes"])
    explorer.configure({"cat": True})
    switched(explorer, told)
    explorer._on_message(explorer, {"type": "configure", "changes": {"cat": True}}, [])
    explorer.settle()
    assert [kind for kind, _ in told][-2:] == ["answered", "numbers"]
    assert told[-1][1]["numbers"] is None


@pytest.mark.parametrize(
    ("looked_at", "is_made"),
    [({"tab": "trace"}, False), ({"tab": "layers"}, False), ({"tab": "kernels"}, True), ({"selected": "cat"}, True)],
)
def test_whoever_looks_at_what_is_lacking_has_it_at_once(
    explorer: Explorer, told: list[tuple[str, Any]], looked_at: dict[str, str], is_made: bool
) -> None:
    switched(explorer, told)
    explorer.set_state(looked_at)
    assert (explorer._unsettled is None) == is_made
    assert ("payload" in {kind for kind, _ in told}) == is_made


def test_whoever_configures_in_python_has_it_at_once(explorer: Explorer, told: list[tuple[str, Any]]) -> None:
    explorer.configure(SWITCH["changes"])
    explorer.config = {**explorer.config, "cat": True}
    assert [kind for kind, _ in told if kind != "answered"] == ["numbers", "numbers", "payload"] * 2


@pytest.mark.parametrize(
    ("tab", "selected", "there"),
    [
        ("", "", VALUES),
        ("trace", "", VALUES),
        ("findings", "", set()),
        ("code", "", VALUES | HALVES | KERNELS),
        ("graph", "", VALUES | HALVES),
        ("kernels", "", VALUES | KERNELS),
        ("memory", "", VALUES | SAVED),
        ("timeline", "", VALUES | SAVED),
        ("layers", "cat", VALUES | KERNELS | SAVED),
        ("findings", "cat", VALUES | KERNELS | SAVED),
        ("code", "cat", VALUES | HALVES | KERNELS | SAVED),
    ],
)
def test_what_is_on_show_follows_the_numbers_before_the_payload(
    explorer: Explorer, told: list[tuple[str, Any]], tab: str, selected: str, there: set[str]
) -> None:
    numbers, *shown = switched(explorer, told, tab, selected)
    late = VALUES | HALVES | KERNELS | SAVED
    assert not late & numbers.keys()
    assert "memory" not in numbers
    assert {name for one in shown for name in late & (one.keys() | one["memory"].keys())} == there
    assert (tab or "trace") not in (shown or [numbers])[-1]["late"]


def test_every_late_part_is_one_that_a_tab_waits_for() -> None:
    assert set().union(*READ_BY.values()) == PARTS
    assert late_tabs(PARTS) == list(READ_BY)
    assert late_tabs(late_parts("", "")) == [tab for tab in READ_BY if tab not in ("trace", "layers")]
    assert late_tabs(frozenset()) == []


def test_a_switch_that_is_refused_tells_no_numbers(explorer: Explorer, told: list[tuple[str, Any]]) -> None:
    explorer._on_message(explorer, {"type": "configure", "changes": {"nonsense": True}}, [])
    assert [kind for kind, _ in told] == ["answered"]


def test_what_is_known_anew_of_the_same_configuration_comes_whole(
    explorer: Explorer, told: list[tuple[str, Any]]
) -> None:
    explorer.show()
    explorer.show(explorer.variant)
    assert [kind for kind, _ in told if kind == "numbers"] == []


@pytest.mark.parametrize("first", [set(), PARTS, {"values"}, {"values", "code"}, {"values", "saved"}])
def test_all_parts_together_are_the_payload(explorer: Explorer, first: Set[str]) -> None:
    numbers, rest = in_two(explorer.variant)
    assert numbers | rest(first) | rest(PARTS - first) == payload(explorer.variant)


def test_what_is_foreseen_of_the_configuration_on_show_is_told_by_what_it_changes(
    explorer: Explorer, told: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The payload has it, for whoever asks for it anew, and is not sent."""
    sent: list[str] = []
    monkeypatch.setattr(Widget, "notify_change", lambda _, change: sent.append(change["name"]))
    before = explorer.payload
    explorer._foresee(lambda: False)
    assert sent == ["anew"]
    assert {"passes"} <= explorer.anew.keys() <= {"passes", "sentence"}
    assert before != explorer.payload == before | explorer.anew
    assert explorer.payload == explorer.held(explorer.variant)
    explorer._foresee(lambda: False)
    assert sent == ["anew"], "nothing is told twice"
    explorer.configure({"fuse": False})
    assert explorer.anew == {}
    assert sent.index("anew", 1) < sent.index("payload"), "it is of the payload before"


def test_what_is_foreseen_for_another_target_comes_whole(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    monkeypatch.setattr(Widget, "notify_change", lambda _, change: sent.append(change["name"]))
    tracefuse.target("L4")
    explorer._foresee(lambda: False)
    assert sent == ["payload"]
    assert explorer.payload == explorer.held(explorer.variant)
