"""The widget's Python side: messages in, payload and status out."""

from __future__ import annotations

from functools import cache
from typing import Any

import programs
import pytest
import torch

import tracefuse
from tracefuse.options import Config
from tracefuse.timing import ProgramTiming, Timing, estimate
from tracefuse.variant import Variant
from tracefuse.widgets.view import IDLE, Explorer

ONE_MS = {"step": estimate([1.0] * 6)}
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
    def measure(progress: Any, budget_s: float, cuda_graph: bool, tune: bool) -> Timing:
        progress(0.5, "half way")
        assert explorer.status == {"busy": "timing", "progress": 0.5, "text": "half way", "error": None}
        explorer.variant.timing = TIMING
        return TIMING

    monkeypatch.setattr(explorer.variant, "measure", measure)


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


def test_an_interrupt_leaves_and_the_view_is_not_busy(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(**_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(explorer.variant, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        explorer.measure()
    assert explorer.status == {**IDLE, "error": {"panel": "timing", "at": "", "message": "interrupted"}}


def test_a_pass_that_failed_is_not_measured(explorer: Explorer) -> None:
    send(explorer, {"type": "configure", "changes": {"freeze": ["nope"]}})
    explorer.measure()
    assert explorer.status["error"]["message"] == explorer.payload["blocked"]
    assert explorer.payload["timing"] is None


def test_a_message_that_does_not_exist_is_an_error(explorer: Explorer) -> None:
    with pytest.raises(ValueError, match="reset"):
        send(explorer, {"type": "reset"})


def test_every_form_says_the_same(explorer: Explorer) -> None:
    bundle, _ = explorer._repr_mimebundle_()
    assert bundle["text/plain"] == str(explorer)
    assert "<pre>" in bundle["text/html"]
    assert "application/vnd.jupyter.widget-view+json" in bundle
