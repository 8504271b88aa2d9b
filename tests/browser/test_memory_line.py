"""The memory line in Chromium: dragged or moved by keys it asks for a budget on the peak, and says what came of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Locator, Page, expect

import tracefuse
from tests.browser.contrast import CONTRAST, SWATCHES
from tracefuse.demo import GPT, batch
from tracefuse.optimizers.liveness import KINDS
from tracefuse.widgets.html import page as html_page

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without a budget, with one that is met, and with one that cannot be."""
    torch.manual_seed(0)
    model, data = GPT(layers=3, width=32, heads=2, vocab=61, length=32), batch(61, 4, 32)
    explorer = tracefuse.capture(lambda: model(*data).backward()).explore()
    payloads = [explorer.payload]
    peak = explorer.payload["summary"]["peak_bytes"][1]
    for share in (0.75, 0.1):
        explorer.configure({"peak_budget": int(share * peak)})
        payloads.append(explorer.payload)
    path = tmp_path_factory.mktemp("line") / "view.html"
    path.write_text(html_page(payloads, "line", None, explorer.board), encoding="utf-8")
    return path


@pytest.fixture
def saved(open_saved: Callable[[Path], Page], written: Path, painted: Callable[[Page], None]) -> Page:
    page = open_saved(written)
    page.get_by_test_id("tf-tab-timeline").click()
    painted(page)
    return page


@pytest.fixture
def live(saved: Page, go_live: Callable[[Page], None], painted: Callable[[Page], None]) -> Page:
    go_live(saved)
    saved.get_by_test_id("tf-tab-timeline").click()
    painted(saved)
    return saved


def line(page: Page) -> Locator:
    return page.get_by_test_id("tf-memory-line")


def drag(page: Page, by: float) -> None:
    box = line(page).bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 40, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + 40, box["y"] + box["height"] / 2 + by, steps=4)
    page.mouse.up()


def test_dragging_it_down_asks_for_a_budget_on_the_peak(live: Page) -> None:
    peak = live.evaluate("state.payload.summary.peak_bytes[1]")
    expect(line(live)).to_contain_text("a budget on the peak")
    drag(live, 30)
    sent = live.evaluate("sent.at(-1)")
    assert sent["type"] == "configure"
    assert sent["changes"].keys() == {"peak_budget"}
    assert 0.2 * peak < sent["changes"]["peak_budget"] < 0.95 * peak


def test_a_click_without_a_drag_asks_for_nothing(live: Page) -> None:
    line(live).click(position={"x": 40, "y": 6})
    assert live.evaluate("sent.filter((one) => one.type === 'configure')") == []


def test_the_keyboard_moves_it_and_enter_asks(live: Page) -> None:
    top = live.evaluate("state.payload.summary.peak_bytes[0]")
    peak = live.evaluate("state.payload.summary.peak_bytes[1]")
    line(live).focus()
    for _ in range(3):
        live.keyboard.press("PageDown")
    expect(line(live)).to_have_attribute("aria-valuetext", re.compile("^peak at most"))
    live.keyboard.press("Enter")
    asked = live.evaluate("sent.at(-1).changes.peak_budget")
    assert asked == pytest.approx(peak - 0.3 * top, abs=2)
    live.keyboard.press("ArrowUp")
    live.keyboard.press("Escape")
    expect(line(live)).to_have_attribute("aria-valuetext", re.compile("^no budget"))
    count = live.evaluate("sent.length")
    live.keyboard.press("ArrowDown")  # asked for without Enter, once nothing more is pressed
    live.wait_for_function("count => sent.length > count", arg=count)
    assert live.evaluate("sent.at(-1).changes.peak_budget") == pytest.approx(peak - 0.01 * top, abs=2)
    error = {"panel": "passes", "at": "remat", "message": "remat is refused"}
    live.evaluate("error => set('status', { ...state.status, error })", error)
    expect(line(live)).to_have_attribute("aria-valuetext", re.compile("^no budget"))


def test_what_is_recomputed_appears_and_undo_takes_it_back(live: Page, painted: Callable[[Page], None]) -> None:
    before = line(live).bounding_box()
    drag(live, 20)
    live.evaluate("show(1)")
    painted(live)
    budget = live.evaluate("state.payload.config.peak_budget")
    assert live.evaluate("state.payload.summary.peak_bytes[1]") <= budget
    expect(line(live)).to_have_attribute("aria-valuenow", str(budget))
    count = live.evaluate("state.payload.memory.after.again.length")
    assert count > 0
    expect(line(live)).to_contain_text(f"{count} ops computed again")
    after = line(live).bounding_box()
    assert before is not None
    assert after is not None
    assert after["y"] > before["y"] + 5
    live.keyboard.press("Control+z")
    assert live.evaluate("sent.at(-1)") == {"type": "configure", "changes": {"peak_budget": None}}


