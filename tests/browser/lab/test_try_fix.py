"""Try fix in JupyterLab: a replay measures what a finding promises, and the line stays beside it."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Locator, Page, expect

pytestmark = pytest.mark.browser

SETUP = """
import torch
import tracefuse
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
x = torch.randn(8, 256)
"""
CELL = """with tracefuse.capture() as c:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().square().sum()
    loss.backward()
view = c.explore(fuse=False)
view.budget_s = 1.0
view
"""
CASTS = "weights-cast-each-step"
UNFUSED = "unfused-pointwise"


@pytest.fixture(scope="module")
def opened(open_notebook: Callable[..., Page]) -> Page:
    return open_notebook(SETUP, CELL)


@pytest.fixture
def root(opened: Page) -> Locator:
    view = opened.get_by_test_id("tf-root")
    expect(view).to_have_attribute("data-ready", "1")
    expect(view).to_have_attribute("data-busy", "")
    view.get_by_test_id("tf-tab-findings").click()
    return view


def test_try_fix_measures_and_says_so_beside_the_finding(root: Locator, press: Callable[[Locator], None]) -> None:
    button = root.get_by_test_id(f"tf-fix-{CASTS}-0")
    expect(button).to_have_text(re.compile("^Try fix"))
    press(button)
    said = root.get_by_test_id(f"tf-trial-{CASTS}-0").locator(".tf-said")
    expect(said).to_have_text(
        re.compile(r"measured on CPU.*: [\d.]+ → [\d.]+ ms a step, ratio .*\[.*\] \(.*the same in every number")
    )
    expect(root).to_have_attribute("data-busy", "")
    expect(button).to_have_text("Try fix again")
    expect(button).to_be_enabled()


def test_what_was_tried_stays_and_goes_into_the_saved_page(
    root: Locator, opened: Page, run_cell: Callable[[Page, str], str]
) -> None:
    root.get_by_test_id(f"tf-fix-{CASTS}-0").click()
    expect(root).to_have_attribute("data-busy", "")
    root.get_by_test_id("tf-tab-code").click()
    root.get_by_test_id("tf-tab-findings").click()
    line = str(root.get_by_test_id(f"tf-trial-{CASTS}-0").locator(".tf-said").text_content())
    held = "print([t['said'] for f in view.held(view.variant)['findings'] for t in f['trials'] if t['said']])"
    assert line in run_cell(opened, held)


def test_a_trial_is_cancelled(root: Locator) -> None:
    root.get_by_test_id(f"tf-fix-{UNFUSED}-0").click()
    root.get_by_test_id("tf-cancel").click()
    expect(root).to_have_attribute("data-busy", "")
    expect(root.get_by_test_id(f"tf-fix-{UNFUSED}-0")).to_be_enabled()
    row = root.get_by_test_id(f"tf-trial-{UNFUSED}-0")
    expect(row.locator(".tf-said, [role=alert]").first).to_contain_text(re.compile("cancelled|measured"))


def test_a_fix_of_passes_is_switched_on(root: Locator) -> None:
    root.get_by_test_id(f"tf-try-{UNFUSED}").click()
    expect(root.get_by_test_id("tf-pass-fuse")).not_to_have_class(re.compile("tf-off"))
    expect(root.get_by_test_id(f"tf-fix-{UNFUSED}-0")).to_have_count(0)
