"""JupyterLab and Chromium for the tests marked `browser`: one server and one browser for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest
from lab import RUN_ALL, SHUT_DOWN, Lab, browsing, serving

HAS_PLAYWRIGHT = find_spec("playwright") is not None
if TYPE_CHECKING or HAS_PLAYWRIGHT:
    from playwright.sync_api import Browser, Locator, Page, expect

    # Patience for a machine that also runs other tests; nothing here waits when the view is quick.
    expect.set_options(timeout=120_000)

# The module of a saved page's view, read once for all views that are made of it there.
MODULE = """
    const read = () => new Blob([document.getElementById("module").textContent], { type: "text/javascript" });
    window.viewModule ??= await import(URL.createObjectURL(read()));
    const view = window.viewModule;
    const host = document.getElementById("view");
    const held = document.getElementById("held").textContent;
"""
# The view of a saved page once more, with a model that keeps what is sent: `sent`, `set(trait, value)`, `show(number)`.
LIVE = (
    f"async () => {{ {MODULE}"
    + """
    const listeners = {};
    const keep = ({ model }) => { window.kept = { payloads: model.payloads, board: model.get("board") }; };
    if (!window.kept) await view.mountPage(keep, held, host);
    const { payloads, board } = window.kept;
    const idle = { busy: "", progress: null, text: "", error: null };
    const quiet = { selected: "", status: idle, timeline: null, step: null, tab: "" };
    window.state = { ...quiet, payload: payloads[0], live: true, board };
    window.received = (message, bytes) => listeners["msg:custom"](message, [bytes]);
    window.sent = [];
    window.set = (name, value) => { window.state[name] = value; listeners[`change:${name}`]?.(); };
    window.payloadsOf = () => payloads;
    window.show = (number) => window.set("payload", payloads[number]);
    const model = {
        get: (name) => window.state[name], set: window.set, save_changes() {}, off() {},
        on: (event, callback) => { listeners[event] = callback; }, send: (message) => window.sent.push(message),
    };
    host.replaceChildren();
    view.default.render({ model, el: host });
}"""
)
REOPEN = (
    f"async () => {{ {MODULE}"
    + """
    host.replaceChildren();
    history.replaceState(null, "", location.pathname);
    await view.mountPage(view.default.render, held, host);
}"""
)
RUN_CELL = """async (source) => {
    const { session } = window.jupyterapp.shell.currentWidget.sessionContext;
    const done = session.kernel.requestExecute({ code: source });
    let text = "";
    done.onIOPub = ({ content }) => { text += content.text ?? content.evalue ?? ""; };
    await done.done;
    return text;
}"""


class WithoutPlaywright(pytest.Module):
    """A file of browser tests on a machine that cannot drive one: skipped as a whole, before it is imported."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip("needs playwright: install it (pip install playwright)", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return None if HAS_PLAYWRIGHT else WithoutPlaywright.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def watch_of() -> Callable[[str], Watch]:
    """`watch_of(allowed)` is a new `Watch` of pages that may ask for what begins with `allowed`."""
    return Watch


@dataclass
class Watch:
    """What a page did that it must not: exceptions, and requests that leave `allowed`."""

    allowed: str
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def on(self, page: Page) -> None:
        page.on("pageerror", lambda error: self._note_error(str(error)))
        page.on("request", lambda request: self._note(request.url))

    def _note_error(self, error: str) -> None:
        # JupyterLab's own, where a kernel is started anew while it asks that one for a subshell.
        if "Canceled future for create_subshell_request" not in error:
            self.errors.append(error)

    def _note(self, url: str) -> None:
        if not url.startswith((self.allowed, "blob:", "data:")):
            self.requests.append(url)

    def check(self) -> None:
        assert self.errors == []
        assert self.requests == []


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with browsing() as running:
        yield running


@pytest.fixture
def open_saved(browser: Browser) -> Iterator[Callable[[Path], Page]]:
    """`open_saved(path)` returns the page of a saved view; at the end none of them may have had an error."""
    pages: list[Page] = []
    errors: list[str] = []

    def opened(path: Path) -> Page:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        pages.append(page)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(path.as_uri())
        page.wait_for_selector("[data-testid=tf-root][data-ready='1']")
        return page

    yield opened
    for page in pages:
        page.close()
    assert errors == []


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with serving(tmp_path_factory.mktemp("lab")) as running:
        yield running


@pytest.fixture(scope="module")
def open_notebook(lab: Lab, browser: Browser, request: pytest.FixtureRequest) -> Iterator[Callable[..., Page]]:
    """`open_notebook(*cells)` runs them all in JupyterLab and returns the page; at the end it checks what the page did."""
    context = browser.new_context(viewport={"width": 1300, "height": 1000})
    watch = Watch(lab.url)
    pages: list[Page] = []

    def run(*cells: str) -> Page:
        name = f"{request.module.__name__.rpartition('.')[2]}_{len(pages)}.ipynb"
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        notebook = nbformat.v4.new_notebook(metadata={"kernelspec": kernel})
        notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
        nbformat.write(notebook, lab.root / name)
        page = context.new_page()
        pages.append(page)
        page.set_default_timeout(120_000)
        watch.on(page)
        lab.open(page, name)
        assert page.evaluate(RUN_ALL) == []
        return page

    yield run
    for page in pages:
        page.evaluate("() => 0")  # what it reported so far arrives before the answer
    seen = replace(watch, errors=list(watch.errors), requests=list(watch.requests))
    # JupyterLab cancels what is under way when its kernel ends, which is an error of its own.
    for page in pages:
        page.evaluate(SHUT_DOWN)
    context.close()
    seen.check()


@pytest.fixture(scope="session")
def go_live() -> Callable[[Page], None]:
    """`go_live(page)` puts a live view in place of the saved one, without a kernel."""

    def mount(page: Page) -> None:
        page.evaluate(LIVE)
        page.wait_for_selector("[data-testid=tf-root][data-ready='1']")

    return mount


@pytest.fixture(scope="session")
def reopen() -> Callable[[Page], None]:
    """`reopen(page)` makes a saved page's view anew, as opening the file does."""

    def mount(page: Page) -> None:
        page.wait_for_selector("[data-testid=tf-root]")  # else the file's own view comes on top of it
        page.evaluate(REOPEN)
        page.wait_for_selector("[data-testid=tf-root][data-ready='1']")

    return mount


@pytest.fixture(scope="session")
def run_cell() -> Callable[[Page, str], str]:
    """`run_cell(page, source)` runs it in the notebook's kernel; what it printed, or the error's message."""
    return lambda page, source: page.evaluate(RUN_CELL, source)


@pytest.fixture(scope="session")
def painted() -> Callable[[Page], None]:
    """`painted(page)` returns when what was asked for is on the screen: a canvas is painted by the next frame."""
    frames = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))"
    return lambda page: page.evaluate(frames)


@pytest.fixture(params=["mouse", "keyboard"])
def press(request: pytest.FixtureRequest) -> Callable[[Locator], None]:
    """`press(control)` clicks it, and in a second run of the test focuses it and presses the key of its kind."""

    def by_key(control: Locator) -> None:
        control.focus()
        expect(control).to_be_focused()
        control.press("Space" if control.get_attribute("type") == "checkbox" else "Enter")

    return Locator.click if request.param == "mouse" else by_key
