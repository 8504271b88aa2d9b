"""What the view asked for runs beside the kernel's messages, alone on the clock, and makes way for cells."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import programs
import pytest
import torch
from IPython.core.events import EventManager, available_events

import tracefuse
from tracefuse.config.configuration import Config
from tracefuse.errors import Cancelled
from tracefuse.measure.alone import alone
from tracefuse.measure.side_by_side import Ablation
from tracefuse.measure.timing import ProgramTiming, Timing, estimate
from tracefuse.variant import Variant
from tracefuse.widgets.view import tasks
from tracefuse.widgets.view.answering import IDLE
from tracefuse.widgets.view.explorer import Explorer

PATIENCE_S = 20
ONE_MS = {"step": estimate([1.0] * 8)}
PROGRAMS = tuple(ProgramTiming(name, ONE_MS, ONE_MS, cold_ms=1.0) for name in ("captured", "optimised"))
TIMING = Timing("measured on CPU", PROGRAMS, rounds=6, inner=1, stopped="six rounds")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[EventManager]:
    """A shell that only has events; no cell is running."""
    shell = SimpleNamespace()
    shell.events = EventManager(shell, available_events)
    monkeypatch.setattr(tasks, "get_ipython", lambda: shell)
    monkeypatch.setattr(tasks, "cells", tasks.Cells())
    monkeypatch.setattr("tracefuse.widgets.view.answering.cells", tasks.cells)
    tasks.cells.watch(is_in_cell=False)
    yield shell.events
    assert not shell.events.callbacks["pre_run_cell"]


@pytest.fixture
def explorer(events: EventManager) -> Explorer:
    return Explorer(tracefuse.capture(programs.rope(torch.float32).run).variant(Config.of(fuse=False)))


class Held:
    """A measurement that lasts until it is let go or cancelled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.release, self.runs = threading.Event(), threading.Event(), 0

        def measure(variant: Variant, **given: Any) -> None:
            self.hold(variant, **given)

        monkeypatch.setattr(Variant, "measure", measure)

    def hold(self, variant: Variant, progress: Callable[[float, str], None], is_cancelled: Any, **_: Any) -> None:
        self.runs += 1
        progress(0.5, "half way")
        self.began.set()
        while not self.release.wait(0.01):
            if is_cancelled():
                raise Cancelled("cancelled before anything was measured")
        variant.timing = TIMING


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(monkeypatch)


def ask(explorer: Explorer, kind: str, **more: Any) -> None:
    explorer._on_message(explorer, {"type": kind, **more}, [])


def test_messages_are_read_while_it_runs(explorer: Explorer, held: Held) -> None:
    ask(explorer, "measure")
    assert held.began.wait(PATIENCE_S)
    assert explorer.status == {"busy": "timing", "progress": 0.5, "text": "half way", "error": None}
    ask(explorer, "configure", changes={"cat": False})
    assert explorer.variant.config == Config.of(fuse=False, cat=False)
    assert (explorer.status["busy"], explorer.status["text"]) == ("timing", "half way")
    held.release.set()
    explorer.wait()
    assert explorer.status == IDLE
    assert explorer.payload["timing"]["stale"]
    assert explorer.payload["timing"]["config"] == "c.optimize(fuse=False)"


def test_a_switch_that_fails_meanwhile_says_so_in_the_end_too(explorer: Explorer, held: Held) -> None:
    ask(explorer, "measure")
    assert held.began.wait(PATIENCE_S)
    ask(explorer, "configure", changes={"remat": 7})
    assert explorer.status["error"]["panel"] == "passes"
    held.release.set()
    explorer.wait()
    assert explorer.status["busy"] == ""
    assert explorer.status["error"]["at"] == "remat"


def test_what_nobody_asked_for_is_given_up_in_time_and_that_is_no_error(explorer: Explorer, held: Held) -> None:
    explorer.measure(within_s=0.05)
    assert held.runs == 1
    assert explorer.payload["timing"] is None
    assert explorer.status == IDLE | {"text": explorer.status["text"]}
    assert re.fullmatch(r"Not measured: this takes longer than \d+ s\. Press Measure\.", explorer.status["text"])
    held.release.set()
    ask(explorer, "measure")
    explorer.wait()
    assert explorer.status == IDLE
    assert explorer.payload["timing"] is not None


def test_a_cancel_stops_it(explorer: Explorer, held: Held) -> None:
    ask(explorer, "measure")
    assert held.began.wait(PATIENCE_S)
    ask(explorer, "cancel")
    explorer.wait()
    assert explorer.status["busy"] == ""
    assert "cancelled" in explorer.status["error"]["message"]
    assert explorer.payload["timing"] is None


def test_only_one_thing_at_a_time(explorer: Explorer, held: Held) -> None:
    ask(explorer, "measure")
    assert held.began.wait(PATIENCE_S)
    ask(explorer, "take", what="python")
    assert explorer.status["error"] == {
        "panel": "take", "at": "", "message": "something else is running: wait for it, or cancel it",
    }  # fmt: skip
    held.release.set()
    explorer.wait()
    assert held.runs == 1


def test_a_cell_that_starts_stops_it(explorer: Explorer, held: Held, events: EventManager) -> None:
    ask(explorer, "measure")
    assert held.began.wait(PATIENCE_S)
    events.trigger("pre_run_cell", None)
    assert not explorer._task.is_running
    assert "cancelled" in explorer.status["error"]["message"]


