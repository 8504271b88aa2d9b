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
from tracefuse.widgets.html import configurations
from tracefuse.widgets.view.explorer import Explorer

pytestmark = pytest.mark.browser

FIRST_PAINT_MS = 500
TOGGLE_S = 1.0
PAGE_BYTES = 1_000_000
# Three times what it takes on two quiet cores.
WRITE_S = 30.0
LAYERS = 12
# Two frames after the view says that it is drawn, it is on the screen.
PAINTED = """() => new Promise((done) => {
    const look = () => document.querySelector("[data-testid=tf-root][data-ready='1']")
        ? requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now())))
        : requestAnimationFrame(look);
    look();
})"""
# In the page, so that the time is of the view and the kernel and not of who drives them.
TOGGLE = """async ([name, isOff]) => {
    const frame = () => new Promise(requestAnimationFrame);
    const start = performance.now();
    document.querySelector(`[data-testid=tf-toggle-${name}]`).click();
    const root = document.querySelector("[data-testid=tf-root]");
    while (root.querySelector(`[data-testid=tf-pass-${name}]`).classList.contains("tf-off") !== isOff) await frame();
    await frame();
    await frame();
    return (performance.now() - start) / 1000;
}"""
MODEL = f"""
%load_ext tracefuse
import torch
from tracefuse.demo import GPT, batch
torch.manual_seed(0)
model, (tokens, targets) = GPT(layers={LAYERS}, width=64, heads=2, vocab=256, length=32), batch(256, 2, 32)
"""
CELL = "%%tracefuse --no-measure -o c\nloss = model(tokens, targets)\nloss.backward()"


@pytest.fixture(scope="module")
def explorer() -> Explorer:
    """Timed op by op, so that its page has a timeline and measured times of every op."""
    torch.manual_seed(0)
    model, (tokens, targets) = GPT(layers=LAYERS, width=64, heads=2, vocab=256, length=32), batch(256, 2, 32)
    capture = tracefuse.capture(lambda: model(tokens, targets).backward())
    assert len(capture.trace.ops) > 1400
    made = Explorer(capture.optimize(), "c", budget_s=0.1)
    made.measure()
    assert made.payload["times"]["after"].startswith("measured on CPU")
    return made


@pytest.fixture(scope="module")
def written(explorer: Explorer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    start_s = time.perf_counter()
    path = explorer.save_html(tmp_path_factory.mktemp("budgets") / "view.html")
    seconds, held = time.perf_counter() - start_s, 1 + len(configurations(explorer.variant.config))
    print(f"\n{held} configurations of {LAYERS} layers written in {seconds:.1f} s of {WRITE_S:.0f}")
    assert seconds < WRITE_S
    return path


def test_a_saved_page_is_small(written: Path) -> None:
    print(f"\nsaved page, {LAYERS} layers: {written.stat().st_size:,} bytes of {PAGE_BYTES:,}")
    assert written.stat().st_size <= PAGE_BYTES


def test_the_first_paint(written: Path, browser: Browser) -> None:
    """From navigation to the second frame after the view was drawn; the best of a few, since other tests run beside."""
    times: list[float] = []
    while len(times) < 8 and min(times, default=FIRST_PAINT_MS) >= FIRST_PAINT_MS:
        page = browser.new_page(viewport={"width": 1300, "height": 900})
        page.goto(written.as_uri())
        times.append(page.evaluate(PAINTED))
        page.close()
    print(f"\nfirst paint, {LAYERS} layers: {', '.join(f'{ms:.0f}' for ms in times)} ms of {FIRST_PAINT_MS}")
    assert min(times) < FIRST_PAINT_MS


def test_a_toggle_repaints(open_notebook: Callable[..., Page]) -> None:
    """In JupyterLab, from the click to the new numbers; each pass off, and on again from what is kept; the best of a few
    notebooks, since other tests run beside."""
    times: dict[str, float] = {}
    for _ in range(3):
        for name, seconds in toggled(open_notebook(MODEL, CELL)).items():
            times[name] = min(seconds, times.get(name, seconds))
        if max(times.values()) < TOGGLE_S:
            break
    print(f"\ntoggle to repaint, {LAYERS} layers: " + ", ".join(f"{name} {s:.2f} s" for name, s in times.items()))
    assert max(times.values()) < TOGGLE_S


def toggled(page: Page) -> dict[str, float]:
    """Seconds of each toggle of a fresh capture."""
    expect(page.get_by_test_id("tf-root")).to_have_attribute("data-ready", "1")
    page.get_by_test_id("tf-idle-passes").click()
    times = {}
    for name in ("simplify", "cat", "remat", "fuse"):
        for is_off in (True, False):
            times[f"{name} {'off' if is_off else 'on'}"] = page.evaluate(TOGGLE, [name, is_off])
            expect(page.get_by_test_id("tf-root")).to_have_attribute("data-busy", "")
    return times
