"""What is taken away from a view in JupyterLab: each file arrives, and is what it says that it is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from shutil import which
from xml.etree import ElementTree

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

pytestmark = pytest.mark.browser

SETUP = """
import torch, tracefuse
from tracefuse.demo import GPT, batch
torch.manual_seed(0)
model, data = GPT(layers=1, width=32, heads=2, vocab=61, length=16), batch(61, 2, 12)
c = tracefuse.capture(lambda: model(*data).backward())
explorer = c.optimize().explore()
"""
MEASURE = "explorer.budget_s = 0.2; explorer.measure()"


@pytest.fixture(scope="module")
def opened(open_notebook: Callable[..., Page]) -> Page:
    """One view as a cell's value, which nobody measured, and one that was measured."""
    page = open_notebook(SETUP, "c.optimize().explore()", f"{MEASURE}\nexplorer")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    expect(page.get_by_test_id("tf-root")).to_have_count(2)
    return page


@pytest.fixture
def view(opened: Page) -> Locator:
    return opened.get_by_test_id("tf-root").nth(1)


def take(view: Locator, what: str, press: Callable[[Locator], None]) -> None:
    expect(view).to_have_attribute("data-busy", "")
    press(view.get_by_test_id("tf-take"))
    press(view.get_by_test_id(f"tf-take-{what}"))


@pytest.fixture
def downloaded(opened: Page, view: Locator, press: Callable[[Locator], None], tmp_path: Path) -> Callable[[str], Path]:
    """`downloaded(what)` takes it from the menu, and returns the file by the name that the browser gives it."""

    def fetch(what: str) -> Path:
        with opened.expect_download() as download:
            take(view, what, press)
        path = tmp_path / download.value.suggested_filename
        download.value.save_as(path)
        expect(view.get_by_test_id("tf-take-notice")).to_contain_text(f"{path.name} was downloaded")
        expect(view.get_by_test_id("tf-take")).to_be_focused()
        return path

    return fetch


def test_the_page_opens_by_itself(downloaded: Callable[[str], Path], browser: Browser) -> None:
    path = downloaded("html")
    assert path.suffix == ".html"
    page = browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(path.as_uri())
    page.wait_for_selector("[data-testid=tf-root][data-ready='1']")
    expect(page.get_by_test_id("tf-own-time")).to_contain_text(
        re.compile("^On this CPU.*(with the passes|of 8 rounds)")
    )
    page.close()
    assert errors == []


def test_the_python_compiles(downloaded: Callable[[str], Path]) -> None:
    path = downloaded("python")
    assert path.name == "step.py"
    code = compile(path.read_text(encoding="utf-8"), path.name, "exec")
    assert {"forward", "backward"} <= set(code.co_names)


def test_the_chrome_trace_has_events(downloaded: Callable[[str], Path]) -> None:
    events = json.loads(downloaded("chrome_trace").read_text())["traceEvents"]
    assert len([event for event in events if event["ph"] == "X"]) > 50


def test_the_graph_for_model_explorer_has_nodes(downloaded: Callable[[str], Path]) -> None:
    graphs = json.loads(downloaded("model_explorer").read_text())["graphs"]
    assert all(graph["nodes"] for graph in graphs)


def test_the_dot_is_a_digraph(downloaded: Callable[[str], Path]) -> None:
    assert downloaded("dot").read_text(encoding="utf-8").startswith("digraph")


@pytest.mark.skipif(which("dot") is None, reason="needs Graphviz: install it (apt-get install graphviz)")
def test_the_svg_is_one(downloaded: Callable[[str], Path]) -> None:
    root = ElementTree.parse(downloaded("svg")).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.parametrize(("what", "start"), [("config", "c.optimize()"), ("trace", "def forward(")])
def test_a_text_is_on_the_clipboard(
    opened: Page, view: Locator, press: Callable[[Locator], None], what: str, start: str
) -> None:
    opened.evaluate("navigator.clipboard.writeText('')")
    take(view, what, press)
    expect(view.get_by_test_id("tf-take-notice")).to_contain_text("is on the clipboard")
    assert opened.evaluate("navigator.clipboard.readText()").startswith(start)
    press(view.get_by_test_id("tf-take-notice").get_by_role("button", name="dismiss"))
    expect(view.get_by_test_id("tf-take-notice")).to_be_hidden()


def test_what_needs_a_measurement_says_so_below_the_menu(opened: Page, press: Callable[[Locator], None]) -> None:
    view = opened.get_by_test_id("tf-root").nth(0)
    take(view, "chrome_trace", press)
    expect(view.get_by_test_id("tf-error-take")).to_contain_text("press Measure")
    press(view.get_by_test_id("tf-take-notice").get_by_role("button", name="dismiss"))
