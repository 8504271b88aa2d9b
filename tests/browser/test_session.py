"""A view and its kernel in JupyterLab: measuring leaves the kernel free, cells come first, and a lost kernel is said."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser
expect.set_options(timeout=30_000)

SETUP = """
%load_ext tracefuse
import torch
from tracefuse.demo import GPT, batch
torch.manual_seed(0)
model = GPT(layers=1, width=32, heads=2, vocab=61, length=16)
tokens, targets = batch(61, 2, 12)
"""
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
RUN_CELL = """async (source) => {
    const { session } = window.jupyterapp.shell.currentWidget.sessionContext;
    const done = session.kernel.requestExecute({ code: source });
    let text = "";
    done.onIOPub = ({ content }) => { text += content.text ?? content.evalue ?? ""; };
    await done.done;
    return text;
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


def test_the_view_goes_on_answering_while_it_measures_and_a_cell_comes_first(opened: Page) -> None:
    view = opened.get_by_test_id("tf-root").nth(1)
    view.get_by_test_id("tf-measure").click()
    expect(view).to_have_attribute("data-busy", "timing")
    expect(view.get_by_test_id("tf-verdict")).to_contain_text("round")
    view.get_by_test_id("tf-toggle-fuse").click()
    expect(view.get_by_test_id("tf-pass-fuse")).to_have_class(re.compile("tf-off"))
    expect(view).to_have_attribute("data-busy", "timing")
    assert opened.evaluate(RUN_CELL, "print(explorer.status['busy'] or 'idle')") == "idle\n"
    expect(view).to_have_attribute("data-busy", "")
    expect(view.get_by_test_id("tf-tile-time")).to_contain_text("of other passes")
    assert "cancelled" in opened.evaluate(RUN_CELL, "print(explorer.payload['timing']['notes'])")


def test_a_cell_that_runs_is_waited_for(opened: Page) -> None:
    view = opened.get_by_test_id("tf-root").nth(1)
    running = "import time; time.sleep(2); print(explorer.status['text'])"
    found = opened.evaluate(
        f"async () => {{ const run = ({RUN_CELL})({running!r});"
        "await new Promise((go) => setTimeout(go, 500));"
        "document.querySelectorAll('[data-testid=tf-measure]')[1].click(); return await run; }"
    )
    assert found in ("waiting for the cell that runs\n", "\n")  # the latter where messages wait for the cell themselves
    expect(view.get_by_test_id("tf-verdict")).to_contain_text("round")
    opened.evaluate(RUN_CELL, "pass")
    expect(view).to_have_attribute("data-busy", "")


def test_python_and_the_views_of_a_notebook_go_their_own_ways(opened: Page) -> None:
    first, second = (opened.get_by_test_id("tf-root").nth(at) for at in (0, 1))
    opened.evaluate(RUN_CELL, "explorer.pin(); explorer.config = {'remat': None}")
    expect(second.get_by_test_id("tf-pass-remat")).to_have_class(re.compile("tf-off"))
    expect(first.get_by_test_id("tf-pass-remat")).not_to_have_class(re.compile("tf-off"))
    assert "no weight" in opened.evaluate(RUN_CELL, "explorer.config = {'remat': 7}")
    assert opened.evaluate(RUN_CELL, "print(explorer.payload['baseline'])").startswith("{'is_pinned': True")


def test_a_kernel_that_was_started_anew_is_said_and_what_was_known_stays(opened: Page) -> None:
    opened.evaluate(RESTART)
    for at in (0, 1):
        view = opened.get_by_test_id("tf-root").nth(at)
        expect(view.get_by_test_id("tf-closed")).to_contain_text("Run the cell again")
        expect(view.get_by_test_id("tf-verdict")).to_be_visible()


def test_a_notebook_that_is_opened_again_keeps_the_still_form(opened: Page) -> None:
    """JupyterLab cannot find the widgets then, and says so; what they showed stands beside."""
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
