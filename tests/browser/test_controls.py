"""Controls that no other file presses, on a saved page, by mouse and by keyboard; every control is reached by Tab."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch
from playwright.sync_api import Browser, Locator, Page, expect

import tracefuse
from tests.browser.contrast import TABS
from tracefuse.demo import GPT, batch
from tracefuse.widgets.html import page as html_page
from tracefuse.widgets.payload.program import payload
from tracefuse.widgets.payload.timeline import timeline_record

pytestmark = pytest.mark.browser
# Notes where the keyboard is; false once it has left the view.
NOTE = """() => {
    const at = document.activeElement;
    if (!at.closest("[data-testid=tf-root]")) return false;
    at.dataset.reached = "";
    return true;
}"""
# What Tab must reach and has not: all that takes the keyboard, but for what arrows reach within a list.
MISSED = """() => {
    const kinds = "button, input, select, textarea, summary, canvas, [tabindex]";
    const all = [...document.querySelectorAll(`[data-testid=tf-root] :is(${kinds})`)];
    const stops = all.filter((one) => one.tabIndex >= 0 && !one.disabled && !one.matches(".tf-switch"));
    const missed = stops.filter((one) => one.checkVisibility() && one.dataset.reached === undefined);
    return missed.map((one) => one.outerHTML.slice(0, 120));
}"""
MOST_STOPS = 300
CLIPBOARD = "() => { navigator.clipboard.writeText = async (text) => { window.copied = text; }; }"
Press = Callable[[Locator], None]


@pytest.fixture(scope="module")
def opened(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    torch.manual_seed(0)
    model, data = GPT(layers=2, width=32, heads=2, vocab=61, length=16), batch(61, 2, 12)
    variant = tracefuse.capture(lambda: model(*data).backward()).optimize()
    timeline = timeline_record(variant.timeline(), as_base64=True)
    path = tmp_path_factory.mktemp("controls") / "view.html"
    path.write_text(html_page([payload(variant, name="c")], "controls", timeline), encoding="utf-8")
    page = browser.new_page()
    errors: list[str] = []
    requests: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector("[data-testid=tf-root][data-ready='1']")
    yield page
    page.close()
    assert errors == []
    assert [url for url in requests if not url.startswith("blob:")] == [path.as_uri()]


@pytest.fixture
def page(opened: Page, reopen: Callable[[Page], None]) -> Page:
    opened.set_viewport_size({"width": 1300, "height": 1000})
    reopen(opened)
    return opened


def open_tab(page: Page, name: str) -> None:
    page.get_by_test_id(f"tf-tab-{name}").click()


def name_of(page: Page) -> str:
    return str(page.get_by_test_id("tf-details").locator(".tf-name").text_content())


# --- the whole --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tab", TABS)
def test_tab_reaches_every_control(page: Page, tab: str) -> None:
    open_tab(page, tab)
    page.get_by_test_id("tf-root").focus()
    for _ in range(MOST_STOPS):
        page.keyboard.press("Tab")
        if not page.evaluate(NOTE):
            break
    assert page.evaluate(MISSED) == []


@pytest.mark.parametrize("width", [480, 700, 1000, 1300, 2000])
def test_no_panel_sticks_out_at_any_width(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    for tab in TABS:
        page.get_by_test_id(f"tf-tab-{tab}").dispatch_event("click")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), tab


def test_a_tab_opens_its_panel(page: Page, press: Press) -> None:
    for tab in (*TABS[1:], TABS[0]):
        control = page.get_by_test_id(f"tf-tab-{tab}")
        press(control)
        expect(control).to_have_attribute("aria-selected", "true")
        expect(page.locator("[role=tab][aria-selected=true]")).to_have_count(1)


def test_arrows_walk_the_tabs_and_each_digit_opens_one(page: Page) -> None:
    selected = page.locator("[role=tab][aria-selected=true]")
    page.get_by_test_id("tf-tab-trace").focus()
    for key, tab in (("ArrowRight", "layers"), ("End", "notes"), ("ArrowLeft", "board"), ("Home", "trace")):
        page.keyboard.press(key)
        expect(page.get_by_test_id(f"tf-tab-{tab}")).to_be_focused()
        expect(selected).to_have_attribute("data-testid", f"tf-tab-{tab}")
    for digit, tab in enumerate(TABS[:9], 1):
        page.keyboard.press(str(digit))
        expect(selected).to_have_attribute("data-testid", f"tf-tab-{tab}")


def test_the_list_of_keys_is_closed(page: Page, press: Press) -> None:
    page.get_by_test_id("tf-root").press("?")
    press(page.get_by_test_id("tf-help-close"))
    expect(page.get_by_test_id("tf-help")).to_have_count(0)


# --- code and details -------------------------------------------------------------------------------------------------


def test_buttons_walk_the_changes(page: Page, press: Press) -> None:
    open_tab(page, "code")
    place = page.locator(".tf-jumps")
    for control, said in (("next", r"1 of \d+"), ("next", r"2 of \d+"), ("previous", r"1 of \d+")):
        press(page.get_by_test_id(f"tf-{control}-change"))
        expect(place).to_contain_text(re.compile(said))
    expect(page.locator(".tf-line.tf-jump")).to_be_in_viewport()


def test_what_a_pass_did_is_closed(page: Page, press: Press) -> None:
    open_tab(page, "code")
    press(page.get_by_test_id("tf-toggle-decompose"))  # this page holds no other choice: nothing is switched
    strip, close = page.get_by_test_id("tf-strip"), page.get_by_test_id("tf-strip").locator(".tf-close")
    expect(strip).to_contain_text("What decompose did")
    press(close)
    expect(strip).not_to_contain_text("What")
    expect(close).to_be_hidden()


def test_the_details_lead_to_what_they_name(page: Page, press: Press) -> None:
    open_tab(page, "code")
    page.locator("[data-testid=tf-code-forward] .tf-line:has(.tf-kernel) .tf-value").first.click()
    first, reads = name_of(page), page.get_by_test_id("tf-details").locator(".tf-fact", has_text="reads").first
    chip = reads.locator(".tf-chip").first
    wanted = str(chip.text_content())
    press(chip)
    expect(page.get_by_test_id("tf-details").locator(".tf-name")).to_have_text(wanted)
    page.keyboard.press("[")
    expect(page.get_by_test_id("tf-details").locator(".tf-name")).to_have_text(first)
    kernel = page.get_by_test_id("tf-details-kernel")
    name = str(kernel.text_content())
    press(kernel)
    expect(page.get_by_test_id(f"tf-kernel-{name}")).to_be_focused()
    press(page.get_by_test_id("tf-clear"))
    expect(page.get_by_test_id("tf-clear")).to_have_count(0)


def test_what_can_be_copied_is(page: Page, press: Press) -> None:
    page.evaluate(CLIPBOARD)
    press(page.locator(".tf-call .tf-chip"))
    page.wait_for_function("window.copied === 'c.optimize()'")
    open_tab(page, "findings")
    fix = page.locator(".tf-finding .tf-block").first
    press(fix.locator(".tf-copy"))
    page.wait_for_function("text => window.copied === text", arg=fix.locator("pre").text_content())
    open_tab(page, "kernels")
    press(page.locator(".tf-disclose").first)
    press(page.locator(".tf-kernel-source:visible .tf-copy"))
    page.wait_for_function("window.copied.includes('@triton.jit')")


# --- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tab", "control"),
    [
        *(
            ("layers", f"layers-by-{column}")
            for column in ("path", "type", "ratio", "share", "change", "saved", "cause")
        ),
        *(("kernels", f"sort-{key}") for key in ("name", "bytes", "time")),
    ],
)
def test_every_column_sorts_both_ways(page: Page, press: Press, tab: str, control: str) -> None:
    page.set_viewport_size({"width": 2000, "height": 1000})  # a narrow table leaves columns out
    open_tab(page, tab)
    heading = page.get_by_test_id(f"tf-{control}")
    orders = []
    for _ in range(2):
        press(heading)
        expect(heading).to_be_focused()
        orders.append(heading.locator("..").get_attribute("aria-sort"))
    assert set(orders) == {"ascending", "descending"}


# --- graph and timeline -----------------------------------------------------------------------------------------------


def height(page: Page) -> float:
    """Of the first layer's attention on the screen."""
    ends = ["h.0.norm_1|forward", "h.0.norm_2|forward"]
    first, last = (page.get_by_test_id("tf-graph").evaluate("(one, name) => one.locate(name)", name) for name in ends)
    return last["y"] - first["y"]


