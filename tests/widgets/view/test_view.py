"""The widget's Python side: messages in, payload and status out."""

from __future__ import annotations

import gc
import json
import re
import weakref
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
import traitlets

import tracefuse
from tracefuse.config.configuration import Config
from tracefuse.errors import OptionError
from tracefuse.measure.timing import Estimate, ProgramTiming, Timing, estimate
from tracefuse.variant import Variant
from tracefuse.widgets.notebook import magic
from tracefuse.widgets.payload.pack import decode
from tracefuse.widgets.payload.values import lines_of
from tracefuse.widgets.view.answering import IDLE
from tracefuse.widgets.view.explorer import Explorer
from tracefuse.widgets.view.takeaway import TAKEAWAYS

ONE_MS = {"step": estimate([1.0] * 8)}
PROGRAMS = tuple(ProgramTiming(name, ONE_MS, ONE_MS, cold_ms=1.0) for name in ("captured", "optimised"))
TIMING = Timing("measured on CPU", PROGRAMS, rounds=6, inner=1, stopped="six rounds")


@cache
def captured() -> tracefuse.Capture:
    return tracefuse.capture(programs.rope(torch.float32).run)


@pytest.fixture
def explorer() -> Explorer:
    return Explorer(captured().variant(Config.of(fuse=False)))


def send(explorer: Explorer, message: dict[str, Any]) -> None:
    explorer._on_message(explorer, message, [])


