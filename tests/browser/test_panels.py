"""Verdict, passes, details, code, kernels and findings: on a saved page, and on a live view whose messages are kept."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, Locator, Page, expect

import tracefuse
from tracefuse.config.names import PASSES
from tracefuse.demo import GPT, batch
from tracefuse.widgets.html import write_html

pytestmark = pytest.mark.browser

MEASURED = """() => set("payload", { ...state.payload,
    summary: { ...state.payload.summary, measured_peak_bytes: [6400000, 4200000],
        difference: { results: 2.4e-7, gradients: 3.1e-6, delta: 3.1e-6, is_same: true, brief: "to 3 fp32 roundings",
            said: "" } },
    timing: { provenance: "measured on a device with a long name", stale: false, is_pinned: true,
        config: "c.optimize()", notes: [], work: [], rows: [
        { label: "step", program: "optimised", phase: "step",
          baseline_ms: { median: 34.1, low: 33, high: 35, coverage: 0.96, samples: 20 },
          variant_ms: { median: 19.2, low: 19, high: 20, coverage: 0.96, samples: 20 },
          ratio: { median: 0.56, low: 0.55, high: 0.57, coverage: 0.99, samples: 20 }, verdict: "faster" }] },
    clock: { ...state.payload.clock, chosen: "here", device: "a device", kinds: ["measured", "measured"],
        step_us: [34100, 19200], takes_us: [34100, 19200], launches: null,
        provenance: ["measured on a device", "measured on a device"] },
    passes: state.payload.passes.map((one) => ({ ...one, delta_ms: one.name !== "fuse" ? null :
        { median: -1.2, low: -1.4, high: -1.0, coverage: 0.96, samples: 20,
          provenance: "measured on a device", stale: false } })),
    baseline: { is_pinned: true, call: "c.optimize(fuse=False)" } })"""
IDLE = "{ busy: '', progress: null, text: '', error: null }"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model, data = GPT(layers=1, width=32, heads=2, vocab=61, length=16), batch(61, 2, 12)
    c = tracefuse.capture(lambda: model(*data).backward())
    return write_html(c.optimize(), tmp_path_factory.mktemp("panels") / "view.html")


@pytest.fixture(scope="module")
def opened(browser: Browser, written: Path) -> Iterator[Page]:
    """One page for all, in which the view is made anew for each test."""
    page = browser.new_page(viewport={"width": 1300, "height": 1000})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(written.as_uri())
    page.wait_for_selector("[data-testid=tf-root][data-ready='1']")
    yield page
    page.close()
    assert errors == []


@pytest.fixture
def page(opened: Page, reopen: Callable[[Page], None]) -> Page:
    opened.set_viewport_size({"width": 1300, "height": 1000})
    reopen(opened)
    opened.get_by_test_id("tf-tab-code").dispatch_event("click")
    return opened


@pytest.fixture
def live(opened: Page, go_live: Callable[[Page], None]) -> Page:
    opened.set_viewport_size({"width": 1300, "height": 1000})
    go_live(opened)
    opened.get_by_test_id("tf-tab-code").dispatch_event("click")
    return opened


def sent(page: Page) -> list[dict[str, Any]]:
    return page.evaluate("() => { const found = window.sent; window.sent = []; return found; }")


def answered(page: Page, message: dict[str, Any]) -> None:
    """What a kernel says when it is done with a choice."""
    page.evaluate("message => received({ type: 'answered', to: message })", message)


def details(page: Page) -> Locator:
    return page.get_by_test_id("tf-details")


# --- passes -----------------------------------------------------------------------------------------------------------


def test_every_pass_has_a_row_whatever_it_changed(page: Page) -> None:
    rows = page.get_by_test_id("tf-passes").locator("[data-pass]")
    assert [row.get_attribute("data-pass") for row in rows.all()] == [
        "simplify", "freeze", "merge_matmuls", "cat", "linear_cross_entropy", "decompose", "channels_last", "pad",
        "remat", "optimizer_step", "fuse", "overlap",
    ]  # fmt: skip
    expect(page.get_by_test_id("tf-pass-freeze")).to_contain_text("type a pattern; freezing all but")


def test_walking_the_passes_shows_what_each_did_by_itself(page: Page) -> None:
    page.get_by_test_id("tf-toggle-simplify").focus()
    expect(page.get_by_test_id("tf-strip")).to_contain_text("What simplify did")
    for _ in range(list(PASSES).index("decompose")):
        page.keyboard.press("ArrowDown")
    expect(page.get_by_test_id("tf-work-decompose")).to_be_visible()
    expect(page.get_by_test_id("tf-pass-decompose")).to_have_class(re.compile("tf-active"))
    expect(page.get_by_test_id("tf-strip")).to_contain_text(re.compile(r"What decompose did: \d+ → \d+ ops"))
    assert page.locator(".tf-line.tf-decided").count() > 0
    page.keyboard.press("Escape")
    expect(page.get_by_test_id("tf-strip")).not_to_contain_text("What")
    expect(page.locator(".tf-line.tf-decided")).to_have_count(0)


def test_space_switches_the_pass_that_was_walked_to(live: Page) -> None:
    live.get_by_test_id("tf-toggle-simplify").focus()
    live.keyboard.press("End")
    live.keyboard.press("Space")
    assert sent(live) == [{"type": "configure", "changes": {"overlap": True}}]


def test_a_switch_moves_at_once_and_says_that_its_numbers_are_on_the_way(live: Page) -> None:
    cat, fuse = live.get_by_test_id("tf-toggle-cat"), live.get_by_test_id("tf-toggle-fuse")
    row = live.get_by_test_id("tf-pass-cat")
    before = live.evaluate("state.payload.summary.ops")
    cat.click()
    expect(cat).not_to_be_checked()
    expect(cat).to_be_focused()
    expect(row).to_have_attribute("aria-busy", "true")
    expect(row).to_contain_text("waiting for the kernel…")
    fuse.click()
    expect(fuse).not_to_be_checked()
    live.evaluate("set('status', { ...state.status, busy: 'passes' })")
    expect(row).to_contain_text("computing its numbers…")
    assert live.evaluate("state.payload.summary.ops") == before
    live.evaluate("set('payload', {...state.payload, config: {...state.payload.config, cat: false}})")
    expect(row).not_to_have_attribute("aria-busy", "true")
    expect(live.get_by_test_id("tf-pass-fuse")).to_have_attribute("aria-busy", "true")
    expect(fuse).not_to_be_checked()
    live.keyboard.press("Control+z")
    expect(fuse).to_be_checked()
    assert [one["changes"] for one in sent(live)] == [{"cat": False}, {"fuse": False}, {"fuse": True}]


def test_a_switch_goes_back_with_a_word_where_the_kernel_refuses(live: Page) -> None:
    cat = live.get_by_test_id("tf-toggle-cat")
    cat.click()
    expect(cat).not_to_be_checked()
    error = {"panel": "passes", "at": "cat", "message": "cat is refused: try another"}
    live.evaluate("error => set('status', { ...state.status, error })", error)
    expect(cat).to_be_checked()
    expect(live.get_by_test_id("tf-pass-cat").get_by_role("alert")).to_have_text("cat is refused: try another")
    expect(live.get_by_test_id("tf-undo")).to_be_disabled()


def test_a_switch_goes_back_where_the_kernel_is_gone(live: Page) -> None:
    live.get_by_test_id("tf-toggle-cat").click()
    expect(live.get_by_test_id("tf-toggle-cat")).not_to_be_checked()
    live.evaluate("set('live', false)")
    expect(live.get_by_test_id("tf-toggle-cat")).to_be_checked()
    expect(live.get_by_test_id("tf-undo")).to_be_disabled()


def test_a_decisions_value_leads_to_it_and_back(page: Page, press: Callable[[Locator], None]) -> None:
    page.get_by_test_id("tf-toggle-remat").focus()
    chip = page.get_by_test_id("tf-work-remat").locator(".tf-decisions .tf-chip").first
    name = str(chip.text_content())
    press(chip)
    expect(details(page).locator(".tf-name")).to_have_text(name)
    press(page.get_by_test_id("tf-clear"))
    expect(page.get_by_test_id("tf-work-remat")).to_be_visible()


def test_a_click_beside_the_controls_shows_the_pass_and_switches_nothing(live: Page) -> None:
    live.get_by_test_id("tf-pass-fuse").locator(".tf-pass-name").click()
    expect(live.get_by_test_id("tf-work-fuse")).to_be_visible()
    expect(live.get_by_test_id("tf-toggle-fuse")).to_be_focused()
    assert sent(live) == []


def test_a_pass_that_is_walked_to_shows_its_own_before_and_after(live: Page) -> None:
    live.get_by_test_id("tf-tab-code").click()
    whole = live.get_by_test_id("tf-code-forward").text_content()
    live.get_by_test_id("tf-toggle-cat").focus()
    live.keyboard.press("ArrowDown")
    live.get_by_test_id("tf-alone").check()
    (walked,) = sent(live)
    assert walked["type"] == "show_pass"
    live.evaluate(
        """(pass) => {
            const line = { code: "alone = f([x])", comment: "# f32[2]  8 B", value: "alone", kind: "op", diff: "-" };
            const half = { lines: [line], ops: [1, 0], added: 0, removed: 1 };
            window.set("step", { pass, forward: half, backward: { ...half, lines: [] } });
        }""",
        walked["pass"],
    )
    expect(live.get_by_test_id("tf-code-forward")).to_contain_text("alone = ")
    expect(live.locator(".tf-against")).to_contain_text(f"{walked['pass']} alone")
    live.get_by_test_id("tf-alone").uncheck()
    assert sent(live) == [{"type": "show_pass", "pass": ""}]
    expect(live.locator(".tf-against")).to_contain_text("as captured")
    assert live.get_by_test_id("tf-code-forward").text_content() == whole


def test_a_pass_that_failed_says_so_in_its_row(live: Page) -> None:
    live.evaluate(
        "set('payload', {...state.payload, passes: state.payload.passes.map((one) => one.name === 'cat'"
        " ? {...one, error: 'no such axis'} : one)})"
    )
    expect(live.get_by_test_id("tf-pass-cat").get_by_role("alert")).to_contain_text("left out: no such axis")


def test_what_a_pass_adds_to_the_time_stands_in_its_row(live: Page) -> None:
    delta = live.get_by_test_id("tf-pass-fuse").locator(".tf-delta").last
    expect(delta).to_have_attribute(
        "title", re.compile("the step with it minus the step without it, modelled for H100")
    )
    expect(delta).not_to_have_class(re.compile("tf-is-stale"))
    live.evaluate(MEASURED)
    expect(delta).to_have_text("−1.20 ±0.20 ms")
    expect(delta).to_have_class(re.compile("tf-gain"))


WITHOUT = {"ops": 1, "saved_bytes": 1, "peak_bytes": 1, "step_us": 1.0, "kind": "modelled"}
FIGURES = """([known, without]) => set("payload", { ...state.payload, passes: state.payload.passes.map((one) => (
    { ...one, enabled: true, changed: /^(fuse|remat)$/.test(one.name), without: known.includes(one.name) ? without : null }
)) })"""


def test_the_head_of_the_passes_says_in_words_what_their_figures_are_of(live: Page) -> None:
    how = live.get_by_test_id("tf-passes-how")
    for known, said in (
        (["fuse", "remat"], "each alone; effects overlap"),
        (["fuse"], "effects, some in turn"),
        ([], "effect of each in turn"),
    ):
        live.evaluate(FIGURES, [known, WITHOUT])
        expect(how).to_have_text(said)
        in_italics = live.locator(".tf-pass .tf-delta.tf-is-stale")
        expect(in_italics).to_have_count(4 * (2 - len(known)))
        assert how.evaluate("one => one.scrollWidth <= one.clientWidth + 1")
    expect(how).to_have_attribute(
        "title", re.compile("^A pass rewrites .* each alone: the step with it minus the step without it")
    )


# --- pins and frozen parameters ---------------------------------------------------------------------------------------


def saved_value(page: Page) -> str:
    return page.evaluate(
        "() => Object.entries(state.payload.values).find(([, v]) => v.saved_bytes > 0 && v.phase === 'forward'"
        " && v.op.startsWith('aten.'))[0]"
    )


def test_a_value_is_pinned_from_its_details_and_dropped_from_the_row(
    live: Page, press: Callable[[Locator], None]
) -> None:
    name = saved_value(live)
    live.evaluate("(name) => set('selected', name)", name)
    expect(live.get_by_test_id("tf-pin-auto")).to_have_attribute("aria-pressed", "true")
    press(live.get_by_test_id("tf-pin-recompute"))
    assert sent(live) == [{"type": "configure", "changes": {"save": [], "recompute": [name]}}]
    live.evaluate(
        "(name) => set('payload', {...state.payload, config: {...state.payload.config, recompute: [name]}})", name
    )
    expect(live.get_by_test_id("tf-pin-recompute")).to_have_attribute("aria-pressed", "true")
    press(live.get_by_test_id(f"tf-drop-recompute {name}"))
    assert sent(live) == [{"type": "configure", "changes": {"save": [], "recompute": []}}]


@pytest.mark.parametrize("value", ["h_0_mlp_up_weight", "grad_h_0_mlp_up_weight"])
def test_a_parameter_is_frozen_from_itself_or_its_gradient(
    live: Page, value: str, press: Callable[[Locator], None]
) -> None:
    live.evaluate("(name) => set('selected', name)", value)
    press(live.get_by_test_id("tf-freeze-one"))
    (asked,) = sent(live)
    assert asked == {"type": "configure", "changes": {"freeze": ["h.0.mlp.up.weight"]}}
    live.evaluate("set('payload', {...state.payload, config: {...state.payload.config, freeze: ['h.*']}})")
    expect(details(live)).to_contain_text("frozen by “h.0.mlp.up.weight”")  # that has no answer yet
    answered(live, asked)
    expect(details(live)).to_contain_text("frozen by “h.*”")
    press(live.get_by_test_id("tf-freeze-one"))
    (asked,) = sent(live)
    assert asked == {"type": "configure", "changes": {"freeze": ["h.*", "!h.0.mlp.up.weight"]}}
    answered(live, asked)
    press(live.get_by_test_id("tf-drop-h.*"))
    assert sent(live) == [{"type": "configure", "changes": {"freeze": []}}]


# --- details ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "said"),
    [
        ("placeholder", "none: it is an input"),
        ("aten.view.default", "none: a view runs nothing"),
        ("getitem", "part of"),
    ],
)
def test_an_unknown_time_says_why(live: Page, op: str, said: str) -> None:
    live.evaluate(
        "(op) => set('selected', Object.entries(state.payload.values).find(([, v]) => v.op === op && !v.removed)[0])",
        op,
    )
    expect(details(live)).to_contain_text(said)


def test_a_fused_values_kernel_its_source_and_what_is_not_known_of_it(
    page: Page, press: Callable[[Locator], None]
) -> None:
    line = page.locator("[data-testid=tf-code-forward] .tf-line:has(.tf-kernel)").first
    line.locator(".tf-value").first.click()
    expect(details(page)).to_contain_text("modelled: roofline of the H100 SXM datasheet")
    expect(details(page)).to_contain_text("memory bound")
    press(page.get_by_test_id("tf-details-source"))
    source = details(page).get_by_test_id("tf-kernel-text")
    expect(source).to_contain_text("@triton.jit")
    expect(source.locator(".tf-decorator").first).to_have_text("@triton.jit")
    inspect = details(page).get_by_role("button", name="inspect")
    expect(inspect).to_be_disabled()
    expect(inspect).to_have_attribute("title", re.compile("run it in a notebook"))


def test_a_kernel_is_inspected_and_its_answer_shown(live: Page, press: Callable[[Locator], None]) -> None:
    live.locator("[data-testid=tf-code-forward] .tf-line:has(.tf-kernel) .tf-value").first.click()
    press(details(live).get_by_role("button", name="inspect"))
    (message,) = sent(live)
    assert message["type"] == "inspect"
    live.evaluate(
        "(name) => set('payload', {...state.payload, kernels: state.payload.kernels.map((k) => k.name !== name ? k :"
        " {...k, resources: {registers: 40, shared_bytes: 2048, spills: 3, target: 'sm_90'}})})",
        message["kernel"],
    )
    expect(details(live)).to_contain_text("40 registers, 2 KiB shared, ▲ 3 spills")


def test_an_inspection_that_fails_says_so_beside_its_button(live: Page) -> None:
    live.locator("[data-testid=tf-code-forward] .tf-line:has(.tf-kernel) .tf-value").first.click()
    details(live).get_by_role("button", name="inspect").click()
    (message,) = sent(live)
    error = {"panel": "kernels", "at": message["kernel"], "message": "Triton refused it"}
    live.evaluate("(error) => set('status', {...state.status, busy: '', error})", error)
    expect(details(live).get_by_role("alert")).to_have_text("Triton refused it")


# --- code -------------------------------------------------------------------------------------------------------------


def test_n_and_shift_n_walk_the_changes(page: Page) -> None:
    page.get_by_test_id("tf-code-forward").focus()
    page.keyboard.press("n")
    first = details(page).locator(".tf-name").text_content()
    expect(page.locator(".tf-jumps")).to_contain_text(re.compile(r"^.*1 of \d+"))
    page.keyboard.press("n")
    expect(page.locator(".tf-jumps")).to_contain_text(re.compile(r"2 of \d+"))
    page.keyboard.press("Shift+N")
    expect(details(page).locator(".tf-name")).to_have_text(str(first))
    row = page.locator(".tf-line.tf-jump")
    expect(row).to_have_count(1)
    expect(row).to_have_class(re.compile("tf-add|tf-del|tf-mod"))
    expect(row).to_be_in_viewport()


def test_only_changes_folds_the_rest_and_a_click_brings_it_back(page: Page, press: Callable[[Locator], None]) -> None:
    page.get_by_test_id("tf-toggle-fuse").click()
    press(page.get_by_test_id("tf-only-changes"))
    folds = page.locator(".tf-code .tf-fold")
    count, lines = folds.count(), page.locator(".tf-code .tf-line").count()
    assert count > 0
    hidden = int(str(folds.first.text_content()).split()[1])
    press(folds.first)
    expect(folds).to_have_count(count - 1)
    assert page.locator(".tf-code .tf-line").count() == lines + hidden


def test_selecting_what_is_folded_away_unfolds_it(live: Page) -> None:
    live.evaluate("show(1)")
    live.get_by_test_id("tf-only-changes").check()
    shown = set(live.locator(".tf-code [data-defines]").evaluate_all("all => all.map(e => e.dataset.defines)"))
    ops = live.evaluate("state.payload.forward.lines.filter(l => l.kind === 'op' && l.diff === ' ').map(l => l.value)")
    name = next(op for op in ops if op not in shown)
    live.evaluate("(name) => set('selected', name)", name)
    line = live.locator(f"[data-testid=tf-code-forward] [data-defines={name}]")
    expect(line).to_be_in_viewport()
    expect(line).to_have_class(re.compile("tf-current"))


def test_removed_lines_and_del_lines_can_be_left_out(page: Page, press: Callable[[Locator], None]) -> None:
    for control, lines in (("tf-diff", ".tf-del"), ("tf-frees", ".tf-is-free")):
        assert page.locator(f".tf-code {lines}").count() > 0
        press(page.get_by_test_id(control))
        expect(page.locator(f".tf-code {lines}")).to_have_count(0)
    assert page.locator(".tf-code .tf-add").count() > 0


def test_a_toggle_leaves_the_line_at_the_top_where_it_was(live: Page) -> None:
    code = live.get_by_test_id("tf-code-backward")
    code.evaluate("e => { e.scrollTop = e.scrollHeight / 2; }")
    at = (
        "e => { const top = e.getBoundingClientRect().top; const row = [...e.querySelectorAll('[data-defines]:not(.tf-del)')]"
        ".find(r => r.getBoundingClientRect().bottom > top); return [row.dataset.defines, row.getBoundingClientRect().top] }"
    )
    name, before = code.evaluate(at)
    live.evaluate("set('payload', {...state.payload})")
    live.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    after = code.locator(f"[data-defines={name}]:not(.tf-del)").evaluate("e => e.getBoundingClientRect().top")
    assert abs(after - before) < 1


# --- kernels and findings ---------------------------------------------------------------------------------------------


def test_kernels_are_sorted_by_a_heading_and_turned_round_by_another_click(
    page: Page, press: Callable[[Locator], None]
) -> None:
    page.get_by_test_id("tf-tab-kernels").click()
    column = page.locator("[data-kernel-row] > :nth-child(2)")
    launches = [int(text) for text in column.all_text_contents()]
    for order, sort in ((sorted(launches, reverse=True), "descending"), (sorted(launches), "ascending")):
        press(page.get_by_test_id("tf-sort-calls"))
        assert [int(text) for text in column.all_text_contents()] == order
        expect(page.locator("th[aria-sort]:has([data-testid=tf-sort-calls])")).to_have_attribute("aria-sort", sort)
    expect(page.get_by_test_id("tf-sort-calls")).to_be_focused()


def test_an_unfolded_kernel_leads_to_the_values_it_computes(page: Page, press: Callable[[Locator], None]) -> None:
    page.get_by_test_id("tf-tab-kernels").click()
    press(page.get_by_test_id("tf-kernels").locator("tr:not(.tf-library) .tf-disclose").first)
    chip = page.locator(".tf-kernel-source:visible .tf-chips .tf-chip:enabled").first
    press(chip)
    expect(details(page).locator(".tf-name")).to_have_text(str(chip.text_content()))
    expect(page.locator("[data-kernel-row].tf-current")).to_have_count(1)


def test_a_finding_can_be_tried_only_where_that_changes_something(live: Page, press: Callable[[Locator], None]) -> None:
    finding = (
        "{id: 'a', severity: 'high', title: 'copies', evidence: [['copy', '5 ms']], values: [], source: 'a.py:1  x',"
        " fix: 'do', worth: '5 ms', kind: 'measured', changes: {cat: CAT}, mended: '', is_mended: false, key: 'x',"
        " bars: [], trials: []}"
    )
    live.get_by_test_id("tf-tab-findings").click()
    live.evaluate(f"set('payload', {{...state.payload, findings: [{finding.replace('CAT', 'false')}]}})")
    expect(live.get_by_test_id("tf-tab-findings")).to_contain_text("Findings 1")
    expect(live.get_by_test_id("tf-finding-a")).to_contain_text("▲ high")
    press(live.get_by_test_id("tf-try-a"))
    assert sent(live) == [{"type": "configure", "changes": {"cat": False}}]
    live.evaluate(f"set('payload', {{...state.payload, findings: [{finding.replace('CAT', 'true')}]}})")
    expect(live.get_by_test_id("tf-finding-a")).to_contain_text("is on")
    expect(live.get_by_test_id("tf-try-a")).to_have_count(0)
    live.evaluate("set('payload', {...state.payload, findings: []})")
    expect(live.get_by_test_id("tf-findings")).to_contain_text("What was looked for")


FINDING = """{id: 'a', severity: 'high', title: 'copies', evidence: [], values: [], source: '', fix: 'do', worth: '',
    changes: null, mended: '', is_mended: false, key: 'x',
    bars: [{label: 'wait', us: 3400, provenance: 'measured on a test'}, {label: 'copy @ 1.3 GB/s', us: 506600, provenance: ''},
        {label: 'host', us: 30000, provenance: ''}],
    trials: [{does: 'on the GPU', blocked: '', verdict: '', said: ''},
        {does: 'pinned', blocked: 'no GPU here', verdict: 'slower', said: 'measured: 1 → 2 ms'}]}"""


def show_finding(page: Page) -> Locator:
    page.get_by_test_id("tf-tab-findings").click()
    page.evaluate(f"set('payload', {{...state.payload, findings: [{FINDING}]}})")
    return page.get_by_test_id("tf-finding-a")


def test_the_bars_of_a_finding_are_to_scale_and_told_in_figures(live: Page) -> None:
    bars = show_finding(live).get_by_test_id("tf-bars")
    for text in ("wait 3.4 ms", "copy @ 1.3 GB/s 507 ms", "host 30 ms", "540 ms in all, measured on a test"):
        expect(bars).to_contain_text(text)
    widths = bars.locator("div > i").evaluate_all("all => all.map(e => e.getBoundingClientRect().width)")
    assert widths[1] / widths[2] == pytest.approx(506.6 / 30, rel=0.05)
    assert (
        len(set(bars.locator("div > i").evaluate_all("all => all.map(e => getComputedStyle(e).backgroundColor)"))) == 3
    )


def test_a_fix_is_tried_and_its_answer_stands_beside_it(live: Page, press: Callable[[Locator], None]) -> None:
    card = show_finding(live)
    button = live.get_by_test_id("tf-fix-a-0")
    expect(button).to_have_accessible_name("Try fix: on the GPU")
    press(button)
    assert sent(live) == [{"type": "try", "finding": "x", "choice": 0}]
    live.evaluate("set('status', { busy: 'findings', progress: 0.5, text: 'round 3', error: null })")
    expect(button).to_have_text("Measuring…")
    expect(button).to_be_disabled()
    expect(live.get_by_test_id("tf-verdict")).to_contain_text("round 3")
    expect(live.get_by_test_id("tf-cancel")).to_be_visible()
    live.evaluate(
        "set('status', { ...state.status, busy: '', error: { panel: 'findings', at: 'x 0', message: 'no such copy' } })"
    )
    expect(live.get_by_test_id("tf-trial-a-0").get_by_role("alert")).to_have_text("no such copy")
    expect(card.get_by_role("alert")).to_have_count(1)


def test_a_fix_that_cannot_run_here_says_why_and_keeps_what_was_measured(live: Page) -> None:
    show_finding(live)
    row = live.get_by_test_id("tf-trial-a-1")
    expect(live.get_by_test_id("tf-fix-a-1")).to_be_disabled()
    expect(row).to_contain_text("no GPU here")
    expect(row.locator(".tf-worse")).to_have_text("measured: 1 → 2 ms")


def test_a_saved_page_tries_nothing(page: Page) -> None:
    page.get_by_test_id("tf-toggle-fuse").click()
    page.get_by_test_id("tf-tab-findings").click()
    buttons = page.locator("[data-testid^=tf-fix-]")
    assert buttons.count() > 0
    for button in buttons.all():
        expect(button).to_be_disabled()
        expect(button).to_have_attribute("title", re.compile("no kernel behind"))


# --- the verdict bar --------------------------------------------------------------------------------------------------


def test_everything_measured_stands_in_one_row(live: Page) -> None:
    live.evaluate(MEASURED)
    tops = live.locator(".tf-tile").evaluate_all("all => all.map(e => e.getBoundingClientRect().top)")
    assert len(tops) == 6
    assert len(set(tops)) == 1
    expect(live.get_by_test_id("tf-tile-peak")).to_contain_text("● measured")
    # The tile and the column of passes mean one span.
    told = [live.get_by_test_id("tf-tile-peak").locator(".tf-term"), live.locator(".tf-passes-head abbr").nth(2)]
    for one in told:
        expect(one).to_have_attribute("title", re.compile(r"^the most bytes alive at once in the step"))
    said = live.get_by_test_id("tf-tile-difference")
    expect(said).to_have_text("Results vs eagersameon CPUto 3 fp32 roundings")
    expect(live.get_by_test_id("tf-baseline")).to_contain_text("c.optimize(fuse=False)")


def test_each_button_asks_for_its_own(live: Page, press: Callable[[Locator], None]) -> None:
    for control, message in (("measure", "measure"), ("ablate", "ablate"), ("pin", "pin")):
        press(live.get_by_test_id(f"tf-{control}"))
        assert sent(live) == [{"type": message}]
    live.evaluate(MEASURED)
    press(live.get_by_test_id("tf-pin"))
    assert sent(live) == [{"type": "unpin"}]


def test_progress_leaves_the_passes_alone_while_an_error_is_shown(live: Page) -> None:
    progress = """(progress) => set("status", { busy: "timing", progress, text: "",
        error: { panel: "passes", at: "cat", message: "no such thing" } })"""
    live.evaluate(progress, 0.1)
    live.get_by_test_id("tf-passes").evaluate("e => (e.dataset.same = '1')")
    live.evaluate(progress, 0.2)
    expect(live.get_by_test_id("tf-passes")).to_have_attribute("data-same", "1")
    expect(live.get_by_test_id("tf-pass-cat")).to_contain_text("no such thing")


def test_beside_a_pinned_time_the_header_predicts_this_one(live: Page) -> None:
    live.evaluate(MEASURED)
    live.evaluate(
        """() => set('payload', { ...state.payload, timing: { ...state.payload.timing, stale: true,
            config: 'c.optimize(fuse=False)',
            rows: state.payload.timing.rows.map((row) =>
                ({ ...row, variant_ms: null, ratio: null, verdict: 'not measured' })) },
            clock: { ...state.payload.clock, kinds: ["measured", "predicted"], step_us: [34100, 25000],
            takes_us: [34100, 25000], launches: null } })"""
    )
    time = live.get_by_test_id("tf-tile-time")
    expect(time.locator(".tf-figure")).to_have_text("34.1→25.0ms")
    expect(time).to_contain_text("◍ predicted")
    expect(time.locator("abbr")).to_have_attribute("title", re.compile("press Measure"))
    expect(time).to_have_class(re.compile("tf-predicted"))
    live.get_by_test_id("tf-tab-timing").click()
    cells = live.get_by_test_id("tf-timing").locator("tbody td")
    expect(cells.nth(0)).to_contain_text("34.1")
    expect(cells.nth(1)).to_have_text("not measured")
    expect(cells.nth(3)).to_have_text("not measured")


def test_times_are_called_after_what_they_were_measured_against_whatever_is_pinned_now(live: Page) -> None:
    live.evaluate(MEASURED)
    live.get_by_test_id("tf-tab-timing").click()
    titles = live.get_by_test_id("tf-timing").locator("th[scope=col]")
    expect(titles.nth(1)).to_have_text("pinned")
    live.evaluate(
        "set('payload', { ...state.payload, timing: { ...state.payload.timing, stale: true, is_pinned: false } })"
    )
    expect(titles.nth(1)).to_have_text("as captured")
    expect(titles.nth(4)).to_have_text("optimised / captured")
    expect(live.get_by_test_id("tf-timing").locator(".tf-pill")).to_have_attribute("title", re.compile("/ captured:"))
    live.evaluate(
        """() => {
        const program = (label) => ({ label, config: "", span_us: 0, lanes: [], names: [], values: [], count: 0,
            events: new DataView(new ArrayBuffer(0)) });
        set("timeline", { provenance: "measured on a device", programs: ["captured", "optimised"].map(program) });
        }"""
    )
    live.get_by_test_id("tf-tab-timeline").click()
    live.get_by_test_id("tf-timeline-source").select_option("measured")
    names = live.locator(".tf-alive b:not([style])")
    expect(names.first).to_have_text("as captured")


def test_peers_are_columns(live: Page) -> None:
    live.evaluate(MEASURED)
    live.evaluate(
        """() => {
        const { timing } = state.payload;
        const [step] = timing.rows;
        const peer = { ...step, label: "step (torch.compile)", program: "torch.compile", verdict: "no difference seen" };
        set("payload", { ...state.payload, timing: { ...timing, rows: [step, peer] } });
        }"""
    )
    live.get_by_test_id("tf-tab-timing").click()
    table = live.get_by_test_id("tf-timing")
    expect(table.locator("th[scope=col]").last).to_have_text("torch.compile")
    expect(table.locator("tbody tr")).to_have_count(1)
    expect(table.locator("tbody td").last).to_contain_text("no difference seen")


def test_kernels_and_the_step_stand_in_one_table(live: Page) -> None:
    live.evaluate(MEASURED)
    live.evaluate(
        """() => set("payload", { ...state.payload, timing: { ...state.payload.timing, work: [
        { label: "Triton kernels", calls: 79, us: 4210, note: "a region each" },
        { label: "first to last", calls: null, us: 22900, note: "of it 859 µs idle" }] } })"""
    )
    live.get_by_test_id("tf-tab-timing").click()
    rows = live.get_by_test_id("tf-work").locator("tbody tr")
    expect(rows.first).to_have_text(re.compile("Triton kernels.*79.*4,?210.*a region each"))
    expect(rows.last).to_contain_text("859 µs idle")


def test_library_calls_stand_among_the_kernels_and_all_sum_to_the_step(live: Page) -> None:
    live.evaluate(
        """() => set("payload", { ...state.payload, kernels: state.payload.kernels.slice(0, 1).map((one) => ({ ...one,
            said: "gelu of h.*.mlp ×2", calls: 2, time_us: 15, kind: "predicted",
            replaces: { ops: [["gelu", 2]], launches: 2, made: 0, us: 24, nbytes: 1024 } })),
        aten: [{ name: "mm bf16[64, 32] bf16[32, 8]", said: "matmul 64×32 · 32×8 ×3", kind: "measured", calls: 3,
        time_us: 40, values: ["mm"], nbytes: 1 << 20, provenance: "measured on a device", gb_per_s: 26, tflop_per_s: 412.5,
        least_us: 36, peak_share: 0.9, peak_source: "4 TB/s, measured peaks of a device", bound: "compute" }],
        clock: { ...state.payload.clock, step_us: [200, 150], takes_us: [200, 150] } })"""
    )
    live.get_by_test_id("tf-tab-kernels").click()
    rows = live.get_by_test_id("tf-kernels").locator("[data-kernel-row]")
    expect(rows).to_have_count(2)
    for text in ("matmul 64×32 · 32×8 ×3", "120 µs", "compute 90 %", "80 %"):
        expect(rows.nth(0)).to_contain_text(text)
    for text in ("gelu of h.*.mlp ×2", "30.0 µs", "2 ops, 24.0 µs", "▼ 0.80×"):
        expect(rows.nth(1)).to_contain_text(text)
    expect(rows.nth(1).locator(".tf-pill")).to_have_class("tf-pill tf-worse")
    expect(rows.nth(1).locator(".tf-hatched").first).to_have_text("30.0 µs")
    expect(live.get_by_test_id("tf-kernels-total")).to_contain_text("150 µs")
    rows.nth(0).locator(".tf-disclose").click()
    expect(live.locator(".tf-kernel-source:visible")).to_contain_text("mm bf16[64, 32] bf16[32, 8]")
    expect(live.locator(".tf-kernel-source:visible")).to_contain_text("413 TFLOP/s")


@pytest.mark.parametrize("runs_triton", [False, True])
def test_a_ratio_has_a_colour_only_where_the_kernels_ran(live: Page, runs_triton: bool) -> None:
    live.evaluate(MEASURED)
    live.evaluate("(runs) => set('payload', { ...state.payload, runs_triton: runs })", runs_triton)
    pill = live.get_by_test_id("tf-tile-time").locator(".tf-pill")
    expect(pill).to_contain_text("0.56× the time")
    expect(pill).to_have_class(f"tf-pill tf-{'better' if runs_triton else 'same'}")


@pytest.mark.parametrize(("samples", "said"), [(1, "34.1 one sample"), (20, "34.1 33.0–35.0")])
def test_a_time_of_one_sample_has_no_interval(live: Page, samples: int, said: str) -> None:
    live.evaluate(MEASURED.replace("samples: 20", f"samples: {samples}"))
    live.get_by_test_id("tf-tab-timing").click()
    expect(live.get_by_test_id("tf-timing")).to_contain_text(said)
    expect(live.get_by_test_id("tf-timing").locator(".tf-bar i:visible")).to_have_count(0 if samples == 1 else 2)


def test_while_it_measures_it_can_be_cancelled_and_the_keyboard_is_not_lost(live: Page) -> None:
    live.get_by_test_id("tf-measure").focus()
    live.evaluate("set('status', { busy: 'timing', progress: 0.4, text: 'round 12', error: null })")
    expect(live.get_by_test_id("tf-cancel")).to_be_focused()
    assert live.get_by_role("progressbar").evaluate("e => e.value") == 0.4
    expect(live.get_by_test_id("tf-verdict")).to_contain_text("round 12")
    live.keyboard.press("Enter")
    assert sent(live) == [{"type": "cancel"}]
    live.evaluate(f"set('status', {IDLE})")
    expect(live.get_by_test_id("tf-measure")).to_be_focused()
    expect(live.get_by_test_id("tf-cancel")).to_be_hidden()


PREDICTED = """() => set("payload", { ...state.payload, runs_triton: true, clock: { ...state.payload.clock,
    chosen: "here", kinds: ["measured", "predicted"] } })"""


# What the page waits for comes thirty times as soon, and a wait of the test's own among it in its turn.
HURRY = """() => {
    const wait = window.setTimeout;
    window.setTimeout = (act, ms, ...given) => wait(act, ms / 30, ...given);
    window.calm = () => { window.setTimeout = wait; };
}"""
LATER = "() => new Promise((done) => window.setTimeout(done, 3000))"


@pytest.fixture
def hurried(live: Page) -> Iterator[Page]:
    live.evaluate(HURRY)
    yield live
    live.evaluate("calm()")


def test_a_prediction_for_this_gpu_is_measured_once_the_view_is_left_alone(hurried: Page) -> None:
    hurried.evaluate(PREDICTED)
    hurried.wait_for_function("window.sent.length > 0")
    assert sent(hurried) == [{"type": "measure"}]
    hurried.evaluate(f"set('status', {{...{IDLE}, error: {{panel: 'timing', at: '', message: 'out of memory'}}}})")
    hurried.evaluate(LATER)
    assert sent(hurried) == [], "what failed is not tried again without a click"


def test_measuring_when_idle_can_be_switched_off(hurried: Page) -> None:
    hurried.evaluate("set('payload', { ...state.payload, runs_triton: true })")
    hurried.get_by_test_id("tf-when-idle").uncheck()
    hurried.evaluate(PREDICTED)
    hurried.evaluate(LATER)
    assert sent(hurried) == []


def test_a_cpu_is_never_measured_without_a_click(hurried: Page) -> None:
    hurried.evaluate(PREDICTED.replace("runs_triton: true", "runs_triton: false"))
    expect(hurried.get_by_test_id("tf-when-idle")).to_be_hidden()
    hurried.evaluate(LATER)
    assert sent(hurried) == []


@pytest.mark.parametrize("control", ["tf-measure", "tf-ablate", "tf-pin"])
def test_what_needs_a_kernel_says_so_in_a_saved_page(page: Page, control: str) -> None:
    expect(page.get_by_test_id(control)).to_be_disabled()
    expect(page.get_by_test_id(control)).to_have_attribute("title", re.compile("run it in a notebook"))


def test_the_menu_is_walked_with_the_keyboard_and_given_up(page: Page) -> None:
    page.get_by_test_id("tf-take").press("Enter")
    expect(page.get_by_test_id("tf-take-html")).to_be_focused()
    expect(page.get_by_test_id("tf-take-html")).to_have_attribute("aria-disabled", "true")
    page.keyboard.press("ArrowUp")
    expect(page.get_by_test_id("tf-take-trace")).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(page.get_by_test_id("tf-take-html")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_test_id("tf-take")).to_be_focused()
    expect(page.get_by_role("menu")).to_be_hidden()


def test_the_trace_is_copied_as_text_from_a_saved_page_too(page: Page) -> None:
    page.evaluate("() => { navigator.clipboard.writeText = async (text) => { window.copied = text; }; }")
    page.get_by_test_id("tf-take").click()
    page.get_by_test_id("tf-take-trace").click()
    expect(page.get_by_test_id("tf-take-notice")).to_contain_text("clipboard")
    copied = page.evaluate("window.copied")
    assert copied.startswith("def forward(")
    assert "def backward(" in copied
    assert "_kernel" not in copied


def test_a_remark_over_the_tabs_goes_by_itself_on_escape_and_on_a_press_elsewhere(page: Page) -> None:
    page.evaluate("() => { navigator.clipboard.writeText = async () => {}; }")
    notice, elsewhere = page.get_by_test_id("tf-take-notice"), page.get_by_test_id("tf-sentence")
    for gone in (lambda: page.keyboard.press("Escape"), elsewhere.click, lambda: page.wait_for_timeout(4500)):
        page.get_by_test_id("tf-take").click()
        page.get_by_test_id("tf-take-trace").click()
        expect(notice).to_contain_text("clipboard")
        notice.click()
        expect(notice).to_be_visible()
        gone()
        expect(notice).to_be_hidden(timeout=1000)


def test_the_code_that_runs_it_is_copied(page: Page) -> None:
    page.evaluate("() => { navigator.clipboard.writeText = async (text) => { window.copied = text; }; }")
    page.get_by_test_id("tf-take").click()
    page.get_by_test_id("tf-take-usage").click()
    first, *more = page.evaluate("window.copied").splitlines()
    assert first == "program = c.optimize().compile()"
    assert len(more) <= 2


def test_a_kernel_of_several_lines_names_them_all_with_their_parts(live: Page) -> None:
    several = live.evaluate("Object.entries(state.payload.values).filter(([, v]) => v.lines.length > 1)")
    assert several
    name, value = several[0]
    live.evaluate("name => set('selected', name)", name)
    lines = live.get_by_test_id("tf-details-lines").locator("li")
    expect(lines).to_have_count(len(value["lines"]))
    for at, (text, _) in enumerate(value["lines"]):
        expect(lines.nth(at)).to_contain_text(text or "no line of the program")
        expect(lines.nth(at)).to_contain_text("%")
    # In the tree a line that has it says with which others it shares it.
    live.get_by_test_id("tf-tab-trace").click()
    expect(live.get_by_test_id("tf-tree-with").first).to_have_attribute(
        "title", re.compile("their whole time stands here")
    )


def test_where_the_clipboard_is_refused_the_text_is_there_to_select(page: Page) -> None:
    page.evaluate("() => { navigator.clipboard.writeText = async () => { throw new DOMException('denied'); }; }")
    page.get_by_test_id("tf-take").click()
    page.get_by_test_id("tf-take-config").click()
    expect(page.get_by_test_id("tf-take-text")).to_have_value("c.optimize()")


def test_a_file_is_asked_for_and_downloaded_with_what_to_do_next(live: Page) -> None:
    live.get_by_test_id("tf-take").click()
    live.get_by_test_id("tf-take-chrome_trace").click()
    assert sent(live) == [{"type": "take", "what": "chrome_trace"}]
    with live.expect_download() as download:
        live.evaluate(
            "received({ type: 'file', name: 'gpt.json', mime: 'application/json' },"
            " new DataView(new TextEncoder().encode('[1, 2]').buffer))"
        )
    assert download.value.suggested_filename == "gpt.json"
    assert Path(download.value.path()).read_text() == "[1, 2]"
    expect(live.get_by_test_id("tf-take-notice")).to_contain_text("ui.perfetto.dev")


def test_an_error_of_a_file_stands_below_the_menu(live: Page) -> None:
    live.evaluate(f"set('status', {{...{IDLE}, error: {{panel: 'take', at: '', message: 'graphviz is missing'}}}})")
    expect(live.get_by_test_id("tf-error-take")).to_have_text("graphviz is missing")


@pytest.mark.parametrize("width", [480, 700, 1000, 1300, 2000])
def test_nothing_sticks_out_with_everything_open(live: Page, width: int) -> None:
    live.set_viewport_size({"width": width, "height": 900})
    live.evaluate(MEASURED)
    live.get_by_test_id("tf-toggle-remat").focus()
    for tab in ("code", "kernels", "findings"):
        live.get_by_test_id(f"tf-tab-{tab}").click()
        assert live.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), tab
        for panel in ("tf-verdict", "tf-passes", "tf-details"):
            box = live.get_by_test_id(panel).bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width