def test_the_graph_is_zoomed_and_fitted(page: Page, press: Press, painted: Callable[[Page], None]) -> None:
    open_tab(page, "graph")
    painted(page)
    whole = height(page)
    for control, expected in (("in", 1.25), ("in", 1.5625), ("out", 1.25), ("fit", 1)):
        press(page.get_by_test_id(f"tf-graph-{control}"))
        assert height(page) == pytest.approx(expected * whole, rel=0.01)


def test_the_graphs_modules_are_opened_and_closed(page: Page, press: Press) -> None:
    open_tab(page, "graph")
    depth = page.get_by_test_id("tf-graph-depth")
    before = int(str(depth.text_content()).split()[1])
    press(page.get_by_test_id("tf-graph-shallower"))
    expect(depth).to_have_text(f"depth {before - 1}")
    press(page.get_by_test_id("tf-graph-deeper"))
    expect(depth).to_have_text(f"depth {before}")
    graph = page.get_by_test_id("tf-graph")
    for control, is_apart in (("expand", True), ("collapse", False)):
        press(page.get_by_test_id(f"tf-graph-{control}"))
        one, other = (graph.evaluate("(one, name) => one.locate(name)", name) for name in ("gelu", "addmm"))
        assert (one != other) == is_apart, "ops of a closed module are where that is"


