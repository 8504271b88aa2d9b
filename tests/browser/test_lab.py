"""The view in JupyterLab, driven as a user drives it."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Locator, Page, expect

pytestmark = pytest.mark.browser

SETUP = """
%load_ext tracefuse
import torch
from tracefuse.demo import GPT, batch
torch.manual_seed(0)
model = GPT(layers=1, width=32, heads=2, vocab=61, length=16, dropout=0.1)
tokens, targets = batch(61, 2, 12)
freqs = torch.randn(6, 1, 1, 8)

def rotate(t):
    first, second = torch.chunk(t, 2, dim=-1)
    return t * freqs.cos() + torch.cat((-second, first), dim=-1) * freqs.sin()
"""
# Work for every pass: dropout to recompute around, a cat of slices, and weights to freeze.
CELL = """%%tracefuse --no-measure -o c
t = torch.randn(6, 2, 3, 8, requires_grad=True)
rotated = rotate(t[..., :8])
loss = model(tokens, targets) + rotated.square().sum()
loss.backward()
"""


def view(page: Page) -> Locator:
    root = page.get_by_test_id("tf-root")
    expect(root).to_have_attribute("data-ready", "1")
    return root


def code(root: Locator) -> str:
    """Both halves without the removed lines."""
    root.get_by_test_id("tf-diff").uncheck()
    return "\n".join(root.get_by_test_id(f"tf-code-{half}").inner_text() for half in ("forward", "backward"))


def settle(root: Locator) -> None:
    expect(root).to_have_attribute("data-busy", "")


def test_every_pass_changes_the_shown_trace(open_notebook: Callable[..., Page]) -> None:
    root = view(open_notebook(SETUP, CELL))
    root.get_by_test_id("tf-diff").uncheck()
    for name in ("simplify", "cat", "remat", "fuse"):
        before = code(root)
        root.get_by_test_id(f"tf-toggle-{name}").click()
        expect(root.get_by_test_id(f"tf-pass-{name}")).to_have_class(re.compile("tf-off"))
        settle(root)
        off = code(root)
        assert off != before, name
        root.get_by_test_id(f"tf-toggle-{name}").click()
        expect(root.get_by_test_id(f"tf-pass-{name}")).not_to_have_class(re.compile("tf-off"))
        settle(root)
        assert code(root) == before, name


def test_freezing_by_pattern_shortens_the_backward(open_notebook: Callable[..., Page]) -> None:
    root = view(open_notebook(SETUP, CELL))
    before = code(root)
    pattern = root.get_by_test_id("tf-freeze")
    pattern.fill("h.*, norm.*")
    pattern.press("Enter")
    expect(root.get_by_test_id("tf-call")).to_have_text("c.optimize(freeze=('h.*', 'norm.*'))")
    settle(root)
    assert len(code(root).splitlines()) < len(before.splitlines())


def test_a_pattern_that_matches_nothing_is_answered_where_it_was_asked(open_notebook: Callable[..., Page]) -> None:
    root = view(open_notebook(SETUP, CELL))
    pattern = root.get_by_test_id("tf-freeze")
    pattern.fill("nothing.*")
    pattern.press("Enter")
    expect(root.get_by_test_id("tf-pass-freeze").get_by_role("alert")).to_contain_text("nothing.*")


def test_the_weight_of_remat(open_notebook: Callable[..., Page]) -> None:
    root = view(open_notebook(SETUP, CELL))
    root.get_by_test_id("tf-remat-weight").select_option("0")
    expect(root.get_by_test_id("tf-call")).to_have_text("c.optimize(remat=0.0)")


def test_measuring_and_stale_times(open_notebook: Callable[..., Page]) -> None:
    root = view(open_notebook(SETUP, CELL))
    expect(root.get_by_test_id("tf-tile-time")).to_contain_text("not measured")
    root.get_by_test_id("tf-measure").click()
    expect(root.get_by_test_id("tf-timing")).to_be_visible()
    expect(root.get_by_test_id("tf-tile-time")).to_contain_text("measured on CPU")
    root.get_by_test_id("tf-toggle-cat").click()
    expect(root.get_by_test_id("tf-tile-time")).to_have_class(re.compile("tf-stale"))


def test_a_click_selects_in_both_halves_and_in_python(open_notebook: Callable[..., Page]) -> None:
    page = open_notebook(SETUP, CELL)
    root = view(page)
    line = root.locator("[data-testid=tf-code-forward] .tf-is-op:has([data-value])").nth(3)
    name = line.get_attribute("data-defines")
    line.locator("[data-value]").first.click()
    expect(root.get_by_test_id("tf-details").locator(".tf-name")).to_have_text(str(name))
    expect(line).to_have_class(re.compile("tf-current"))
    root.get_by_test_id("tf-code-forward").press("ArrowDown")
    expect(root.get_by_test_id("tf-details").locator(".tf-name")).not_to_have_text(str(name))
    root.get_by_test_id("tf-code-forward").press("Escape")
    expect(root.get_by_test_id("tf-details")).to_contain_text("Click a value")


def test_a_kernels_source_unfolds(open_notebook: Callable[..., Page]) -> None:
    root = view(open_notebook(SETUP, CELL))
    root.get_by_test_id("tf-tab-kernels").click()
    root.get_by_test_id("tf-kernels").get_by_role("button").first.click()
    expect(root.get_by_test_id("tf-kernel-text").first).to_contain_text("@triton.jit")
