"""A view and its kernel in JupyterLab: measuring leaves the kernel free, cells come first, and a lost kernel is said."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from lab import MEASURED_UNTIL_STOPPED
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser

SETUP = f"""
%load_ext tracefuse
import torch
from tracefuse.demo import GPT, batch
from tracefuse.widgets.view import keeping
keeping.QUIET_S = 1e6  # no page is made of what is shown later: tests/browser/lab/test_kept.py
torch.manual_seed(0)
model = GPT(layers=1, width=32, heads=2, vocab=61, length=16)
tokens, targets = batch(61, 2, 12)
{MEASURED_UNTIL_STOPPED}"""
CELL = """%%tracefuse --no-measure -o c
loss = model(tokens, targets)
loss.backward()
"""
# Long enough for a hand to be quicker; the tests stop it.
EXPLORE = """
explorer = c.explore()
explorer.budget_s = 60
explorer
"""
START_CELL = """(source) => {
    window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.requestExecute({ code: source });
}"""
RESTART = "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()"

IS_IDLE = """() => {
    const context = window.jupyterapp?.shell?.currentWidget?.sessionContext;
    return context?.isReady === true && context.session?.kernel?.status === "idle";
}"""


@pytest.fixture(scope="module")
def opened(open_notebook: Callable[..., Page]) -> Page:
    page = open_notebook(SETUP, CELL, EXPLORE)
    expect(page.get_by_test_id("tf-root")).to_have_count(2)
    return page


def test_the_view_goes_on_answering_while_it_measures_and_a_cell_comes_first(
    opened: Page, run_cell: Callable[[Page, str], str]
) -> None:
    """The first one that ends what was asked for puts it off, the second one ends it for good."""
    view = opened.get_by_test_id("tf-root").nth(1)
    run_cell(
        opened, "from tracefuse.widgets.view import tasks\nrounds.MIN_ROUNDS = 10**9  # what a cell ends is not enough"
    )
    view.get_by_test_id("tf-measure").click()
    expect(view).to_have_attribute("data-busy", "timing")
    expect(view.get_by_test_id("tf-verdict")).to_contain_text("round")
    view.get_by_test_id("tf-toggle-fuse").click()
    expect(view.get_by_test_id("tf-pass-fuse")).to_have_class(re.compile("tf-off"))
    expect(view).to_have_attribute("data-busy", "timing")
    opened.evaluate(START_CELL, "import time; time.sleep(3); seen = len(tasks._timed)")
    expect(view.get_by_test_id("tf-verdict")).to_contain_text("waiting for the cell that runs")
    expect(view.get_by_test_id("tf-verdict")).to_contain_text("round")
    assert run_cell(opened, "print(seen, explorer.status['busy'] or 'idle')") == "0 idle\n"
    expect(view).to_have_attribute("data-busy", "")
    # Of these passes there is no time, and of no program as the cell came before the rounds that an interval takes.
    expect(view.get_by_test_id("tf-own-time").filter(has_text="with the passes")).to_have_count(0)
    assert "cancelled" in run_cell(opened, "print(explorer.status['error'], explorer.payload['timing'])")


def test_a_cancel_is_read_while_it_measures(opened: Page) -> None:
    view = opened.get_by_test_id("tf-root").nth(1)
    view.get_by_test_id("tf-measure").click()
    expect(view.get_by_test_id("tf-verdict")).to_contain_text("round")
    view.get_by_test_id("tf-cancel").click()
    expect(view).to_have_attribute("data-busy", "")


def test_a_file_arrives(opened: Page) -> None:
    view = opened.get_by_test_id("tf-root").nth(0)
    view.get_by_test_id("tf-take").click()
    with opened.expect_download() as download:
        view.get_by_test_id("tf-take-html").click()
    assert download.value.suggested_filename == "tracefuse.html"
    assert download.value.path().read_text(encoding="utf-8").startswith("<!doctype html>")
    expect(view).to_have_attribute("data-busy", "")


def test_a_pinned_configuration_is_what_the_view_compares_with(opened: Page) -> None:
    view = opened.get_by_test_id("tf-root").nth(0)
    view.get_by_test_id("tf-pin").click()
    expect(view.get_by_test_id("tf-pin")).to_have_text("Unpin")
    view.get_by_test_id("tf-pin").click()
    expect(view.get_by_test_id("tf-pin")).to_have_text("Pin as baseline")


def test_a_cell_that_runs_is_waited_for(opened: Page, run_cell: Callable[[Page, str], str]) -> None:
    view = opened.get_by_test_id("tf-root").nth(1)
    opened.evaluate(START_CELL, "import time; time.sleep(2); said = explorer.status['text']")
    view.get_by_test_id("tf-measure").click()
    expect(view.get_by_test_id("tf-verdict")).to_contain_text("round")
    # Nothing is said where messages wait for the cell themselves.
    assert run_cell(opened, "print(said)") in ("waiting for the cell that runs\n", "\n")
    expect(view).to_have_attribute("data-busy", "")


def test_python_and_the_views_of_a_notebook_go_their_own_ways(
    opened: Page, run_cell: Callable[[Page, str], str]
) -> None:
    first, second = (opened.get_by_test_id("tf-root").nth(at) for at in (0, 1))
    run_cell(opened, "explorer.pin(); explorer.config = {'remat': None}")
    expect(second.get_by_test_id("tf-pass-remat")).to_have_class(re.compile("tf-off"))
    expect(first.get_by_test_id("tf-pass-remat")).not_to_have_class(re.compile("tf-off"))
    assert "no weight" in run_cell(opened, "explorer.config = {'remat': 7}")
    assert run_cell(opened, "print(explorer.payload['baseline'])").startswith("{'is_pinned': True")


def test_a_kernel_that_was_started_anew_is_said_and_what_was_known_stays(opened: Page) -> None:
    """Also while it measured: of that nothing goes on, and there is nothing to cancel."""
    measuring = opened.get_by_test_id("tf-root").first
    measuring.get_by_test_id("tf-measure").click()
    expect(measuring.get_by_test_id("tf-cancel")).to_be_visible()
    opened.evaluate(RESTART)
    for at in (0, 1):
        view = opened.get_by_test_id("tf-root").nth(at)
        expect(view.get_by_test_id("tf-closed")).to_contain_text("Run the cell again")
        expect(view.get_by_test_id("tf-verdict")).to_be_visible()
        expect(view.get_by_test_id("tf-cancel")).to_be_hidden()


def test_a_notebook_that_is_opened_again_keeps_the_still_form(opened: Page) -> None:
    """JupyterLab cannot find the widgets then. What they showed stands beside, as tables while no page of it is made."""
    stills = opened.locator("[class^=tf-still-]")
    expect(stills).to_have_count(2)
    for at in (0, 1):
        expect(stills.nth(at)).to_be_hidden()
    opened.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    opened.reload()
    opened.wait_for_function(IS_IDLE)  # JupyterLab's own requests to the kernel fail if it is shut down under them
    for at in (0, 1):
        expect(stills.nth(at)).to_be_visible()
        expect(stills.nth(at)).to_contain_text("Run the cell again for the view itself")
    expect(stills.nth(1)).to_contain_text("which is pinned")
