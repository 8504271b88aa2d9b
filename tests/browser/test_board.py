"""The board in Chromium: points and rows, going back, comparing, the sweep's dialog; nothing moves, all can be read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from playwright.sync_api import Locator, Page, expect

import tracefuse
from tests.browser.contrast import CONTRAST
from tracefuse.demo import GPT, batch
from tracefuse.widgets.html import page as html_page

pytestmark = pytest.mark.browser
IDLE = {"busy": "", "progress": None, "text": "", "error": None}


class Written(NamedTuple):
    """A page, and the boards that a view had one after another: at first, after a sweep, comparing one capture, and two."""

    path: Path
    boards: list[dict[str, Any]]


def captured(size: int) -> tracefuse.Capture:
    torch.manual_seed(0)
    model, data = GPT(layers=2, width=32, heads=2, vocab=61, length=16, dropout=0.1), batch(61, size, 12)
    return tracefuse.capture(lambda: model(*data).backward())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    before, after = captured(2), captured(4)
    explorer = tracefuse.board(before, after)
    payloads, boards = [explorer.payload], [explorer.board]
    explorer.configure({"fuse": False})
    payloads.append(explorer.payload)
    explorer.configure({"fuse": True})
    explorer.budget_s = 0.1
    explorer.measure()
    explorer.show_times_of("here")
    explorer.sweep(weights=[1.0, 0.5, 0.0], budgets=[None, 0.5, 0.1])
    payloads.append(explorer.payload)
    boards.append(explorer.board)
    for other in (before.optimize(remat=0.0, memory_budget=0.1), after.optimize()):
        explorer.compare(before.optimize(), other)
        boards.append(explorer.board)
    path = tmp_path_factory.mktemp("board") / "view.html"
    path.write_text(html_page(payloads, "board", explorer.measured.timeline, boards[1]), encoding="utf-8")
    return Written(path, json.loads(json.dumps(boards)))


@pytest.fixture
def saved(open_saved: Callable[[Path], Page], written: Written) -> Page:
    page = open_saved(written.path)
    page.get_by_test_id("tf-tab-board").click()
    return page


@pytest.fixture
def live(saved: Page, go_live: Callable[[Page], None]) -> Page:
    go_live(saved)
    saved.evaluate("show(2)")
    saved.get_by_test_id("tf-tab-board").click()
    return saved


def rows(page: Page) -> Locator:
    return page.get_by_test_id("tf-board-table").locator("tbody tr")


def test_every_row_has_a_point_and_the_shown_one_is_marked(live: Page, written: Written) -> None:
    board = written.boards[1]
    expect(rows(live)).to_have_count(len(board["rows"]))
    mine = [row for row in board["rows"] if row["device"] == board["device"]]
    expect(live.get_by_test_id("tf-plot").locator(".tf-point")).to_have_count(len(mine))
    expect(live.locator("[data-testid=tf-plot] .tf-point-shown")).to_have_count(1)
    expect(live.locator("[data-testid=tf-board-table] [aria-current=true]")).to_contain_text("all passes")
    expect(live.get_by_test_id("tf-plot").locator(".tf-frontier")).to_have_count(
        sum(row["is_best"] for row in board["rows"]) - 1
    )


def test_each_column_of_times_compares_its_own_kind(live: Page, written: Written) -> None:
    board = written.boards[0] | {"rows": [dict(row) for row in written.boards[0]["rows"]]}
    row = board["rows"][1]
    # As after Measure on a CPU, where the view goes on telling a GPU: modelled it gains, measured it loses.
    timed = {"median": 11.3, "low": 11.2, "high": 11.4, "coverage": 0.95, "samples": 20, "where": "measured on CPU"}
    timed |= {"ratio": 1.13, "ratio_how": "measured on CPU, in the same rounds"}
    row |= {"kind": "modelled", "ratio": 0.5, "ratio_kind": "modelled", "measured": timed}
    live.evaluate("board => set('board', board)", board)
    step, measured = rows(live).nth(1).locator("td").nth(1), rows(live).nth(1).locator("td").nth(2)
    expect(step).to_contain_text("≈ ")
    expect(step.locator(".tf-gain")).to_have_text("−50 %")
    expect(step.locator(".tf-gain")).to_have_attribute("title", re.compile("modelled, both on "))
    expect(measured).to_contain_text("11.3 ms 11.2–11.4")
    expect(measured.locator(".tf-cost")).to_have_text("+13 %")
    expect(measured.locator(".tf-cost")).to_have_attribute("title", re.compile("measured on CPU, in the same rounds"))
    row |= {"ratio": None, "ratio_kind": "", "measured": None}
    live.evaluate("board => set('board', board)", board)
    expect(measured).to_have_text("—")
    expect(step.locator(".tf-beside")).to_have_count(0)


def test_points_lie_where_their_numbers_say(live: Page, written: Written) -> None:
    board = written.boards[1]
    mine = [row for row in board["rows"] if row["device"] == board["device"]]
    points = live.locator("[data-testid=tf-plot] .tf-point").evaluate_all(
        "all => all.map(one => { const { x, y } = one.getBoundingClientRect(); return [x, y]; })"
    )
    for (x, y), row in zip(points, mine, strict=True):
        for (other_x, other_y), other in zip(points, mine, strict=True):
            if row["peak_bytes"] > other["peak_bytes"]:
                assert x > other_x - 0.01
            if row["step_us"] > other["step_us"]:
                assert y < other_y + 0.01


def test_a_row_goes_back_to_its_configuration_and_undo_returns(live: Page, press: Callable[[Locator], None]) -> None:
    press(live.get_by_test_id("tf-board-0-without fuse"))
    assert live.evaluate("sent.at(-1)") == {"type": "configure", "changes": {"fuse": False}}
    live.evaluate("show(1)")
    live.keyboard.press("Control+z")
    assert live.evaluate("sent.at(-1)") == {"type": "configure", "changes": {"fuse": True}}


def test_a_row_of_another_capture_is_asked_for_and_taken_back(live: Page, written: Written) -> None:
    live.get_by_test_id("tf-board-1-all passes").click()
    sent = live.evaluate("sent.at(-1)")
    assert (sent["type"], sent["capture"], sent["back"]["capture"]) == ("return", 1, 0)
    live.keyboard.press("Control+z")
    back = live.evaluate("sent.at(-1)")
    assert (back["type"], back["capture"], back["back"]["capture"]) == ("return", 0, 1)


def test_two_marked_rows_are_compared(live: Page, written: Written) -> None:
    compare = live.get_by_test_id("tf-board-compare")
    expect(compare).to_be_disabled()
    boxes = rows(live).locator("input")
    boxes.nth(0).check()
    expect(boxes.nth(0)).to_be_focused()
    expect(compare).to_be_disabled()
    boxes.nth(1).press("Space")
    compare.click()
    sent = live.evaluate("sent.at(-1)")
    wanted = [{"capture": row["capture"], "config": row["config"]} for row in written.boards[1]["rows"][:2]]
    assert sent == {"type": "compare", "pair": wanted}
    live.evaluate("board => set('board', board)", written.boards[2])
    found = live.get_by_test_id("tf-comparison")
    expect(found).to_contain_text("all passes → weight 0, saves at most 10 %")
    expect(found).to_contain_text("memory_budget")
    live.evaluate("board => set('board', board)", written.boards[3])
    expect(found).to_contain_text("before → after")
    module = found.locator("[data-module='h.*.mlp.up']")
    expect(module).to_contain_text(re.compile(r"×2.*\+"))
    line = found.locator(".tf-comparison-line").filter(has_text="self.down(F.gelu(self.up(x)))").first
    expect(line).to_be_hidden()
    module.get_by_role("button").click()
    expect(line).to_be_visible()
    found.get_by_test_id("tf-comparison-back").click()
    expect(rows(live).first).to_be_visible()


def test_rows_are_ordered_by_a_column(live: Page, written: Written) -> None:
    live.get_by_test_id("tf-board-sort-peak").click()
    ordered = sorted(written.boards[1]["rows"], key=lambda row: row["peak_bytes"])
    assert rows(live).evaluate_all("all => all.map(one => one.dataset.name)") == [row["name"] for row in ordered]


def test_the_dialog_asks_for_a_sweep(live: Page) -> None:
    live.get_by_test_id("tf-board-sweep").click()
    dialog = live.get_by_test_id("tf-sweep")
    expect(live.get_by_test_id("tf-sweep-count")).to_have_text("15 configurations")
    for name in ("simplify", "freeze", "cat", "pad", "fuse"):
        live.get_by_test_id(f"tf-sweep-pass-{name}").check()
    expect(live.get_by_test_id("tf-sweep-count")).to_contain_text("480 configurations: a sweep takes at most 256")
    expect(live.get_by_test_id("tf-sweep-start")).to_be_disabled()
    for name in ("simplify", "freeze", "pad", "fuse"):
        live.get_by_test_id(f"tf-sweep-pass-{name}").uncheck()
    live.get_by_test_id("tf-sweep-weight-½").uncheck()
    live.get_by_test_id("tf-sweep-start").click()
    expect(dialog).to_have_count(0)
    sent = {"type": "sweep", "weights": [1, 0], "budgets": [None, 0.75, 0.5, 0.25, 0.1], "passes": ["cat"]}
    assert live.evaluate("sent.at(-1)") == sent


def test_the_dialog_of_a_step_that_gathers_parameters_asks_what_becomes_of_them(live: Page, written: Written) -> None:
    live.evaluate("board => set('board', board)", written.boards[1] | {"gathers": True})
    live.get_by_test_id("tf-board-sweep").click()
    expect(live.get_by_test_id("tf-sweep-count")).to_have_text("45 configurations")
    live.get_by_test_id("tf-sweep-reshard-as recorded").uncheck()
    expect(live.get_by_test_id("tf-sweep-count")).to_have_text("30 configurations")
    expect(live.get_by_test_id("tf-sweep-pass-overlap")).to_have_count(0)  # it is asked for by what becomes of them
    live.get_by_test_id("tf-sweep-start").click()
    assert live.evaluate("[sent.at(-1).reshards, sent.at(-1).passes]") == [[True, False], []]


def test_a_sweep_shows_its_progress_and_can_be_cancelled(live: Page) -> None:
    live.evaluate(
        "status => set('status', status)", IDLE | {"busy": "board", "progress": 0.4, "text": "4 of 10: weight 1"}
    )
    expect(live.get_by_test_id("tf-verdict")).to_contain_text("4 of 10: weight 1")
    expect(live.get_by_test_id("tf-board-sweep")).to_be_disabled()
    live.get_by_test_id("tf-cancel").click()
    assert live.evaluate("sent.at(-1)") == {"type": "cancel"}
    error = {"panel": "board", "at": "", "message": "2 configurations of 10 could not be made"}
    live.evaluate("status => set('status', status)", IDLE | {"error": error})
    expect(live.get_by_test_id("tf-error-board")).to_contain_text("could not be made")


def test_a_saved_page_goes_to_what_it_holds_and_says_what_it_does_not(saved: Page) -> None:
    held = saved.get_by_test_id("tf-board-0-without fuse")
    expect(held).to_have_attribute("aria-disabled", "false")
    held.click()
    expect(saved.get_by_test_id("tf-toggle-fuse")).not_to_be_checked()
    expect(saved.locator("[data-testid=tf-board-table] [aria-current=true]")).to_contain_text("without fuse")
    missing = saved.get_by_test_id("tf-board-0-weight 0")
    expect(missing).to_have_attribute("aria-disabled", "true")
    expect(missing).to_have_attribute("title", re.compile("no kernel"))
    expect(saved.get_by_test_id("tf-board-sweep")).to_be_disabled()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [800, 1024, 1440])
def test_every_text_can_be_read_and_nothing_sticks_out(live: Page, written: Written, scheme: Any, width: int) -> None:
    live.set_viewport_size({"width": width, "height": 768})
    live.emulate_media(color_scheme=scheme)
    for board in written.boards:
        live.evaluate("board => set('board', board)", board)
        count, problems = live.evaluate(CONTRAST)
        assert count > 50
        assert problems == []
        assert live.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        content = live.locator(".tf-board-content")
        assert content.evaluate("one => one.scrollWidth <= one.clientWidth")
    live.evaluate("board => set('board', board)", written.boards[1])
    live.get_by_test_id("tf-board-sweep").click()
    assert live.evaluate(CONTRAST)[1] == []


@pytest.mark.parametrize("width", [800, 1024, 1440])
def test_no_board_moves_a_control(live: Page, written: Written, width: int) -> None:
    live.set_viewport_size({"width": width, "height": 768})
    places = """() => [...document.querySelectorAll(
        ".tf-board-bar button, [role=tab], .tf-side input, .tf-verdict button")].filter((one) => one.checkVisibility())
        .map((one) => { const { x, y } = one.getBoundingClientRect(); return [one.dataset.testid, x, y]; })"""
    first = live.evaluate(places)
    assert len(first) > 20
    for board in written.boards:
        live.evaluate("board => set('board', board)", board)
        assert live.evaluate(places) == first


def test_rows_are_seen_between_the_points_and_what_is_known_of_a_selection(saved: Page) -> None:
    """On a page of 1024 by 768 the details lie below the board; nothing on the board moves when they come."""
    saved.set_viewport_size({"width": 1024, "height": 768})
    places = (
        "() => [...document.querySelectorAll('.tf-point, .tf-board-name')].map((one) => one.getBoundingClientRect().y)"
    )
    first = saved.evaluate(places)
    saved.get_by_test_id("tf-pass-fuse").click()
    expect(saved.get_by_test_id("tf-details")).to_contain_text("fuse")
    bottom = saved.locator(".tf-aside").bounding_box()
    assert bottom is not None
    assert bottom["y"] + bottom["height"] <= 768
    heights = rows(saved).evaluate_all("all => all.map((one) => one.getBoundingClientRect().bottom)")
    assert sum(one <= bottom["y"] for one in heights) >= 3
    assert saved.evaluate(places) == first
