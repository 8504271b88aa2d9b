"""Stored notebooks in JupyterLab: pictures before anything runs, the view itself once it has."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import draw
import nbformat
import pytest
import store
from lab import RUN_ALL, SHUT_DOWN, Lab
from nbformat.v4 import new_code_cell, new_notebook
from PIL import Image
from playwright.sync_api import Browser, Page, expect

pytestmark = pytest.mark.browser

CELLS = [
    "import torch, tracefuse\nfrom tracefuse.widgets import charts\nx = torch.ones(64, 64, requires_grad=True)",
    "c = tracefuse.capture(lambda: (x.sin() @ x.cos()).exp().sum().backward())\nc.explore()",
    "charts.memory(c.optimize())",
    "with tracefuse.profile_run() as run:\n    x.sin().sum().backward()\nrun.timeline.explore()",
]
MOST_NBYTES = 150 * 1024


@pytest.fixture(scope="module")
def stored(browser: Browser) -> nbformat.NotebookNode:
    """A notebook with a view, a chart and a timeline, stored as the committed ones are."""
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    committed = new_notebook(cells=[new_code_cell(cell) for cell in CELLS], metadata={"kernelspec": kernel})
    committed.cells[1].metadata["tracefuse"] = {"tab": "code"}
    with ThreadPoolExecutor(1) as elsewhere:  # playwright's event loop runs in this thread
        executed = elsewhere.submit(store.execute, committed).result()
    made = store.store(committed, store.with_views(executed), draw.Artist(browser))
    assert made is not None
    return made


@pytest.fixture(scope="module")
def page(lab: Lab, browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1300, "height": 1000})
    page = context.new_page()
    page.set_default_timeout(60_000)
    yield page
    page.evaluate(SHUT_DOWN)
    context.close()


def pictures(notebook: nbformat.NotebookNode) -> list[bytes]:
    found = (output.get("data", {}).get("image/png") for output in store.outputs_of(notebook))
    return [base64.b64decode(png) for png in found if png]


def test_what_needs_javascript_is_drawn_small_and_in_many_colours(stored: nbformat.NotebookNode) -> None:
    drawn = pictures(stored)
    assert len(drawn) == 3
    for png in drawn:
        picture = Image.open(io.BytesIO(png))
        assert len(png) < MOST_NBYTES
        assert picture.width > 600
        assert picture.height > 200
        assert len(picture.getcolors(256)) > 30


def test_a_stored_notebook_shows_its_pictures_and_run_again_its_view(
    stored: nbformat.NotebookNode, lab: Lab, page: Page
) -> None:
    nbformat.write(stored, lab.root / "stored.ipynb")
    lab.open(page, "stored.ipynb")
    view, _, timeline = (page.locator(".jp-CodeCell").nth(at).locator(".jp-OutputArea-output img") for at in (1, 2, 3))
    for picture in (view, timeline):
        expect(picture).to_be_visible()
        assert picture.evaluate("image => image.naturalWidth > 600")
    expect(page.get_by_test_id("tf-root")).to_have_count(0)
    assert page.evaluate(RUN_ALL) == []
    expect(page.get_by_test_id("tf-root")).to_have_attribute("data-ready", "1")
    expect(view).to_have_count(0)


def test_the_first_committed_notebook_opens_with_pictures(lab: Lab, page: Page) -> None:
    path: Path = store.paths()[0]
    (lab.root / path.name).write_bytes(path.read_bytes())
    lab.open(page, path.name)
    expect(page.locator(".jp-OutputArea-output img").first).to_be_visible()
    expect(page.get_by_test_id("tf-root")).to_have_count(0)
