"""The graph of the trace: what a mouse, a keyboard and a switch do to it, and how fast it moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.browser.synthetic import OPS_PER_LAYER, payload
from tracefuse.widgets.html import page as page_text

pytestmark = pytest.mark.browser
FRAMES = 60
PAN = """async ([frames, kind]) => {
    const canvas = document.querySelector("[data-testid=tf-graph]");
    const { left, top } = canvas.getBoundingClientRect();
    const send = (Kind, name, more) => canvas.dispatchEvent(new Kind(name, { bubbles: true, cancelable: true, ...more }));
    const at = (y) => ({ buttons: 1, clientX: left + 200, clientY: top + y });
    canvas.setPointerCapture = () => {};  // a pointer of a script cannot be captured
    send(PointerEvent, "pointerdown", at(900));
    const times = [await new Promise(requestAnimationFrame)];
    for (let frame = 1; frame <= frames; frame += 1) {
        kind === "drag" ? send(PointerEvent, "pointermove", at(900 - 40 * frame)) : send(WheelEvent, "wheel", { deltaY: 90 });
        times.push(await new Promise(requestAnimationFrame));
    }
    delete canvas.setPointerCapture;
    return times.slice(1).map((time, index) => time - times[index]);
}"""


def opened(browser: Browser, path: Path, payloads: list[dict[str, Any]], **options: Any) -> Page:
    path.write_text(page_text(payloads, "graph"), encoding="utf-8")
    page = browser.new_page(viewport={"width": 1300, "height": 1000}, **options)
    page.goto(path.as_uri())
    page.get_by_test_id("tf-tab-graph").click()
    return page


@pytest.fixture(scope="module")
def shared(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    path = tmp_path_factory.mktemp("graph") / "small.html"
    found = opened(browser, path, [payload(3), payload(3, fused=False)], reduced_motion="reduce", device_scale_factor=2)
    errors: list[str] = []
    found.on("pageerror", lambda error: errors.append(str(error)))
    yield found
    found.close()
    assert errors == []


@pytest.fixture
def page(shared: Page) -> Page:
    """The graph as it is when it is first opened."""
    shared.set_viewport_size({"width": 1300, "height": 1000})
    shared.get_by_test_id("tf-graph").press("Escape")
    for control in ("collapse", "deeper"):
        shared.get_by_test_id(f"tf-graph-{control}").click()
    shared.get_by_test_id("tf-graph-fold").check()
    shared.get_by_test_id("tf-graph-links").uncheck()
    shared.get_by_test_id("tf-graph-colouring").select_option("kernel")
    shared.get_by_test_id("tf-graph-fit").click()
    return shared


@pytest.fixture
def graph(page: Page) -> Locator:
    return page.get_by_test_id("tf-graph")


def locate(graph: Locator, name: str) -> tuple[float, float]:
    at = graph.evaluate("(canvas, name) => canvas.locate(name)", name)
    assert at is not None, f"{name} is not in the graph"
    return at["x"], at["y"]


def is_shown(graph: Locator, name: str) -> bool:
    return graph.evaluate("(canvas, name) => canvas.locate(name) !== null", name)


def pixel(graph: Locator, name: str) -> list[int]:
    """The colour of a node at its left edge, where its colour is whatever else is drawn on it."""
    return graph.evaluate(
        """(canvas, name) => {
            const { x, y } = canvas.locate(name);
            const box = canvas.getBoundingClientRect();
            const scale = canvas.width / box.width;
            const node = canvas.getContext("2d");
            return [...node.getImageData((x - box.left) * scale, (y - box.top + 15) * scale, 1, 1).data].slice(0, 3);
        }""",
        name,
    )


def test_a_click_selects_an_op_and_shows_it_in_the_details(page: Page, graph: Locator) -> None:
    page.get_by_test_id("tf-graph-expand").click()
    page.mouse.click(*locate(graph, "h1_1_addmm"))
    expect(page.get_by_test_id("tf-details")).to_contain_text("h1_1_addmm")
    expect(page.get_by_test_id("tf-graph-live")).to_contain_text("h.1.attn.qkv: Linear")


def test_double_click_opens_a_module_and_its_triangle_closes_it(page: Page, graph: Locator) -> None:
    collapsed = locate(graph, "h.1.attn|forward")
    assert locate(graph, "h1_2_mul") == collapsed
    page.mouse.dblclick(*collapsed)
    assert locate(graph, "h1_2_mul") != locate(graph, "h1_3_sin")
    page.mouse.click(*locate(graph, "h.1.attn"))
    assert locate(graph, "h1_2_mul") == locate(graph, "h1_3_sin")


def test_what_is_opened_stays_where_it_is(page: Page, graph: Locator) -> None:
    before = locate(graph, "h.1.norm_2|backward")
    page.mouse.dblclick(*before)
    below = locate(graph, "h.1.norm_2")
    assert below[1] < before[1] < below[1] + 40


def test_the_keyboard_walks_opens_and_clears(page: Page, graph: Locator) -> None:
    live = page.get_by_test_id("tf-graph-live")
    graph.focus()
    page.keyboard.press("ArrowDown")
    expect(live).to_contain_text("h.1.norm_1")
    page.keyboard.press("ArrowRight")
    expect(live).to_contain_text("backward, h.1.norm_1")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowDown")
    expect(live).to_contain_text("forward, h.1.attn")
    page.keyboard.press("Enter")
    assert is_shown(graph, "h.1.attn.qkv|forward")
    expect(live).to_contain_text("forward, h.1.attn.qkv")
    page.keyboard.press("ArrowDown")
    expect(page.get_by_test_id("tf-details")).to_contain_text("h1_2_mul")
    page.keyboard.press("ArrowUp")
    expect(live).to_contain_text("h.1.attn.qkv")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Escape")
    expect(live).to_have_text("")
    expect(page.get_by_test_id("tf-details")).to_contain_text("Click a value")


def test_a_selection_from_elsewhere_is_followed_into_folded_layers(page: Page, graph: Locator) -> None:
    page.get_by_test_id("tf-graph-expand").click()
    assert not is_shown(graph, "h2_23_gelu")
    page.get_by_test_id("tf-tab-code").click()
    page.locator("[data-defines=h2_23_gelu]").click()
    page.get_by_test_id("tf-tab-graph").click()
    frame = graph.bounding_box()
    assert frame is not None
    x, y = locate(graph, "h2_23_gelu")
    assert frame["x"] < x < frame["x"] + frame["width"]
    assert frame["y"] < y < frame["y"] + frame["height"]
    assert not is_shown(graph, "h1_23_gelu")


def test_layers_unfold(page: Page, graph: Locator, press: Callable[[Locator], None]) -> None:
    press(page.get_by_test_id("tf-graph-collapse"))
    assert not is_shown(graph, "h.2|forward")
    press(page.get_by_test_id("tf-graph-fold"))
    assert is_shown(graph, "h.2|forward")
    expect(page.get_by_test_id("tf-graph-depth")).to_have_text("depth 1")
    press(page.get_by_test_id("tf-graph-deeper"))
    assert is_shown(graph, "h.2.attn|forward")


def test_colours_are_those_of_kernels_or_of_times(page: Page, graph: Locator, painted: Callable[[Page], None]) -> None:
    page.get_by_test_id("tf-graph-expand").click()
    page.mouse.click(*locate(graph, "h1_1_addmm"))
    by_kernel = pixel(graph, "h1_1_addmm")
    expect(page.get_by_test_id("tf-graph-legend")).to_contain_text("addmm")
    page.get_by_test_id("tf-graph-colouring").select_option("time")
    expect(page.get_by_test_id("tf-graph-legend")).to_contain_text("modelled: synthetic")
    painted(page)
    assert pixel(graph, "h1_1_addmm") != by_kernel


def test_the_theme_changes_under_it(page: Page, graph: Locator, painted: Callable[[Page], None]) -> None:
    page.emulate_media(color_scheme="light")
    painted(page)
    light = pixel(graph, "h.1.norm_1|forward")
    page.emulate_media(color_scheme="dark")
    painted(page)
    dark = pixel(graph, "h.1.norm_1|forward")
    assert min(light) > 200
    assert max(dark) < 80


def test_the_theme_changes_while_another_tab_is_open(
    page: Page, graph: Locator, painted: Callable[[Page], None]
) -> None:
    page.emulate_media(color_scheme="light")
    painted(page)
    page.get_by_test_id("tf-tab-trace").click()
    page.emulate_media(color_scheme="dark")
    page.get_by_test_id("tf-tab-graph").click()
    painted(page)
    assert max(pixel(graph, "h.1.norm_1|forward")) < 80
    page.emulate_media(color_scheme="light")


def test_the_map_leads_anywhere(page: Page, graph: Locator) -> None:
    page.get_by_test_id("tf-graph-expand").click()
    page.get_by_test_id("tf-graph-fit").click()
    last = locate(graph, "h1_33_add")
    strip = page.get_by_test_id("tf-graph-map").bounding_box()
    assert strip is not None
    page.mouse.click(strip["x"] + 30, strip["y"] + strip["height"] - 3)
    assert locate(graph, "h1_33_add")[1] < strip["y"] + strip["height"] < last[1]
    page.get_by_test_id("tf-graph-fit").click()
    assert locate(graph, "h1_33_add") == pytest.approx(last)


def test_a_wheel_pans_and_with_control_zooms_at_the_pointer(page: Page, graph: Locator) -> None:
    page.get_by_test_id("tf-graph-expand").click()
    x, y = locate(graph, "h1_1_addmm")
    page.mouse.move(x, y)
    page.mouse.wheel(0, 50)
    page.wait_for_function("y => document.querySelector('[data-testid=tf-graph]').locate('h1_1_addmm').y < y", arg=y)
    x, y = locate(graph, "h1_1_addmm")
    far = y - locate(graph, "h1_0_native_layer_norm")[1]
    page.mouse.move(x, y)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -200)
    page.keyboard.up("Control")
    page.wait_for_function(
        "far => { const { locate } = document.querySelector('[data-testid=tf-graph]');"
        "return locate('h1_1_addmm').y - locate('h1_0_native_layer_norm').y > 1.2 * far; }",
        arg=far,
    )
    assert locate(graph, "h1_1_addmm")[1] == pytest.approx(y, abs=1)


def test_a_drag_pans_and_selects_nothing(page: Page, graph: Locator) -> None:
    page.get_by_test_id("tf-graph-expand").click()
    x, y = locate(graph, "h1_1_addmm")
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x, y - 60, steps=4)
    page.mouse.up()
    assert locate(graph, "h1_1_addmm")[1] == pytest.approx(y - 60, abs=1)
    expect(page.get_by_test_id("tf-details")).to_contain_text("Click a value")


def test_a_switch_leaves_what_is_unchanged_where_it_is(
    page: Page, graph: Locator, painted: Callable[[Page], None]
) -> None:
    page.get_by_test_id("tf-graph-expand").click()
    names = ("h1_1_addmm", "h1_3_sin", "grad_h1_1_addmm", "h1_33_add")
    before = [locate(graph, name) for name in names]
    colour = pixel(graph, "h1_1_addmm")
    kernel = page.get_by_test_id("tf-graph-legend").locator("[title^=fused_mul]")
    expect(kernel).to_have_count(1)
    page.get_by_test_id("tf-toggle-fuse").click()
    expect(kernel).to_have_count(0)
    assert [locate(graph, name) for name in names] == before
    painted(page)
    assert pixel(graph, "h1_1_addmm") == colour
    page.get_by_test_id("tf-toggle-fuse").click()
    expect(kernel).to_have_count(1)


def test_hovering_tells_what_it_is(page: Page, graph: Locator) -> None:
    page.mouse.move(*locate(graph, "h.1.attn|forward"))
    expect(page.get_by_test_id("tf-graph-tip")).to_contain_text("SelfAttention")
    page.mouse.move(5, 5)
    expect(page.get_by_test_id("tf-graph-tip")).to_be_hidden()


def test_links_to_the_backward_are_drawn_on_request_and_of_the_selected(
    page: Page, graph: Locator, painted: Callable[[Page], None], press: Callable[[Locator], None]
) -> None:
    painted(page)
    image = "canvas => canvas.toDataURL()"
    without = graph.evaluate(image)
    press(page.get_by_test_id("tf-graph-links"))
    painted(page)
    assert graph.evaluate(image) != without
    press(page.get_by_test_id("tf-graph-links"))
    painted(page)
    assert graph.evaluate(image) == without
    page.mouse.click(*locate(graph, "h.1.attn|forward"))
    expect(page.get_by_test_id("tf-graph-live")).to_contain_text("saved-tensor link")


@pytest.mark.parametrize("width", [480, 760, 1300])
def test_it_fits_any_width_sharply(page: Page, graph: Locator, width: int, painted: Callable[[Page], None]) -> None:
    page.set_viewport_size({"width": width, "height": 1000})
    painted(page)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert graph.evaluate("canvas => canvas.width / canvas.getBoundingClientRect().width") == pytest.approx(2, abs=0.01)
    page.get_by_test_id("tf-graph-fit").click()
    frame = graph.bounding_box()
    assert frame is not None
    assert (
        frame["x"]
        < locate(graph, "h.1.attn|forward")[0]
        < locate(graph, "h.1.attn|backward")[0]
        < frame["x"] + frame["width"]
    )


def test_it_pans_smoothly_with_5300_nodes(
    browser: Browser, tmp_path: Path, capsys: pytest.CaptureFixture, painted: Callable[[Page], None]
) -> None:
    layers = 5300 // OPS_PER_LAYER + 1
    page = opened(browser, tmp_path / "large.html", [payload(layers)])
    page.get_by_test_id("tf-graph-fold").uncheck()
    page.get_by_test_id("tf-graph-expand").click()
    painted(page)
    assert is_shown(page.get_by_test_id("tf-graph"), f"h{layers - 1}_2_mul")
    start = locate(page.get_by_test_id("tf-graph"), "h1_1_addmm")[1]
    figures = {kind: page.evaluate(PAN, [FRAMES, kind]) for kind in ("wheel", "drag")}
    assert start - locate(page.get_by_test_id("tf-graph"), "h1_1_addmm")[1] == pytest.approx(
        FRAMES * (90 + 40), rel=0.01
    )
    page.get_by_test_id("tf-graph-links").check()
    figures["wheel, saved tensors"] = page.evaluate(PAN, [FRAMES, "wheel"])
    with capsys.disabled():
        for kind, times in figures.items():
            print(
                f"\n{layers * OPS_PER_LAYER} nodes, {kind}: {sum(times) / FRAMES:.1f} ms a frame, at most {max(times):.1f}",
                end="",
            )
    page.close()
    assert all(sum(times) / FRAMES < 1000 / 30 for times in figures.values())
