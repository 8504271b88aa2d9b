"""What is cramped first where the view is narrow: the headline, its cards, words of the graph, lanes, and details."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.browser.tabs.cut import CUT

pytestmark = pytest.mark.browser

SIZES = [(1440, 900), (1024, 768), (800, 900), (660, 768)]
# A notebook beside JupyterLab's side bar, on a screen of 800 px and less.
NARROW = [332, 367, 500]
# Every text that a canvas is asked to write, with the size of its letters on the screen.
WRITTEN = """() => {
    window.written = [];
    const write = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
        const px = parseFloat(this.font.match(/([\\d.]+)px/)[1]) * this.getTransform().a / devicePixelRatio;
        window.written.push([text, px]);
        return write.call(this, text, ...at);
    };
}"""


@pytest.fixture(scope="module")
def shared(browser: Browser, whole_step: Path) -> Iterator[Page]:
    """The page of a whole step, whose graph has three columns, and whose headline has all that a headline may have."""
    page = browser.new_page()
    page.add_init_script(f"({WRITTEN})()")
    page.goto(whole_step.as_uri())
    page.wait_for_selector("[data-testid=tf-root][data-ready='1']")
    yield page
    page.close()


@pytest.fixture
def opened(shared: Page, reopen: Callable[[Page], None]) -> Callable[[int, int], Page]:
    """`opened(width, height)` is the page with a saved view that was made in a window of that size."""

    def at(width: int, height: int) -> Page:
        shared.set_viewport_size({"width": width, "height": height})
        shared.evaluate("() => { window.written = []; }")
        reopen(shared)
        return shared

    return at


@pytest.fixture
def lived(shared: Page, go_live: Callable[[Page], None]) -> Callable[[int, int], Page]:
    """`lived(width, height)` is the page with a live view that was made in a window of that size."""

    def at(width: int, height: int) -> Page:
        shared.set_viewport_size({"width": width, "height": height})
        go_live(shared)
        return shared

    return at


@pytest.fixture(params=SIZES, ids=lambda size: f"{size[0]} px")
def page(request: pytest.FixtureRequest, opened: Callable[[int, int], Page]) -> Page:
    return opened(*request.param)


@pytest.fixture(params=SIZES, ids=lambda size: f"{size[0]} px")
def live(request: pytest.FixtureRequest, lived: Callable[[int, int], Page]) -> Page:
    return lived(*request.param)


@pytest.fixture(params=NARROW, ids=lambda width: f"{width} px")
def narrow(request: pytest.FixtureRequest, lived: Callable[[int, int], Page]) -> Page:
    return lived(request.param, 900)


# Where the first word of a text ends on the screen.
PLACE = """(one) => {
    const range = document.createRange();
    range.selectNodeContents(one.firstChild);
    return range.getBoundingClientRect().right;
}"""


def is_cut(element: Locator) -> bool:
    return element.evaluate("one => one.scrollHeight > one.clientHeight + 1 || one.scrollWidth > one.clientWidth + 1")


def test_the_headline_is_read_to_its_end(page: Page) -> None:
    headline = page.get_by_test_id("tf-sentence")
    expect(headline).to_contain_text(
        re.compile(r"^The GPU waits for launches: on .* launches take .* fewer launches help most.*\.$")
    )
    assert not is_cut(headline)
    # What it would be shortened by stands in the cards, and in its title.
    assert str(headline.get_attribute("title")).startswith(str(headline.text_content()).removesuffix("."))


# As long as a sentence gets of a step that waits for launches, and has a head that is not aligned.
HEADLINE = """() => {
    const lead = "The GPU waits for launches: on an example GPU (H100 SXM), modelled, 581 launches take 5.05 ms, "
        + "their kernels 1.63 ms";
    const head = `${lead}; the passes leave 368 launches and 3.2 ms. 228 of those 368 are in transformer.h.*.attn ×12, `
        + "46 % of kernels' time in lm_head (50,257 wide, not aligned for TF32, which is off; In[2]:81); "
        + "fewer launches help most.";
    set("payload", { ...state.payload, sentence: { ...state.payload.sentence, head, lead } });
}"""


@pytest.mark.parametrize("width", [1440, 1024, 800, 660, 500, 367, 332])
def test_a_headline_that_names_two_places_is_read_to_its_end(lived: Callable[[int, int], Page], width: int) -> None:
    page = lived(width, 900)
    page.evaluate(HEADLINE)
    headline = page.get_by_test_id("tf-sentence")
    expect(headline).to_contain_text("fewer launches help most.")
    assert not is_cut(headline)


def test_what_the_optimizer_takes_is_no_share_of_a_step_that_waits_for_launches(page: Page) -> None:
    said = page.get_by_test_id("tf-tree-update")
    expect(said).to_have_text(re.compile(r"^The optimizer takes \d+ % of the kernels’ [\d.]+ .s\.$"))


# What passes mend already leads by its worth, and has no number.
ACTIONS = """() => {
    const { key } = state.payload.findings[0];
    const title = "what is found, in words, of ";
    const actions = [["fuse"], [], []].map((by) => ({ key, title: title + by, brief: "", worth: "", kind: "", by }));
    set("payload", { ...state.payload, sentence: { ...state.payload.sentence, actions } });
}"""


def test_the_cards_count_on(live: Page) -> None:
    live.evaluate(ACTIONS)
    cards = live.get_by_test_id("tf-first").locator("[data-finding] > b")
    assert cards.all_text_contents() == ["1", "2", "✓ fuse"]


def test_the_findings_that_lead_and_the_tree_are_seen(live: Page) -> None:
    """A notebook beside its file browser is 660 px wide on a screen of 1024."""
    live.evaluate(ACTIONS)
    cards = live.get_by_test_id("tf-first").locator("[data-finding]")
    assert cards.count() == 3
    for card in cards.all():
        expect(card).to_be_visible()
        assert card.locator("span").first.bounding_box()["width"] > 100
    places = [live.locator(one).bounding_box() for one in (".tf-first", ".tf-main", ".tf-side")]
    first, tree, passes = ((box["y"], box["y"] + box["height"]) for box in places)
    assert first[1] <= tree[0] <= passes[0]


# Three actions as long as those of real programs get, and a fix with all that one says.
LONG = """() => {
    const title = "the forward saves 640 KiB that the backward could compute again faster than it is stored and loaded";
    const fix = "make SGD with `fused=True`, or on a GPU switch passes on: `fuse` makes one kernel of the ops on a tensor, "
        + "and `optimizer_step` makes one launch of equal ops";
    const [{ key }] = state.payload.findings;
    const findings = state.payload.findings.map((one) => ({ ...one, fix }));
    const actions = [[], [], ["fuse"]].map((by) => ({ key, title, brief: "", worth: "252 of 1,360 launches", kind: "", by }));
    set("payload", { ...state.payload, findings, sentence: { ...state.payload.sentence, actions } });
}"""


def test_what_leads_is_read_whole(live: Page) -> None:
    """A sentence that ends in dots says nothing to do."""
    live.evaluate(LONG)
    first = live.get_by_test_id("tf-first")
    texts = first.locator(".tf-lever-what span, .tf-lever-fix, .tf-action-card > span, .tf-worth")
    assert texts.count() == 7
    for text in texts.all():
        assert not is_cut(text), text.text_content()
    bottom = first.bounding_box()["y"] + first.bounding_box()["height"]
    assert all(one.bounding_box()["y"] + one.bounding_box()["height"] <= bottom for one in texts.all())
    lever, fix, button = (live.locator(one).bounding_box() for one in (".tf-lever", ".tf-lever-fix", ".tf-apply"))
    assert fix["width"] > lever["width"] - button["width"] - 40, "nothing stands beside a fix but what applies it"


# The words of the first screen that are cut, that lie over others, or that leave what holds them.
UNREAD = """() => {
    const found = [];
    const words = ".tf-said-line, .tf-lever-what span, .tf-lever-place, .tf-worth, .tf-lever-fix, .tf-apply, "
        + ".tf-action-card > span, .tf-figure, .tf-tile .tf-label";
    const seen = [...document.querySelectorAll(".tf-verdict :is(" + words + ")")].filter((one) => one.textContent);
    const name = (one) => one.textContent.slice(0, 30) + " | " + one.className;
    const box = (one) => one.getBoundingClientRect();
    for (const one of seen) {
        if (one.clientWidth && one.scrollWidth > one.clientWidth + 1) found.push("cut: " + name(one));
        if (one.scrollHeight > one.clientHeight + 1 && !one.closest(".tf-tile, .tf-worth")) found.push("cut: " + name(one));
        const held = box(one.closest(".tf-lever, .tf-action-card, .tf-tile, .tf-verdict"));
        const { left, right, top, bottom } = box(one);
        const isIn = left >= held.left && right <= held.right && top >= held.top && bottom <= held.bottom + 1;
        if (!isIn || right > innerWidth) found.push("outside: " + name(one));
    }
    const parts = [...document.querySelectorAll(".tf-lever > *, .tf-action-card")].filter((one) => one.textContent);
    for (const [at, one] of parts.entries()) {
        const over = parts.slice(at + 1).filter((other) => box(other).top < box(one).bottom - 1);
        found.push(...over.map((other) => name(one) + " over " + name(other)));
    }
    return found;
}"""
# What leads with a line, and a worth and code as long as those of real programs.
LEADS = """() => {
    const [first] = state.payload.findings;
    const fix = "`y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)` in place of "
        + "model.py:19 to 22 computes the same in one kernel that keeps the scores on chip";
    const source = "model.py:1021  att = torch.softmax(att, dim=-1)";
    const title = "every forward casts 97 parameters from float32 to bfloat16";
    const worth = "spares up to 1.63 ms of 4.56 ms: 194 of 543 launches";
    const actions = [[], [], ["fuse"]].map((by) => ({ key: first.key, title, brief: "", worth, kind: "modelled", by }));
    const findings = state.payload.findings.map((one) => ({ ...one, fix, source }));
    set("payload", { ...state.payload, findings, sentence: { ...state.payload.sentence, actions } });
}"""


@pytest.mark.parametrize("width", NARROW)
def test_the_first_screen_of_a_narrow_output_is_read_whole(
    opened: Callable[[int, int], Page], go_live: Callable[[Page], None], width: int
) -> None:
    narrow = opened(width, 900)
    assert narrow.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert narrow.evaluate(UNREAD) == []
    go_live(narrow)
    for leads in (LEADS, LONG):
        narrow.evaluate(leads)
        assert narrow.evaluate(UNREAD) == []


# A card with what to do and where, and no more letters than it has room for.
TOLD = """() => {
    const [first] = state.payload.findings;
    const source = "In[2]:19  attn = attn.softmax(dim=-1)";
    const action = { key: first.key, title: "12 attentions written by hand", brief: "F.scaled_dot_product_attention",
        worth: "spares up to 626 µs of 4.66 ms: 72 of 536 launches", kind: "modelled", by: [] };
    const actions = [{ ...action, title: `${action.title}: the scores go through memory` }, action, action];
    const findings = state.payload.findings.map((one) => ({ ...one, source, is_mended: false }));
    set("payload", { ...state.payload, findings, sentence: { ...state.payload.sentence, actions } });
}"""


def test_what_leads_has_its_line_and_why_and_a_card_its_line_and_what_to_do(live: Page) -> None:
    live.evaluate(TOLD)
    place = live.locator(".tf-lever-place")
    line, room = place.locator("code").first.evaluate(PLACE), place.bounding_box()
    assert line <= room["x"] + room["width"], "the number of its line is not cut"
    card = live.locator(".tf-action-card").first
    assert not any(map(is_cut, live.locator(".tf-lever-what span, .tf-lever .tf-worth, .tf-action-card > span").all()))
    expect(card).to_contain_text("→ F.scaled_dot_product_attention")
    expect(card).to_contain_text("In[2]:19")


def test_where_a_card_is_narrow_its_line_stands_before_what_to_do(narrow: Page) -> None:
    narrow.evaluate(TOLD)
    card = narrow.locator(".tf-action-card").first
    assert not is_cut(card.locator("> span"))
    expect(card.get_by_text("In[2]:19")).to_be_visible()
    expect(card.get_by_text("→ F.scaled")).to_be_hidden()


FEW = """() => {
    const known = (median) => ({ median, low: median, high: median, samples: 3, coverage: 0.75 });
    const row = { label: "step", phase: "step", program: "optimised", verdict: "too few rounds to say (3 of 8)" };
    const times = { baseline_ms: known(356), variant_ms: known(380), ratio: known(1.05) };
    const about = { provenance: "measured on CPU", stale: false, is_pinned: false, config: "", work: [], notes: [] };
    set("payload", { ...state.payload, timing: { ...about, rows: [{ ...row, ...times }] } });
}"""


@pytest.mark.parametrize("width", [1440, 1024, 660, 367])
def test_a_measurement_of_too_few_rounds_says_what_to_press(lived: Callable[[int, int], Page], width: int) -> None:
    page = lived(width, 900)
    page.evaluate(FEW)
    said = page.get_by_test_id("tf-own-time")
    expect(said).to_have_text("On this CPU: 3 of 8 rounds: press Measure again")
    words, line = said.bounding_box(), page.locator(".tf-lines").bounding_box()
    # What follows it on the line ends in dots, which have 9 px.
    assert words["x"] + words["width"] <= line["x"] + line["width"] - 9
    assert page.locator(".tf-know").evaluate("one => one.scrollHeight <= one.clientHeight + 1")


# A table of times as wide as it gets: intervals, a verdict of several words, an update, and what a replay consists of.
TIMED = """() => {
    const known = (median) => ({ median, low: median * 0.98, high: median * 1.02, samples: 12, coverage: 0.95 });
    const times = { baseline_ms: known(135.6), variant_ms: known(137.2), ratio: known(1.01) };
    const verdict = "no difference within 1 %";
    const rows = ["forward", "backward", "update", "step"].map((label) => (
        { label, phase: label, program: "optimised", verdict, ...times }));
    const work = [{ label: "Triton kernels", calls: 1360, us: 21400, note: "their time on the GPU, 99 % of the step" }];
    const about = { provenance: "measured on H200", stale: false, is_pinned: false, config: "", notes: [] };
    set("payload", { ...state.payload, timing: { ...about, rows, work } });
}"""


@pytest.mark.parametrize("width", [1440, 1400, 1024, 900, 800])
def test_the_table_of_times_is_read_whole_and_its_bars_leave_first(
    lived: Callable[[int, int], Page], width: int
) -> None:
    page = lived(width, 900)
    page.get_by_test_id("tf-tab-timing").click()
    page.evaluate(TIMED)
    panel = page.locator(".tf-table-panel", has=page.get_by_test_id("tf-timing"))
    assert not panel.evaluate("one => one.scrollWidth > one.clientWidth")
    assert [one for one in page.evaluate(CUT) if "tf-table-panel" in one] == []
    table = page.get_by_test_id("tf-timing")
    expect(table.get_by_text("update", exact=True)).to_be_visible()
    expect(table.get_by_text("no difference within 1 %").last).to_be_visible()
    assert table.locator(".tf-bars").first.is_visible() == (width > 900)


COLUMNS = """() => {
    const delta_ms = { median: -0.123, low: -0.168, high: -0.078, samples: 9, stale: false, provenance: "measured" };
    const without = { ops: 1000, saved_bytes: 9e5, peak_bytes: 9e7, step_us: 2000, kind: "modelled" };
    const passes = state.payload.passes.map((one) => ({ ...one, enabled: true, changed: true, without, delta_ms }));
    set("payload", { ...state.payload, passes, clock: { ...state.payload.clock, chosen: "here" } });
}"""


@pytest.mark.parametrize("width", [1440, 1024, 800])
def test_each_figure_of_a_pass_stands_below_its_heading(lived: Callable[[int, int], Page], width: int) -> None:
    page = lived(width, 900)
    page.evaluate(COLUMNS)
    ends = "all => all.map((one) => [one.getBoundingClientRect().right, one.getBoundingClientRect().top])"
    heads = page.locator(".tf-passes-head > *").evaluate_all(ends)
    figures = page.get_by_test_id("tf-pass-fuse").locator(".tf-delta")
    found = figures.evaluate_all(ends)
    assert figures.last.text_content() == "−0.123 ±0.045 ms"
    assert len(found) == len(heads) == 4
    assert {top for _, top in found} == {found[0][1]}, "they are on one row"
    assert all(abs(right - head) <= 3 for (right, _), (head, _) in zip(found, heads, strict=True))
    assert not any(is_cut(one) for one in figures.all())


SWITCH = """() => {
    const told = { key: "switch cat", title: "switch cat off", brief: "" };
    const instead = { ...told, source: "", fix: "the step takes 1 ms without it", code: "", changes: { cat: false } };
    const actions = [{ ...told, worth: "−504 µs of 1.81 ms", kind: "modelled", by: [], instead }];
    set("payload", { ...state.payload, sentence: { ...state.payload.sentence, actions } });
}"""


def test_a_pass_that_costs_time_is_switched_off_by_the_first_lever(live: Page) -> None:
    live.evaluate(SWITCH)
    lever = live.get_by_test_id("tf-lever")
    expect(lever).to_contain_text("switch cat off")
    expect(lever).to_contain_text("−504 µs of 1.81 ms")
    lever.get_by_test_id("tf-apply").click()
    assert live.evaluate("window.sent.at(-1)") == {"type": "configure", "changes": {"cat": False}}


def test_the_legend_of_the_graph_has_no_row_half_seen(page: Page) -> None:
    page.get_by_test_id("tf-tab-graph").click()
    assert not is_cut(page.get_by_test_id("tf-graph-legend"))


def test_the_panel_has_the_room_of_details_until_there_are_any(page: Page) -> None:
    aside, tree = page.locator(".tf-aside"), page.get_by_test_id("tf-tree")
    hint = page.get_by_test_id("tf-details")
    expect(hint).to_contain_text(
        "Next: c.optimize().compile() runs the step this way; Take away saves it. Click a value"
    )
    width = page.viewport_size["width"]
    assert width < 701 or width > 1160 or aside.bounding_box()["height"] < 32
    rows = tree.locator("[role=row][aria-level]")
    last = [one for one in rows.all() if one.bounding_box()["y"] < aside.bounding_box()["y"] - 24 or width > 1160][-1]
    last.click()
    # What was clicked is not covered by what it opens.
    expect(last).to_be_in_viewport(ratio=1)
    below = aside.bounding_box()
    row = last.bounding_box()
    assert width > 1160 or row["y"] + row["height"] <= below["y"] + 1 or row["y"] >= below["y"] + below["height"]


def test_it_is_said_whether_times_are_a_modules_own(page: Page) -> None:
    page.get_by_test_id("tf-tab-layers").click()
    panel = page.locator(".tf-layers")
    note = panel.get_by_text(
        re.compile(r"In [nµm]s of the kernels’ time, modelled, of each module's own ops; Trace sums those inside\.")
    )
    assert note.bounding_box()["y"] < panel.locator("table").bounding_box()["y"]
    assert not is_cut(note)
    expect(panel.locator("thead th").first).to_contain_text("own ops")
    page.get_by_test_id("tf-tab-trace").click()
    expect(page.get_by_role("columnheader").first).to_contain_text("all inside")


def test_boxes_of_the_graph_say_what_they_run(page: Page, painted: Callable[[Page], None]) -> None:
    page.get_by_test_id("tf-tab-graph").click()
    painted(page)
    found = [(text, px) for text, px in page.evaluate("written") if "embed" in text]
    assert found
    assert all(px >= 9 for _, px in found)


def test_what_is_known_of_a_value_has_the_room_that_there_is(page: Page) -> None:
    page.get_by_test_id("tf-tab-code").click()
    page.locator("[data-value]").nth(12).click()
    details = page.get_by_test_id("tf-details")
    aside, facts = page.locator(".tf-aside").bounding_box(), details.locator(".tf-fact")
    bottom = aside["y"] + aside["height"]
    seen = [one for one in facts.all() if one.bounding_box()["y"] + one.bounding_box()["height"] <= bottom]
    assert len(seen) >= 4
    close = details.get_by_test_id("tf-clear").bounding_box()
    assert aside["x"] + aside["width"] - close["x"] - close["width"] < 32
