"""The timeline tab: lanes of both programs and their memory, by mouse and by keyboard, in a saved page."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from playwright.sync_api import Browser, Locator, Page, expect

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.widgets.html import page as html_page
from tracefuse.widgets.payload.clock import HERE
from tracefuse.widgets.payload.measured import Measured
from tracefuse.widgets.payload.program import payload
from tracefuse.widgets.payload.timeline import timeline_record

pytestmark = pytest.mark.browser

# The view's own module with a model that has no kernel: what `mountPage` does, with a payload and a timeline from outside.
MOUNT = """async (given) => {
    const text = document.getElementById("module").textContent;
    const view = await import(URL.createObjectURL(new Blob([text], { type: "text/javascript" })));
    const [payload, timeline] = JSON.parse(given);
    for (const program of timeline.programs) {
        program.events = new DataView(Uint8Array.from(atob(program.events), (char) => char.charCodeAt(0)).buffer);
    }
    const status = { busy: "", progress: null, text: "", error: null };
    const state = { payload, timeline, status, selected: "", live: true };
    const model = { get: (name) => state[name], set() {}, save_changes() {}, on() {}, off() {}, send() {} };
    const host = document.getElementById("view");
    host.replaceChildren();
    view.default.render({ model, el: host });
    host.querySelector("[data-testid=tf-tab-timeline]").click();
    await new Promise(requestAnimationFrame);
    await new Promise(requestAnimationFrame);
    return host.querySelectorAll("*").length;
}"""

# Drags back and forth, one move and one painted frame at a time: the places seen, and the most that one frame drew.
PAN = """async (canvas) => {
    const { left, top } = canvas.getBoundingClientRect();
    const fire = (type, x) => {
        const at = { clientX: left + x, clientY: top + 150, pointerId: 1, button: 0, bubbles: true };
        canvas.dispatchEvent(new PointerEvent(type, at));
    };
    canvas.setPointerCapture = () => {};
    const drawing = CanvasRenderingContext2D.prototype;
    const plain = { fillRect: drawing.fillRect, rect: drawing.rect, fillText: drawing.fillText, lineTo: drawing.lineTo };
    let drawn = 0;
    for (const [name, draw] of Object.entries(plain)) {
        drawing[name] = function (...given) { drawn += 1; return draw.apply(this, given); };
    }
    fire("pointerdown", 300);
    const seen = new Set();
    let most = 0;
    for (let frame = 0; frame < 30; frame += 1) {
        drawn = 0;
        fire("pointermove", 300 + 200 * Math.sin(frame / 5));
        await new Promise(requestAnimationFrame);
        await new Promise(requestAnimationFrame);
        seen.add(canvas.dataset.from);
        most = Math.max(most, drawn);
    }
    fire("pointerup", 300);
    Object.assign(drawing, plain);
    return [seen.size, most];
}"""


@pytest.fixture(scope="module")
def variant() -> tracefuse.Variant:
    torch.manual_seed(0)
    model, data = GPT(layers=1, width=32, heads=2, vocab=61, length=16), batch(61, 2, 12)
    return tracefuse.capture(lambda: model(*data).backward()).optimize()


@pytest.fixture(scope="module")
def written(variant: tracefuse.Variant, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    variants, measured = [variant, variant.capture.optimize(fuse=False)], Measured()
    timeline = timeline_record(measured.profile(variant), as_base64=True)
    measured.clocks.choose(HERE, variant)
    found = {"measured": timeline, "modelled": None}
    folder = tmp_path_factory.mktemp("timeline")
    for name, timeline in found.items():
        payloads = [measured.payload(one, None, "c") if timeline else payload(one) for one in variants]
        (folder / name).with_suffix(".html").write_text(html_page(payloads, name, timeline))
    return {name: (folder / name).with_suffix(".html") for name in found}


@pytest.fixture(scope="module")
def loaded(browser: Browser, written: dict[str, Path]) -> Iterator[dict[str, Page]]:
    """Each file opened once: what takes time is not what these tests are about."""
    errors: list[str] = []
    pages = {name: browser.new_page() for name in written}
    for name, page in pages.items():
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(written[name].as_uri())
        page.wait_for_selector("[data-testid=tf-root][data-ready='1']")
    yield pages
    for page in pages.values():
        page.close()
    assert errors == []


@pytest.fixture
def opened(loaded: dict[str, Page], reopen: Callable[[Page], None]) -> Callable[[str], Page]:
    """`opened(name)` is that file's page with a view that nobody has touched, its timeline open."""

    def open_page(name: str) -> Page:
        page = loaded[name]
        page.bring_to_front()
        page.set_viewport_size({"width": 1300, "height": 1000})
        page.mouse.move(0, 0)
        reopen(page)
        page.get_by_test_id("tf-tab-timeline").click()
        page.wait_for_selector("[data-testid=tf-timeline][data-to]")
        return page

    return open_page


