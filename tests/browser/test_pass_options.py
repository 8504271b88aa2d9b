"""The options in the passes column of a live view: what they show, what they send, and where an error stands.

The view's own module with a model that keeps what is sent, so that no kernel is needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from playwright.sync_api import Browser, Locator, Page, expect

import tracefuse
from tracefuse.config import registry
from tracefuse.config.configuration import Config
from tracefuse.demo import GPT, batch
from tracefuse.widgets.html import page as html_page
from tracefuse.widgets.payload.program import payload

pytestmark = pytest.mark.browser


@dataclass(frozen=True)
class Trimmed:
    """Does nothing, with options of every kind."""

    level: int = field(default=2, metadata={"help": "how often"})
    eager: bool = field(default=False, metadata={"help": "whether at once"})
    only: tuple[str, ...] = field(default=("add", "mul"), metadata={"help": "which ops"})
    name: ClassVar[str] = "trimmed"

    def run(self, trace: Any, decide: Any) -> Any:
        return trace.copy()


SHOWN = (
    {},
    {"remat_options": {"longest_chain": 8}, "trimmed": {"level": 3}},
    {"trimmed": False, "remat": False},
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    torch.manual_seed(0)
    model, data = GPT(layers=1, width=32, heads=2, vocab=61, length=16), batch(61, 2, 12)
    c = tracefuse.capture(lambda: model(*data).backward())
    tracefuse.register(before="fuse")(Trimmed)
    path = tmp_path_factory.mktemp("options") / "view.html"
    path.write_text(html_page([payload(c.variant(Config.of(**one))) for one in SHOWN], "options"))
    yield path
    registry.unregister("trimmed")


@pytest.fixture
def page(browser: Browser, written: Path, go_live: Callable[[Page], None]) -> Iterator[Page]:
    opened = browser.new_page(viewport={"width": 1300, "height": 1000})
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.goto(written.as_uri())
    opened.wait_for_selector("[data-testid=tf-root][data-ready='1']")
    go_live(opened)
    yield opened
    opened.close()
    assert errors == []


def sent(page: Page) -> list[dict[str, Any]]:
    found = page.evaluate("() => { const found = window.sent; window.sent = []; return found; }")
    assert all(message["type"] == "configure" for message in found)
    return [message["changes"] for message in found]


def test_the_budget_is_a_slider_with_more_memory_to_the_right(page: Page) -> None:
    slider = page.get_by_test_id("tf-memory-budget")
    expect(slider).to_have_value("10")
    expect(page.get_by_test_id("tf-pass-remat")).to_contain_text("off")
    slider.focus()
    for keys, expected, text in (
        ("ArrowLeft", 1, "100 %"),
        ("Home", 0.1, "10 %"),
        ("ArrowRight", 0.2, "20 %"),
        ("End", None, "off"),
    ):
        page.keyboard.press(keys)
        assert sent(page) == [{"memory_budget": expected}]
        expect(slider).to_have_attribute("aria-valuetext", text)


@pytest.mark.parametrize(("budget", "step", "text"), [(0.4, "3", "40 %"), (0.0, "0", "0 %"), (2 << 30, "9", "2 GiB")])
def test_a_budget_from_python_is_shown(page: Page, budget: float, step: str, text: str) -> None:
    page.evaluate(f"set('payload', {{...state.payload, config: {{...state.payload.config, memory_budget: {budget}}}}})")
    expect(page.get_by_test_id("tf-memory-budget")).to_have_value(step)
    expect(page.get_by_test_id("tf-pass-remat").locator(".tf-budget")).to_have_text(text)


def test_every_option_is_folded_with_its_default_and_help(page: Page, press: Callable[[Locator], None]) -> None:
    field = page.get_by_test_id("tf-option-trimmed-level")
    expect(field).to_be_hidden()
    press(page.get_by_test_id("tf-options-trimmed"))
    expect(field).to_have_value("2")
    expect(page.get_by_test_id("tf-option-trimmed-only")).to_have_value("add, mul")
    expect(page.get_by_test_id("tf-option-trimmed-eager")).not_to_be_checked()
    for text in ("how often (default: 2)", "whether at once (default: off)", "which ops (default: add, mul)"):
        expect(page.get_by_test_id("tf-pass-trimmed")).to_contain_text(text)
    shown = {
        row["name"]
        for row in json.loads(
            page.evaluate("JSON.stringify(state.payload.passes.find(p => p.name === 'remat').options)")
        )
    }
    assert {"distance_base", "longest_chain", "reduction_ratio"} <= shown


def test_an_option_that_is_changed_is_sent_with_the_others(page: Page, press: Callable[[Locator], None]) -> None:
    page.evaluate("show(1)")
    expect(page.get_by_test_id("tf-options-remat")).to_contain_text("1 set")
    page.get_by_test_id("tf-options-remat").click()
    page.get_by_test_id("tf-option-remat-distance_base").fill("1.0")
    page.keyboard.press("Enter")
    assert sent(page) == [{"remat_options": {"longest_chain": "8", "distance_base": "1.0"}}]
    page.keyboard.press("Escape")
    expect(page.get_by_test_id("tf-option-remat-distance_base")).to_be_hidden()
    page.get_by_test_id("tf-options-trimmed").click()
    press(page.get_by_test_id("tf-option-trimmed-eager"))
    assert sent(page) == [{"trimmed": {"level": "3", "eager": True}}]
    expect(page.get_by_test_id("tf-option-trimmed-eager")).to_be_checked()  # at once, and kept by the next choice
    page.get_by_test_id("tf-option-trimmed-level").fill("")
    page.keyboard.press("Enter")
    assert sent(page) == [{"trimmed": {"level": "2", "eager": True}}], "an empty field is the default"


def test_an_error_stands_in_the_row_and_what_was_typed_stays(page: Page) -> None:
    page.get_by_test_id("tf-options-trimmed").click()
    page.get_by_test_id("tf-option-trimmed-level").fill("many")
    page.keyboard.press("Enter")
    page.evaluate("set('status', {...state.status, error: {panel: 'passes', at: 'trimmed', message: 'pass a number'}})")
    expect(page.get_by_test_id("tf-pass-trimmed").get_by_role("alert")).to_have_text("pass a number")
    expect(page.get_by_test_id("tf-option-trimmed-level")).to_have_value("many")
    expect(page.get_by_test_id("tf-option-trimmed-level")).to_be_visible()
    expect(page.get_by_test_id("tf-option-trimmed-level")).to_be_focused()


def test_names_that_are_refused_stay_where_they_were_typed(page: Page) -> None:
    field = page.get_by_test_id("tf-freeze")
    field.fill("nothing.*")
    page.keyboard.press("Enter")
    assert sent(page) == [{"freeze": ["nothing.*"]}]
    expect(page.get_by_test_id("tf-drop-nothing.*")).to_be_visible()
    page.evaluate("set('status', {...state.status, error: {panel: 'passes', at: 'freeze', message: 'no parameter'}})")
    expect(page.get_by_test_id("tf-drop-nothing.*")).to_have_count(0)
    expect(field).to_have_value("nothing.*")


def test_undo_restores_the_field_of_names_that_were_refused_before_any_choice(page: Page) -> None:
    page.get_by_test_id("tf-remat-weight").select_option("0")
    page.evaluate("set('payload', {...state.payload, config: {...state.payload.config, remat: 0}})")
    field, undo = page.get_by_test_id("tf-freeze"), page.get_by_test_id("tf-undo")
    field.fill("nothing.*")
    page.keyboard.press("Enter")
    page.evaluate("set('status', {...state.status, error: {panel: 'passes', at: 'freeze', message: 'no parameter'}})")
    expect(field).to_have_value("nothing.*")
    assert sent(page) == [{"remat": 0}, {"freeze": ["nothing.*"]}]
    undo.click()
    expect(field).to_have_value("")
    assert sent(page) == []
    undo.click()
    assert sent(page) == [{"remat": 0.5}]


@pytest.mark.parametrize("field", ["tf-freeze", "tf-option-trimmed-level"])
def test_enter_takes_what_was_typed_before_the_panel_was_drawn_anew(page: Page, field: str) -> None:
    page.get_by_test_id("tf-options-trimmed").click()
    page.get_by_test_id(field).fill("2")
    page.evaluate("set('status', {...state.status})")
    expect(page.get_by_test_id(field)).to_be_focused()
    expect(page.get_by_test_id(field)).to_have_value("2")
    page.keyboard.press("Enter")
    expected = {"tf-freeze": {"freeze": ["2"]}, "tf-option-trimmed-level": {"trimmed": {"level": "2"}}}
    assert sent(page) == [expected[field]], "it is sent once"


def test_a_pass_of_the_users_own_is_a_switch(page: Page, press: Callable[[Locator], None]) -> None:
    press(page.get_by_test_id("tf-toggle-trimmed"))
    page.evaluate("show(2)")
    expect(page.get_by_test_id("tf-pass-trimmed")).to_contain_text("off")
    page.get_by_test_id("tf-options-trimmed").click()
    expect(page.get_by_test_id("tf-option-trimmed-level")).to_be_disabled()
    expect(page.get_by_test_id("tf-memory-budget")).to_be_disabled()
    press(page.get_by_test_id("tf-toggle-trimmed"))
    assert sent(page) == [{"trimmed": False}, {"trimmed": True}]


@pytest.mark.parametrize("width", [480, 760, 1300])
def test_nothing_sticks_out_when_all_is_unfolded(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    for name in ("trimmed", "remat"):
        page.get_by_test_id(f"tf-options-{name}").click()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    edges = page.evaluate(
        "[...document.querySelectorAll('.tf-pass')].map(p => Math.max(...[...p.querySelectorAll('*')]"
        ".map(e => e.getBoundingClientRect().right)) - p.getBoundingClientRect().right)"
    )
    assert max(edges) <= 1