def test_what_cannot_be_met_is_said_at_the_line(live: Page, painted: Callable[[Page], None]) -> None:
    live.evaluate("show(2)")
    painted(live)
    expect(line(live)).to_contain_text("cannot be met: the least found is")
    expect(line(live)).to_have_attribute("title", re.compile(r"are alive.*pass peak_budget=\d+ or more"))
    line(live).focus()
    live.keyboard.press("Delete")
    live.keyboard.press("Enter")
    assert live.evaluate("sent.at(-1).changes") == {"peak_budget": None}


def test_without_a_kernel_it_is_still_and_says_why(saved: Page) -> None:
    expect(line(saved)).to_have_attribute("aria-disabled", "true")
    expect(line(saved)).to_have_attribute("title", re.compile("no kernel"))
    expect(line(saved)).to_contain_text("a budget needs a kernel: run it in a notebook")
    expect(line(saved)).not_to_contain_text("drag")
    before = line(saved).bounding_box()
    drag(saved, 20)
    line(saved).press("PageDown")
    assert line(saved).bounding_box() == before
    expect(line(saved)).to_have_attribute("aria-valuetext", re.compile("^no budget"))


def test_where_remat_is_off_it_is_still_too(live: Page) -> None:
    live.evaluate("""() => { const { payload } = state;
        set("payload", { ...payload, config: { ...payload.config, remat: null } }); }""")
    expect(line(live)).to_contain_text("a budget needs remat, which is off")
    drag(live, 20)
    assert live.evaluate("sent.filter((one) => one.type === 'configure')") == []


def test_it_ends_at_the_least_peak_and_says_so(live: Page, painted: Callable[[Page], None]) -> None:
    least = live.evaluate("state.payload.summary.least_peak")
    assert 0.1 * live.evaluate("state.payload.summary.peak_bytes[1]") < least
    drag(live, 400)
    assert live.evaluate("sent.at(-1).changes.peak_budget") == least
    line(live).focus()
    live.keyboard.press("Home")
    expect(line(live)).to_contain_text("no choice of what is recomputed reaches less")
    expect(line(live)).to_have_attribute("aria-valuemin", str(least))
    live.keyboard.press("Escape")
    live.evaluate("show(2)")  # a budget that is missed: from then on the least that was found is known
    painted(live)
    found = live.evaluate("state.payload.summary.peak_bytes[1]")
    live.evaluate("show(0)")
    painted(live)
    line(live).focus()
    live.keyboard.press("Home")
    expect(line(live)).to_contain_text("the least that was found")
    live.keyboard.press("Enter")
    assert live.evaluate("sent.at(-1).changes.peak_budget") == found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_swatch_of_a_legend_can_be_seen(live: Page, scheme: Any, painted: Callable[[Page], None]) -> None:
    live.emulate_media(color_scheme=scheme)
    painted(live)
    live.locator(".tf-timeline-more summary").evaluate_all(
        "all => all.forEach((one) => { one.parentElement.open = true; })"
    )
    # Every purpose that there is, whether or not this step has it.
    live.evaluate(
        """all => document.querySelector(".tf-kinds").append(...all.map((id) => {
            const made = document.createElement("span");
            made.className = "tf-purpose";
            made.innerHTML = `<i class="tf-purpose-${id}"></i>`;
            return made;
        }))""",
        list(KINDS),
    )
    for tab in ("timeline", "layers", "graph", "board"):
        live.get_by_test_id(f"tf-tab-{tab}").click()
        found = live.evaluate(SWATCHES)
        assert found, tab
        assert [one for one in found if one[1] < 3] == [], tab
        if tab == "timeline":
            fills = "all => all.map((one) => getComputedStyle(one).backgroundColor)"
            assert "rgba(0, 0, 0, 0)" not in live.locator(".tf-purpose i").evaluate_all(fills)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [800, 1024, 1440])
def test_it_can_be_read_and_moves_nothing(live: Page, scheme: Any, width: int, painted: Callable[[Page], None]) -> None:
    live.set_viewport_size({"width": width, "height": 768})
    live.emulate_media(color_scheme=scheme)
    places = """() => [...document.querySelectorAll(".tf-timeline-bar button, [role=tab], .tf-side input, .tf-verdict button")]
        .filter((one) => one.checkVisibility()).map((one) => one.getBoundingClientRect()).map(({ x, y }) => [x, y])"""
    painted(live)
    first = live.evaluate(places)
    for number in (0, 1, 2):
        live.evaluate(f"show({number})")
        painted(live)
        assert live.evaluate(CONTRAST)[1] == []
        assert live.evaluate(places) == first
        box, stage = line(live).bounding_box(), live.locator(".tf-stage").bounding_box()
        assert box is not None
        assert stage is not None
        assert stage["x"] <= box["x"] < box["x"] + box["width"] <= stage["x"] + stage["width"] + 1
    live.get_by_test_id("tf-timeline").focus()
    live.keyboard.press("Tab")
    expect(line(live)).to_be_focused()
    outline = line(live).evaluate("one => getComputedStyle(one).outlineStyle")
    assert outline != "none"
