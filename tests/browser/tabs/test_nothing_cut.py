"""Nothing is cut without a sign of it, and nothing lies over anything else, in any tab at any width."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.browser.contrast import TABS
from tests.browser.tabs.cut import CUT, HIDDEN_TABS, OVERLAPPING

pytestmark = pytest.mark.browser
WIDTHS = [800, 900, 1000, 1024, 1060, 1160, 1280, 1440]
# What JupyterLab's fonts, or a reader's own, may be wider than those that the view was drawn with.
WIDER = ".tf { letter-spacing: .03em; }"
COUNTS = """() => {
    const { payload } = state;
    const [kernel] = payload.kernels;
    const [note] = payload.notes.length ? payload.notes : [{ kind: "note", text: "a guard" }];
    const [finding] = payload.findings;
    const many = (one, key) => [...Array(128).keys()].map((at) => ({ ...one, [key]: `${one[key]}_${at}` }));
    const kernels = many(kernel, "name").map((one) => ({ ...one, ops: [] }));
    const findings = payload.findings.concat(many(finding, "key"));
    set("payload", { ...payload, kernels, notes: many(note, "text"), findings });
}"""


@pytest.fixture(scope="module")
def opened(browser: Browser, whole_step: Path) -> Iterator[Page]:
    with shown(browser, whole_step) as page:
        yield page


@contextmanager
def shown(browser: Browser, path: Path) -> Iterator[Page]:
    page = browser.new_page()
    page.goto(path.as_uri())
    page.wait_for_selector("[data-testid=tf-root][data-ready='1']")
    yield page
    page.close()


@pytest.fixture(scope="module", params=WIDTHS)
def page(request: pytest.FixtureRequest, opened: Page, reopen: Callable[[Page], None]) -> Page:
    """With a view that was made at this width."""
    opened.set_viewport_size({"width": request.param, "height": 900})
    reopen(opened)
    return opened


@pytest.mark.parametrize("tab", TABS)
def test_no_word_is_cut_and_nothing_overlaps(page: Page, tab: str) -> None:
    page.get_by_test_id(f"tf-tab-{tab}").click()
    assert page.evaluate(CUT) == []
    assert page.evaluate(OVERLAPPING) == []
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.fixture(scope="module")
def other(browser: Browser, whole_step: Path) -> Iterator[Page]:
    """One beside `opened`, whose view stays as it is while a width is looked at."""
    with shown(browser, whole_step) as page:
        yield page


@pytest.mark.parametrize("width", [*WIDTHS, 1100, 700])
def test_all_tabs_are_seen_whatever_they_count(other: Page, go_live: Callable[[Page], None], width: int) -> None:
    other.set_viewport_size({"width": width, "height": 900})
    go_live(other)
    other.evaluate(COUNTS)
    wider = other.add_style_tag(content=WIDER)
    assert other.evaluate(HIDDEN_TABS) == []
    assert other.evaluate(OVERLAPPING) == []
    wider.evaluate("one => one.remove()")


# Where the canvas of the timeline is asked to write what the peak of a program is, on the screen.
PEAKS = """() => {
    window.peaks = {};
    const write = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
        if (/^peak .* · /.test(text)) {
            const frame = this.canvas.getBoundingClientRect();
            const scale = this.getTransform().a / devicePixelRatio;
            const { width } = this.measureText(text);
            window.peaks[text] = { left: frame.left + x * scale, y: frame.top + y * scale, width };
        }
        return write.call(this, text, x, y);
    };
}"""


def test_the_peak_and_the_line_that_is_dragged_are_both_read(browser: Browser, whole_step: Path) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.add_init_script(f"({PEAKS})()")
    page.goto(whole_step.as_uri())
    page.wait_for_selector("[data-testid=tf-root][data-ready='1']")
    page.get_by_test_id("tf-tab-timeline").click()
    label = page.locator(".tf-memory-label").bounding_box()
    assert label is not None
    page.wait_for_function("Object.keys(window.peaks).length > 0")
    for text, at in page.evaluate("window.peaks").items():
        beside = at["left"] + at["width"] < label["x"] or at["left"] > label["x"] + label["width"]
        assert beside or abs(at["y"] - label["y"] - label["height"] / 2) > 12, text
    page.close()


@pytest.mark.parametrize("tab", ["trace", "layers", "kernels", "board"])
def test_headings_are_whole(page: Page, tab: str) -> None:
    """Also without dots: a heading that is shortened names no column."""
    page.get_by_test_id(f"tf-tab-{tab}").click()
    headings = page.locator(".tf-tab-body :is(th[scope=col], [role=columnheader]):visible")
    assert headings.count() > 3
    short = """all => all.filter((one) => one.clientWidth > 8 && one.scrollWidth > one.clientWidth + 1)
        .map((one) => one.textContent)"""
    assert headings.evaluate_all(short) == []
