"""The view in JupyterLab, driven as a user drives it."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from lab import MEASURED_UNTIL_STOPPED
from playwright.sync_api import Locator, Page, expect

pytestmark = pytest.mark.browser

SETUP = """
%load_ext tracefuse
import torch
from tracefuse.demo import GPT, batch
torch.manual_seed(0)
model = GPT(layers=1, width=32, heads=2, vocab=61, length=16, dropout=0.1)
tokens, targets = batch(61, 2, 12)
x = torch.randn(6, 2, 3, 16, requires_grad=True)
freqs = torch.randn(6, 1, 1, 8)

def rope(t):
    turned, rest = t[..., :8], t[..., 8:]
    first, second = torch.chunk(turned, 2, dim=-1)
    turned = turned * freqs.cos() + torch.cat((-second, first), dim=-1) * freqs.sin()
    return torch.cat((turned, rest), dim=-1)
"""
# Work for every pass: dropout to recompute around, concatenations to eliminate, weights to freeze.
CELL = """%%tracefuse --no-measure -o c
loss = model(tokens, targets) + rope(x).square().sum()
loss.backward()
"""


@pytest.fixture(scope="module")
def opened(open_notebook: Callable[..., Page]) -> Page:
    """One notebook for all: starting a kernel and recording takes longer than every test together."""
    return open_notebook(SETUP + MEASURED_UNTIL_STOPPED, CELL)


@pytest.fixture
def root(opened: Page) -> Locator:
    """The view's code with every pass on, no parameter frozen and nothing selected."""
    view = opened.get_by_test_id("tf-root")
    expect(view).to_have_attribute("data-ready", "1")
    view.get_by_test_id("tf-tab-code").click()
    for name in reversed(PASSES):  # `fuse` before `decompose`, which needs it
        if not view.get_by_test_id(f"tf-toggle-{name}").is_checked():
            switch(view, name)
    view.get_by_test_id("tf-freeze").fill("")
    view.get_by_test_id("tf-freeze").press("Enter")
    view.get_by_test_id("tf-remat-weight").select_option("0.5")
    expect(view.get_by_test_id("tf-call")).to_have_text("c.optimize()")
    settle(view)
    return view


PASSES = ("simplify", "freeze", "merge_matmuls", "cat", "linear_cross_entropy", "decompose", "channels_last",
          "pad", "remat", "optimizer_step", "fuse")  # fmt: skip


def switch(root: Locator, name: str) -> None:
    """Click a pass's switch and wait until the new traces are shown."""
    was_on = root.get_by_test_id(f"tf-toggle-{name}").is_checked()
    root.get_by_test_id(f"tf-toggle-{name}").click()
    row = expect(root.get_by_test_id(f"tf-pass-{name}"))
    is_off = re.compile("tf-off")
    row.to_have_class(is_off) if was_on else row.not_to_have_class(is_off)
    row.not_to_have_attribute("aria-busy", "true")  # the switch moved at once: now it is answered
    settle(root)


def settle(root: Locator) -> None:
    expect(root).to_have_attribute("data-busy", "")


def code(root: Locator) -> str:
    """Both halves without the removed lines, those off the screen included."""
    root.get_by_test_id("tf-diff").uncheck()
    return "\n".join(root.locator(".tf-code .tf-line").all_text_contents())


@pytest.mark.parametrize("name", ["simplify", "cat", "decompose", "remat", "fuse"])
def test_every_pass_changes_the_shown_trace(root: Locator, name: str) -> None:
    before = code(root)
    switch(root, name)
    assert code(root) != before
    switch(root, name)
    assert code(root) == before


def test_freezing_by_pattern_takes_ops_out_of_the_backward(root: Locator) -> None:
    before = code(root).count(" = ")
    root.get_by_test_id("tf-freeze").fill("h.*, norm.*")
    root.get_by_test_id("tf-freeze").press("Enter")
    expect(root.get_by_test_id("tf-call")).to_have_text("c.optimize(freeze=('h.*', 'norm.*'))")
    settle(root)
    assert code(root).count(" = ") < before


def test_a_pattern_that_matches_nothing_is_answered_where_it_was_asked(root: Locator) -> None:
    root.get_by_test_id("tf-freeze").fill("nothing.*")
    root.get_by_test_id("tf-freeze").press("Enter")
    expect(root.get_by_test_id("tf-pass-freeze").get_by_role("alert")).to_contain_text("nothing.*")


