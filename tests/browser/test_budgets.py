"""What a page is held to in bytes and in elements; how long it takes is for `tests/bench/overhead/page.py` to say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser, Page

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.widgets.view.explorer import Explorer

pytestmark = pytest.mark.browser

PAGE_BYTES = 1_000_000
LAYERS = 12
ELEMENTS = "() => document.querySelector('[data-testid=tf-root]').querySelectorAll('*').length"


def explored(layers: int) -> Explorer:
    """Timed op by op, so that its page has a timeline and measured times of every op."""
    torch.manual_seed(0)
    model, (tokens, targets) = GPT(layers=layers, width=64, heads=2, vocab=256, length=32), batch(256, 2, 32)
    made = Explorer(tracefuse.capture(lambda: model(tokens, targets).backward()).optimize(), "c", budget_s=0.1)
    made.measure()
    made.show_times_of("here")
    assert made.payload["times"]["after"].startswith("measured on CPU")
    return made


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("budgets")
    return {layers: explored(layers).save_html(folder / f"{layers}.html") for layers in (LAYERS // 3, LAYERS)}


@pytest.fixture
def opened(pages: dict[int, Path], browser: Browser) -> Iterator[dict[int, Page]]:
    found = {layers: browser.new_page(viewport={"width": 1300, "height": 900}) for layers in pages}
    for layers, page in found.items():
        page.goto(pages[layers].as_uri())
        page.wait_for_selector("[data-testid=tf-root][data-ready='1']")
    yield found
    for page in found.values():
        page.close()


def test_a_saved_page_is_small(pages: dict[int, Path]) -> None:
    assert len(pages[LAYERS].read_bytes()) <= PAGE_BYTES


def test_three_times_the_layers_make_as_many_elements(opened: dict[int, Page]) -> None:
    """What is outside the window is drawn when it is scrolled to; modules alike share a row."""
    few, many = (page.evaluate(ELEMENTS) for page in opened.values())
    assert many <= 1.1 * few