def measures(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(progress: Any, **_: Any) -> Timing:
        progress(0.5, "half way")
        assert explorer.status == {"busy": "timing", "progress": 0.5, "text": "half way", "error": None}
        explorer.variant.timing = TIMING
        return TIMING

    monkeypatch.setattr(explorer.variant, "measure", measure)


@pytest.mark.parametrize(
    "message",
    [
        {"type": "configure", "changes": {"cat": False}},
        {"type": "configure", "changes": {"nonsense": True}},
        {"type": "pin"},
        {"type": "unpin"},
        {"type": "clock", "device": "no such GPU"},
    ],
)
def test_every_choice_is_answered_after_what_came_of_it(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch, message: dict[str, Any]
) -> None:
    sent: list[tuple[Any, str]] = []
    monkeypatch.setattr(explorer, "send", lambda answer: sent.append((answer, explorer.status["busy"])))
    send(explorer, message)
    assert [one for one in sent if one[0]["type"] != "numbers"] == [({"type": "answered", "to": message}, "")]


def test_a_switch_regenerates_the_traces(explorer: Explorer) -> None:
    before = explorer.payload
    send(explorer, {"type": "configure", "changes": {"cat": False}})
    assert explorer.variant.config == Config.of(fuse=False, cat=False)
    assert explorer.payload["backward"] != before["backward"]
    assert explorer.status == IDLE


def test_switching_back_shows_the_same_variant(explorer: Explorer) -> None:
    first = explorer.variant
    for value in (False, True):
        send(explorer, {"type": "configure", "changes": {"cat": value}})
    assert explorer.variant is first


@pytest.mark.parametrize(("changes", "words"), [({"remat": 7}, "remat"), ({"unknown": 1}, "unknown")])
def test_a_bad_option_is_answered_in_the_panel_that_asked(
    explorer: Explorer, changes: dict[str, Any], words: str
) -> None:
    before = explorer.payload
    send(explorer, {"type": "configure", "changes": changes})
    assert explorer.status["error"]["panel"] == "passes"
    assert explorer.status["error"]["at"] == next(iter(changes))
    assert words in explorer.status["error"]["message"]
    assert (explorer.status["busy"], explorer.payload) == ("", before)


def test_measuring_reports_progress_and_then_times(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    measures(explorer, monkeypatch)
    send(explorer, {"type": "measure"})
    assert explorer.status == IDLE
    assert explorer.payload["timing"]["provenance"] == "measured on CPU"
    assert not explorer.payload["timing"]["stale"]
    explorer.variant.timing = None


def test_times_go_stale_with_the_next_switch(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    measures(explorer, monkeypatch)
    explorer.measure()
    explorer.variant.timing = None
    send(explorer, {"type": "configure", "changes": {"simplify": False}})
    assert explorer.payload["timing"]["stale"]
    assert explorer.payload["timing"]["config"] == "c.optimize(fuse=False)"


def test_a_failing_measurement_says_why_where_it_was_asked(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(**_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(explorer.variant, "measure", measure)
    explorer.measure()
    assert explorer.status["error"]["panel"] == "timing"
    assert "RuntimeError: out of memory" in explorer.status["error"]["message"]


def test_cuda_graphs_are_timed_where_they_were_asked_for(explorer: Explorer) -> None:
    """On a CPU that is refused, with the reason."""
    asked = Explorer(explorer.variant, cuda_graph=True)
    asked.measure()
    assert "a graph replays the work of a GPU only" in asked.status["error"]["message"]


def test_block_sizes_are_tuned_where_they_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Config] = []
    monkeypatch.setattr(Variant, "tune", lambda variant, progress: tried.append(variant.config))
    variant = tracefuse.capture(programs.rope(torch.float32).run).variant(Config.of(fuse=False))
    Explorer(variant, budget_s=0.01).measure()
    assert tried == []
    Explorer(variant, budget_s=0.01, tune=True).measure()
    assert tried == [variant.config]


def test_measuring_again_takes_as_long_as_enough_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = tracefuse.capture(programs.rope(torch.float32).run).variant(Config.of(fuse=False))
    explorer, asked = Explorer(variant, budget_s=0.01), list[float]()
    real = Variant.measure

    def measure(variant: Variant, budget_s: float, **options: Any) -> Any:
        asked.append(budget_s)
        timing = real(variant, budget_s=0.01, **options)
        few = [replace(one, times_ms={"step": Estimate(500.0, 500.0, 500.0, 0.0, 1)}) for one in timing.programs]
        variant.timing = replace(timing, programs=tuple(few), rounds=1 if len(asked) == 1 else 8, inner=1)
        return variant.timing

    monkeypatch.setattr(Variant, "measure", measure)
    for _ in range(3):
        explorer.measure()
    # Two programs of half a second each, eight rounds and a margin; then there are enough.
    assert asked == [0.01, 12.0, 0.01]


def test_an_interrupt_leaves_and_the_view_is_not_busy(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(**_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(explorer.variant, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        explorer.measure()
    assert explorer.status == {**IDLE, "error": {"panel": "timing", "at": "", "message": "interrupted"}}


def test_a_pass_that_failed_is_not_measured(explorer: Explorer) -> None:
    explorer.show(explorer.variant.with_config(freeze=["nope"]))
    explorer.measure()
    assert explorer.status["error"]["message"] == explorer.payload["blocked"]
    assert explorer.payload["timing"] is None


def test_options_with_which_a_pass_fails_are_refused_and_nothing_else_changes(explorer: Explorer) -> None:
    before, tried = explorer.config, len(explorer.board["rows"])
    for ask in (
        lambda: send(explorer, {"type": "configure", "changes": {"freeze": ["nope"]}}),
        lambda: setattr(explorer, "config", {**before, "freeze": ["nope"]}),
    ):
        ask()
        assert explorer.status["error"]["panel"] == "passes"
        assert "nope" in explorer.status["error"]["message"]
        assert explorer.config == before
        assert explorer.payload["config"]["freeze"] == before["freeze"]
        assert len(explorer.board["rows"]) == tried
    send(explorer, {"type": "configure", "changes": {"cat": not before["cat"]}})
    assert explorer.status["error"] is None


def test_a_message_that_does_not_exist_is_an_error(explorer: Explorer) -> None:
    with pytest.raises(ValueError, match="reset"):
        send(explorer, {"type": "reset"})


def test_every_form_says_the_same(explorer: Explorer) -> None:
    bundle, _ = explorer._repr_mimebundle_()
    assert bundle["text/plain"] == str(explorer)
    assert "</table>" in bundle["text/html"]
    assert "application/vnd.jupyter.widget-view+json" in bundle


# --- the baseline -----------------------------------------------------------------------------------------------------


def test_any_configuration_can_be_what_before_is(explorer: Explorer) -> None:
    send(explorer, {"type": "configure", "changes": {"cat": False}})
    pinned = explorer.payload
    send(explorer, {"type": "pin"})
    said = {"is_pinned": True, "call": "c.optimize(cat=False, fuse=False)", "config": explorer.payload["config"]}
    assert explorer.payload["baseline"] == said
    assert {line["diff"] for half in ("forward", "backward") for line in explorer.payload[half]["lines"]} == {" "}
    send(explorer, {"type": "configure", "changes": {"cat": True}})
    shown = explorer.payload
    assert shown["summary"]["ops"][0] == pinned["summary"]["ops"][1] != captured().trace.op_count
    assert shown["summary"]["peak_bytes"][0] == pinned["summary"]["peak_bytes"][1]
    assert shown["memory"]["before"] == pinned["memory"]["after"]
    before = {name: value["time_us"][0] for name, value in shown["values"].items()}
    assert {name for name, us in before.items() if us is not None} <= pinned["values"].keys()
    assert [layer["backward_us"][0] for layer in shown["layers"]] == [
        layer["backward_us"][1] for layer in pinned["layers"]
    ]
    send(explorer, {"type": "unpin"})
    assert explorer.payload["baseline"]["is_pinned"] is False
    assert explorer.payload["summary"]["ops"][0] == captured().trace.op_count


def test_a_pin_names_what_it_pins_so_that_it_can_be_made_again() -> None:
    explorer = Explorer(captured().variant(Config()))
    send(explorer, {"type": "configure", "changes": {"fuse": False}})
    send(explorer, {"type": "pin"})
    config = explorer.payload["baseline"]["config"]
    assert config["fuse"] is False
    send(explorer, {"type": "unpin"})
    send(explorer, {"type": "configure", "changes": {"fuse": True}})
    send(explorer, {"type": "pin", "config": config})
    assert explorer.baseline.config == Config.of(fuse=False)
    assert explorer.payload["config"]["fuse"] is True


def test_a_message_chooses_whose_times_are_shown() -> None:
    explorer = Explorer(captured().variant(Config()))
    send(explorer, {"type": "clock", "device": "H200"})
    assert explorer.payload["clock"]["device"] == "H200"
    send(explorer, {"type": "clock", "device": "a toaster"})
    assert "choose from" in explorer.status["error"]["message"]
    assert explorer.payload["clock"]["device"] == "H200"


def test_measuring_times_the_shown_one_against_the_pinned_one() -> None:
    explorer = Explorer(captured().variant(Config.of(fuse=False)), budget_s=0.05)
    send(explorer, {"type": "measure"})
    assert not explorer.payload["timing"]["is_pinned"]
    send(explorer, {"type": "pin"})
    send(explorer, {"type": "configure", "changes": {"cat": False}})
    pinned = explorer.payload["timing"]
    assert (pinned["stale"], pinned["is_pinned"]) == (True, True)
    assert all(row["baseline_ms"] and row["variant_ms"] is row["ratio"] is None for row in pinned["rows"])
    assert "not measured" in str(explorer)
    send(explorer, {"type": "measure"})
    timing = explorer.payload["timing"]
    assert (timing["stale"], timing["is_pinned"]) == (False, True)
    assert [row["label"] for row in timing["rows"]][::3] == ["forward", "forward (captured)"]
    assert "c.optimize(fuse=False), pinned" in timing["notes"][-1]
    send(explorer, {"type": "unpin"})
    assert explorer.payload["timing"]["stale"]
    send(explorer, {"type": "configure", "changes": {"cat": True}})
    assert not explorer.payload["timing"]["stale"]
    assert not explorer.payload["timing"]["is_pinned"]


def test_two_that_were_timed_beside_the_captured_program_are_set_beside_each_other_when_one_is_pinned() -> None:
    explorer = Explorer(captured().variant(Config.of(fuse=False, pad=False)), budget_s=0.05)
    explorer.measure()
    pinned = explorer.variant.timing.program("optimised").times_ms["step"]
    explorer.pin()
    explorer.configure({"simplify": False})
    explorer.unpin()
    explorer.measure()
    mine = explorer.variant.timing.program("optimised").times_ms["step"]
    explorer.pin(captured().variant(Config.of(fuse=False, pad=False)))
    timing = explorer.payload["timing"]
    assert (timing["stale"], timing["is_pinned"]) == (False, True)
    (step,) = [row for row in timing["rows"] if row["label"] == "step"]
    assert (step["baseline_ms"]["median"], step["variant_ms"]["median"]) == (pinned.median, mine.median)
    assert any("in rounds of its own" in note for note in timing["notes"])


def test_after_measure_each_pass_the_header_has_the_steps_time() -> None:
    explorer = Explorer(captured().variant(Config.of(fuse=False, decompose=False)), budget_s=0.05)
    assert explorer.payload["timing"] is None
    explorer.ablate()
    timing = explorer.payload["timing"]
    assert (timing["stale"], timing["is_pinned"]) == (False, False)
    assert [row["label"] for row in timing["rows"]] == ["forward", "backward", "step"]


def test_another_view_of_the_capture_does_not_take_over_what_this_one_pinned() -> None:
    one, other = (Explorer(captured().variant(Config.of(fuse=False)), budget_s=0.05) for _ in range(2))
    one.pin()
    one.configure({"simplify": False})
    one.measure()
    other.configure({"simplify": False})
    assert one.payload["timing"]["is_pinned"]
    assert other.baseline is None
    assert other.payload["timing"] is None or not other.payload["timing"]["is_pinned"]
    one.variant.timing = None


# --- configuration as a trait -----------------------------------------------------------------------------------------


def test_setting_the_configuration_shows_it(explorer: Explorer) -> None:
    explorer.config = {"cat": False}
    assert explorer.variant.config == Config.of(fuse=False, cat=False)
    assert explorer.config == explorer.payload["config"]
    explorer.configure({"cat": True})
    assert explorer.config["cat"] is True


def test_linked_views_go_together_and_others_stay() -> None:
    one, other, third = (Explorer(captured().variant(Config.of(fuse=False))) for _ in range(3))
    link = traitlets.link((one, "config"), (other, "config"))
    send(one, {"type": "configure", "changes": {"remat": 0.25}})
    assert other.variant is one.variant
    other.config = {**other.config, "remat": 0.5}
    assert one.variant is other.variant
    link.unlink()
    send(one, {"type": "configure", "changes": {"cat": False}})
    assert other.variant.config == third.variant.config == Config.of(fuse=False)


@pytest.mark.parametrize(("bad", "words"), [({"remat": 7}, "no weight"), ({"nope": 1}, "no option")])
def test_a_bad_configuration_is_refused_and_the_old_one_stays(
    explorer: Explorer, bad: dict[str, Any], words: str
) -> None:
    before = explorer.config, explorer.payload
    with pytest.raises(traitlets.TraitError, match=words):
        explorer.config = bad
    assert (explorer.config, explorer.payload) == before


def test_a_front_end_that_sets_a_bad_one_is_told_why_and_what_holds(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[list[str]] = []
    before = explorer.config
    monkeypatch.setattr(explorer, "send_state", lambda key=None: sent.append(key))
    explorer.set_state({"config": {**before, "remat": 7}})
    assert explorer.config == before
    assert ["config"] in sent
    assert "no weight" in explorer.status["error"]["message"]
    explorer.set_state({"config": {**before, "cat": False}})
    assert explorer.variant.config == Config.of(fuse=False, cat=False)


# --- shares, kernels, files -------------------------------------------------------------------------------------------


def test_each_pass_gets_its_own_share_which_ages_with_the_configuration() -> None:
    explorer = Explorer(captured().variant(Config.of(fuse=False)), budget_s=0.05)
    send(explorer, {"type": "ablate"})
    assert explorer.status == IDLE
    shares = {one["name"]: one["delta_ms"] for one in explorer.payload["passes"]}
    assert shares["fuse"] is None
    assert {name for name, share in shares.items() if share} == {
        "simplify",
        "freeze",
        "merge_matmuls",
        "cat",
        "linear_cross_entropy",
        "channels_last",
        "pad",
        "optimizer_step",
        "remat",
    }
    assert shares["cat"]["low"] <= shares["cat"]["median"] <= shares["cat"]["high"]
    assert shares["freeze"]["provenance"].endswith("the same program without it")
    assert re.search(r": \d+ rounds?$", shares["cat"]["provenance"])
    assert not shares["cat"]["stale"]
    send(explorer, {"type": "configure", "changes": {"remat": 0.25}})
    assert all(one["delta_ms"]["stale"] for one in explorer.payload["passes"] if one["delta_ms"])


def test_a_kernel_is_compiled_when_it_is_asked_for() -> None:
    explorer = Explorer(captured().variant(Config()))
    names = [one["name"] for one in explorer.payload["kernels"]]
    send(explorer, {"type": "inspect", "kernel": names[0]})
    first, *rest = (one["resources"] for one in explorer.payload["kernels"])
    assert first["registers"] > 0
    assert first["target"].startswith("sm_")
    assert rest == [None] * len(rest)
    send(explorer, {"type": "inspect", "kernel": "nope"})
    assert explorer.status["error"]["panel"] == "kernels"
    assert explorer.status["error"]["at"] == "nope"  # where it is shown
    assert "'nope'" in explorer.status["error"]["message"]


@pytest.mark.parametrize(
    ("what", "name", "starts"),
    [
        ("html", "tracefuse.html", b"<!doctype"),
        ("python", "step.py", b'"""'),
        ("dot", "trace.dot", b"digraph"),
        ("model_explorer", "model_explorer.json", b'{"'),
    ],
)
def test_a_file_comes_as_bytes(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch, what: str, name: str, starts: bytes
) -> None:
    sent: list[tuple[dict[str, Any], list[bytes]]] = []
    monkeypatch.setattr(explorer, "send", lambda message, buffers: sent.append((message, buffers)))
    send(explorer, {"type": "take", "what": what})
    ((message, (data,)),) = sent
    assert (message["type"], message["name"]) == ("file", name)
    assert data.startswith(starts)


def test_a_timeline_is_taken_once_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    explorer = Explorer(captured().variant(Config.of(fuse=False)), budget_s=0.05)
    sent: list[bytes] = []
    monkeypatch.setattr(explorer, "send", lambda _, buffers: sent.extend(buffers))
    send(explorer, {"type": "take", "what": "chrome_trace"})
    assert "press Measure" in explorer.status["error"]["message"]
    explorer.measure()
    send(explorer, {"type": "take", "what": "chrome_trace"})
    assert explorer.status == IDLE
    (data,) = sent
    values = {event["args"].get("value") for event in json.loads(data)["traceEvents"]}
    assert len(values & explorer.payload["values"].keys()) > 5
    explorer.variant.timing = None


def test_every_file_that_the_menu_offers_is_made(root: Path) -> None:
    offered = re.search(r"type TakeAway = (.*?);", (root / "widgets/js/types.d.ts").read_text())
    assert offered is not None
    assert set(re.findall(r'"(\w+)"', offered[1])) == TAKEAWAYS.keys()


def test_what_cannot_be_taken_is_said_in_its_panel(explorer: Explorer) -> None:
    send(explorer, {"type": "take", "what": "nothing"})
    assert explorer.status["error"]["panel"] == "take"
    explorer.show(explorer.variant.with_config(freeze=["nope"]))
    send(explorer, {"type": "take", "what": "python"})
    assert "freeze" in explorer.status["error"]["message"]


def test_a_saved_page_holds_what_is_shown(tmp_path: Path) -> None:
    explorer = Explorer(captured().variant(Config.of(fuse=False)), budget_s=0.05)
    explorer.pin()
    explorer.measure()
    explorer.ablate()
    text = explorer.save_html(tmp_path / "a.html").read_text(encoding="utf-8")
    (found,) = re.findall(r'<script id="held" type="text/plain">(.*?)</script>', text)
    first, *others = decode(found)["payloads"]
    assert first == json.loads(json.dumps(explorer.payload))
    assert len(others) > 5
    assert all(one["baseline"]["is_pinned"] for one in others)


# --- the still form ---------------------------------------------------------------------------------------------------


def test_the_still_form_is_inert_and_says_how_to_return(explorer: Explorer) -> None:
    nasty = "<script>alert(1)</script>"
    explorer.payload = {**explorer.payload, "call": nasty, "notes": [{"kind": "note", "text": nasty}]}
    still = explorer._repr_mimebundle_()[0]["text/html"]
    assert "<script" not in still
    assert still.count("&lt;script&gt;") == 2
    assert "Run the cell again" in still
    for one in explorer.payload["passes"]:
        assert f">{one['name']}</td>" in still


def test_what_is_explored_is_named_as_the_caller_names_it() -> None:
    mine = captured()
    assert mine.explore(cat=False).name == "mine"
    assert mine.explore(cat=False).variant.config == Config.of(cat=False)
    assert mine.optimize().explore().payload["call"] == "mine.optimize()"
    assert captured().explore().payload["call"] != ""
    with pytest.raises(OptionError, match="no option"):
        mine.explore(nope=1)


def test_a_view_writes_the_python_file(explorer: Explorer, tmp_path: Path) -> None:
    assert explorer.export(tmp_path / "a.py").read_text() == explorer.variant.source


def test_a_view_that_is_closed_holds_nothing() -> None:
    capture = tracefuse.capture(programs.rope(torch.float32).run)
    explorer, gone = Explorer(capture.variant(Config.of(fuse=False))), weakref.ref(capture)
    explorer.close()
    del explorer, capture
    gc.collect()
    assert gone() is None


def test_a_pass_that_is_walked_to_shows_its_own_change_until_it_is_left(explorer: Explorer) -> None:
    send(explorer, {"type": "show_pass", "pass": "cat"})
    (step,) = [one for one in explorer.variant.passes if one.name == "cat"]
    assert explorer.step is not None
    assert explorer.step["pass"] == "cat"
    for side, before, after in zip(("forward", "backward"), step.before.split(), step.after.split(), strict=True):
        assert explorer.step[side]["ops"] == [before.op_count, after.op_count]
    assert explorer.step["backward"] != explorer.payload["backward"]
    send(explorer, {"type": "configure", "changes": {"cat": False}})
    assert explorer.step is None
    send(explorer, {"type": "show_pass", "pass": ""})
    assert explorer.step is None


def test_a_cell_that_runs_again_closes_its_views_and_lets_their_captures_go() -> None:
    def shown() -> Explorer:
        x = torch.ones(3, requires_grad=True)
        return Explorer(tracefuse.capture(lambda: x.exp().sum().backward()).optimize())

    first, second, other = shown(), shown(), shown()
    kept = weakref.ref(first.variant.capture)
    magic._replace_views(("cell", 1), first)
    magic._replace_views(("cell", 1), second)
    magic._replace_views(("another", 2), other)
    assert first.comm is not None
    magic._replace_views(("cell", 3), shown())
    assert first.comm is None
    assert second.comm is None
    assert other.comm is not None
    del first, second
    gc.collect()
    assert kept() is None


def test_views_of_a_front_end_without_cells_stay() -> None:
    x = torch.ones(3, requires_grad=True)
    explorer = Explorer(tracefuse.capture(lambda: x.exp().sum().backward()).optimize())
    for run in (1, 2):
        magic._replace_views(("", run), explorer)
    assert explorer.comm is not None


def test_right_after_a_measurement_what_is_shown_can_be_pinned_and_its_times_stay(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    measures(explorer, monkeypatch)
    explorer.measure()
    explorer.pin()
    timing = explorer.payload["timing"]
    assert (timing["stale"], timing["is_pinned"]) == (False, True)
    (row,) = timing["rows"]
    assert (row["baseline_ms"], row["variant_ms"]["median"]) == (row["variant_ms"], 1.0)
    assert (row["ratio"]["low"], row["ratio"]["high"], row["verdict"]) == (1.0, 1.0, "no difference seen")
    assert "the shown program is the pinned one" in timing["notes"]
    explorer.configure({"cat": False})
    stale = explorer.payload["timing"]
    assert (stale["stale"], stale["is_pinned"]) == (True, True)
    assert stale["rows"][0]["baseline_ms"] == row["baseline_ms"], "the captured program's time is no pinned one's"
    explorer.unpin()
    explorer.configure({"cat": True})
    assert not explorer.payload["timing"]["stale"]


def test_all_passes_together_are_asked_for_with_the_text_before(explorer: Explorer) -> None:
    send(explorer, {"type": "show_pass", "pass": "*"})
    assert explorer.step is not None
    for side in ("forward", "backward"):
        own = {name: explorer.step[side][name] for name in explorer.payload[side]}
        assert own == explorer.payload[side]
        text = [(line["code"], line["comment"]) for line in explorer.step[side]["before"]]
        captured = getattr(explorer.variant.baseline, side)
        assert text == [(line.code, line.comment) for line in lines_of(captured)]
    send(explorer, {"type": "configure", "changes": {"fuse": False}})
    assert explorer.step["forward"]["lines"] == explorer.payload["forward"]["lines"]
