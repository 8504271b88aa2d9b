"""The Findings tab: those that are counted only are one press away, and what is bound by launches says so; code in texts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

pytestmark = pytest.mark.browser
SMALL = """() => {
    const { payload } = state;
    const small = [0, 1, 2].map((at) => ({ ...payload.findings[0], key: `small ${at}`, title: `small ${at}` }));
    set("payload", { ...payload, small, below: "3 more below 1 % of the step: tf32-off ×3" });
}"""


MARKED = """() => {
    const { payload } = state;
    const texts = { title: "`x.item()` waits", fix: "keep `x` a tensor", worth: "`2` waits", mended: "by `fuse`" };
    const one = { ...payload.findings[0], ...texts, evidence: [["`a`", "`b`"]] };
    const actions = [{ key: one.key, title: one.title, brief: "", worth: "", kind: "", by: [] }];
    set("payload", { ...payload, findings: [one], sentence: { ...payload.sentence, actions } });
}"""


@pytest.fixture
def live(open_saved: Callable[[Path], Page], written: Path, go_live: Callable[[Page], None]) -> Page:
    opened = open_saved(written)
    go_live(opened)
    opened.get_by_test_id("tf-tab-findings").click()
    return opened


def test_small_findings_are_shown_on_request(live: Page, press: Callable[[Locator], None]) -> None:
    live.evaluate(SMALL)
    summary, cards = live.get_by_test_id("tf-small"), live.locator("details article")
    expect(summary).to_have_text("3 more below 1 % of the step: tf32-off ×3")
    expect(cards.first).to_be_hidden()
    press(summary)
    expect(cards).to_have_count(3)
    expect(cards.first).to_be_visible()
    expect(cards.first).to_contain_text("small 0")
    live.evaluate("set('status', { ...state.status, busy: 'timing' })")
    live.evaluate("set('status', { ...state.status, busy: '' })")
    expect(cards.first).to_be_visible()
    press(live.get_by_test_id("tf-small"))
    expect(cards.first).to_be_hidden()


def test_what_is_bound_by_launches_says_so(live: Page) -> None:
    """A small GPT takes a GPU less time than its launches take the host: a share of its kernels' time tells nothing."""
    assert live.evaluate("state.payload.clock.launches[1]") > 0
    told = live.get_by_test_id("tf-launched").first
    expect(told).to_contain_text(re.compile(r"^launches [\d,]+ of [\d,]+( as captured)?, [\d.]+ \S+ of the host$"))
    worths = live.locator("article p", has_text="worth ").all_text_contents()
    assert any(re.search(r"[\d.]+ \S+ of [\d.]+ \S+ of kernels, \d+ %", one) for one in worths), worths
    assert not any(re.search(r"of \S+ \S+ a step", one) for one in worths)
    once = "Worth is kernels’ time. Launching takes longer: launches that a fix spares count."
    expect(live.get_by_text(once)).to_have_count(1)
    worth = live.locator(".tf-first .tf-worth").all_text_contents()
    expect(live.locator(".tf-first .tf-pulled").first).to_contain_text("the pass mends it")
    assert not any(text.endswith(" %") for text in worth)


def test_what_stands_in_backticks_is_shown_as_code(live: Page) -> None:
    """In every text of a finding, where it leads too; a title that pops up has no marks."""
    live.evaluate(MARKED)
    card = live.locator("article").first
    assert set(card.locator("code").all_text_contents()) >= {"x.item()", "x", "2", "fuse", "a", "b"}
    assert live.get_by_test_id("tf-lever").locator("code").all_text_contents()[0] == "x.item()"
    assert live.get_by_test_id("tf-first-0").get_attribute("title") == "x.item() waits: all about it"
    assert "`" not in live.get_by_test_id("tf-root").inner_text()


def test_a_capture_without_a_name_says_how_it_gets_one_anywhere(live: Page) -> None:
    """A page that a script made has no cell: what is said holds there, too."""
    live.evaluate("set('payload', { ...state.payload, call: '' })")
    call = live.get_by_test_id("tf-call")
    expect(call).to_have_text("give the capture a name, with c = … or as %%tracefuse -o c, to use it in Python")
    assert call.locator("code").all_text_contents() == ["c = …", "%%tracefuse -o c"]
