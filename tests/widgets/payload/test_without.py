"""What stands beside a switch: the difference that the switch makes to the headline, by the headline's clock."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from traces import captured_step

import tracefuse
from tracefuse import passed
from tracefuse.config.configuration import Config
from tracefuse.config.names import PASSES
from tracefuse.measure.op_times import OpTimes, modelled
from tracefuse.optimizers.facts import giving_way
from tracefuse.optimizers.passes import Decision, Pass
from tracefuse.optimizers.trace import Trace
from tracefuse.variant import Variant
from tracefuse.widgets.html import to_html
from tracefuse.widgets.payload import values
from tracefuse.widgets.payload.clock import HERE, Clock, kind_beside, modelled_clock
from tracefuse.widgets.payload.pack import decode
from tracefuse.widgets.payload.program import payload
from tracefuse.widgets.payload.without import foreseen, reweighed, without_record
from tracefuse.widgets.view.explorer import Explorer
from tracefuse.widgets.view.keeping import StillForm


def headline(shown: dict[str, Any]) -> dict[str, float]:
    sizes = {name: shown["summary"][name][1] for name in ("ops", "saved_bytes", "peak_bytes")}
    return sizes | {"step_us": shown["clock"]["takes_us"][1]}


def switched_off(shown: Variant, name: str) -> Variant:
    return shown.under(shown.config.switched(name))


@pytest.fixture
def shown() -> Variant:
    """A whole step, whose peak is with the update, of a model in which two modules are trained."""
    return captured_step(2).optimize()


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        ("measured", "measured", "measured"),
        ("measured", "predicted", "predicted"),
        ("predicted", "measured", "predicted"),
        ("modelled", "modelled", "modelled"),
        ("modelled", "measured", ""),
        ("predicted", "modelled", ""),
    ],
)
def test_what_stands_beside_a_switch_compares_times_of_one_clock(
    shown: Variant, one: str, other: str, kind: str
) -> None:
    def times(kind: str, trace: Trace) -> OpTimes:
        return OpTimes(modelled(trace).us, f"{kind}: of a test", device="a GPU")

    assert switched_off(shown, "fuse").passes
    mine = times(one, shown.whole)
    record = without_record("fuse", shown, Clock((mine, mine), "a GPU", lambda trace: times(other, trace)))
    assert kind_beside(one, other) == kind
    assert (record["kind"] if record else "") == kind


@pytest.mark.parametrize("told_of", [lambda e: None, lambda e: e.show_times_of("L4"), lambda e: e.show_times_of(HERE)])
def test_a_switch_changes_the_headline_by_what_stands_beside_it(
    shown: Variant, told_of: Callable[[Explorer], None]
) -> None:
    explorer = Explorer(shown, budget_s=0.05)
    explorer.measure()
    told_of(explorer)
    shown = explorer.variant
    for config in foreseen(shown):
        shown.under(config).whole  # noqa: B018
    beside = explorer.held(shown)["passes"]
    said = {one["name"]: dict(one["without"]) for one in beside if one["changed"]}
    assert {"decompose", "remat", "fuse"} <= said.keys()
    kind = explorer.payload["clock"]["kinds"][1]
    for name, without in said.items():
        assert without.pop("kind") == ("predicted" if kind == "measured" else kind)
        assert without == pytest.approx(headline(explorer.held(switched_off(shown, name))), rel=1e-9)


def test_what_a_pass_does_in_its_place_is_not_what_its_switch_changes(shown: Variant) -> None:
    for config in foreseen(shown):
        shown.under(config).whole  # noqa: B018
    told = payload(shown, clock=replace(modelled_clock(shown), launched=None, each=None))  # by its kernels alone
    (one,) = [one for one in told["passes"] if one["name"] == "decompose"]
    assert one["delta_us"] > 0 > headline(told)["step_us"] - one["without"]["step_us"]


def test_until_the_other_steps_are_known_nothing_is_said_of_them(shown: Variant) -> None:
    assert [one["without"] for one in payload(shown)["passes"]] == [None] * len(PASSES)
    assert "of the captured step" in next(one["needs"] for one in payload(shown)["passes"] if one["name"] == "freeze")


def test_freezing_saves_what_is_said_beside_its_switch(shown: Variant) -> None:
    (patterns,) = [one["suggests"] for one in payload(shown)["passes"] if one["name"] == "freeze"]
    frozen = shown.with_config(freeze=patterns)
    saved = headline(payload(shown))["step_us"] - headline(payload(frozen))["step_us"]
    needs = next(one["needs"] for one in payload(shown)["passes"] if one["name"] == "freeze")
    amount, unit = needs.rpartition("would save ")[2].split()
    assert float(amount) == pytest.approx(saved * {"ns": 1e3, "µs": 1, "ms": 1e-3}[unit], rel=0.02)


def test_a_saved_page_knows_what_every_switch_changes(shown: Variant) -> None:
    held = to_html(shown).partition('<script id="held" type="text/plain">')[2].partition("</script>")[0]
    first, *others = decode(held)["payloads"]
    assert all(one["without"] for one in first["passes"] if one["changed"])
    of = {one["call"]: one for one in others}
    for one in first["passes"]:
        if one["changed"]:
            without = {name: value for name, value in one["without"].items() if name != "kind"}
            assert without == pytest.approx(headline(of[switched_off(shown, one["name"]).call]), rel=1e-6)


def test_a_view_foresees_what_its_switches_change_unless_something_else_is_shown(shown: Variant) -> None:
    explorer = Explorer(shown)
    explorer._foresee(lambda: True)
    assert all(one["without"] is None for one in explorer.payload["passes"])
    explorer._foresee(lambda: False)
    assert all((one["without"] is not None) == one["changed"] for one in explorer.payload["passes"])
    assert "of the captured step" not in next(
        one["needs"] for one in explorer.payload["passes"] if one["name"] == "freeze"
    )


def test_what_a_switch_shows_is_worked_out_before_it_is_used(shown: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    explorer = Explorer(shown)
    explorer._foresee(lambda: False)
    printed: list[Trace] = []
    monkeypatch.setattr(values, "body", lambda trace: printed.append(trace) or [])
    for config in (*foreseen(shown), *reweighed(shown.config)):
        explorer.show(shown.under(config))
    assert not printed
    explorer.show(shown.with_config(remat=0.25))
    assert printed


def test_the_passes_of_every_switch_run_before_the_payloads_of_any(
    shown: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A click waits for them longest."""
    explorer = Explorer(shown)
    configs = [*foreseen(shown), *reweighed(shown.config)[:1]]
    made, known = explorer.measured.in_two, list[bool]()

    def noted(variant: Variant, *given: Any) -> Any:
        if variant is not shown:
            known.append(all(shown.capture.made(config) is not None for config in configs))
        return made(variant, *given)

    monkeypatch.setattr(explorer.measured, "in_two", noted)
    explorer._foresee(lambda: False)
    assert known
    assert all(known)