@pytest.mark.parametrize("box", ["views", "removed", "links"])
def test_a_box_of_the_graph_shows_more(page: Page, press: Press, painted: Callable[[Page], None], box: str) -> None:
    open_tab(page, "graph")
    page.get_by_test_id("tf-graph-expand").click()

    def drawn() -> str:
        painted(page)
        return page.get_by_test_id("tf-graph").evaluate("one => one.toDataURL()")

    before = drawn()
    press(page.get_by_test_id(f"tf-graph-{box}"))
    assert drawn() != before


@pytest.mark.parametrize(
    ("tab", "control", "values"),
    [("graph", "tf-graph-colouring", ("kernel", "time")), ("timeline", "tf-timeline-source", ("measured", "modelled"))],
)
def test_a_choice_is_made_with_the_keyboard(page: Page, tab: str, control: str, values: tuple[str, str]) -> None:
    open_tab(page, tab)
    choice = page.get_by_test_id(control)
    for key, value in (("ArrowDown", values[1]), ("ArrowUp", values[0])):
        choice.press(key)
        expect(choice).to_have_value(value)


def test_all_of_the_time_axis_comes_back(page: Page, press: Press, painted: Callable[[Page], None]) -> None:
    open_tab(page, "timeline")

    def end() -> float:
        painted(page)
        return page.get_by_test_id("tf-timeline").evaluate("one => Number(one.dataset.to)")

    whole = end()
    press(page.get_by_test_id("tf-timeline-in"))
    assert end() < whole
    press(page.get_by_test_id("tf-timeline-all"))
    assert end() == whole
    press(page.get_by_test_id("tf-timeline-measure"))
    expect(page.get_by_test_id("tf-timeline-measure")).to_have_attribute("aria-pressed", "true")