def test_the_weight_of_remat(root: Locator) -> None:
    root.get_by_test_id("tf-remat-weight").select_option("0")
    expect(root.get_by_test_id("tf-call")).to_have_text("c.optimize(remat=0.0)")


def test_a_value_is_pinned_from_its_details_and_given_back_in_the_row(root: Locator) -> None:
    root.locator("[data-testid=tf-code-forward] [data-defines=gelu]").first.click()
    root.get_by_test_id("tf-pin-save").click()
    expect(root.get_by_test_id("tf-call")).to_have_text("c.optimize(save=('gelu',))")
    expect(root.get_by_test_id("tf-details")).to_contain_text("gelu")
    root.get_by_test_id("tf-drop-save gelu").click()
    expect(root.get_by_test_id("tf-call")).to_have_text("c.optimize()")


def test_a_parameter_is_frozen_and_trained_from_the_trace(root: Locator) -> None:
    backward = code(root)
    root.locator("[data-testid=tf-code-forward] .tf-inputs summary").click()
    root.locator("[data-testid=tf-code-forward] [data-defines=h_0_mlp_up_weight]").click()
    root.get_by_test_id("tf-freeze-one").click()
    expect(root.get_by_test_id("tf-call")).to_have_text("c.optimize(freeze=('h.0.mlp.up.weight',))")
    settle(root)
    assert "grad_h_0_mlp_up_weight" not in code(root)
    expect(root.get_by_test_id("tf-freeze-one")).to_have_text("train")
    root.get_by_test_id("tf-freeze-one").click()
    expect(root.get_by_test_id("tf-call")).to_have_text("c.optimize()")
    settle(root)
    assert code(root) == backward


def test_measuring_and_predicted_times(root: Locator) -> None:
    tile = root.get_by_test_id("tf-tile-time")
    expect(tile).to_contain_text("≈ modelled")
    root.get_by_test_id("tf-measure").click()
    expect(root.get_by_test_id("tf-own-time")).to_contain_text("On this CPU, measured: ")
    expect(tile).to_contain_text("≈ modelled")
    settle(root)
    root.get_by_test_id("tf-clock").select_option("here")
    expect(tile).to_contain_text("● measured")
    expect(tile.locator("[title*='measured on CPU']")).to_have_count(1)
    settle(root)
    root.get_by_test_id("tf-tab-timing").click()
    expect(root.get_by_test_id("tf-timing")).to_be_visible()
    root.get_by_test_id("tf-tab-code").click()
    switch(root, "remat")
    expect(tile).to_contain_text("◍ predicted")
    switch(root, "remat")
    expect(tile).to_contain_text("● measured")
    root.get_by_test_id("tf-undo").click()
    expect(tile).to_contain_text("◍ predicted")
    root.get_by_test_id("tf-redo").click()
    expect(tile).to_contain_text("● measured")


def test_a_measurement_is_cancelled(root: Locator) -> None:
    root.get_by_test_id("tf-measure").click()
    expect(root.get_by_test_id("tf-verdict")).to_contain_text("round")
    root.get_by_test_id("tf-cancel").click()
    expect(root).to_have_attribute("data-busy", "")
    expect(root.get_by_test_id("tf-measure")).to_be_enabled()
    root.get_by_test_id("tf-tab-timing").click()
    expect(root.locator(".tf-table-panel")).to_contain_text("cancelled")


def test_a_click_selects_and_arrows_walk(root: Locator) -> None:
    line = root.locator("[data-testid=tf-code-forward] .tf-is-op:has([data-value])").nth(3)
    name = str(line.get_attribute("data-defines"))
    line.locator("[data-value]").first.click()
    selected = root.get_by_test_id("tf-details").locator(".tf-name")
    expect(selected).to_have_text(name)
    expect(line).to_have_class(re.compile("tf-current"))
    root.get_by_test_id("tf-code-forward").press("ArrowDown")
    expect(selected).not_to_have_text(name)
    root.get_by_test_id("tf-code-forward").press("Escape")
    expect(root.get_by_test_id("tf-clear")).to_have_count(0)


def test_a_kernels_source_unfolds(root: Locator) -> None:
    root.get_by_test_id("tf-tab-kernels").click()
    root.get_by_test_id("tf-kernels").locator("tr:not(.tf-library) .tf-disclose").first.click()
    expect(root.get_by_test_id("tf-kernel-text").first).to_contain_text("@triton.jit")