@pytest.fixture
def page(opened: Callable[[str], Page]) -> Page:
    return opened("measured")


def canvas(page: Page) -> Locator:
    return page.get_by_test_id("tf-timeline")


def window(page: Page) -> tuple[float, float]:
    """What is seen of the axis, in µs, once what was asked for is painted."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return canvas(page).evaluate("(one) => [Number(one.dataset.from), Number(one.dataset.to)]")


def length(page: Page) -> float:
    left, right = window(page)
    return right - left


def locate(page: Page, value: str, program: int) -> dict[str, float]:
    window(page)
    return canvas(page).evaluate("(one, [value, program]) => one.locate(value, program)", [value, program])


def spoken(page: Page) -> str:
    return page.get_by_test_id("tf-timeline-spoken").inner_text()


def matmul(variant: tracefuse.Variant) -> str:
    """A value that both programs compute."""
    captured = {node.name for node in variant.capture.trace.ops}
    return next(n.name for n in variant.trace.ops if n.name in captured and "aten.mm" in str(n.target))


def at(page: Page, x: float, y: float) -> tuple[float, float]:
    box = canvas(page).bounding_box()
    assert box
    return box["x"] + x, box["y"] + y


def drag(page: Page, start: tuple[float, float], end: tuple[float, float]) -> None:
    page.mouse.move(*at(page, *start))
    page.mouse.down()
    page.mouse.move(*at(page, *end), steps=5)
    page.mouse.up()


# --- looking ----------------------------------------------------------------------------------------------------------


def test_it_says_where_its_times_come_from(page: Page) -> None:
    expect(page.get_by_test_id("tf-timeline-said")).to_contain_text("op by op, the middle of 3 profiled replays")
    expect(page.get_by_test_id("tf-timeline-stale")).to_have_count(0)


def test_the_wheel_with_ctrl_zooms_around_the_pointer(page: Page, variant: tracefuse.Variant) -> None:
    before, place = length(page), locate(page, matmul(variant), 1)
    page.mouse.move(*at(page, **place))
    page.keyboard.down("Control")
    page.mouse.wheel(0, -200)
    page.keyboard.up("Control")
    assert length(page) == pytest.approx(before / np.e, rel=0.01)
    assert locate(page, matmul(variant), 1)["x"] == pytest.approx(place["x"], abs=2)
    page.mouse.wheel(0, -200)
    assert length(page) == pytest.approx(before / np.e, rel=0.01), "a plain wheel scrolls the notebook"


def test_buttons_and_keys_zoom(page: Page, press: Callable[[Locator], None]) -> None:
    whole = length(page)
    press(page.get_by_test_id("tf-timeline-in"))
    assert length(page) == pytest.approx(whole / 2)
    press(page.get_by_test_id("tf-timeline-out"))
    assert length(page) == pytest.approx(whole)
    canvas(page).focus()
    for key, expected in (("+", 2), ("+", 4), ("-", 2), ("0", 1)):
        page.keyboard.press(key)
        assert length(page) == pytest.approx(whole / expected)


def test_dragging_arrows_and_the_overview_pan(page: Page) -> None:
    for _ in range(2):
        page.get_by_test_id("tf-timeline-in").click()
    (left, _), width = window(page), length(page)
    drag(page, (500, 150), (400, 150))
    assert window(page)[0] > left
    assert length(page) == pytest.approx(width)
    drag(page, (400, 150), (500, 150))
    assert window(page)[0] == pytest.approx(left, abs=width / 100)
    canvas(page).focus()
    page.keyboard.press("ArrowRight")
    assert window(page)[0] == pytest.approx(left + 0.1 * width)
    page.keyboard.press("PageUp")
    assert window(page)[0] == pytest.approx(left - 0.8 * width)
    drag(page, (300, 12), (80, 12))
    assert window(page)[0] == 0
    page.keyboard.down("Shift")
    page.mouse.wheel(0, 120)
    page.keyboard.up("Shift")
    assert window(page)[0] > 0


# --- selecting --------------------------------------------------------------------------------------------------------


def test_a_click_selects_the_op_in_both_programs(page: Page, variant: tracefuse.Variant) -> None:
    name = matmul(variant)
    canvas(page).click(position=locate(page, name, 1))
    selected = page.get_by_test_id("tf-timeline-strip").locator("code")
    # Beside it may stand one that is narrower than the pointer.
    page.get_by_test_id("tf-timeline-show").click()
    clicked = selected.inner_text()
    for _ in range(8):
        page.get_by_test_id("tf-timeline-in").click()
    canvas(page).click(position=locate(page, clicked, 1) or locate(page, clicked, 0))
    expect(selected).to_have_text(clicked)
    expect(page.get_by_test_id("tf-details")).to_contain_text(clicked)


def test_a_selection_made_elsewhere_is_shown_by_a_button(
    page: Page, variant: tracefuse.Variant, press: Callable[[Locator], None]
) -> None:
    press(page.get_by_test_id("tf-alive").locator("summary"))
    press(page.get_by_test_id("tf-alive").get_by_role("button").first)
    name = page.get_by_test_id("tf-timeline-strip").locator("code").inner_text()
    strip = page.get_by_test_id("tf-timeline-strip")
    expect(strip).to_contain_text(re.compile(r"as captured: [\d.]+ (ns|µs|ms)"))
    whole = length(page)
    press(page.get_by_test_id("tf-timeline-show"))
    assert length(page) < whole
    assert locate(page, name, 0) or locate(page, name, 1)


def test_the_keyboard_walks_events_and_lanes(page: Page) -> None:
    canvas(page).focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Home")
    first = spoken(page)
    assert re.match(r"\w+, .+, [\d.]+ (ns|µs|ms) at 0 µs, CPU, as captured", first)
    page.keyboard.press("ArrowRight")
    second = spoken(page)
    assert second != first
    page.keyboard.press("ArrowLeft")
    assert spoken(page) == first
    page.keyboard.press("ArrowDown")
    assert spoken(page).endswith("optimised")
    page.keyboard.press("End")
    last = page.get_by_test_id("tf-timeline-strip").locator("code").inner_text()
    assert locate(page, last, 1)
    page.keyboard.press("ArrowUp")
    assert spoken(page).endswith("as captured")
    expect(page.get_by_test_id("tf-details")).to_contain_text(spoken(page).split(",")[0])


def test_what_the_pointer_is_over(page: Page, variant: tracefuse.Variant) -> None:
    name = matmul(variant)
    place = locate(page, name, 1)
    page.mouse.move(*at(page, **place))
    tip = page.get_by_test_id("tf-timeline-tip")
    expect(tip).to_contain_text(re.compile(r"[\d.]+ (ns|µs|ms) at [\d.]+ "))
    expect(tip).to_contain_text("optimised · CPU")
    page.mouse.move(*at(page, place["x"], place["y"] + 45))
    expect(tip).to_contain_text("alive while")
    page.mouse.move(5, 5)
    expect(tip).to_be_hidden()


def test_a_search_dims_the_rest(page: Page, variant: tracefuse.Variant) -> None:
    def drawn() -> str:
        window(page)
        return canvas(page).evaluate("(one) => one.toDataURL()")

    before = drawn()
    page.get_by_test_id("tf-search").fill("mm")
    page.wait_for_function(
        "(before) => document.querySelector('[data-testid=tf-timeline]').toDataURL() !== before", arg=before
    )
    page.get_by_test_id("tf-search").fill("")
    page.wait_for_function(
        "(before) => document.querySelector('[data-testid=tf-timeline]').toDataURL() === before", arg=before
    )


def test_it_follows_the_theme(page: Page) -> None:
    corner = (
        "() => [...document.querySelector('[data-testid=tf-timeline]').getContext('2d').getImageData(2, 60, 1, 1).data]"
    )
    assert min(page.evaluate(corner)[:3]) > 200
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"({corner})()[0] < 60")
    page.emulate_media(color_scheme="light")
    page.wait_for_function(f"({corner})()[0] > 200")


# --- measuring --------------------------------------------------------------------------------------------------------


def microseconds(text: str) -> float:
    found = re.match(r"([\d.]+) (ns|µs|ms)", text)
    assert found
    return float(found[1]) * {"ns": 1e-3, "µs": 1, "ms": 1e3}[found[2]]


@pytest.mark.parametrize("by", ["shift", "button"])
def test_a_drag_measures(page: Page, by: str) -> None:
    width = canvas(page).bounding_box()["width"]  # type: ignore[index]
    if by == "shift":
        page.keyboard.down("Shift")
    else:
        page.get_by_test_id("tf-timeline-measure").click()
        expect(page.get_by_test_id("tf-timeline-measure")).to_have_attribute("aria-pressed", "true")
    whole = length(page)
    drag(page, (70, 100), (270, 100))  # at the start of the axis, where both programs run
    page.keyboard.up("Shift")
    expected = whole * 200 / (width - 61)
    assert microseconds(page.get_by_test_id("tf-range-length").inner_text()) == pytest.approx(expected, rel=0.03)
    rows = page.get_by_test_id("tf-range").locator("tbody tr")
    expect(rows).to_have_count(2)
    for row, name in zip(rows.all(), ("A · CPU", "B · CPU"), strict=True):
        expect(row).to_contain_text(name)
        expect(row).to_contain_text("%")
    assert "measured" in spoken(page)
    assert length(page) == whole, "nothing was panned"
    canvas(page).focus()
    page.keyboard.press("Escape")
    expect(page.get_by_test_id("tf-range")).to_have_count(0)
    expect(page.get_by_test_id("tf-timeline-measure")).to_have_attribute("aria-pressed", "false")


def test_the_keyboard_measures_from_event_to_event(page: Page, press: Callable[[Locator], None]) -> None:
    canvas(page).focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Home")
    page.keyboard.press("Shift+ArrowRight")
    short = microseconds(page.get_by_test_id("tf-range-length").inner_text())
    for _ in range(10):
        page.keyboard.press("Shift+ArrowRight")
    assert microseconds(page.get_by_test_id("tf-range-length").inner_text()) > short
    expect(page.get_by_test_id("tf-range").locator("tbody tr").first.locator("td").first).to_have_text("12")
    press(page.get_by_test_id("tf-range-clear"))
    expect(page.get_by_test_id("tf-range")).to_have_count(0)


# --- memory, and what was not measured --------------------------------------------------------------------------------


def test_the_peak_names_its_op_and_selects_it(page: Page, variant: tracefuse.Variant) -> None:
    peak = payload(variant)["memory"]["after"]
    place = locate(page, peak["at"], 1)
    position = {"x": place["x"], "y": place["y"] + 40}
    canvas(page).hover(position=position)
    expect(page.get_by_test_id("tf-timeline-tip")).to_contain_text(f"alive while {peak['at']} runs")
    expect(page.get_by_test_id("tf-timeline-tip")).to_contain_text("100 % of the peak · static")
    canvas(page).click(position=position)
    expect(page.get_by_test_id("tf-details")).to_contain_text(peak["at"])
    page.get_by_test_id("tf-alive").locator("summary").click()
    lists = page.get_by_test_id("tf-alive").locator(".tf-alive")
    expect(lists).to_have_count(2)
    expect(lists.nth(1)).to_contain_text("Static, from the trace; not measured.")
    expect(lists.nth(1).locator("li")).to_have_count(len(peak["alive"]))


def test_memory_is_parted_by_what_it_is_for(page: Page, variant: tracefuse.Variant) -> None:
    shown = payload(variant)["memory"]
    place = locate(page, shown["after"]["at"], 1)
    canvas(page).hover(position={"x": place["x"], "y": place["y"] + 40})
    tip = page.get_by_test_id("tf-timeline-tip")
    expect(tip.locator(".tf-purpose").first).to_contain_text("inputs, parameters")
    expect(tip).to_contain_text("saved for backward")
    expect(page.locator(".tf-kinds .tf-purpose", has_text="saved for backward")).to_be_visible()


def test_what_is_saved_stands_by_reason_and_by_module(page: Page, variant: tracefuse.Variant) -> None:
    shown = payload(variant)["memory"]
    page.get_by_test_id("tf-alive").locator("summary").click()
    tables = page.get_by_test_id("tf-saved").locator("table")
    expect(tables).to_have_count(2)
    expect(tables.nth(0).locator("tbody tr")).to_have_count(len(shown["reasons"]))
    expect(tables.nth(1).locator("tbody tr")).to_have_count(len(shown["modules"]))
    expect(tables.nth(0)).to_contain_text(shown["reasons"][0][3])
    expect(page.get_by_test_id("tf-saved")).to_contain_text("static")


def test_without_a_timeline_ops_stand_end_to_end_and_the_remedy_is_said(opened: Callable[[str], Page]) -> None:
    page = opened("modelled")
    expect(page.get_by_test_id("tf-timeline-said")).to_contain_text("ops end to end")
    expect(page.get_by_test_id("tf-timeline-said")).to_contain_text("Run its cell and press Measure")
    expect(page.get_by_test_id("tf-timeline-source")).to_have_count(0)
    canvas(page).focus()
    page.keyboard.press("ArrowDown")
    assert "end to end, as captured" in spoken(page)


def test_a_switch_predicts_the_timeline_and_a_replay_of_other_passes_says_so(page: Page) -> None:
    expect(page.get_by_test_id("tf-timeline-source")).to_have_value("measured")
    page.get_by_test_id("tf-toggle-fuse").click()
    expect(page.get_by_test_id("tf-timeline-source")).to_have_value("modelled")
    expect(page.get_by_test_id("tf-timeline-said")).to_contain_text("predicted for CPU")
    page.get_by_test_id("tf-timeline-source").select_option("measured")
    expect(page.get_by_test_id("tf-timeline-stale")).to_contain_text("c.optimize()")
    expect(page.get_by_test_id("tf-timeline-stale")).to_contain_text("Run its cell")
    page.get_by_test_id("tf-timeline-source").select_option("modelled")
    expect(page.get_by_test_id("tf-timeline-stale")).to_have_count(0)
    expect(page.get_by_test_id("tf-timeline-said")).to_contain_text("ops end to end")
    page.get_by_test_id("tf-toggle-fuse").click()
    page.get_by_test_id("tf-timeline-source").select_option("measured")
    expect(page.get_by_test_id("tf-timeline-stale")).to_have_count(0)


@pytest.mark.parametrize("width", [480, 700])
def test_nothing_sticks_out(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 1000})
    canvas(page).focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Shift+ArrowRight")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert canvas(page).bounding_box()["width"] <= width  # type: ignore[index]


# --- size -------------------------------------------------------------------------------------------------------------


def large(shown: dict[str, Any], ops: int, events: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """`shown` with `ops` ops, and a timeline of both programs with `events` events in all, on the GPU and on the CPU."""
    record = next(one for one in shown["values"].values() if one["op"] == "aten.mm.default")
    names = [f"op_{number}" for number in range(ops)]
    values = {name: record | {"phase": "forward" if at < ops / 3 else "backward"} for at, name in enumerate(names)}
    live = [1000 + min(at, ops - at) for at in range(ops)]
    storages = [number for at in range(1, ops // 2 + 1) for number in (at, ops - at, 1, 1)]
    peak, at = max(live), names[live.index(max(live))]
    again = list(range(ops // 3, ops, 2))
    memory = shown["memory"]["after"] | {
        "ops": names, "live": live, "peak": peak, "at": at, "alive": [], "inputs": 1000, "again": again,
        "storages": storages,
    }  # fmt: skip
    each = events // 4
    order = np.arange(each)
    value = order * ops // each + 1
    rng = np.random.default_rng(0)
    start = np.concatenate([10.0 * order, 10.0 * order + 4])
    sort = np.argsort(start, kind="stable")
    columns = (
        start[sort].astype("<f8"), rng.uniform(1, 9, 2 * each).astype("<f4"), np.tile(order % 6, 2)[sort].astype("<u4"),
        np.tile(value, 2)[sort].astype("<u4"), np.full(2 * each, np.nan, "<f4"),
        np.repeat([1, 0], each)[sort].astype("<u2"),
    )  # fmt: skip
    program = {
        "config": "c.optimize()", "span_us": float(start.max() + 10), "values": names, "count": 2 * each,
        "lanes": [{"name": "stream 7", "kind": "gpu"}, {"name": "CPU", "kind": "cpu"}],
        "names": [f"aten.{name}.default" for name in ("mm", "add", "sum", "copy_", "gelu", "cat")],
        "events": base64.b64encode(b"".join(column.tobytes() for column in columns)).decode(),
    }  # fmt: skip
    timeline = {
        "provenance": "measured on nothing",
        "causes": {},
        "programs": [program | {"label": label} for label in ("captured", "optimised")],
    }
    return shown | {"values": values, "memory": shown["memory"] | {"before": memory, "after": memory}}, timeline


def test_what_is_drawn_does_not_grow_with_the_program(page: Page, variant: tracefuse.Variant) -> None:
    """Four times the ops and the events make as many elements, and no zoom draws more in a frame than the whole axis did."""
    elements, drawn = [], []
    for ops, events in [(1325, 12_500), (5300, 50_000)]:
        shown, timeline = large(payload(variant), ops, events)
        assert sum(program["count"] for program in timeline["programs"]) == events
        elements.append(page.evaluate(MOUNT, json.dumps([shown, timeline])))
        for zoom in ("0", "+++"):
            canvas(page).focus()
            for key in zoom:
                page.keyboard.press(key)
            seen, most = canvas(page).evaluate(PAN)
            assert (seen > 10) == (zoom != "0"), "all of the axis has nowhere to go"
            drawn.append(most)
    assert elements[1] <= 1.1 * elements[0]
    whole, _, *more = drawn
    assert 0 < max(more) <= 1.1 * whole
