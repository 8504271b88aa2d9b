"""The tree of modules, the layers table, search and keys, on a saved page of a model with three identical layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser, Locator, Page, ViewportSize, expect

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.widgets.html import page as html_page
from tracefuse.widgets.payload.program import payload

pytestmark = pytest.mark.browser
NASTY = "<img src=x onerror=alert(1)>"
SIZE = ViewportSize(width=1300, height=1000)
FOLD = "h.0 … h.2"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = GPT(layers=3, width=32, heads=2, vocab=61, length=16, dropout=0.1)
    # A class name is the program's text, too.
    model.norm.__class__ = type(NASTY, (torch.nn.LayerNorm,), {})
    tokens, targets = batch(61, 2, 12)
    with tracefuse.capture() as c:
        loss = model(tokens, targets) * 2
        loss.backward()
    path = tmp_path_factory.mktemp("tree") / "view.html"
    path.write_text(html_page([payload(c.optimize()), payload(c.optimize(fuse=False))], "tree"), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def opened(browser: Browser, written: Path) -> Iterator[Page]:
    page = browser.new_page(viewport=SIZE)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(written.as_uri())
    yield page
    page.close()
    assert errors == []


@pytest.fixture
def page(opened: Page, reopen: Callable[[Page], None]) -> Page:
    """The page with a new view, as the file shows it first."""
    opened.set_viewport_size(SIZE)
    reopen(opened)
    return opened


def names(page: Page) -> list[str]:
    """First words of the rows that are shown, without what marks them."""
    cells = page.locator("[data-testid=tf-tree] [data-row] > :first-child")
    texts = cells.evaluate_all("all => all.map(e => e.querySelector('b, code')?.textContent ?? e.textContent)")
    return [str(text) for text in texts]


def current(page: Page) -> Locator:
    """The row that the keyboard is in, as a screen reader finds it."""
    row = page.get_by_test_id("tf-tree").get_attribute("aria-activedescendant")
    return page.locator(f"[id='{row}']")


def selected(page: Page) -> str:
    return str(page.get_by_test_id("tf-details").locator(".tf-name").text_content())


def row(page: Page, name: str) -> Locator:
    return page.get_by_test_id(f"tf-tree-{name}")


def open_up(page: Page) -> None:
    """Unfold the first linear of the MLP, which is a matmul forward and two backward."""
    row(page, "h.0.mlp").click()
    row(page, "h.0.mlp.up").click()


# --- the tree ---------------------------------------------------------------------------------------------------------


def test_the_first_screen_tells_the_models_story(page: Page) -> None:
    assert page.get_by_test_id("tf-tab-trace").get_attribute("aria-selected") == "true"
    shown = names(page)
    modules = ["GPT", "tokens", "positions", FOLD, "norm_1", "attn", "norm_2", "mlp", "norm", "head"]
    assert [name for name in shown if name in modules] == modules
    assert any("F.cross_entropy" in name for name in shown)
    assert any("loss = model(tokens, targets) * 2" in name for name in shown)
    tree = page.get_by_test_id("tf-tree")
    assert tree.evaluate("e => e.scrollHeight <= e.clientHeight")
    expect(page.get_by_test_id("tf-tree-says")).to_contain_text("modelled")


def test_rows_are_a_treegrid_for_a_screen_reader(page: Page) -> None:
    expect(page.get_by_role("treegrid")).to_have_count(1)
    fold = page.get_by_role("row", level=2, expanded=True)
    expect(fold).to_contain_text(FOLD)
    expect(page.get_by_role("row", level=3, expanded=False).first).to_contain_text("norm_1")
    expect(page.get_by_role("columnheader")).to_have_count(7)


def test_a_folded_row_is_the_sum_of_its_layers(page: Page) -> None:
    page.get_by_test_id("tf-tree-times").click()
    layers = page.locator("[data-row][aria-level='3'][aria-expanded]")
    expect(layers).to_have_count(3)
    ops = [text.split("→")[-1] for text in layers.locator(".tf-tree-ops").all_text_contents()]
    whole = page.locator("[data-row]", has_text=FOLD).locator(".tf-tree-ops").text_content()
    assert whole is not None
    assert sum(map(int, ops)) == int(whole.split("→")[-1])
    page.get_by_test_id("tf-tree-times").click()
    expect(row(page, "h.1")).to_have_count(0)


def test_an_op_stands_beside_its_twins_and_lights_them(page: Page) -> None:
    open_up(page)
    op = page.locator("[data-row]", has_text="addmm").first
    op.locator(".tf-tree-name").click()
    forward = selected(page)
    expect(op.locator(".tf-tree-name")).to_have_class(re.compile("tf-current"))
    twins = page.locator(".tf-tree-right.tf-twin")
    assert twins.count() >= 2
    expect(twins.first.get_by_label("twin")).to_be_visible()
    twins.last.click()
    assert selected(page) != forward
    expect(op.locator(".tf-tree-name")).to_have_class(re.compile("tf-twin"))


def test_a_double_click_shows_the_code(page: Page) -> None:
    open_up(page)
    page.locator("[data-row]", has_text="addmm").first.locator(".tf-tree-name").dblclick()
    expect(page.get_by_test_id("tf-tab-code")).to_have_attribute("aria-selected", "true")
    line = page.locator(f"[data-testid=tf-code-forward] .tf-current[data-defines='{selected(page)}']")
    expect(line).to_be_in_viewport()


def test_the_keyboard_walks_and_folds(page: Page) -> None:
    page.get_by_test_id("tf-tree").focus()
    page.keyboard.press("Home")
    expect(current(page)).to_contain_text("GPT")
    page.keyboard.press("ArrowLeft")
    assert len(names(page)) == 2  # the model, and the line outside of it
    page.keyboard.press("ArrowRight")
    for _ in names(page):
        if "MLP" in str(current(page).text_content()):
            break
        page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    expect(current(page)).to_have_attribute("aria-expanded", "true")
    page.keyboard.press("ArrowRight")
    expect(current(page)).to_contain_text("up")
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowDown")
    forward = selected(page)
    page.keyboard.press("ArrowRight")
    assert selected(page) != forward
    page.keyboard.press("ArrowLeft")
    assert selected(page) == forward
    page.keyboard.press("ArrowLeft")
    expect(current(page)).to_contain_text("up")
    page.keyboard.press("End")
    expect(current(page)).to_contain_text("* 2")
    page.keyboard.press("ArrowUp")
    expect(current(page)).not_to_contain_text("* 2")


def test_enter_on_an_op_moves_the_keyboard_to_its_code(page: Page) -> None:
    open_up(page)
    page.locator("[data-row]", has_text="addmm").first.click()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.dataset.testid") == "tf-code-forward"


def test_the_x_key_takes_layers_apart(page: Page) -> None:
    page.locator("[data-row]", has_text=FOLD).click()
    page.keyboard.press("x")
    assert {"h.0", "h.1", "h.2"} <= set(names(page))
    page.keyboard.press("x")
    assert "h.1" not in names(page)


def test_removed_values_and_views_are_listed_on_demand(page: Page, press: Callable[[Locator], None]) -> None:
    row(page, "norm").click()
    before = page.get_by_label("removed by a pass").count()
    press(page.get_by_test_id("tf-tree-removed"))
    assert page.get_by_label("removed by a pass").count() > before == 0
    row(page, "head").click()
    count = len(names(page))
    press(page.get_by_test_id("tf-tree-views"))
    assert len(names(page)) > count


def test_without_folding_every_layer_is_in_its_list(page: Page, press: Callable[[Locator], None]) -> None:
    press(page.get_by_test_id("tf-tree-fold"))
    assert FOLD not in names(page)
    assert "h" in names(page)


def test_a_value_selected_elsewhere_is_unfolded_and_in_sight(page: Page) -> None:
    page.get_by_test_id("tf-tab-code").click()
    page.locator("[data-testid=tf-code-forward] [data-defines^=gelu]").last.click()
    name = selected(page)
    page.get_by_test_id("tf-tab-trace").click()
    expect(page.get_by_test_id(f"tf-op-{name}")).to_be_in_viewport()
    expect(page.locator(".tf-tree-note", has_text="h.2.mlp")).to_be_visible()


def test_a_toggle_keeps_what_was_unfolded(page: Page) -> None:
    open_up(page)
    page.get_by_test_id("tf-toggle-fuse").click()
    expect(page.get_by_test_id("tf-pass-fuse")).to_have_class(re.compile("tf-off"))
    expect(row(page, "h.0.mlp.up")).to_have_attribute("aria-expanded", "true")


def test_what_is_slowest_is_one_click_away(page: Page, press: Callable[[Locator], None]) -> None:
    """The sentence, the chip and the row say the same of the same module."""
    chip = page.get_by_test_id("tf-tree-slowest")
    told = re.fullmatch(r"▲ most launches: (h\.\* ×3), (\d+) of (\d+)", str(chip.text_content()))
    assert told
    expect(page.get_by_test_id("tf-sentence")).to_contain_text(f"{told[2]} of those {told[3]} are in {told[1]};")
    press(chip)
    expect(current(page).get_by_label("slowest", exact=True)).to_be_visible()
    expect(current(page).locator("b")).to_have_text(FOLD)
    expect(current(page).locator(".tf-tree-ops")).to_have_text(re.compile(rf"(^|→ ){told[2]}$"))


@pytest.mark.parametrize("width", [480, 760, 1300, 2000])
def test_rows_fit_at_any_width(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    open_up(page)
    for tab, content in (("trace", "tf-tree"), ("layers", "tf-layers")):
        page.get_by_test_id(f"tf-tab-{tab}").click()
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert page.get_by_test_id(content).evaluate("e => e.scrollWidth <= e.clientWidth"), tab


def test_names_of_the_program_are_text(page: Page) -> None:
    expect(row(page, "norm")).to_contain_text(NASTY)
    page.get_by_test_id("tf-tab-layers").click()
    expect(page.locator("td.tf-layers-type", has_text=NASTY)).to_have_count(1)
    assert page.locator("img").count() == 0


# --- layers -----------------------------------------------------------------------------------------------------------


def layer_column(page: Page, column: str) -> list[str]:
    return page.locator(f"[data-testid=tf-layers] tbody td.tf-layers-{column}").all_text_contents()


def test_layers_are_sorted_by_backward_and_by_what_is_clicked(page: Page, press: Callable[[Locator], None]) -> None:
    page.get_by_test_id("tf-tab-layers").click()
    by = page.get_by_role("columnheader", name="backward")
    expect(by).to_have_attribute("aria-sort", "descending")
    backward = [float(text.lstrip("<")) for text in layer_column(page, "backward") if text != "–"]
    assert backward == sorted(backward, reverse=True)
    press(page.get_by_test_id("tf-layers-by-forward"))
    expect(by).not_to_have_attribute("aria-sort", re.compile("."))
    forward = [float(text.lstrip("<")) for text in layer_column(page, "forward") if text != "–"]
    assert forward == sorted(forward, reverse=True)
    assert page.evaluate("document.activeElement.dataset.testid") == "tf-layers-by-forward"
    press(page.get_by_test_id("tf-layers-by-forward"))
    expect(page.get_by_role("columnheader", name="forward")).to_have_attribute("aria-sort", "ascending")


def test_the_sentence_is_the_tables_first_row(page: Page, press: Callable[[Locator], None]) -> None:
    page.get_by_test_id("tf-tab-layers").click()
    says = page.get_by_test_id("tf-layers-says")
    first = page.locator("[data-testid=tf-layers] tbody th").first.text_content()
    expect(says).to_have_text(
        re.compile(rf"^Backward is \d+\.\d× forward; that of {re.escape(str(first))} takes \d+ % of the kernels’ time")
    )
    folded = page.locator("[data-testid=tf-layers] tbody tr").count()
    press(page.get_by_test_id("tf-layers-fold"))
    assert page.locator("[data-testid=tf-layers] tbody tr").count() > folded
    expect(says).not_to_contain_text("×3")


def test_the_backwards_time_is_parted_by_kind_in_colour_and_in_words(page: Page) -> None:
    page.get_by_test_id("tf-tab-layers").click()
    bar = page.locator("[data-testid=tf-layers] .tf-kinds-of").first
    assert re.search(r"matmul \d+ %", str(bar.get_attribute("aria-label")))
    expect(page.get_by_test_id("tf-work-legend")).to_contain_text("matmul")
    widths = (
        bar.locator("i").first.locator("b").evaluate_all("all => all.map((one) => one.getBoundingClientRect().width)")
    )
    assert len(widths) > 0
    assert sum(widths) <= bar.bounding_box()["width"] + 1
    expect(page.get_by_role("columnheader", name="time by kind")).to_be_visible()


def test_a_layer_leads_to_its_slowest_op_in_the_tree(page: Page, press: Callable[[Locator], None]) -> None:
    page.get_by_test_id("tf-tab-layers").click()
    press(page.get_by_test_id("tf-layer-head"))
    expect(page.get_by_test_id("tf-tab-trace")).to_have_attribute("aria-selected", "true")
    expect(page.get_by_test_id("tf-details")).to_contain_text("head")
    expect(row(page, "head")).to_have_attribute("aria-expanded", "true")


# --- search and keys --------------------------------------------------------------------------------------------------


def test_search_marks_the_tree_and_walks_the_matches(page: Page) -> None:
    page.keyboard.press("/")
    field = page.get_by_test_id("tf-search")
    expect(field).to_be_focused()
    page.keyboard.type("op:gelu -phase:backward")
    count = page.get_by_test_id("tf-search-count")
    expect(count).to_have_text(re.compile(r"^3 of [\d,]+$"))
    assert FOLD in names(page), "nothing unfolds by itself"
    assert page.locator("[data-testid^=tf-op-]").count() == 0
    expect(page.get_by_test_id("tf-hits").first).to_contain_text("3")
    visited = []
    for _ in range(3):
        page.keyboard.press("Enter")
        visited.append(selected(page))
    assert len(set(visited)) == 3
    expect(count).to_have_text(re.compile("^3/3 of"))
    expect(page.locator(".tf-hit")).not_to_have_count(0)
    page.keyboard.press("Shift+Enter")
    assert selected(page) == visited[1]
    page.keyboard.press("Escape")
    expect(field).to_have_value("")
    expect(count).to_have_text("")
    expect(page.get_by_test_id("tf-hits")).to_have_count(0)


# The op of what is selected, and those of so many matches that come next.
OP = "() => document.querySelector('[data-testid=tf-details] .tf-wide + .tf-wide').textContent"
STEPS = f"""(count) => [...Array(count).keys()].map(() => {{
    document.querySelector("[data-testid=tf-search-next]").click();
    return ({OP})();
}})"""


def test_what_is_called_so_is_found_first(page: Page, press: Callable[[Locator], None]) -> None:
    page.get_by_test_id("tf-search").fill("mm")
    count = page.get_by_test_id("tf-search-count")
    expect(count).to_have_attribute("title", re.compile(r"^\d+ called so, \d+ more contain it$"))
    exact = int(str(count.get_attribute("title")).split()[0])

    def step() -> str:
        press(page.get_by_test_id("tf-search-next"))
        return page.evaluate(OP)

    ops = [step(), *page.evaluate(STEPS, exact - 1), step()]
    assert all(op.startswith("aten.mm.default") for op in ops[:-1])
    assert not ops[-1].startswith("aten.mm.default")
    press(page.get_by_test_id("tf-search-back"))
    expect(count).to_have_text(re.compile(f"^{exact}/"))


def test_a_match_outside_the_shown_layer_filters_the_layers_table(page: Page) -> None:
    page.get_by_test_id("tf-tab-layers").click()
    page.get_by_test_id("tf-search").fill("module:head")
    visible = page.locator("[data-testid=tf-layers] tbody tr:visible")
    expect(visible).to_have_count(1)
    expect(visible).to_contain_text("head")


def test_what_was_not_understood_is_said_below_the_field(page: Page) -> None:
    page.get_by_test_id("tf-search").fill("dtype:foo")
    hint = page.get_by_test_id("tf-search-hint")
    expect(hint).to_contain_text("f32")
    expect(page.get_by_test_id("tf-search-count")).to_have_text(re.compile("^0 of"))
    expect(page.get_by_test_id("tf-search-next")).to_be_disabled()
    page.get_by_test_id("tf-search").fill("dtype:f32")
    expect(hint).to_be_hidden()


def test_what_was_not_understood_takes_no_click_from_what_it_covers(page: Page) -> None:
    page.set_viewport_size({"width": 1000, "height": 1000})
    page.get_by_test_id("tf-search").fill("dtype:foo")
    expect(page.get_by_test_id("tf-search-hint")).to_be_visible()
    page.get_by_test_id("tf-tab-notes").click()
    expect(page.get_by_test_id("tf-tab-notes")).to_have_attribute("aria-selected", "true")
    expect(page.get_by_test_id("tf-search-hint")).to_be_hidden()
    page.get_by_test_id("tf-search").focus()
    expect(page.get_by_test_id("tf-search-hint")).to_be_visible()


def test_matches_follow_a_new_configuration(page: Page) -> None:
    page.get_by_test_id("tf-search").fill("kernel:")
    count = page.get_by_test_id("tf-search-count")
    expect(count).not_to_have_text(re.compile("^0 of"))
    page.get_by_test_id("tf-toggle-fuse").click()
    expect(count).to_have_text(re.compile("^0 of"))


def test_help_lists_the_keys_and_keeps_the_keyboard(page: Page) -> None:
    page.get_by_test_id("tf-tree").focus()
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("search")
    page.keyboard.press("2")
    expect(page.get_by_test_id("tf-tab-trace")).to_have_attribute("aria-selected", "true")
    outside = "document.activeElement.closest('.tf') !== null && document.activeElement.closest('dialog') === null"
    for _ in range(6):
        page.keyboard.press("Tab")
        assert not page.evaluate(outside)
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(page.get_by_test_id("tf-tree")).to_be_focused()


def test_digits_open_tabs_and_p_goes_to_the_passes(page: Page) -> None:
    tabs = page.get_by_role("tab")
    for number in (2, 3, 1):
        page.keyboard.press(str(number))
        expect(tabs.nth(number - 1)).to_have_attribute("aria-selected", "true")
        assert page.evaluate("document.activeElement !== document.body")
    page.keyboard.press("p")
    assert page.evaluate("document.activeElement.closest('.tf-side') !== null")


def test_letters_typed_into_a_field_stay_there(page: Page) -> None:
    page.keyboard.press("/")
    page.keyboard.type("p2[?/x")
    expect(page.get_by_test_id("tf-search")).to_have_value("p2[?/x")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_test_id("tf-tab-trace")).to_have_attribute("aria-selected", "true")


def test_brackets_go_through_what_was_selected(page: Page) -> None:
    open_up(page)
    visited = []
    page.get_by_test_id("tf-tree").focus()
    for _ in range(3):
        page.keyboard.press("ArrowDown")
        visited.append(selected(page) if page.locator(".tf-details .tf-name").count() else "")
    visited = [name for name in visited if name]
    page.keyboard.press("[")
    assert selected(page) == visited[-2]
    page.keyboard.press("]")
    assert selected(page) == visited[-1]


# --- what is never used -----------------------------------------------------------------------------------------------


class Probed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.spare = (torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        probe = y.exp().log()  # noqa: F841 - it is what the test is about
        self.spare(x)
        return self.down(y.relu())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_is_never_used_is_grey_in_its_place(browser: Browser, tmp_path: Path, scheme: str) -> None:
    model, x = Probed(), torch.randn(4, 8)
    with tracefuse.capture() as c:
        loss = model(x).sum()
        loss.backward()
    assert len(c.dropped) == 3
    path = tmp_path / "view.html"
    path.write_text(html_page([payload(c.optimize())], "unused"), encoding="utf-8")
    page = browser.new_page(viewport=SIZE, color_scheme=scheme)
    page.goto(path.as_uri())
    rows = page.get_by_test_id("tf-tree-unused")
    closed = page.locator("[data-testid=tf-tree] [aria-expanded=false]")
    while closed.count():
        closed.first.click(position={"x": 8, "y": 8})
    expect(rows).to_have_count(3)
    texts = [row.inner_text().split() for row in rows.all()]
    assert [one[1] for one in texts] == ["exp", "log", "addmm"]
    assert all("never" in one for one in texts)
    expect(rows.first).to_have_attribute("title", re.compile(r"no part of the trace.*\n.*modelled.*writes 128 B"))
    above = rows.first.locator("xpath=preceding-sibling::*[@aria-expanded][1]")
    expect(above).to_contain_text("probe = y.exp().log()")
    grey, text = (
        page.locator(f"[data-testid={of}] code").first.evaluate("e => getComputedStyle(e).color")
        for of in ("tf-tree-unused", "tf-op-y")
    )
    assert grey != text
    assert page.evaluate("getComputedStyle(document.querySelector('.tf')).colorScheme") in (scheme, "light dark")
    page.close()