def test_what_a_click_would_wait_for_longest_is_foreseen_first(shown: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    """An input weight of 0, then the switches in the order of the passes."""
    explorer, ran = Explorer(shown), list[Config]()
    run_ahead = Variant.run_ahead

    def noted(variant: Variant, is_stale: Callable[[], bool]) -> bool:
        if variant.update is not None:  # the step, not its update
            ran.append(variant.config)
        return run_ahead(variant, is_stale)

    monkeypatch.setattr(Variant, "run_ahead", noted)
    explorer._foresee(lambda: False)
    first, *others = dict.fromkeys(ran)
    switched = [shown.config.switched(name) for name in PASSES]
    assert first == shown.config.changed(remat=0.0)
    assert [one for one in others if one in switched] == [one for one in switched if one in others]
    assert others[-1] == shown.config.changed(remat=1.0)


def test_what_is_foreseen_stops_behind_the_pass_that_runs(shown: Variant) -> None:
    known, asked = shown.capture.known_records, list[int]()
    assert shown.passes
    before = len(known)

    def is_stale() -> bool:
        asked.append(len(known))
        return len(known) > before

    other = shown.with_config(simplify=False)
    assert not other.run_ahead(is_stale)
    assert len(known) == before + 1
    assert shown.capture.made(other.config) is None
    assert other.run_ahead(lambda: False)
    assert len(other.passes) == len(shown.passes) - 1


@pytest.mark.parametrize("looks", [1, 100, 1000])
def test_a_pass_that_is_foreseen_gives_way_in_its_midst(looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it made so far is thrown away, and whoever needs it has what it makes otherwise."""
    capture, run = captured_step(2), passed.run_pipeline
    other, expected = (one.optimize().with_config(simplify=False) for one in (capture, captured_step(2)))
    under_way, left = list[tuple[Trace, Pass]](), [looks]

    def noted(trace: Trace, passes: list[Pass], **given: Any) -> Any:
        under_way.append((trace, passes[0]))
        found = run(trace, passes, **given)
        under_way.clear()
        return found

    def is_stale() -> bool:
        left[0] -= bool(under_way)
        return left[0] <= 0

    with monkeypatch.context() as patched:
        patched.setattr(passed, "run_pipeline", noted)
        assert not other.run_ahead(is_stale)
    (half_done,) = under_way
    assert half_done not in capture.known_records
    assert capture.made(other.config) is None
    assert [one.after.code for one in other.passes] == [one.after.code for one in expected.passes]
    assert [one.decisions for one in other.passes] == [one.decisions for one in expected.passes]


def test_what_a_pass_makes_that_hears_nothing_of_it_is_thrown_away_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of a user's own, which catches whatever ends it."""
    capture, run = captured_step(1), passed.run_pipeline
    other, began = capture.optimize().with_config(simplify=False), list[tuple[Trace, Pass]]()

    def deaf(trace: Trace, passes: list[Pass], **given: Any) -> Any:
        began.append((trace, passes[0]))
        with giving_way(lambda: False):
            return run(trace, passes, **given)

    monkeypatch.setattr(passed, "run_pipeline", deaf)
    assert not other.run_ahead(lambda: bool(began))
    assert len(began) == 1
    assert began[0] not in capture.known_records


@pytest.mark.parametrize("how", ["configure", "pin", "unpin"])
def test_a_switch_ends_what_is_foreseen(how: str, shown: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    explorer = Explorer(shown)
    foreseer = explorer._foreseer
    questions: list[Callable[[], bool]] = []
    monkeypatch.setattr(foreseer, "_work", questions.append)
    foreseer.touch(0.0)
    while not questions:
        time.sleep(0.001)
    (is_stale,) = questions
    assert not is_stale()
    seen, kept = list[bool](), explorer._keeper._asked
    monkeypatch.setattr(explorer, "_show", lambda *_: seen.append(is_stale()))
    if how == "configure":
        explorer.configure({"cat": False})
    else:
        explorer._do({"type": how})
    assert seen == [True]
    assert explorer._keeper._asked > kept


def test_what_is_foreseen_begins_anew_behind_a_switch_that_fails(
    shown: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    explorer, touched = Explorer(shown), list[bool]()
    monkeypatch.setattr(StillForm, "is_shown", True)
    monkeypatch.setattr(explorer, "_touch", lambda: touched.append(True))
    monkeypatch.setattr(explorer, "_show", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        explorer.configure({"cat": False})
    assert touched


def test_no_garbage_is_looked_for_between_what_is_foreseen(shown: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    explorer, thresholds = Explorer(shown), list[int]()
    explorer._ahead(shown, [shown.config] * 2, lambda _: thresholds.append(gc.get_threshold()[0]), lambda: False)
    assert thresholds == [0, 0]
    assert gc.get_threshold()[0]


def test_two_threads_run_a_pass_once(shown: Variant) -> None:
    assert shown.passes
    other = shown.with_config(simplify=False)
    before, records = len(shown.capture.known_records), list[Any]()
    threads = [threading.Thread(target=lambda: records.append([*other._recorded()])) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one, two = records
    assert all(a is b for a, b in zip(one, two, strict=True))
    assert len(shown.capture.known_records) == before + len(one)


def test_the_input_weights_are_those_that_the_view_offers(shown: Variant) -> None:
    assert [c.remat for c in reweighed(shown.config)] == [0.0, 1.0]
    assert [c.remat for c in reweighed(shown.config.changed(remat=0.25))] == [0.0, 0.5, 1.0]
    assert reweighed(shown.config.changed(remat=None)) == []


@dataclass(frozen=True)
class Idle:
    """Changes nothing."""

    name: ClassVar[str] = "idle"

    def run(self, trace: Trace, decide: Callable[[Decision], None]) -> Trace:
        return trace


def test_a_pass_that_the_user_registered_is_told_from_ours(shown: Variant) -> None:
    tracefuse.register(Idle)
    try:
        rows = payload(shown.with_config(idle=True))["passes"]
    finally:
        tracefuse.unregister("idle")
    assert [one["name"] for one in rows if one["own"]] == ["idle"]