def test_it_waits_for_the_cell_that_runs(explorer: Explorer, held: Held, events: EventManager) -> None:
    events.trigger("pre_execute")
    ask(explorer, "measure")
    assert not held.began.wait(3 * tasks.POLL_S)
    assert explorer.status["text"] == "waiting for the cell that runs"
    events.trigger("post_execute")
    assert held.began.wait(PATIENCE_S)
    held.release.set()
    explorer.wait()
    assert explorer.status == IDLE


def test_explorers_take_turns(explorer: Explorer, held: Held) -> None:
    other = Explorer(explorer.variant)
    ask(explorer, "measure")
    assert held.began.wait(PATIENCE_S)
    ask(other, "measure")
    while other.status["text"] != "waiting for another measurement":
        assert other._task.is_running
    assert held.runs == 1
    ask(other, "cancel")
    other.wait()
    assert "cancelled" in other.status["error"]["message"]
    held.release.set()
    explorer.wait()
    assert explorer.status == IDLE


def test_what_python_asks_for_comes_before_what_the_view_asked_for(explorer: Explorer, held: Held) -> None:
    ask(explorer, "measure")
    assert held.began.wait(PATIENCE_S)
    held.began.clear()
    threading.Thread(target=lambda: held.began.wait(PATIENCE_S) and held.release.set()).start()
    explorer.measure()
    assert held.runs == 2
    assert explorer.status == IDLE
    assert not explorer.payload["timing"]["stale"]


class Watched:
    """A view's lock, which says when a task wants it."""

    def __init__(self) -> None:
        self.lock, self.wanted = threading.RLock(), threading.Event()

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.wanted.set()
        self.lock.acquire()

    def __exit__(self, *_: Any) -> None:
        self.lock.release()

    def acquire(self, timeout: float) -> bool:
        self.wanted.set()
        return self.lock.acquire(timeout=timeout)

    def release(self) -> None:
        self.lock.release()


def test_a_task_that_ends_while_a_switch_is_at_work_shows_what_was_switched_to(
    explorer: Explorer, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ablate(variant: Variant, **given: Any) -> Ablation:
        held.hold(variant, **given)
        return Ablation("measured on CPU", {}, frozenset(), rounds=6, stopped="six rounds")

    monkeypatch.setattr(Variant, "ablate", ablate)
    explorer._lock = watched = Watched()  # type: ignore[assignment]
    ask(explorer, "ablate")
    assert held.began.wait(PATIENCE_S)
    watched.wanted.clear()
    with explorer._lock:  # as `set_state` holds it while the passes run
        held.release.set()
        assert watched.wanted.wait(PATIENCE_S)
        explorer.configure({"cat": False})
    explorer.wait()
    assert explorer.variant.config.cat is False
    assert explorer.config["cat"] is False


def test_a_switch_ends_the_stretch_that_runs_and_the_next_one_waits_for_the_switch(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What passes take would be in the times of whatever runs beside them."""
    log: list[str] = []
    began = threading.Event()

    def replays() -> str:
        log.append("stretch begins")
        began.set()
        if len(log) == 1:  # longer than anybody waits, in steps of a Python program
            deadline = time.monotonic() + PATIENCE_S
            while time.monotonic() < deadline:
                time.sleep(0.001)
        log.append("stretch ends")
        return "timed"

    def measure(variant: Variant, **_: Any) -> None:
        assert alone.whole(replays, in_reach=True) == "timed"
        variant.timing = TIMING

    def passes(changes: dict[str, Any]) -> None:
        log.append("passes begin")
        time.sleep(0.2)  # time enough for a stretch that does not wait
        log.append("passes end")

    monkeypatch.setattr(Variant, "measure", measure)
    monkeypatch.setattr(explorer, "configure", passes)
    ask(explorer, "measure")
    assert began.wait(PATIENCE_S)
    ask(explorer, "configure", changes={"cat": False})
    explorer.wait()
    assert log == ["stretch begins", "passes begin", "passes end", "stretch begins", "stretch ends"]


def test_a_switch_does_not_wait_for_what_is_not_timed(
    explorer: Explorer, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as compiling."""
    stuck = threading.Event()
    monkeypatch.setattr(Variant, "measure", lambda variant, **_: held.began.set() or stuck.wait(PATIENCE_S))
    ask(explorer, "measure")
    assert held.began.wait(PATIENCE_S)
    ask(explorer, "configure", changes={"cat": False})
    assert explorer.variant.config.cat is False
    assert explorer._task.is_running
    stuck.set()
    explorer.wait()


def test_an_observer_may_measure_while_something_is_measured(explorer: Explorer, held: Held) -> None:
    """Traits are set under a lock, which a task needs to end, and measuring from Python waits for that end."""

    def measure_again(_: Any) -> None:
        held.release.set()
        explorer.measure()

    ask(explorer, "measure")
    assert held.began.wait(PATIENCE_S)
    explorer.observe(measure_again, "selected")
    setting = threading.Thread(target=lambda: explorer.set_state({"selected": "x"}), daemon=True)
    setting.start()
    setting.join(PATIENCE_S)
    assert not setting.is_alive(), "two threads wait for each other"
    assert held.runs == 2
    assert explorer.status == IDLE
