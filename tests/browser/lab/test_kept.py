"""A saved notebook without a kernel: the view works on what was stored, reopened in JupyterLab and as nbconvert's HTML."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import nbformat
import pytest
from lab import Lab
from playwright.sync_api import Browser, FrameLocator, Page, expect

from tests.browser.contrast import TABS

pytestmark = pytest.mark.browser

SETUP = """
%load_ext tracefuse
import torch
from tracefuse.demo import GPT, batch
from tracefuse.widgets.view import keeping
keeping.QUIET_S = 0.2
torch.manual_seed(0)
model = GPT(layers=1, width=32, heads=2, vocab=61, length=16)
tokens, targets = batch(61, 2, 12)
"""
CELL = """%%tracefuse --no-measure -o c
loss = model(tokens, targets)
loss.backward()
"""
SAVE = "() => window.jupyterapp.commands.execute('docmanager:save')"
NAME = "test_kept_0.ipynb"


def held_configurations(path: Path) -> int:
    """How large the kept page is: it grows once the neighbours are in it."""
    notebook = nbformat.read(path, as_version=4)
    texts = [
        out["data"].get("text/html", "") for cell in notebook.cells for out in cell.get("outputs", []) if "data" in out
    ]
    return max(map(len, texts), default=0)


@pytest.fixture(scope="module")
def living(open_notebook: Callable[..., Page], lab: Lab) -> Page:
    """A notebook that was saved when the neighbours of what is shown were computed, and whose kernel is there."""
    page = open_notebook(SETUP, CELL)
    expect(page.get_by_test_id("tf-root")).to_have_attribute("data-ready", "1")
    path = lab.root / NAME
    page.evaluate(SAVE)
    first = held_configurations(path)
    assert first > 100_000  # the page of the shown configuration came with the cell
    for _ in range(120):
        page.wait_for_timeout(500)
        page.evaluate(SAVE)
        if held_configurations(path) > first + 5_000:
            break
    else:
        raise AssertionError("no neighbours were kept")
    assert page.locator("iframe").count() == 0  # the living view is the only one
    return page


@pytest.fixture(scope="module")
def notebook(living: Page, lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file, as it was saved then."""
    path = tmp_path_factory.mktemp("kept") / NAME
    path.write_bytes((lab.root / NAME).read_bytes())
    return path


@pytest.fixture(scope="module")
def html_of(notebook: Path) -> Callable[[str], Path]:
    """`html_of(theme)` is what nbconvert makes of the file."""

    @cache
    def converted(theme: str) -> Path:
        folder = notebook.parent / theme
        command = [sys.executable, "-m", "nbconvert", "--to", "html", str(notebook), "--output-dir", str(folder)]
        subprocess.run([*command, "--theme", theme], check=True, capture_output=True)
        return (folder / notebook.name).with_suffix(".html")

    return converted


def check_view(view: FrameLocator) -> None:
    """Switches move between what is stored, panels draw, and what is not stored says so."""
    expect(view.get_by_test_id("tf-root")).to_have_attribute("data-ready", "1")
    fuse = view.get_by_test_id("tf-toggle-fuse")
    expect(fuse).to_be_checked()
    fuse.click()
    expect(fuse).not_to_be_checked()
    expect(view.get_by_test_id("tf-pass-fuse")).to_have_class(re.compile("tf-off"))
    fuse.click()
    for tab in (*TABS[1:], TABS[0]):
        view.get_by_test_id(f"tf-tab-{tab}").click()
        expect(view.get_by_test_id(f"tf-tab-{tab}")).to_have_attribute("aria-selected", "true")
    expect(view.get_by_test_id("tf-measure")).to_be_disabled()
    expect(view.get_by_test_id("tf-freeze")).to_be_disabled()


def test_a_reopened_notebook_shows_the_view(notebook: Path, lab: Lab, browser: Browser) -> None:
    name = "reopened.ipynb"
    (lab.root / name).write_bytes(notebook.read_bytes())
    context = browser.new_context(viewport={"width": 1300, "height": 1000})
    page = context.new_page()
    page.set_default_timeout(60_000)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    lab.open(page, name)
    still = page.locator("[class^=tf-still-]")
    expect(still).to_be_attached()
    still.scroll_into_view_if_needed()
    check_view(page.frame_locator("iframe[title^=tracefuse]"))
    context.close()
    assert [error for error in errors if "create_subshell" not in error] == []


@pytest.mark.usefixtures("notebook")
def test_a_page_that_is_loaded_again_shows_the_living_view(living: Page) -> None:
    """The kernel is still there: JupyterLab says "Loading widget" for a while, and the still form stands in for that long."""
    page = living
    view = page.get_by_test_id("tf-root")
    expect(view).to_have_attribute("data-ready", "1")
    page.evaluate(SAVE)
    page.reload()
    page.locator("[class^=tf-still-]").wait_for(state="attached")
    page.locator(".jp-CodeCell").last.scroll_into_view_if_needed()
    expect(view).to_have_attribute("data-ready", "1")
    expect(view).to_be_visible()
    expect(page.locator("iframe[title^=tracefuse]:visible")).to_have_count(0)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_html_of_nbconvert_shows_the_view(html_of: Callable[[str], Path], browser: Browser, theme: str) -> None:
    """In the notebook's own theme, which need not be the browser's."""
    page = browser.new_page(viewport={"width": 1300, "height": 1000}, color_scheme="light")
    page.route(
        re.compile("^https?://"), lambda route: route.abort()
    )  # what nbconvert links to: the view needs none of it
    page.goto(html_of(theme).as_uri(), wait_until="domcontentloaded")
    page.locator("[class^=tf-still-]").scroll_into_view_if_needed()
    view = page.frame_locator("iframe[title^=tracefuse]")
    check_view(view)
    for one in (view.locator("html"), view.get_by_test_id("tf-root")):
        expect(one).to_have_css("color-scheme", theme)
    page.close()


def test_where_no_script_runs_there_are_tables(html_of: Callable[[str], Path], browser: Browser) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.route(re.compile("^https?://"), lambda route: route.abort())
    page.goto(html_of("light").as_uri(), wait_until="domcontentloaded")
    expect(page.locator("[class^=tf-still-]")).to_contain_text("Run the cell again for the view itself")
    context.close()
