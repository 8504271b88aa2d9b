"""The first screen of a stranger, in JupyterLab: the biggest lever that nobody pulled, and details where they are seen."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from lab import SHUT_DOWN
from playwright.sync_api import Locator, Page, expect

pytestmark = pytest.mark.browser
# A GPT with two mistakes: attention by hand, and a head whose rows are not aligned. Fusing what is behind it gains most.
SETUP = """
%load_ext tracefuse
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.register_buffer("mask", torch.tril(torch.ones(64, 64)))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        att = (q @ k.transpose(-2, -1)) * 64 ** -0.5
        att = att.masked_fill(self.mask[:64, :64] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        return x + self.out(att @ v)

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.h = nn.Embedding(203, 64), nn.Sequential(Block(), Block(), Block())
        self.head = nn.Linear(64, 203, bias=False)

    def forward(self, tokens, targets):
        x = torch.tanh(torch.sigmoid(torch.sin(self.h(self.tokens(tokens)) * 2.0) + 1.0) * 3.0 - 1.0) * 0.5
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

model = GPT().bfloat16()
tokens, targets = torch.randint(203, (2, 4, 64))
"""
CELL = """%%tracefuse --no-measure -o c
model(tokens, targets).backward()
"""
SIZES = [(800, 768), (1024, 768), (1440, 900)]
# From where to where the notebook shows what it holds.
SEEN = """() => {
    const { top, bottom } = document.querySelector(".jp-WindowedPanel-outer").getBoundingClientRect();
    return [top, bottom];
}"""
TO_TOP = "one => one.scrollIntoView({ block: 'start' })"
SCROLL = "([by]) => document.querySelector('.jp-WindowedPanel-outer').scrollBy(0, by)"
CLIPPED = "one => one.scrollWidth > one.clientWidth + 1"
CONTROLS = "[data-testid^=tf-toggle-], [role=tab], .tf-actions button, [data-testid^=tf-tile-], .tf-lever, .tf-tree-row"


@pytest.fixture(scope="module")
def opened(open_notebook: Callable[..., Page]) -> Page:
    page = open_notebook(SETUP, CELL)
    expect(page.get_by_test_id("tf-root")).to_have_attribute("data-ready", "1")
    page.evaluate("() => { navigator.clipboard.writeText = async (text) => { window.copied = text; }; }")
    return page


@pytest.fixture
def view(opened: Page) -> Locator:
    root = opened.get_by_test_id("tf-root")
    expect(root).to_have_attribute("data-busy", "")
    for name in ("fuse", "pad"):
        if not root.get_by_test_id(f"tf-toggle-{name}").is_checked():
            root.get_by_test_id(f"tf-toggle-{name}").click()
            expect(root.get_by_test_id(f"tf-pass-{name}")).not_to_have_class(re.compile("tf-off"))
    root.get_by_test_id("tf-tab-trace").click()
    for clear in root.get_by_test_id("tf-clear").all():
        clear.click()
    root.get_by_test_id("tf-undo").press("Escape")  # of the pass whose switch was used, too
    expect(root).to_have_attribute("data-busy", "")
    return root


def sized(opened: Page, view: Locator, width: int, height: int) -> tuple[float, float]:
    """The view at the top of a notebook of this size, and from where to where that shows it."""
    opened.set_viewport_size({"width": width, "height": height})
    view.evaluate(TO_TOP)
    top, bottom = opened.evaluate(SEEN)
    return top, bottom


def box(one: Locator) -> dict[str, float]:
    """Where it is; the view may be drawn anew meanwhile, since what its switches change becomes known in the background."""
    while True:
        expect(one).to_be_visible()
        found: Any = one.bounding_box()
        if found is not None:
            return found


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_biggest_lever_that_nobody_pulled_is_on_the_first_screen(
    opened: Page, view: Locator, width: int, height: int
) -> None:
    """All of it without scrolling: what, where, the fix, what it is worth, and a button."""
    top, bottom = sized(opened, view, width, height)
    lever = view.get_by_test_id("tf-lever")
    what, where = lever.get_by_test_id("tf-first-0"), lever.locator(".tf-lever-place code")
    expect(what).to_contain_text("3 attentions written by hand")
    expect(where).to_have_text(re.compile(r"^In\[1\]:\d+"))
    expect(lever.locator(".tf-worth")).to_have_text(
        re.compile(r"^≈ spares up to [\d.]+ [µm]s of [\d.]+ [µm]s: \d+ of \d+ launches$")
    )
    expect(lever.locator(".tf-lever-fix")).to_contain_text(
        "return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)) in place of In[1]:"
    )
    for part in (
        what,
        where,
        lever.locator(".tf-worth"),
        lever.locator(".tf-lever-fix"),
        lever.get_by_role("button").last,
    ):
        found = box(part)
        assert top <= found["y"] <= found["y"] + found["height"] <= bottom
        assert found["x"] + found["width"] <= box(lever)["x"] + box(lever)["width"]
    then = view.get_by_test_id("tf-first").locator(".tf-action-card > b").all_text_contents()
    assert then == ["2", "3"]
    assert not lever.locator(".tf-worth").evaluate(CLIPPED)
    assert not lever.locator(".tf-lever-place").evaluate(CLIPPED) or width == 1440  # its line's text is cut there


def test_its_button_takes_the_code_along_where_no_switch_does_it(opened: Page, view: Locator) -> None:
    view.get_by_test_id("tf-lever").get_by_role("button", name="Copy fix").click()
    code = "return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))"
    opened.wait_for_function("code => window.copied === code", arg=code)


def test_its_button_pulls_it_where_a_switch_does(view: Locator) -> None:
    view.get_by_test_id("tf-toggle-fuse").click()
    lever = view.get_by_test_id("tf-lever")
    expect(lever).to_contain_text("run as kernels of their own")
    lever.get_by_test_id("tf-apply").click()
    expect(view.get_by_test_id("tf-pass-fuse")).not_to_have_class(re.compile("tf-off"))
    expect(lever).to_contain_text("3 attentions written by hand")
    expect(view.get_by_test_id("tf-first").locator(".tf-pulled")).to_have_count(0)  # what comes next has its place


def test_what_a_pass_did_makes_way_for_a_tab_where_it_lies_over_the_panel(opened: Page, view: Locator) -> None:
    sized(opened, view, 1024, 768)
    view.get_by_test_id("tf-toggle-pad").click()
    lifted = view.locator(".tf-aside.tf-lifted")
    expect(lifted).to_contain_text("pad")
    view.get_by_test_id("tf-tab-findings").click()
    expect(lifted).to_have_count(0)


def test_its_name_opens_all_that_is_known_of_it(view: Locator) -> None:
    view.get_by_test_id("tf-first-0").click()
    card = view.get_by_test_id("tf-finding-attention-by-hand")
    expect(card).to_be_in_viewport()
    assert card.locator("pre").evaluate("one => getComputedStyle(one).wordBreak") == "normal"


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("scrolled", [0, -220, 160])
def test_what_a_click_opens_is_in_sight_and_nothing_moves(
    opened: Page, view: Locator, width: int, height: int, scrolled: int
) -> None:
    """Wherever the view lies in the notebook: at the top, below other cells, or half out of sight."""
    sized(opened, view, width, height)
    tree = view.get_by_test_id("tf-tree")
    tree.evaluate("one => one.scrollIntoView({ block: 'nearest' })")
    opened.evaluate(SCROLL, [scrolled])
    top, bottom = opened.evaluate(SEEN)
    twisty = view.locator(".tf-tree-row[data-row]", has_text="tokens").first
    if not view.locator("[data-row] .tf-tree-value").count():
        twisty.click()
    expect(view.locator("[data-row] .tf-tree-value").first).to_be_visible()
    rows = [one for one in view.locator("[data-row]:has(.tf-tree-value)").all() if one.bounding_box()]
    seen = [one for one in rows if top <= box(one)["y"] and box(one)["y"] + box(one)["height"] <= bottom]
    if not seen:
        pytest.skip("no row of an op is in sight here")
    row = seen[-1]
    before = [box(one) for one in view.locator(CONTROLS).all() if one.bounding_box()]
    at = box(row)
    opened.mouse.click(at["x"] + 150, at["y"] + at["height"] / 2)
    details = view.get_by_test_id("tf-details")
    expect(details.locator(".tf-name")).to_be_visible()
    name = box(details.locator(".tf-name"))
    assert top <= name["y"]
    assert name["y"] + name["height"] <= bottom
    after = [box(one) for one in view.locator(CONTROLS).all() if one.bounding_box()]
    assert len(after) == len(before)
    assert max(abs(a["y"] - b["y"]) for a, b in zip(before, after, strict=True)) <= 2
    aside = box(view.locator(".tf-aside"))
    is_beside = aside["x"] > at["x"] + at["width"] - 1
    assert is_beside or aside["y"] >= at["y"] + at["height"] - 1 or aside["y"] + aside["height"] <= at["y"] + 1


def test_a_kernel_that_was_shut_down_is_said_at_once_and_nothing_looks_as_if_it_answered(
    opened: Page, view: Locator
) -> None:
    """JupyterLab leaves the widgets of such a kernel as they are; what they show is still worth reading."""
    sized(opened, view, 800, 768)
    opened.evaluate(SHUT_DOWN)
    expect(view.get_by_test_id("tf-closed")).to_have_text(re.compile("^Run the cell again.*it was shut down"))
    expect(view.get_by_test_id("tf-verdict")).not_to_contain_text("A saved view")
    for switch in view.locator(".tf-switch").all():
        expect(switch).to_have_attribute("aria-disabled", "true")
    expect(view.get_by_test_id("tf-measure")).to_be_disabled()
    view.get_by_test_id("tf-tab-findings").click()
    expect(view.get_by_test_id("tf-finding-attention-by-hand")).to_be_visible()
