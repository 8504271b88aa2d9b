"""No action moves a control: every one is used in every state, and all others stay within 2 px of where they were.

What unfolds in a list, a module's rows or a kernel's source, takes its room in that list; it is content, and scrolls. All else
is a control: the head, the passes with their options, the tabs, the search, and the bar above each panel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, Page, expect

import tracefuse
from tests.browser.contrast import CONTRAST, CUT, TABS
from tracefuse.config.names import PASSES
from tracefuse.demo import GPT, batch
from tracefuse.widgets.html import page as html_page
from tracefuse.widgets.view.explorer import Explorer

pytestmark = pytest.mark.browser

WIDTHS = (800, 1024, 1170, 1440)
# Payloads by number, as `opened` holds them, and what else is shown.
IDLE = {"busy": "", "progress": None, "text": "", "error": None}
STATES: dict[str, tuple[int, dict[str, Any]]] = {
    "captured": (0, IDLE),
    "fuse off": (1, IDLE),
    "measured": (2, IDLE),
    "predicted": (3, IDLE),
    "pinned": (4, IDLE),
    "all off": (5, IDLE),
    "frozen and pinned values": (6, IDLE),
    "measuring": (
        2,
        IDLE | {"busy": "timing", "progress": 0.4, "text": "round 3 of 9, which is a long text to be shown"},
    ),
    "refused": (0, IDLE | {"error": {"panel": "passes", "at": "freeze", "message": "no parameter matches 'x': " * 5}}),
    "writing": (0, IDLE | {"busy": "take"}),
}
# In every state all is used at one width, in the first one at all of them; where the controls of a state stand before any is
# used is seen at each width.
IN_TURN = [
    *(("captured", width) for width in WIDTHS),
    *((state, WIDTHS[at % len(WIDTHS)]) for at, state in enumerate(STATES) if state != "captured"),
]
HARNESS = """() => {
    const controls = "button, input, select, summary, [role=tab]";
    const fixed = ".tf-verdict, .tf-side, .tf-bar-top, .tf-toolbar, .tf-timeline-bar, .tf-board-bar";
    const frame = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    const root = () => document.querySelector("[data-testid=tf-root]");
    const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);
    const nameOf = (one) => one.dataset.testid ?? `${one.tagName} ${one.getAttribute("aria-label") ?? one.textContent}`;
    const all = () => [...root().querySelectorAll(`:is(${fixed}) :is(${controls})`)].filter((one) => one.checkVisibility());
    const places = () => {
        const found = new Map();
        for (const one of all()) {
            const { x, y, width } = one.getBoundingClientRect();
            // A chip comes and goes with what it stands for; what lies over others is no part of the page's flow.
            const comes = ".tf-menu, .tf-more-options, .tf-pins, .tf-error, .tf-take-notice";
            if (!one.closest(comes)) found.set(nameOf(one), [x, y, width]);
        }
        return found;
    };
    const use = (one) => {
        if (one.tagName === "SELECT") {
            one.selectedIndex = (one.selectedIndex + 1) % one.options.length;
            one.dispatchEvent(new Event("change", { bubbles: true }));
        } else if (one.type === "range" || one.type === "text" || one.type === "search") {
            one.value = one.type === "range" ? "3" : "h.*.mlp.*";
            one.dispatchEvent(new Event("input", { bubbles: true }));
            one.dispatchEvent(new Event("change", { bubbles: true }));
        } else one.click();
    };
    const moved = (before, after) => [...after].flatMap(([name, [x, y]]) => {
        const was = before.get(name);
        const by = was ? Math.max(Math.abs(x - was[0]), Math.abs(y - was[1])) : 0;
        return by > 2 ? [`${name} by ${by.toFixed(1)} px`] : [];
    });
    // What moved while what was asked for was on its way, and what had moved once it was there.
    const used = async (one, name, before) => {
        window.asked = [];
        use(one);
        const early = asked.length ? moved(before, places()).map((text) => `${name}, while it waits, moves ${text}`) : [];
        asked.forEach((answer) => answer());
        window.asked = null;
        await frame();
        return [...early, ...moved(before, places()).map((text) => `${name} moves ${text}`)];
    };
    // Only what is not as it should be is drawn anew.
    window.reset = async (number, status, tab) => {
        const opens = () => root().querySelector(`[data-testid=tf-tab-${tab}]`);
        const isShown = () => state.payload === payloadsOf()[number] && root().dataset.busy === status.busy;
        const unfolded = root().querySelectorAll("details[open]");
        const isStatus = same(state.status, status);
        if (isStatus && isShown() && opens().ariaSelected === "true" && unfolded.length === 0) return;
        unfolded.forEach((one) => { one.open = false; });
        if (!isStatus) window.set("status", status);
        if (!isShown()) window.show(number);
        if (opens().ariaSelected !== "true") opens().click();
        await frame();
    };
    window.useAll = async (number, status, tab, inPanel) => {
        const problems = [];
        await window.reset(number, status, tab);
        const first = places();
        const wanted = all().filter((one) => !one.disabled && (!inPanel || one.closest(".tf-tab-body"))).map(nameOf);
        for (const name of new Set(wanted)) {
            await window.reset(number, status, tab);
            const before = places();
            problems.push(...moved(first, before).map((text) => `coming back after ${name}: ${text}`));
            const one = all().find((other) => nameOf(other) === name);
            if (!one) continue;
            problems.push(...await used(one, name, before));
        }
        return [new Set(wanted).size, [...new Set(problems)]];
    };
    // What stands in a panel itself: chips, rows, headings that sort, sources that unfold; `most` of them, from end to end.
    const inPanel = `.tf-tab-body :is(${controls}, [role=row], [data-value], canvas):not(:disabled, [aria-disabled=true])`;
    const inside = () => [...root().querySelectorAll(inPanel)].filter((one) => one.checkVisibility() && !one.closest(fixed));
    window.useInside = async (number, status, tab, most, from) => {
        const problems = [];
        const start = async () => {
            await window.reset(number, status, tab);
            if (state.selected === "") return;
            window.set("selected", "");
            await frame();
        };
        await start();
        const count = inside().length;
        const step = Math.max(1, Math.floor(count / most));
        for (let at = Math.floor(from * step); at < count; at += step) {
            await start();
            const before = places();
            const one = inside()[at];
            if (!one) continue;
            const name = nameOf(one).slice(0, 60);
            one.focus?.({ preventScroll: true });
            problems.push(...await used(one, name, before));
            const focus = document.activeElement;
            if (!root().contains(focus) && focus !== document.body) problems.push(`${name} takes the keyboard out`);
            if (document.documentElement.scrollWidth > innerWidth) problems.push(`${name} makes the page scroll`);
        }
        return [count, [...new Set(problems)]];
    };
}"""
# A kernel of the page's own: it answers with the payloads that there are, at once or, where something holds what is `asked`
# back, when that is called.
ANSWER = """() => {
    const same = (one, other) => Object.keys(one).every((name) => JSON.stringify(one[name]) === JSON.stringify(other[name]));
    window.asked = null;
    const configure = ({ changes }) => {
        const wanted = { ...state.payload.config, ...changes };
        const at = payloadsOf().findIndex((one) => same(one.config, wanted));
        if (at >= 0) window.show(at);
        else window.set("status", { busy: "", progress: null, text: "",
            error: { panel: "passes", at: Object.keys(changes)[0], message: "this is not held ".repeat(8) } });
    };
    window.sent = { push(message) {
        const answer = () => {
            if (message.type === "configure") configure(message);
            window.received({ type: "answered", to: message });
        };
        if (window.asked) window.asked.push(answer);
        else answer();
    } };
}"""
PLACED = (
    "[data-testid^=tf-toggle-], [role=tab], .tf-actions button, [data-testid^=tf-tile-], .tf-clock, .tf-search input, "
    "[data-testid=tf-freeze], [data-testid=tf-remat-weight], [data-testid=tf-memory-budget]"
)
FOCUS = """() => {
    const one = document.activeElement;
    if (!one.closest("[data-testid=tf-root]")) return null;
    const { outlineStyle, outlineWidth, outlineColor } = getComputedStyle(one);
    const isSeen = outlineStyle !== "none" && parseFloat(outlineWidth) >= 1.5;
    return isSeen ? "" : `${one.outerHTML.slice(0, 90)}: outline ${outlineStyle} ${outlineWidth}`;
}"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model, data = GPT(layers=2, width=32, heads=2, vocab=61, length=16, dropout=0.1), batch(61, 2, 12)
    explorer = Explorer(tracefuse.capture(lambda: model(*data).backward()).optimize(), "c", budget_s=0.2)
    payloads = [explorer.payload]
    explorer.configure({"fuse": False})
    payloads.append(explorer.payload)
    explorer.configure({"fuse": True})
    explorer.measure()
    explorer.show_times_of("here")
    payloads.append(explorer.payload)
    explorer.configure({"remat": None})
    payloads.append(explorer.payload)
    explorer.pin()
    payloads.append(explorer.payload)
    explorer.unpin()
    off = dict.fromkeys(
        (
            "simplify",
            "merge_matmuls",
            "cat",
            "linear_cross_entropy",
            "decompose",
            "channels_last",
            "pad",
            "optimizer_step",
            "fuse",
        ),
        False,
    )
    explorer.configure(off | {"freeze": None})
    payloads.append(explorer.payload)
    on = dict.fromkeys(off, True)
    explorer.configure(on | {"freeze": ["h.*.mlp.*", "!h.1.*"], "remat": 0.5, "save": ["h.0.attn", "h.1.mlp"]})
    payloads.append(explorer.payload)
    path = tmp_path_factory.mktemp("moves") / "view.html"
    path.write_text(html_page(payloads, "moves", explorer.measured.timeline, explorer.board), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def opened(browser: Browser, written: Path) -> Iterator[tuple[Page, list[str]]]:
    """One page for all, in which the view is made anew for each test, and what it reports as errors."""
    page = browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(written.as_uri())
    page.wait_for_selector("[data-testid=tf-root][data-ready='1']")
    yield page, errors
    page.close()


@pytest.fixture
def live(opened: tuple[Page, list[str]], go_live: Callable[[Page], None]) -> Iterator[Page]:
    page, errors = opened
    page.set_viewport_size({"width": 1440, "height": 900})
    page.emulate_media(color_scheme="light")
    go_live(page)
    page.evaluate(HARNESS)
    page.evaluate(ANSWER)
    yield page
    page.evaluate("() => 0")  # what it reported so far arrives before the answer
    assert errors == []


# --- nothing moves ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("state", "width"), IN_TURN)
def test_no_control_moves_another(live: Page, state: str, width: int) -> None:
    live.set_viewport_size({"width": width, "height": 768})
    number, status = STATES[state]
    count, problems = live.evaluate("given => useAll(...given)", [number, status, "trace", False])
    assert count > 20
    assert problems == []


@pytest.mark.parametrize("tab", TABS)
def test_no_panels_bar_moves_another_control(live: Page, tab: str) -> None:
    live.set_viewport_size({"width": 1024, "height": 768})
    for number in (0, 3):
        _, problems = live.evaluate("given => useAll(...given)", [number, IDLE, tab, True])
        assert problems == []


@pytest.mark.parametrize("tab", TABS)
def test_nothing_in_a_panel_moves_a_control(live: Page, tab: str) -> None:
    """In each state that a panel may be in, and in each of them others of what stands there; what unfolds scrolls in it."""
    live.set_viewport_size({"width": 1024, "height": 768})
    states = ("captured", "measured", "pinned", "all off")
    for at, state in enumerate(states):
        number, status = STATES[state]
        count, problems = live.evaluate("given => useInside(...given)", [number, status, tab, 4, at / len(states)])
        assert count > 0 or tab in ("timing", "notes", "findings", "memory")
        assert problems == [], state


@pytest.mark.parametrize("width", WIDTHS)
def test_all_states_and_tabs_have_their_controls_at_the_same_places(live: Page, width: int) -> None:
    """Whatever led from one to the other: a switch, a measurement, a pin, an error."""
    live.set_viewport_size({"width": width, "height": 768})
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for name, (number, status) in STATES.items():
        live.evaluate("given => reset(...given)", [number, status, "trace"])
        found[name] = live.evaluate(
            """(wanted) => Object.fromEntries([...document.querySelectorAll(wanted)]
            .filter((one) => one.checkVisibility()).map((one) => [one.dataset.testid,
                [one.getBoundingClientRect().x, one.getBoundingClientRect().y]]))""",
            PLACED,
        )
    first = found["captured"]
    assert len(first) > 25
    for name, places in found.items():
        common = first.keys() & places.keys()
        assert len(common) > 20
        assert {one: places[one] for one in common} == {one: pytest.approx(first[one], abs=2) for one in common}, name


def test_a_switch_and_its_effect_are_on_one_screen(live: Page) -> None:
    live.set_viewport_size({"width": 1024, "height": 768})
    for name in PASSES:
        expect(live.get_by_test_id(f"tf-toggle-{name}")).to_be_in_viewport(ratio=1)
    for tile in ("time", "peak", "saved", "ops"):
        expect(live.get_by_test_id(f"tf-tile-{tile}")).to_be_in_viewport(ratio=1)
    expect(live.get_by_test_id("tf-tree").locator("[role=row]").nth(8)).to_be_in_viewport(ratio=1)


def test_every_pass_has_a_row_that_says_what_it_would_need(live: Page) -> None:
    rows = live.locator("[data-pass]")
    expect(rows).to_have_count(len(PASSES))
    expect(live.get_by_test_id("tf-pass-freeze")).to_contain_text("type a pattern; freezing all but")
    expect(live.get_by_test_id("tf-pass-optimizer_step")).to_contain_text("call optimizer.step()")
    live.evaluate("show(1)")
    expect(rows).to_have_count(len(PASSES))
    expect(live.get_by_test_id("tf-pass-decompose")).to_contain_text("off: needs fuse")


# --- undo -------------------------------------------------------------------------------------------------------------


def test_every_choice_is_taken_back_and_made_again(live: Page) -> None:
    fuse = live.get_by_test_id("tf-toggle-fuse")
    expect(live.get_by_test_id("tf-undo")).to_be_disabled()
    fuse.click()
    expect(fuse).not_to_be_checked()
    live.keyboard.press("Control+z")
    expect(fuse).to_be_checked()
    expect(live.get_by_test_id("tf-undo")).to_be_disabled()
    live.keyboard.press("Control+Shift+Z")
    expect(fuse).not_to_be_checked()
    live.get_by_test_id("tf-undo").click()
    expect(fuse).to_be_checked()
    live.get_by_test_id("tf-redo").click()
    expect(fuse).not_to_be_checked()


def test_what_is_refused_is_not_undone(live: Page) -> None:
    fuse, cat = live.get_by_test_id("tf-toggle-fuse"), live.get_by_test_id("tf-toggle-cat")
    fuse.click()
    expect(fuse).not_to_be_checked()
    cat.click()
    expect(live.get_by_test_id("tf-pass-cat")).to_contain_text("this is not held")
    expect(cat).to_be_checked()
    live.get_by_test_id("tf-undo").click()
    expect(fuse).to_be_checked()
    expect(live.get_by_test_id("tf-undo")).to_be_disabled()


# --- seen and legible -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tab", TABS)
def test_where_the_keyboard_is_can_be_seen(live: Page, tab: str) -> None:
    live.get_by_test_id(f"tf-tab-{tab}").click()
    live.get_by_test_id("tf-root").focus()
    seen = []
    for _ in range(200):
        live.keyboard.press("Tab")
        problem = live.evaluate(FOCUS)
        if problem is None:
            break
        seen.append(problem)
    assert len(seen) > 10
    assert [problem for problem in seen if problem] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(live: Page, scheme: Any) -> None:
    live.emulate_media(color_scheme=scheme)
    for number, (state, status) in enumerate(STATES.values()):
        for tab in TABS if number in (0, 3) else TABS[:1]:
            live.evaluate("given => reset(...given)", [state, status, tab])
            count, problems = live.evaluate(CONTRAST)
            assert count > 50
            assert problems == [], (scheme, tab, state)


@pytest.mark.parametrize("width", [800, 1024, 1440])
def test_no_text_is_cut_without_a_way_to_read_it(live: Page, width: int) -> None:
    live.set_viewport_size({"width": width, "height": 768})
    for number, status in (STATES["captured"], STATES["measured"], STATES["pinned"]):
        for tab in TABS:
            live.evaluate("given => reset(...given)", [number, status, tab])
            assert live.evaluate(CUT) == [], tab
