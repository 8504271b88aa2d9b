"""What a person waits for, printed and held to its budget: a page's first paint, a toggle, the size of what is saved."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser, Page, expect

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.widgets.html import write_html

pytestmark = pytest.mark.browser

FIRST_PAINT_MS = 500
TOGGLE_S = 1.0
PAGE_BYTES = 1_000_000
LAYERS = 12
# Two frames after the view says that it is drawn, it is on the screen.
PAINTED = """() => new Promise((done) => {
    const look = () => document.querySelector("[data-testid=tf-root][data-ready='1']")
        ? requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now())))
        : requestAnimationFrame(look);
    look();
})"""
MODEL = f"""
%load_ext tracefuse
import torch
from tracefuse.demo import GPT, batch
torch.manual_seed(0)
model, (tokens, targets) = GPT(layers={LAYERS}, width=64, heads=2, vocab=256, length=32), batch(256, 2, 32)
"""
CELL = "%%tracefuse --no-measure -o c\nloss = model(tokens, targets)\nloss.backward()"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model, (tokens, targets) = GPT(layers=LAYERS, width=64, heads=2, vocab=256, length=32), batch(256, 2, 32)
    capture = tracefuse.capture(lambda: model(tokens, targets).backward())
    assert len(capture.trace.ops) > 1400
    return write_html(capture.optimize(), tmp_path_factory.mktemp("budgets") / "view.html")


def test_a_saved_page_is_small(written: Path) -> None:
    print(f"\nsaved page, {LAYERS} layers: {written.stat().st_size:,} bytes of {PAGE_BYTES:,}")
    assert written.stat().st_size <= PAGE_BYTES


def test_the_first_paint(written: Path, browser: Browser) -> None:
    """From navigation to the second frame after the view was drawn; the best of three, since other tests run beside."""
    times = []
    for _ in range(3):
        page = browser.new_page(viewport={"width": 1300, "height": 900})
        page.goto(written.as_uri())
        times.append(page.evaluate(PAINTED))
        page.close()
    print(f"\nfirst paint, {LAYERS} layers: {', '.join(f'{ms:.0f}' for ms in times)} ms of {FIRST_PAINT_MS}")
    assert min(times) < FIRST_PAINT_MS


def test_a_toggle_repaints(open_notebook: Callable[..., Page]) -> None:
    """In JupyterLab, from the click to the new numbers; each pass off, and on again from what is kept."""
    page = open_notebook(MODEL, CELL)
    root = page.get_by_test_id("tf-root")
    expect(root).to_have_attribute("data-ready", "1")
    times = {}
    for name in ("simplify", "cat", "remat", "fuse"):
        for state in ("off", "on"):
            start = time.perf_counter()
            root.get_by_test_id(f"tf-toggle-{name}").click()
            root.locator(f"[data-testid=tf-pass-{name}]{'.tf-off' if state == 'off' else ':not(.tf-off)'}").wait_for()
            page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            times[f"{name} {state}"] = time.perf_counter() - start
    print(f"\ntoggle to repaint, {LAYERS} layers: " + ", ".join(f"{name} {s:.2f} s" for name, s in times.items()))
    assert sorted(times.values())[len(times) // 2] < TOGGLE_S
