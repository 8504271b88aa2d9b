"""A saved page of a model of real depth: small enough to send, quick to write and to open."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser, Page, expect

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.widgets.html import configurations
from tracefuse.widgets.view import Explorer

pytestmark = pytest.mark.browser
MIB = 2**20
# Three times what it takes on two quiet cores: this is no benchmark, and other tests run beside it.
WRITE_S, OPEN_S = 30.0, 6.0


@pytest.fixture(scope="module")
def explorer() -> Explorer:
    """Twelve layers, timed op by op, so that the page has a timeline and measured times of every op."""
    torch.manual_seed(0)
    model, (tokens, targets) = GPT(layers=12, width=64, heads=2, vocab=256, length=32), batch(256, 2, 32)
    with tracefuse.capture() as c:
        loss = model(tokens, targets)
        loss.backward()
    made = Explorer(c.optimize(), "c", budget_s=0.1)
    made.measure()
    return made


@pytest.fixture(scope="module")
def written(explorer: Explorer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, start_s = tmp_path_factory.mktemp("page") / "view.html", time.perf_counter()
    explorer.save_html(path)
    seconds, held = time.perf_counter() - start_s, 1 + len(configurations(explorer.variant.config))
    print(f"\n{held} configurations in {seconds:.1f} s and {path.stat().st_size / 1e3:.0f} kB")
    assert seconds < WRITE_S
    return path


@pytest.fixture
def page(browser: Browser, written: Path) -> Iterator[Page]:
    opened = browser.new_page(viewport={"width": 1300, "height": 1000})
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.goto(written.as_uri())
    opened.wait_for_selector("[data-testid=tf-root][data-ready='1']")
    yield opened
    opened.close()
    assert errors == []


def test_it_is_at_most_a_megabyte(explorer: Explorer, written: Path) -> None:
    assert len(explorer.variant.capture.trace.ops) > 1000
    assert explorer.payload["times"]["after"].startswith("measured on CPU")
    assert written.stat().st_size <= MIB


def test_it_opens_at_once(page: Page) -> None:
    ready_ms = page.evaluate("performance.now()")
    print(f"\nready after {ready_ms:.0f} ms")
    assert ready_ms < OPEN_S * 1e3


def test_its_switches_and_its_timeline_are_there(page: Page) -> None:
    for name in ("remat", "fuse"):
        page.get_by_test_id(f"tf-toggle-{name}").click()
        expect(page.get_by_test_id(f"tf-toggle-{name}")).not_to_be_checked()
        page.get_by_test_id(f"tf-toggle-{name}").click()
        expect(page.get_by_test_id(f"tf-toggle-{name}")).to_be_checked()
    expect(page.get_by_test_id("tf-tile-time")).to_contain_text("measured on CPU")


def test_a_browser_that_cannot_unpack_says_so(browser: Browser, written: Path) -> None:
    page = browser.new_page()
    page.add_init_script("delete globalThis.DecompressionStream")
    page.goto(written.as_uri())
    expect(page.get_by_text("This browser cannot unpack the page")).to_be_visible()
    page.close()
