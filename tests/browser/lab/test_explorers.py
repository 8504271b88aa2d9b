"""Two explorers in one notebook of JupyterLab, and what Python and other widgets see of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from lab import MEASURED_UNTIL_STOPPED
from playwright.sync_api import Locator, Page, expect

pytestmark = pytest.mark.browser
NASTY = "<img src=x onerror=alert(1)>"

SETUP = f"""
import ipywidgets, torch, tracefuse
from tracefuse.demo import GPT, batch
torch.manual_seed(0)
model, data = GPT(layers=1, width=32, heads=2, vocab=61, length=16), batch(61, 2, 12)
model.register_parameter({NASTY!r}, torch.nn.Parameter(torch.ones(())))
c = tracefuse.capture(lambda: (model(*data) * getattr(model, {NASTY!r})).backward())
"""
FIRST = "first = c.explore()\nfirst"
SECOND = "second = c.optimize(fuse=False).explore()\nsecond.budget_s = 60\nsecond"
AS_FIRST = """
for one, options in ((first, {}), (second, {"fuse": False})):
    one.cancel(); one.wait(); one.unpin(); one.selected = ""
    if one.variant.config != c.optimize(**options).config: one.show(c.optimize(**options))
started = dict(first.config)
"""
LINKED = """
by_kernel, by_page = ipywidgets.Text(), ipywidgets.Text()
link = ipywidgets.link((first, "selected"), (by_kernel, "value"))
jslink = ipywidgets.jslink((first, "selected"), (by_page, "value"))
ipywidgets.VBox([by_kernel, by_page])
"""
RUN_CELL_AT = """async (at) => {
    const panel = window.jupyterapp.shell.currentWidget;
    panel.content.activeCellIndex = at;
    await window.jupyterapp.commands.execute("notebook:run-cell");
}"""
Run = Callable[[Page, str], str]
Press = Callable[[Locator], None]


@pytest.fixture(scope="module")
def opened(open_notebook: Callable[..., Page]) -> Iterator[Page]:
    page = open_notebook(SETUP + MEASURED_UNTIL_STOPPED, FIRST, SECOND, LINKED)
    expect(page.get_by_test_id("tf-root")).to_have_count(2)
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    yield page
    assert dialogs == []


@pytest.fixture
def views(opened: Page, run_cell: Run) -> tuple[Locator, Locator]:
    """Both as they were first shown, their code open."""
    run_cell(opened, AS_FIRST)
    first, second = (opened.get_by_test_id("tf-root").nth(at) for at in (0, 1))
    for view in (first, second):
        expect(view).to_have_attribute("data-busy", "")
        view.get_by_test_id("tf-tab-code").click()
    expect(first.get_by_test_id("tf-call")).to_have_text("c.optimize()")
    expect(second.get_by_test_id("tf-call")).to_have_text("c.optimize(fuse=False)")
    expect(first.get_by_test_id("tf-clear")).to_have_count(0)
    return first, second


@pytest.fixture
def seen(opened: Page, run_cell: Run) -> Callable[[str], str]:
    """`seen(expression)` is what the notebook's kernel prints of it, once no view waits for an answer: a switch moves at once,
    and what it asks for comes later. A cell runs before it: ipywidgets holds a view's message back until the kernel has
    answered the one before."""

    def printed(expression: str) -> str:
        for view in opened.get_by_test_id("tf-root").all():
            expect(view).to_have_attribute("data-busy", "")
        run_cell(opened, "pass")
        return run_cell(opened, f"print({expression})").removesuffix("\n")

    return printed


def name_of(view: Locator) -> str:
    return str(view.get_by_test_id("tf-details").locator(".tf-name").text_content())


# --- selection --------------------------------------------------------------------------------------------------------


def test_python_sees_what_is_selected_and_the_other_view_does_not(
    views: tuple[Locator, Locator], seen: Callable[[str], str]
) -> None:
    first, second = views
    lines = second.locator("[data-testid=tf-code-forward] .tf-is-op [data-value]")
    lines.nth(3).click()
    clicked = name_of(second)
    assert seen("second.selected, repr(first.selected)") == f"{clicked} ''"
    second.get_by_test_id("tf-code-forward").press("ArrowDown")
    expect(second.get_by_test_id("tf-details").locator(".tf-name")).not_to_have_text(clicked)
    assert seen("second.selected, repr(first.selected)") == f"{name_of(second)} ''"
    expect(first.get_by_test_id("tf-clear")).to_have_count(0)


def test_python_selects(opened: Page, views: tuple[Locator, Locator], run_cell: Run) -> None:
    first, second = views
    run_cell(opened, "first.selected = 'gelu'")
    expect(first.get_by_test_id("tf-details").locator(".tf-name")).to_have_text("gelu")
    first.get_by_test_id("tf-code-forward").scroll_into_view_if_needed()
    expect(first.locator("[data-testid=tf-code-forward] .tf-current").first).to_be_in_viewport()
    expect(second.get_by_test_id("tf-clear")).to_have_count(0)


@pytest.mark.parametrize("at", [0, 1], ids=["link", "jslink"])
def test_a_text_that_is_linked_follows_and_leads(
    opened: Page, views: tuple[Locator, Locator], seen: Callable[[str], str], at: int
) -> None:
    first, _ = views
    field = opened.locator(".widget-text input").nth(at)
    first.locator("[data-testid=tf-code-forward] .tf-is-op [data-value]").nth(3).click()
    expect(field).to_have_value(name_of(first))
    field.fill("gelu")
    expect(first.get_by_test_id("tf-details").locator(".tf-name")).to_have_text("gelu")
    assert seen("first.selected, repr(second.selected)") == "gelu ''"


# --- configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "off", "press"),
    [
        ("simplify", "False", "mouse"),
        ("cat", "False", "keyboard"),
        ("remat", "None", "mouse"),
        ("decompose", "False", "keyboard"),
        ("pad", "False", "mouse"),
        ("fuse", "False", "keyboard"),
    ],
    indirect=["press"],
)
def test_python_sees_a_switch_and_the_other_view_stays(
    views: tuple[Locator, Locator], press: Press, seen: Callable[[str], str], name: str, off: str
) -> None:
    first, second = views
    press(first.get_by_test_id(f"tf-toggle-{name}"))
    expect(first.get_by_test_id(f"tf-pass-{name}")).to_have_class(re.compile("tf-off"))
    assert seen(f"first.config[{name!r}]") == off
    press(first.get_by_test_id(f"tf-toggle-{name}"))
    expect(first.get_by_test_id(f"tf-pass-{name}")).not_to_have_class(re.compile("tf-off"))
    assert seen(f"first.config[{name!r}] == started[{name!r}]") == "True"
    expect(second.get_by_test_id("tf-call")).to_have_text("c.optimize(fuse=False)")


@pytest.mark.parametrize("by", ["mouse", "keyboard"])
def test_python_sees_the_options_of_remat(views: tuple[Locator, Locator], seen: Callable[[str], str], by: str) -> None:
    first, _ = views
    slider, weight = first.get_by_test_id("tf-memory-budget"), first.get_by_test_id("tf-remat-weight")
    if by == "mouse":
        slider.click(position={"x": 2, "y": 5})
    else:
        slider.press("Home")
    expect(first.get_by_test_id("tf-call")).to_have_text("c.optimize(memory_budget=0.1)")
    expect(first).to_have_attribute("data-busy", "")
    slider.press("End")
    expect(first.get_by_test_id("tf-call")).to_have_text("c.optimize()")
    expect(first).to_have_attribute("data-busy", "")
    if by == "mouse":
        weight.select_option("0")
    else:
        weight.press("ArrowDown")
    expect(first.get_by_test_id("tf-call")).to_have_text("c.optimize(remat=0.0)")
    assert seen("first.config['remat'], first.config['memory_budget'], second.config['remat']") == "0.0 None 0.5"


def test_an_option_is_unfolded_and_set(
    views: tuple[Locator, Locator], press: Press, seen: Callable[[str], str]
) -> None:
    first, _ = views
    press(first.get_by_test_id("tf-options-remat"))
    field = first.get_by_test_id("tf-option-remat-longest_chain")
    field.fill("8")
    field.press("Enter")
    expect(first.get_by_test_id("tf-options-remat")).to_contain_text("1 set")
    options = "first.variant.config.remat_options, second.variant.config.remat_options"
    assert seen(options) == "(('longest_chain', 8),) ()"
    press(first.get_by_test_id("tf-options-remat"))
    expect(field).to_be_hidden()


def test_pins_are_set_from_the_details_and_dropped_from_the_row(
    opened: Page, views: tuple[Locator, Locator], press: Press, run_cell: Run, seen: Callable[[str], str]
) -> None:
    first, _ = views
    run_cell(opened, "first.selected = 'gelu'")
    for pin, other in (("save", "recompute"), ("recompute", "save")):
        press(first.get_by_test_id(f"tf-pin-{pin}"))
        expect(first.get_by_test_id("tf-call")).to_have_text(f"c.optimize({pin}=('gelu',))")
        assert seen(f"*first.config[{pin!r}], len(first.config[{other!r}])") == "gelu 0"
    press(first.get_by_test_id("tf-drop-recompute gelu"))
    expect(first.get_by_test_id("tf-call")).to_have_text("c.optimize()")


def test_a_finding_is_tried(views: tuple[Locator, Locator], press: Press, seen: Callable[[str], str]) -> None:
    _, second = views
    second.get_by_test_id("tf-tab-findings").click()
    press(second.get_by_test_id("tf-try-unfused-pointwise"))
    expect(second.get_by_test_id("tf-pass-fuse")).not_to_have_class(re.compile("tf-off"))
    assert seen("second.config['fuse']") == "True"
    expect(second.get_by_test_id("tf-finding-unfused-pointwise")).to_contain_text("mended by fuse")


def test_a_baseline_is_pinned_and_given_up(
    views: tuple[Locator, Locator], press: Press, seen: Callable[[str], str]
) -> None:
    first, second = views
    press(first.get_by_test_id("tf-pin"))
    expect(first.get_by_test_id("tf-baseline")).to_contain_text("c.optimize()")
    assert seen("first.baseline is first.variant, second.baseline") == "True None"
    expect(second.get_by_test_id("tf-baseline")).to_have_count(0)
    press(first.get_by_test_id("tf-pin"))
    expect(first.get_by_test_id("tf-baseline")).to_have_count(0)
    assert seen("first.baseline") == "None"


# --- what takes seconds -----------------------------------------------------------------------------------------------


def test_each_pass_is_measured(opened: Page, views: tuple[Locator, Locator], press: Press, run_cell: Run) -> None:
    first, _ = views
    run_cell(opened, "first.budget_s = 0.2; first.measured.known.ablations.clear(); first.show(first.variant)")
    share = first.get_by_test_id("tf-pass-fuse").locator(".tf-delta[title^='time']")
    told = r"the step with it minus the step without it, modelled for H100[^;]*"
    expect(share).to_have_attribute("title", re.compile(f"{told}$"))  # foreseen while nothing was asked for
    press(first.get_by_test_id("tf-ablate"))
    # The headline is modelled for a GPU: what the CPU took is told in words, and no figure beside the modelled ones.
    expect(share).to_have_attribute("title", re.compile(f"{told}; .* ms, 95 % interval: .*measured on"))
    expect(first.get_by_test_id("tf-each")).to_have_text("Each pass was measured: choose “this CPU” in times.")


def test_measuring_starts_and_is_cancelled(
    views: tuple[Locator, Locator], press: Press, seen: Callable[[str], str]
) -> None:
    _, second = views
    press(second.get_by_test_id("tf-measure"))
    expect(second.get_by_test_id("tf-verdict")).to_contain_text("round")
    press(second.get_by_test_id("tf-cancel"))
    expect(second).to_have_attribute("data-busy", "")
    # After enough rounds what was measured is kept; before, there is only the word.
    assert "cancelled" in seen("(second.status['error'] or {}).get('message') or second.payload['timing']['notes']")


def test_a_kernel_is_inspected(opened: Page, views: tuple[Locator, Locator], press: Press, run_cell: Run) -> None:
    first, _ = views
    run_cell(opened, "first.measured.inspected.clear(); first.show(first.variant)")
    first.get_by_test_id("tf-tab-kernels").click()
    row = first.get_by_test_id("tf-kernels").locator(".tf-disclose").first
    press(row)
    more = first.locator(".tf-kernel-source:visible")
    expect(more.get_by_test_id("tf-kernel-text")).to_contain_text("@triton.jit")
    press(more.get_by_role("button", name="inspect"))
    expect(more).to_contain_text(re.compile(r"\d+ registers"))
    press(row)
    expect(more).to_have_count(0)


# --- names are text ---------------------------------------------------------------------------------------------------


def test_a_parameter_called_like_markup_is_text_everywhere(
    opened: Page, views: tuple[Locator, Locator], press: Press, run_cell: Run, seen: Callable[[str], str]
) -> None:
    first, _ = views
    name = seen(f"next(name for name, one in first.payload['values'].items() if one['of'] == {NASTY!r})")
    run_cell(opened, f"first.selected = {name!r}")
    expect(first.get_by_test_id("tf-details")).to_contain_text(NASTY)
    press(first.get_by_test_id("tf-freeze-one"))
    expect(first.get_by_test_id(f"tf-drop-{NASTY}")).to_have_text(f"{NASTY} ×")
    assert seen("*first.config['freeze']") == NASTY
    first.get_by_test_id("tf-search").fill(f"dtype:{NASTY}")
    for tab in first.get_by_role("tab").all():
        press(tab)
        expect(tab).to_have_attribute("aria-selected", "true")
        assert opened.locator("img[src=x]").count() == 0, tab.text_content()
    first.get_by_test_id("tf-search").press("Escape")


# --- cells ------------------------------------------------------------------------------------------------------------


def test_a_cell_that_is_run_again_has_a_new_view_and_the_other_stays(
    opened: Page, views: tuple[Locator, Locator], run_cell: Run, seen: Callable[[str], str]
) -> None:
    first, second = views
    run_cell(opened, "first.selected = second.selected = 'gelu'")
    expect(first.get_by_test_id("tf-clear")).to_have_count(1)
    opened.evaluate(RUN_CELL_AT, 1)
    expect(first.get_by_test_id("tf-clear")).to_have_count(0)
    expect(opened.get_by_test_id("tf-root")).to_have_count(2)
    expect(second.get_by_test_id("tf-details").locator(".tf-name")).to_have_text("gelu")
    first.get_by_test_id("tf-toggle-simplify").click()
    expect(first.get_by_test_id("tf-pass-simplify")).to_have_class(re.compile("tf-off"))
    assert seen("first.config['simplify'], second.config['simplify']") == "False True"
