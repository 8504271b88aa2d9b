"""The numbers of a switch are on the screen before the rest of its payload, and nothing moves or is lost in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser, Page, expect

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.widgets.html import write_html
from tracefuse.widgets.view.late import READ_BY

pytestmark = pytest.mark.browser

# The numbers of a payload that the page holds, and what the first tab shows of it, as widgets/view/keeping.py sends them.
TELL = """([number, late]) => {
    const { values, layers, decisions, forward, backward, update, kernels, aten, memory, ...others } = payloadsOf()[number];
    received({ type: "numbers", numbers: { ...others, late } });
}"""
FOLLOW = """([number, late]) => {
    const { values, layers, decisions, memory: { before, after } } = payloadsOf()[number];
    received({ type: "numbers", numbers: { values, layers, decisions, memory: { before, after }, late } });
}"""
HEAD = "() => document.querySelector('[data-testid=tf-verdict]').textContent"
# What a timeline says beside its lines comes with a frame.
DRAWN = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
BODY = "() => document.querySelector('[role=tabpanel]').textContent"
PLACES = """() => Object.fromEntries([...document.querySelectorAll("[data-testid=tf-root] [data-testid]")]
    .filter((one) => one.checkVisibility())
    .map((one) => [one.dataset.testid, [one.getBoundingClientRect().x, one.getBoundingClientRect().y]]))"""
LATE = list(READ_BY)
LATER = [tab for tab, parts in READ_BY.items() if parts != {"values"}]


@pytest.fixture(scope="module")
def opened(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    torch.manual_seed(0)
    model, data = GPT(layers=2, width=32, heads=2, vocab=61, length=16), batch(61, 2, 12)
    captured = tracefuse.capture(lambda: model(*data).backward())
    path: Path = write_html(captured.optimize(), tmp_path_factory.mktemp("numbers") / "view.html")
    page = browser.new_page(viewport={"width": 1300, "height": 1000})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(path.as_uri())
    page.wait_for_selector("[data-testid=tf-root][data-ready='1']")
    yield page
    page.close()
    assert errors == []


@pytest.fixture
def page(opened: Page, go_live: Callable[[Page], None]) -> Page:
    go_live(opened)
    return opened


@pytest.fixture
def captured(page: Page) -> int:
    """The number of the payload without any pass."""
    return page.evaluate("() => payloadsOf().findIndex((one) => !one.config.fuse && !one.config.cat)")


def test_the_numbers_are_there_at_once_and_nothing_moves_when_the_rest_comes(page: Page, captured: int) -> None:
    before, rows = page.evaluate(HEAD), page.evaluate(BODY)
    page.evaluate(TELL, [captured, LATE])
    head = page.evaluate(HEAD)
    assert head != before
    assert page.evaluate(BODY) == rows
    expect(page.get_by_role("tabpanel")).to_have_attribute("aria-busy", "true")
    page.evaluate(FOLLOW, [captured, LATER])
    expect(page.get_by_role("tabpanel")).to_have_attribute("aria-busy", "false")
    body, places = page.evaluate(BODY), page.evaluate(PLACES)
    assert page.evaluate(HEAD) == head
    assert body != rows
    page.evaluate("(number) => show(number)", captured)
    assert (page.evaluate(HEAD), page.evaluate(BODY)) == (head, body)
    after = page.evaluate(PLACES)
    assert after.keys() == places.keys()
    moved = {name: (at, after[name]) for name, at in places.items() if max(map(_apart, at, after[name])) > 2}
    assert moved == {}


def _apart(one: float, other: float) -> float:
    return abs(one - other)


@pytest.mark.parametrize("tab", LATE)
def test_a_tab_that_waits_keeps_what_it_showed_until_the_rest_is_there(page: Page, captured: int, tab: str) -> None:
    page.get_by_test_id(f"tf-tab-{tab}").click()
    before = page.evaluate(BODY)
    page.get_by_test_id("tf-tab-trace").click()
    page.evaluate(TELL, [captured, LATE])
    page.get_by_test_id(f"tf-tab-{tab}").click()
    expect(page.get_by_role("tabpanel")).to_have_attribute("aria-busy", "true")
    assert page.evaluate(BODY) == before
    page.evaluate("(number) => show(number)", captured)
    expect(page.get_by_role("tabpanel")).to_have_attribute("aria-busy", "false")
    assert page.evaluate(BODY) != before


@pytest.mark.parametrize("tab", LATE)
def test_a_tab_that_is_opened_first_while_it_waits_is_drawn_with_the_rest(page: Page, captured: int, tab: str) -> None:
    page.evaluate(TELL, [captured, LATE])
    page.get_by_test_id(f"tf-tab-{tab}").click()
    value = page.evaluate("(number) => Object.keys(payloadsOf()[number].values).at(-1)", captured)
    page.evaluate("(value) => set('selected', value)", value)
    page.get_by_test_id("tf-search").fill("mm")
    page.evaluate("(number) => show(number)", captured)
    page.evaluate(DRAWN)
    got = page.evaluate(BODY)
    page.get_by_test_id("tf-tab-trace").click()
    page.get_by_test_id(f"tf-tab-{tab}").click()
    page.evaluate(DRAWN)
    assert got == page.evaluate(BODY) != ""


def test_numbers_of_an_older_switch_do_not_outlive_the_next_payload(page: Page, captured: int) -> None:
    page.evaluate("(number) => show(number)", captured)
    wanted = page.evaluate(HEAD)
    page.evaluate("() => show(0)")
    page.evaluate(TELL, [1, LATE])
    page.evaluate("(number) => show(number)", captured)
    assert page.evaluate(HEAD) == wanted
    expect(page.get_by_role("tabpanel")).to_have_attribute("aria-busy", "false")


def test_what_is_known_anew_of_the_shown_configuration_is_drawn_and_kept(page: Page) -> None:
    """What each switch changes, once it was foreseen."""
    page.evaluate("() => set('payload', JSON.parse(JSON.stringify(state.payload)))")  # as a kernel sends it
    row = page.get_by_test_id("tf-pass-fuse")
    known, rows, head = row.text_content(), page.evaluate(BODY), page.evaluate(HEAD)
    page.evaluate("""() => {
        const { passes, sentence } = state.payload;
        window.known = { passes, sentence };
        const head = `${sentence.head} And another word.`;
        set("anew", { passes: passes.map((one) => ({ ...one, without: null })), sentence: { ...sentence, head } });
    }""")
    assert row.text_content() != known
    assert "And another word." in page.evaluate(HEAD)
    assert page.evaluate(BODY) == rows
    page.evaluate("() => set('anew', known)")
    assert (row.text_content(), page.evaluate(HEAD), page.evaluate(BODY)) == (known, head, rows)
    assert page.evaluate("() => state.payload.passes === known.passes")


def test_a_view_that_is_made_later_knows_it_too(page: Page) -> None:
    page.evaluate("""() => {
        set("payload", JSON.parse(JSON.stringify(state.payload)));
        state.anew = { passes: state.payload.passes.map((one) => ({ ...one, without: null })) };
    }""")
    row = page.get_by_test_id("tf-pass-fuse")
    known = row.text_content()
    page.evaluate("() => set('live', true)")  # as another view of the model draws all
    assert row.text_content() != known


def test_details_wait_for_all_that_they_tell(page: Page, captured: int) -> None:
    """A value's time, its kernel and why it is saved are not seen beside what another configuration made of it."""
    value = page.evaluate("(number) => Object.keys(payloadsOf()[number].values).at(-1)", captured)
    page.evaluate("(value) => set('selected', value)", value)
    details = page.get_by_test_id("tf-details")
    before = details.text_content()
    page.evaluate(TELL, [captured, LATE])
    assert details.text_content() == before
    page.evaluate(FOLLOW, [captured, LATER])
    assert details.text_content() == before
    page.evaluate(FOLLOW, [captured, [tab for tab in LATER if READ_BY[tab] <= {"values", "code"}]])
    assert details.text_content() != before


def test_where_no_value_is_selected_they_wait_for_the_rows(page: Page, captured: int) -> None:
    page.locator("[data-pass=fuse]").click()
    details = page.get_by_test_id("tf-details")
    before = details.text_content()
    page.evaluate(TELL, [captured, LATE])
    assert details.text_content() == before
    page.evaluate(FOLLOW, [captured, LATER])
    assert details.text_content() != before


def test_numbers_stay_though_their_switch_was_answered(page: Page, captured: int) -> None:
    """Their payload follows once nobody clicks."""
    before = page.evaluate(HEAD)
    page.evaluate(TELL, [captured, LATE])
    page.evaluate("() => received({ type: 'answered', to: { type: 'configure', changes: {} } })")
    assert page.evaluate(HEAD) != before


def test_numbers_whose_rows_never_come_are_taken_back_with_the_kernel(page: Page, captured: int) -> None:
    head = page.evaluate(HEAD)
    page.evaluate(TELL, [captured, LATE])
    assert page.evaluate(HEAD) != head
    page.evaluate("() => set('live', false)")
    expect(page.get_by_role("tabpanel")).to_have_attribute("aria-busy", "false")
    assert page.get_by_test_id("tf-tile-ops").text_content() in head
