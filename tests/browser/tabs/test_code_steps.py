"""The Code tab's two texts side by side and its steps through the pipeline, answered by what Python says of each pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tracefuse.optimizers.render import render
from tracefuse.variant import Variant
from tracefuse.widgets.payload.passes import change_record, changes_record

pytestmark = pytest.mark.browser

# A kernel that answers `show_pass` with what `change_record` said of each.
ANSWER = """(steps) => {
    window.sent = { push(message) { if (message.type === "show_pass") window.set("step", steps[message.pass] ?? null); } };
}"""
# The code of all lines that stand in a pane, unfolded, and nothing where the other pane has a line alone.
TEXTS = """(pane) => [...pane.querySelectorAll(".tf-line")].filter((one) => one.matches(".tf-is-op"))
    .map((one) => one.querySelector("code")?.textContent.trim() ?? "")"""
PLACES = """() => Object.fromEntries(
    [...document.querySelectorAll(".tf-code-panel :is(button, select, input), .tf-bar-top button")]
    .filter((one) => one.checkVisibility() && !one.closest(".tf-pane"))
    .map((one) => [one.dataset.testid ?? one.getAttribute("aria-label"), one.getBoundingClientRect()])
    .map(([name, { x, y }]) => [name, [x, y]]))"""
TOPS = """(pane) => [...pane.querySelectorAll(".tf-chunk > .tf-line")].map((one) => one.getBoundingClientRect().top)"""


@pytest.fixture
def page(open_saved: Callable[[Path], Page], written: Path, go_live: Callable[[Page], None], variant: Variant) -> Page:
    opened = open_saved(written)
    go_live(opened)
    steps: dict[str, Any] = {name: change_record(name, variant.passes) for name in variant.config.names}
    opened.evaluate(ANSWER, steps | {"*": changes_record("*", (variant.baseline.trace, variant.trace), None)})
    opened.get_by_test_id("tf-tab-code").click()
    return opened


def lay(page: Page, layout: str) -> tuple[Locator, Locator]:
    page.get_by_test_id("tf-code-layout").select_option(layout)
    return page.get_by_test_id("tf-code-before"), page.get_by_test_id("tf-code-after")


def ops_of(trace: Any) -> list[str]:
    """The printed ops of a trace as the view shows them."""
    lines = (line.partition("  # ")[0].strip() for line in render(trace).splitlines())
    return [line for line in lines if " = " in line and not line.startswith("#")]


def test_all_passes_together_have_the_whole_text_before_and_after(page: Page, variant: Variant) -> None:
    before, after = lay(page, "backward")
    expect(page.locator(".tf-against")).to_contain_text("as captured")
    assert [code for code in before.evaluate(TEXTS) if code] == ops_of(variant.baseline.trace.split()[1])
    assert [code for code in after.evaluate(TEXTS) if code] == ops_of(variant.trace.split()[1])


@pytest.mark.parametrize("name", ["simplify", "decompose", "remat", "fuse"])
@pytest.mark.parametrize("half", ["forward", "backward"])
def test_each_step_shows_the_whole_text_before_it_and_after_it(
    page: Page, variant: Variant, name: str, half: str
) -> None:
    (record,) = [one for one in variant.passes if one.name == name]
    at = ("forward", "backward").index(half)
    before, after = lay(page, half)
    page.get_by_test_id(f"tf-step-{name}").click()
    expect(page.locator(".tf-against")).to_contain_text(f"{name} alone")
    assert [code for code in before.evaluate(TEXTS) if code] == ops_of(record.before.split()[at])
    assert [code for code in after.evaluate(TEXTS) if code] == ops_of(record.after.split()[at])


def test_rows_of_both_sides_stand_beside_each_other_and_scroll_together(page: Page) -> None:
    before, after = lay(page, "backward")
    page.get_by_test_id("tf-step-remat").click()
    assert before.evaluate(TOPS) == pytest.approx(after.evaluate(TOPS), abs=0.5)
    after.evaluate("(pane) => { pane.scrollTop = 400; }")
    page.wait_for_function("document.querySelector('[data-testid=tf-code-before]').scrollTop === 400")
    assert before.evaluate(TOPS) == pytest.approx(after.evaluate(TOPS), abs=0.5)
    before.locator(".tf-inputs summary").click()
    expect(after.locator(".tf-inputs")).to_have_attribute("open", "")
    assert before.evaluate(TOPS) == pytest.approx(after.evaluate(TOPS), abs=0.5)


def test_what_differs_in_a_line_is_marked(page: Page) -> None:
    before, after = lay(page, "backward")
    page.get_by_test_id("tf-step-remat").click()
    changed = after.locator(".tf-mod", has=page.locator(".tf-differs")).first
    assert "_again" in str(changed.locator(".tf-differs").first.text_content())
    value = changed.get_attribute("data-defines")
    assert "_again" not in str(before.locator(f".tf-del[data-defines='{value}'] .tf-differs").first.text_content())


def test_the_pipeline_is_walked_with_the_keyboard_and_no_control_moves(page: Page) -> None:
    lay(page, "forward")
    places = page.evaluate(PLACES)
    assert len(places) > 15
    seen = []
    page.get_by_test_id("tf-code-after").focus()
    for key in "." * 9 + "," * 9:
        page.keyboard.press(key)
        shown = page.locator(".tf-stepping[aria-pressed=true]")
        expect(shown).to_have_count(1)
        seen.append(shown.text_content())
        now = page.evaluate(PLACES)
        assert {name: now[name] for name in places} == {name: pytest.approx(at, abs=2) for name, at in places.items()}
    assert len(set(seen)) == 10
    assert seen[-1] == "all passes"
    expect(page.locator(".tf-against")).to_contain_text("as captured")


@pytest.mark.parametrize("width", [800, 1024, 1440])
def test_every_step_of_the_pipeline_is_seen(page: Page, variant: Variant, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 768})
    for name in variant.config.names:
        expect(page.get_by_test_id(f"tf-step-{name}")).to_be_in_viewport(ratio=1)


@pytest.mark.parametrize(("width", "characters"), [(1024, 44), (1440, 70)])
def test_a_line_side_by_side_has_the_room_of_details_that_are_empty(page: Page, width: int, characters: int) -> None:
    page.set_viewport_size({"width": width, "height": 768})
    tabs = page.evaluate(PLACES)
    before, after = lay(page, "forward")
    page.get_by_test_id("tf-step-all").click()
    shown = before.evaluate("(pane) => pane.clientWidth - 20") / 7.23
    assert shown >= characters
    kept = {name: at for name, at in page.evaluate(PLACES).items() if name in tabs}
    assert kept == {name: pytest.approx(tabs[name], abs=2) for name in kept}
    empty = after.bounding_box()
    after.locator(".tf-is-op").first.click()
    expect(page.get_by_test_id("tf-clear")).to_be_in_viewport()
    selected = after.bounding_box()
    assert empty is not None
    assert selected is not None
    assert selected["x"] == pytest.approx(empty["x"], abs=1)
    assert selected["height"] < empty["height"]


def test_the_details_of_a_value_say_what_the_step_has_of_it(page: Page) -> None:
    before, _ = lay(page, "forward")
    page.get_by_test_id("tf-step-fuse").click()
    gone = before.locator(".tf-del.tf-is-op").first
    name, code = gone.get_attribute("data-defines"), str(gone.locator("code").first.text_content()).strip()
    code = code.replace("torch.ops.", "").replace(".default(", "(")
    gone.click()
    details = page.get_by_test_id("tf-details")
    expect(details.locator(".tf-fact").filter(has_text="before fuse")).to_contain_text(code)
    expect(details.locator(".tf-fact").filter(has_text="after fuse")).to_be_visible()
    expect(details.locator("h4")).to_have_text("With all passes")
    page.get_by_test_id("tf-tab-trace").click()
    expect(details).to_contain_text(str(name))
    expect(details).not_to_contain_text("before fuse")


def test_jumps_go_through_the_changes_of_both_sides(page: Page) -> None:
    lay(page, "forward")
    page.get_by_test_id("tf-step-fuse").click()
    page.get_by_test_id("tf-next-change").click()
    expect(page.locator(".tf-jumps")).to_contain_text("1 of")
    expect(page.locator(".tf-line.tf-jump")).to_have_count(1)
    expect(page.locator(".tf-line.tf-jump")).to_be_in_viewport()


def test_only_changes_fold_the_same_lines_on_both_sides(page: Page) -> None:
    before, after = lay(page, "backward")
    page.get_by_test_id("tf-step-remat").click()
    page.get_by_test_id("tf-only-changes").check()
    folds = [side.locator(".tf-fold").all_text_contents() for side in (before, after)]
    assert folds[0] == folds[1] != []


def test_a_step_of_a_saved_page_says_what_it_needs(open_saved: Callable[[Path], Page], written: Path) -> None:
    page = open_saved(written)
    page.get_by_test_id("tf-tab-code").click()
    step = page.get_by_test_id("tf-step-remat")
    expect(step).to_be_disabled()
    expect(step).to_have_attribute("title", "there is no kernel behind this view: run it in a notebook")
    layout = page.get_by_test_id("tf-code-layout")
    assert layout.locator("option").evaluate_all("all => all.map((one) => one.disabled)") == [False, True, True, True]
    expect(layout).to_have_attribute("title", "there is no kernel behind this view: run it in a notebook")
