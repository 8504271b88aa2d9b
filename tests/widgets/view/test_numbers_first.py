"""A switch is answered in two parts: what is on show at once, then all of it."""

from __future__ import annotations

from typing import Any

import programs
import pytest
import torch

import tracefuse
from tracefuse.widgets.payload.program import in_two, payload
from tracefuse.widgets.view.explorer import Explorer
from tracefuse.widgets.view.late import PARTS, READ_BY, late_parts, late_tabs

HALVES, KERNELS, SAVED = (
    {"forward", "backward", "update"},
    {"kernels", "aten"},
    {"why", "reasons", "modules", "at_peak"},
)
SWITCH = {"type": "configure", "changes": {"cat": False}}


@pytest.fixture
def explorer() -> Explorer:
    return Explorer(tracefuse.capture(programs.rope(torch.float32).run).optimize())


@pytest.fixture
def told(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What the view is told, in order: its messages by their kinds, and its payloads."""
    found: list[tuple[str, Any]] = []
    monkeypatch.setattr(explorer, "send", lambda message: found.append((message["type"], message)))
    explorer.observe(lambda change: found.append(("payload", change["new"])), "payload")
    return found


def switched(explorer: Explorer, told: list[tuple[str, Any]], tab: str = "", selected: str = "") -> dict[str, Any]:
    """The numbers that the view has first of a switch, while that tab is open and that value selected."""
    explorer.tab, explorer.selected = tab, selected
    explorer._on_message(explorer, SWITCH, [])
    return next(message["numbers"] for kind, message in told if kind == "numbers")


def test_the_numbers_come_before_the_payload_which_has_all_of_them(
    explorer: Explorer, told: list[tuple[str, Any]]
) -> None:
    numbers = switched(explorer, told)
    assert [kind for kind, _ in told] == ["numbers", "payload", "answered"]
    assert numbers["late"] == list(READ_BY)
    whole = explorer.payload
    assert whole == payload(explorer.variant, name=None)
    assert "late" not in whole
    alike = numbers.keys() - {"late", "memory"}
    assert {name: numbers[name] for name in alike} == {name: whole[name] for name in alike}
    assert numbers["memory"].items() <= whole["memory"].items()
    assert whole.keys() - alike == {*HALVES, *KERNELS, "memory"}


def test_numbers_whose_payload_fails_are_taken_back(
    explorer: Explorer, told: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: Any) -> Any:
        numbers, _ = found(*arguments)
        return numbers, lambda: 1 // 0

    found = explorer.measured.in_two
    monkeypatch.setattr(explorer.measured, "in_two", failing)
    with pytest.raises(ZeroDivisionError):
        explorer.configure(SWITCH["changes"])
    assert [message["numbers"] is None for _, message in told] == [False, True]


@pytest.mark.parametrize(
    ("tab", "selected", "there"),
    [
        ("", "", set()),
        ("trace", "", set()),
        ("code", "", HALVES | KERNELS),
        ("graph", "", HALVES),
        ("kernels", "", KERNELS),
        ("memory", "", SAVED),
        ("timeline", "", SAVED),
        ("layers", "cat", KERNELS | SAVED),
        ("code", "cat", HALVES | KERNELS | SAVED),
    ],
)
def test_what_is_on_show_is_among_the_numbers(
    explorer: Explorer, told: list[tuple[str, Any]], tab: str, selected: str, there: set[str]
) -> None:
    numbers = switched(explorer, told, tab, selected)
    assert (HALVES | KERNELS | SAVED) & (numbers.keys() | numbers["memory"].keys()) == there
    assert tab not in numbers["late"]


def test_every_late_part_is_one_that_a_tab_waits_for() -> None:
    assert set().union(*READ_BY.values()) == PARTS
    assert late_tabs(late_parts("", "")) == list(READ_BY)
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


@pytest.mark.parametrize("late", [frozenset(), PARTS, frozenset({"code"})])
def test_both_parts_together_are_the_payload(explorer: Explorer, late: frozenset[str]) -> None:
    numbers, rest = in_two(explorer.variant, late=late)
    assert numbers | rest() == payload(explorer.variant)
