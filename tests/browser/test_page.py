"""The saved page, opened from a file with no server behind it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser, Locator, Page, expect

import tracefuse
from tests.browser.contrast import TABS
from tracefuse.config.names import PASSES
from tracefuse.demo import GPT, batch
from tracefuse.widgets.html import write_html

pytestmark = pytest.mark.browser
NASTY = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = GPT(layers=1, width=32, heads=2, vocab=61, length=16, dropout=0.1)
    model.register_parameter(NASTY, torch.nn.Parameter(torch.ones(())))
    tokens, targets = batch(61, 2, 12)
    with tracefuse.capture() as c:
        loss = model(tokens, targets) * getattr(model, NASTY)
        loss.backward()
    return write_html(c.optimize(), tmp_path_factory.mktemp("page") / "view.html")


@pytest.fixture
def page(browser: Browser, written: Path) -> Iterator[Page]:
    opened = browser.new_page(viewport={"width": 1300, "height": 1000})
    errors: list[str] = []
    requests: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("request", lambda request: requests.append(request.url))
    opened.goto(written.as_uri())
    opened.wait_for_selector("[data-testid=tf-root][data-ready='1']")
    opened.get_by_test_id("tf-tab-code").click()
    yield opened
    opened.close()
    assert errors == []
    assert [url for url in requests if not url.startswith("blob:")] == [written.as_uri()]


def shown(page: Page) -> str:
    return "\n".join(page.locator(".tf-code .tf-line").all_text_contents())


@pytest.mark.parametrize("name", ["simplify", "remat", "fuse"])
def test_a_switch_moves_to_another_configuration(page: Page, name: str, press: Callable[[Locator], None]) -> None:
    before = shown(page)
    press(page.get_by_test_id(f"tf-toggle-{name}"))
    expect(page.get_by_test_id(f"tf-pass-{name}")).to_have_class(re.compile("tf-off"))
    assert shown(page) != before
    press(page.get_by_test_id(f"tf-toggle-{name}"))
    expect(page.get_by_test_id(f"tf-pass-{name}")).not_to_have_class(re.compile("tf-off"))
    assert shown(page) == before


def test_what_the_page_does_not_hold_it_says(page: Page, press: Callable[[Locator], None]) -> None:
    press(page.get_by_test_id("tf-toggle-fuse"))
    press(page.get_by_test_id("tf-toggle-cat"))
    expect(page.get_by_test_id("tf-error-passes")).to_contain_text("run it in a notebook")
    expect(page.get_by_test_id("tf-toggle-cat")).to_be_checked()


def test_a_switch_that_is_refused_is_no_choice(page: Page) -> None:
    page.get_by_test_id("tf-toggle-fuse").click()
    page.get_by_test_id("tf-undo").click()
    page.get_by_test_id("tf-toggle-fuse").click()
    page.get_by_test_id("tf-undo").click()
    page.get_by_test_id("tf-redo").click()
    expect(page.get_by_test_id("tf-toggle-fuse")).not_to_be_checked()
    for _ in range(2):  # the same answer once more puts the switch back too
        page.get_by_test_id("tf-toggle-cat").click()
        expect(page.get_by_test_id("tf-pass-cat").get_by_role("alert")).to_have_count(1)
        expect(page.get_by_test_id("tf-toggle-cat")).to_be_checked()
    page.get_by_test_id("tf-undo").click()
    expect(page.get_by_test_id("tf-toggle-fuse")).to_be_checked()
    expect(page.get_by_test_id("tf-undo")).to_be_disabled()
    expect(page.get_by_test_id("tf-redo")).to_be_enabled()


def test_its_board_is_what_it_holds_and_says_what_needs_a_kernel(page: Page) -> None:
    page.get_by_test_id("tf-tab-board").click()
    rows = page.get_by_test_id("tf-board-table").locator("tbody tr")
    assert rows.count() > len(PASSES)
    expect(page.get_by_test_id("tf-plot").locator(".tf-point")).to_have_count(rows.count())
    said = page.get_by_test_id("tf-board-said")
    expect(said).to_contain_text(re.compile(rf"^{rows.count()} stored.*Sweep and Compare need a kernel"))
    expect(rows.first.locator("input")).to_be_disabled()
    page.get_by_test_id("tf-board-0-without fuse").click()
    expect(page.get_by_test_id("tf-toggle-fuse")).not_to_be_checked()
    expect(page.locator("[data-testid=tf-board-table] [aria-current=true]")).to_contain_text("without fuse")


def test_a_switch_that_changes_nothing_is_not_offered(page: Page) -> None:
    page.get_by_test_id("tf-toggle-fuse").click()
    expect(page.get_by_test_id("tf-pass-decompose")).to_contain_text("off: needs fuse")
    note = page.get_by_test_id("tf-pass-remat").locator(".tf-info")
    expect(note).to_have_attribute("title", re.compile("without fuse, what it recomputes"))
    switch = page.get_by_test_id("tf-toggle-decompose")
    expect(switch).to_have_attribute("aria-disabled", "true")
    switch.press("Space")
    expect(switch).not_to_be_checked()
    page.get_by_test_id("tf-toggle-fuse").click()
    expect(switch).to_have_attribute("aria-disabled", "false")
    expect(page.get_by_test_id("tf-toggle-decompose")).to_be_checked()


def test_its_answer_stands_beside_the_switch(page: Page) -> None:
    page.get_by_test_id("tf-toggle-fuse").click()
    page.get_by_test_id("tf-toggle-cat").click()
    expect(page.get_by_test_id("tf-pass-cat").get_by_role("alert")).to_have_count(1)
    expect(page.get_by_role("alert")).to_have_count(1)


def test_the_input_weights_of_remat_are_held(page: Page) -> None:
    weights = page.get_by_test_id("tf-remat-weight")
    before = shown(page)
    for weight in ("0", "1"):
        weights.select_option(weight)
        expect(weights).to_have_value(weight)
        expect(page.get_by_test_id("tf-error-passes")).to_have_count(0)
    weights.select_option("0.5")
    assert shown(page) == before


@pytest.mark.parametrize("control", ["tf-freeze", "tf-memory-budget", "tf-option-remat-longest_chain"])
def test_a_control_with_nothing_to_choose_says_so(page: Page, control: str) -> None:
    expect(page.get_by_test_id(control)).to_be_disabled()
    title = page.get_by_test_id(control).locator("..").get_attribute("title")
    assert title is not None
    assert "run it in a notebook" in title


@pytest.mark.parametrize("width", [600, 1300])
def test_types_and_bytes_stay_visible_however_long_a_line_is(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    pane = page.get_by_test_id("tf-code-forward")
    assert pane.evaluate("e => e.scrollWidth > e.clientWidth")
    edges = pane.evaluate(
        "e => [...e.querySelectorAll('.tf-types')].slice(0, 9).map(t => t.getBoundingClientRect().right)"
    )
    right = pane.evaluate("e => e.getBoundingClientRect().left + e.clientWidth")
    assert max(edges) <= right + 1


def test_strings_of_the_session_are_text(page: Page) -> None:
    page.locator("[data-testid=tf-code-forward] .tf-inputs summary").click()
    expect(page.get_by_test_id("tf-code-forward")).to_contain_text(NASTY)
    assert page.locator("img").count() == 0


@pytest.mark.parametrize("width", [480, 760, 1300, 2000])
def test_nothing_sticks_out_at_any_width(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    for name in ("tf-verdict", "tf-code-forward", "tf-code-backward", "tf-details"):
        box = page.get_by_test_id(name).bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_background(page: Page, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    contrast = """() => {
        const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        const luminance = (color) => {
            const [r, g, b] = color.match(/[\\d.]+/g).map((v) => linear(v / 255));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const style = getComputedStyle(document.querySelector(".tf-frame"));
        const [text, back] = [luminance(style.color), luminance(style.backgroundColor)];
        return (Math.max(text, back) + 0.05) / (Math.min(text, back) + 0.05);
    }"""
    assert page.evaluate(contrast) > 7


def test_everything_can_be_reached_with_the_keyboard(page: Page) -> None:
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement?.dataset?.testid ?? ''"))
    assert {"tf-take", "tf-diff", "tf-only-changes", "tf-code-forward", "tf-code-backward"} <= reached
    (way_in,) = (name for name in reached if name.startswith("tf-toggle-"))
    page.get_by_test_id(way_in).press("Home")
    walked = []
    for _ in PASSES:
        walked.append(page.evaluate("document.activeElement.dataset.testid"))
        page.keyboard.press("ArrowDown")
    assert walked == [f"tf-toggle-{name}" for name in PASSES]


def test_a_kernels_call_leads_to_its_source(page: Page) -> None:
    call = page.locator("[data-testid=tf-code-forward] [data-kernel]").first
    name = str(call.get_attribute("data-kernel"))
    call.click()
    expect(page.get_by_test_id(f"tf-kernel-{name}")).to_be_focused()
    expect(page.get_by_test_id("tf-kernel-text").locator("visible=true")).to_contain_text(f"def {name}_kernel")


def test_a_browser_that_cannot_unpack_says_so(browser: Browser, written: Path) -> None:
    page = browser.new_page()
    page.add_init_script("delete globalThis.DecompressionStream")
    page.goto(written.as_uri())
    expect(page.get_by_text("This browser cannot unpack the page")).to_be_visible()
    page.close()


# --- a link -----------------------------------------------------------------------------------------------------------


def test_the_address_is_a_link_to_what_is_open_and_selected(page: Page, browser: Browser) -> None:
    page.get_by_test_id("tf-toggle-fuse").click()
    page.get_by_test_id("tf-tab-trace").click()
    page.get_by_test_id("tf-tab-graph").click()
    page.locator("[data-testid=tf-search] input, .tf-search input").first.fill("softmax")
    page.keyboard.press("Enter")
    expect(page.get_by_test_id("tf-details")).to_contain_text("softmax")
    selected = page.evaluate("new URLSearchParams(location.hash.slice(1)).get('value')")
    assert selected
    other = browser.new_page()
    other.goto(page.url)
    other.wait_for_selector("[data-testid=tf-root][data-ready='1']")
    expect(other.get_by_test_id("tf-tab-graph")).to_have_attribute("aria-selected", "true")
    expect(other.get_by_test_id("tf-toggle-fuse")).not_to_be_checked()
    expect(other.get_by_test_id("tf-details")).to_contain_text(selected)
    other.evaluate("location.hash = 'tab=layers'")
    expect(other.get_by_test_id("tf-tab-layers")).to_have_attribute("aria-selected", "true")
    expect(other.get_by_test_id("tf-toggle-fuse")).to_be_checked()
    other.close()


def test_every_panel_works_on_what_is_stored(page: Page) -> None:
    for tab in TABS:
        page.get_by_test_id(f"tf-tab-{tab}").click()
        expect(page.get_by_test_id(f"tf-tab-{tab}")).to_have_attribute("aria-selected", "true")
        body = page.locator(".tf-tab-body > *")
        box = body.bounding_box()
        assert box is not None
        assert box["height"] > 100
