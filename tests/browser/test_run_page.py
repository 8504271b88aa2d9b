"""The page of a run of one's own: timeline with idle time, findings, text; no trace, no kernel."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, Locator, Page, expect

import tracefuse
from tracefuse.profiling.lanes import run_lanes
from tracefuse.timeline.lanes import idle_us
from tracefuse.timeline.replayed import Timeline
from tracefuse.widgets.html import page as html_page
from tracefuse.widgets.payload.program import payload
from tracefuse.widgets.payload.timeline import timeline_record

pytestmark = pytest.mark.browser

FILES = Path(__file__).parents[1] / "timelines"


@pytest.fixture(scope="module")
def opened(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory, watch_of: Callable[[str], Any]
) -> Iterator[Callable[[str], Page]]:
    """`opened(name)` is the page of that recorded timeline; at the end no page has had an error, or asked for anything."""
    folder, watch, pages = tmp_path_factory.mktemp("run"), watch_of("file:"), []

    def open_page(name: str) -> Page:
        path = tracefuse.load_timeline(FILES / f"{name}.json.gz", window="window").save_html(folder / f"{name}.html")
        page = browser.new_page(viewport={"width": 1300, "height": 1000})
        pages.append(page)
        watch.on(page)
        page.goto(path.as_uri())
        page.wait_for_selector("[data-testid=tf-timeline][data-to]")
        return page

    yield open_page
    for page in pages:
        page.close()
    watch.check()


def canvas(page: Page) -> Locator:
    return page.get_by_test_id("tf-timeline")


def length(page: Page) -> float:
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return canvas(page).evaluate("(one) => one.dataset.to - one.dataset.from")


def test_it_says_where_it_is_from_and_what_the_gpu_was_idle_for(opened: Callable[[str], Page]) -> None:
    page = opened("item_with_stack")
    expect(page.get_by_test_id("tf-timeline-said")).to_have_text(
        "measured by the profiler that wrote item_with_stack.json.gz, on NVIDIA H200"
    )
    idle = page.get_by_test_id("tf-idle")
    expect(idle.locator("summary")).to_have_text(
        re.compile(r"GPU idle for 36 % of the run, 318 µs of it by: synchronization")
    )
    rows = idle.locator("tbody tr").all_inner_texts()
    assert [row.split("\t")[1] for row in rows][:2] == ["synchronization", "end of the window"]
    assert "the host waited for the GPU" in rows[0]
    expect(page.get_by_test_id("tf-finding-host-sync")).to_contain_text("run, at record_timelines.py:57")
    expect(page.get_by_test_id("tf-timeline-source")).to_have_count(0)
    expect(page.get_by_test_id("tf-alive")).to_be_hidden()


def test_a_cause_shows_its_longest_gap_by_mouse_and_by_keyboard(
    opened: Callable[[str], Page], press: Callable[[Locator], None]
) -> None:
    page = opened("item_with_stack")
    whole = length(page)
    press(page.get_by_test_id("tf-idle").get_by_role("button", name="synchronization"))
    assert length(page) < whole / 2
    assert re.match(
        r"synchronization: aten::item, cudaStreamSynchronize, 52\.0 µs at .*, idle, the run",
        page.get_by_test_id("tf-timeline-spoken").inner_text(),
    )


def test_the_keyboard_walks_gaps_too(opened: Callable[[str], Page]) -> None:
    page = opened("item_with_stack")
    canvas(page).focus()
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Home")
    assert "start of the window" in page.get_by_test_id("tf-timeline-spoken").inner_text()
    page.keyboard.press("ArrowRight")
    assert (
        page.get_by_test_id("tf-timeline-spoken").inner_text().startswith("host-bound launch: aten::matmul, 13.8 µs at")
    )


def test_the_tip_of_a_kernel_has_the_delay_of_its_launch(opened: Callable[[str], Page]) -> None:
    page = opened("healthy_step")
    box = canvas(page).bounding_box()
    assert box
    page.mouse.move(box["x"] + 700, box["y"] + 80)
    expect(page.get_by_test_id("tf-timeline-tip")).to_contain_text(
        re.compile(r"launched [\d.]+ (µs|ms) before it started")
    )


def test_a_forward_and_its_backward_lead_to_each_other(opened: Callable[[str], Page]) -> None:
    page = opened("healthy_step")
    for _ in range(4):
        place = canvas(page).evaluate("(one) => one.locate('gelu #1', 0)")
        canvas(page).hover(position=place)
        page.keyboard.down("Control")
        page.mouse.wheel(0, -200)
        page.keyboard.up("Control")
        length(page)
    canvas(page).click(position=canvas(page).evaluate("(one) => one.locate('gelu #1', 0)"))
    strip = page.get_by_test_id("tf-timeline-strip")
    expect(strip.locator("code")).to_have_text("gelu #1")
    strip.get_by_role("button", name=re.compile("GeluBackward0")).click()
    expect(strip.locator("code")).to_have_text(re.compile(r"GeluBackward0 #\d"))
    strip.get_by_role("button", name="gelu #1").click()
    expect(strip.locator("code")).to_have_text("gelu #1")


def test_the_text_has_the_account_of_every_record(
    opened: Callable[[str], Page], press: Callable[[Locator], None]
) -> None:
    page = opened("two_streams")
    text = page.get_by_test_id("tf-run-text")
    press(text.locator("summary"))
    expect(text.locator("pre")).to_contain_text(re.compile(r"[\d,]+ records read = [\d,]+ shown \+ [\d,]+ set aside"))
    expect(page.get_by_test_id("tf-findings")).to_contain_text("Nothing found")


def test_in_the_explorer_idle_time_stands_beside_the_programs(browser: Browser, tmp_path: Path) -> None:
    """The lanes of a GPU in place of a replay's: which ops they are of is said, and there is no memory for them."""
    run = run_lanes(tracefuse.load_timeline(FILES / "sleep.json.gz", window="window")).program
    programs = tuple(replace(run, label=label) for label in ("captured", "optimised"))
    variant = tracefuse.capture(lambda x: x.exp().sum(), torch.ones(3)).optimize()
    record = timeline_record(Timeline("measured on a GPU", programs), as_base64=True)
    path = tmp_path / "page.html"
    path.write_text(html_page([payload(variant)], "idle", record))
    page = browser.new_page(viewport={"width": 1300, "height": 1000})
    page.goto(path.as_uri())
    page.get_by_test_id("tf-tab-timeline").click()
    page.get_by_test_id("tf-timeline-source").select_option("measured")
    idle = page.get_by_test_id("tf-idle")
    expect(idle.locator("summary")).to_have_text("GPU idle for 92 % of optimised, 6.07 ms of it by: host idle")
    expect(idle.locator("table")).to_be_hidden()
    idle.locator("summary").press("Enter")
    expect(idle.locator("tbody tr")).to_have_count(2 * len(idle_us(run)))
    page.close()
