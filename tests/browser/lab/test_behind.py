"""A cell on a CPU ends with its view in JupyterLab, which is timed behind it, and nothing that anybody does waits for that."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
from lab import MEASURED_UNTIL_STOPPED
from playwright.sync_api import Locator, Page, expect

pytestmark = pytest.mark.browser

SOON_S = 5.0
"""What is answered at once, on a machine that also runs other tests; measuring takes several times as long here."""
SETUP = f"""
%load_ext tracefuse
import torch
from tracefuse.demo import GPT, batch
from tracefuse.widgets.view import explorer, keeping, timing
explorer.BUDGET_S, timing.UNASKED_S = 600.0, 600.0  # the tests end it
keeping.QUIET_S = 1e6  # no page is made of what is shown later: tests/browser/lab/test_kept.py
torch.manual_seed(0)
model = GPT(layers=2, width=64, heads=2, vocab=61, length=32)
tokens, targets = batch(61, 2, 32)
{MEASURED_UNTIL_STOPPED}
rounds.MIN_ROUNDS = 10**9  # what a cell ends is never enough
"""
CELL = """%%tracefuse -o c
loss = model(tokens, targets)
loss.backward()
"""
NEXT = """
from tracefuse.widgets.view.tasks import is_unasked_timed
torch.manual_seed(5)
twin = torch.Generator().manual_seed(5)
print(is_unasked_timed(), torch.equal(torch.rand(9), torch.rand(9, generator=twin)))
"""


@pytest.fixture(scope="module")
def opened(open_notebook: Callable[..., Page]) -> Page:
    return open_notebook(SETUP, CELL)


@pytest.fixture
def view(opened: Page) -> Locator:
    return opened.get_by_test_id("tf-root")


def soon(act: Callable[[], object]) -> None:
    start_s = time.monotonic()
    act()
    assert time.monotonic() - start_s < SOON_S


def test_the_cell_has_ended_and_a_switch_is_answered_while_the_view_is_timed(view: Locator) -> None:
    expect(view.get_by_test_id("tf-cancel")).to_be_visible()  # the notebook has run to its end before
    tiles = view.locator(".tf-tiles")
    before = tiles.inner_text()

    def switch() -> None:
        view.get_by_test_id("tf-toggle-fuse").click()
        expect(view.get_by_test_id("tf-pass-fuse")).to_have_class(re.compile("tf-off"))
        expect(view.get_by_test_id("tf-pass-fuse")).not_to_have_attribute("aria-busy", "true")
        expect(view).to_have_attribute("data-busy", "")

    soon(switch)
    assert tiles.inner_text() != before
    expect(view.get_by_test_id("tf-cancel")).to_be_visible()
    expect(view.get_by_test_id("tf-verdict")).to_contain_text("round")


def test_pinning_and_undoing_wait_for_nothing_either(view: Locator) -> None:
    def pin() -> None:
        view.get_by_test_id("tf-pin").click()
        expect(view.get_by_test_id("tf-pin")).to_have_text("Unpin")
        view.get_by_test_id("tf-pin").click()
        expect(view.get_by_test_id("tf-pin")).to_have_text("Pin as baseline")

    def undo() -> None:
        view.press("Control+z")  # each pin, and the switch before
        view.press("Control+z")
        view.press("Control+z")
        expect(view.get_by_test_id("tf-pass-fuse")).not_to_have_class(re.compile("tf-off"))
        expect(view).to_have_attribute("data-busy", "")

    soon(pin)
    soon(undo)
    expect(view.get_by_test_id("tf-cancel")).to_be_visible()


def test_a_file_is_written_meanwhile(opened: Page, view: Locator) -> None:
    view.get_by_test_id("tf-take").click()
    with opened.expect_download() as download:
        view.get_by_test_id("tf-take-html").click()
    assert download.value.path().read_text(encoding="utf-8").startswith("<!doctype html>")
    expect(view.get_by_test_id("tf-cancel")).to_be_visible()
    expect(view.get_by_test_id("tf-verdict")).to_contain_text("round")


def test_the_next_cell_runs_alone_and_at_once_and_it_is_timed_anew_behind_that(
    opened: Page, view: Locator, run_cell: Callable[[Page, str], str]
) -> None:
    expect(view.get_by_test_id("tf-verdict")).to_contain_text("round")
    soon(lambda: run_cell(opened, "pass"))
    assert run_cell(opened, NEXT) == "False True\n"
    expect(view.get_by_test_id("tf-verdict")).to_contain_text("round")
    opened.evaluate(
        "() => { window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.requestExecute("
        "{ code: 'import time; time.sleep(3)' }); }"
    )
    expect(view.get_by_test_id("tf-verdict")).to_contain_text("waiting for the cell that runs")
    expect(view.get_by_test_id("tf-verdict")).to_contain_text("round")


def test_cancel_works_at_once(view: Locator) -> None:
    def cancel() -> None:
        view.get_by_test_id("tf-cancel").click()
        expect(view.get_by_test_id("tf-cancel")).to_be_hidden()
        expect(view.get_by_test_id("tf-measure")).to_be_visible()

    soon(cancel)
    expect(view.get_by_role("alert")).to_have_count(0)
