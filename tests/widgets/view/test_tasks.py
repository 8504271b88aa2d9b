"""What the view asked for runs beside the kernel's messages, alone on the clock, and makes way for cells; what nobody asked
for makes way for everything."""

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
from tracefuse.widgets.view import answering, keeping, tasks, timing, unasked
from tracefuse.widgets.view.answering import IDLE
from tracefuse.widgets.view.explorer import Explorer

PATIENCE_S = 20
ONE_MS = {"step": estimate([1.0] * 8)}
PROGRAMS = tuple(ProgramTiming(name, ONE_MS, ONE_MS, cold_ms=1.0) for name in ("captured", "optimised"))
TIMING = Timing("measured on CPU", PROGRAMS, rounds=6, inner=1, stopped="six rounds")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[EventManager]:
    """A shell that only has events; no cell is running."""
    shell = SimpleNamespace(showtraceback=lambda: None)
    shell.events = EventManager(shell, available_events)
    monkeypatch.setattr(tasks, "get_ipython", lambda: shell)
    monkeypatch.setattr(unasked, "get_ipython", lambda: shell)
    monkeypatch.setattr(tasks, "cells", tasks.Cells())
    for module in (answering, keeping, timing):
        monkeypatch.setattr(module, "cells", tasks.cells)
    tasks.cells.watch(is_in_cell=False)
    before = {event: list(callbacks) for event, callbacks in shell.events.callbacks.items()}
    yield shell.events
    assert shell.events.callbacks == before


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


def test_what_is_asked_for_begins_anew_behind_the_cell_that_ends_it(
    explorer: Explorer, held: Held, events: EventManager
) -> None:
    ask(explorer, "measure")
    assert held.began.wait(PATIENCE_S)
    held.began.clear()

    def cell() -> None:
        assert not tasks._timed
        until(lambda: explorer.status["text"] == "waiting for the cell that runs")
        assert explorer.status == IDLE | {"busy": "timing", "progress": 0.0, "text": explorer.status["text"]}
        assert not held.began.wait(5 * tasks.POLL_S)

    run_cell(events, cell)
    run_cell(events, lambda: None)  # which comes before it has begun anew
    assert held.began.wait(PATIENCE_S)
    held.release.set()
    explorer.wait()
    assert held.runs == 2
    assert explorer.status == IDLE
    assert not explorer.payload["timing"]["stale"]


def test_the_second_cell_that_ends_it_does_so_for_good(explorer: Explorer, held: Held, events: EventManager) -> None:
    ask(explorer, "measure")
    for runs in (1, 2):
        assert held.began.wait(PATIENCE_S)
        assert held.runs == runs
        held.began.clear()
        run_cell(events, lambda: None)
    assert not explorer._task.is_running
    assert "cancelled" in explorer.status["error"]["message"]
    assert explorer.payload["timing"] is None


def test_a_cancel_ends_what_waits_for_a_cell(explorer: Explorer, held: Held, events: EventManager) -> None:
    def cell() -> None:
        until(lambda: explorer.status["text"] == "waiting for the cell that runs")
        ask(explorer, "cancel")
        until(lambda: not explorer._task.is_running)

    ask(explorer, "measure")
    assert held.began.wait(PATIENCE_S)
    run_cell(events, cell)
    assert held.runs == 1
    assert explorer.status["busy"] == ""


def test_the_cell_that_it_waits_for_does_not_wait_for_it(explorer: Explorer, held: Held, events: EventManager) -> None:
    ask(explorer, "measure")
    assert held.began.wait(PATIENCE_S)
    run_cell(events, explorer.wait)
    held.release.set()
    explorer.wait()
    assert explorer.status == IDLE


def test_nor_does_the_cell_in_which_it_was_asked_for(explorer: Explorer, held: Held, events: EventManager) -> None:
    def cell() -> None:
        ask(explorer, "measure")
        until(lambda: explorer.status["text"] == "waiting for the cell that runs")
        explorer.wait()

    run_cell(events, cell)
    assert held.began.wait(PATIENCE_S)
    held.release.set()
    explorer.wait()
    assert explorer.status == IDLE


def test_a_measurement_in_the_cell_that_it_waits_for_takes_its_place(
    explorer: Explorer, held: Held, events: EventManager
) -> None:
    ask(explorer, "measure")
    assert held.began.wait(PATIENCE_S)
    seen: list[Any] = []
    before = explorer._task

    def cell() -> None:
        until(lambda: explorer.status["text"] == "waiting for the cell that runs")
        held.release.set()
        explorer.observe(lambda change: seen.append(change["new"]["busy"]), "status")
        explorer.measure()
        assert not before.is_running

    run_cell(events, cell)
    assert seen[-1] == ""
    assert explorer.status == IDLE
    assert held.runs == 2


def test_no_cell_waits_for_what_waits_for_cells(explorer: Explorer, held: Held, events: EventManager) -> None:
    ask(explorer, "measure")
    assert held.began.wait(PATIENCE_S)
    took: list[float] = []
    for _ in range(15):
        start = time.perf_counter()
        events.trigger("pre_execute")
        events.trigger("pre_run_cell", None)
        took.append(time.perf_counter() - start)
        events.trigger("post_execute")
    assert sorted(took)[7] < tasks.POLL_S / 3
    ask(explorer, "cancel")
    explorer.wait()


def test_it_times_what_was_shown_when_it_was_asked_for(explorer: Explorer, held: Held, events: EventManager) -> None:
    ask(explorer, "measure")
    asked = explorer.variant.config
    assert held.began.wait(PATIENCE_S)
    held.began.clear()
    run_cell(events, lambda: ask(explorer, "configure", changes={"cat": False}))
    assert held.began.wait(PATIENCE_S)
    held.release.set()
    explorer.wait()
    assert explorer.variant.config != asked
    assert [config for config, _ in explorer.measured.known.timings] == [asked]


@pytest.mark.parametrize("kind", ["ablate", "try"])
def test_so_does_whatever_else_is_timed(
    explorer: Explorer, held: Held, events: EventManager, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    log: list[int] = []

    def work(task: tasks.Task, *_: Any) -> None:
        with task.turn((), explorer._progress):
            held.hold(explorer.variant, explorer._progress, task.is_cancelled)
        log.append(held.runs)

    monkeypatch.setattr(explorer, f"_{kind}" if kind == "ablate" else "_try_fix", work)
    ask(explorer, kind, finding="one", choice=0)
    assert held.began.wait(PATIENCE_S)
    run_cell(events, lambda: None)
    held.release.set()
    explorer.wait()
    assert log == [2]
    assert explorer.status == IDLE


def test_handlers_of_several_threads_are_counted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of subshells end at once: else one stays counted, and what is asked for waits for a cell that nobody runs."""
    counted = tasks.Cells()

    def slow(*given: int) -> int:
        time.sleep(0.05)
        return max(given)

    monkeypatch.setattr(tasks, "max", slow, raising=False)
    counted._begin()
    counted._begin()
    ends = [threading.Thread(target=counted._end) for _ in range(2)]
    for one in ends:
        one.start()
    for one in ends:
        one.join()
    assert counted._depth == 0


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
    monkeypatch.setattr(explorer, "_configure", passes)
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


def test_a_handler_that_was_interrupted_is_no_cell_that_runs_for_ever(events: EventManager) -> None:
    events.trigger("pre_execute")  # and no end of it
    assert tasks.cells.is_running
    run_cell(events, lambda: None)
    assert not tasks.cells.is_running


# --- what nobody asked for --------------------------------------------------------------------------------------------


def run_cell(events: EventManager, cell: Callable[[], object]) -> None:
    """As IPython runs one."""
    events.trigger("pre_execute")
    events.trigger("pre_run_cell", None)
    cell()
    events.trigger("post_execute")
    events.trigger("post_run_cell", None)


@pytest.fixture
def behind(explorer: Explorer, held: Held, events: EventManager) -> Iterator[Explorer]:
    """A view that measures behind its cell, which is over: half way."""
    run_cell(events, explorer.measure_behind)
    assert held.began.wait(PATIENCE_S)
    yield explorer
    held.release.set()
    over(explorer)


def over(explorer: Explorer) -> None:
    assert explorer._unasked is not None
    explorer._unasked._thread.join(PATIENCE_S)
    assert not explorer._unasked._thread.is_alive()


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_it_waits_for_the_end_of_its_cell(explorer: Explorer, held: Held, events: EventManager) -> None:
    def cell() -> None:
        explorer.measure_behind()
        until(lambda: explorer.status["text"] == "waiting for the cell that runs")
        assert not held.began.wait(5 * tasks.POLL_S)

    run_cell(events, cell)
    assert held.began.wait(PATIENCE_S)
    held.release.set()
    over(explorer)
    assert explorer.status == IDLE
    assert explorer.payload["timing"] is not None
    assert explorer.timeline is not None


def test_it_has_a_progress_and_keeps_nothing_busy(behind: Explorer, held: Held) -> None:
    until(lambda: behind.status == {"busy": "", "progress": 0.5, "text": "half way", "error": None})
    ask(behind, "configure", changes={"cat": False})
    assert behind.variant.config == Config.of(fuse=False, cat=False)
    assert (behind.status["progress"], behind.status["text"]) == (0.5, "half way")
    ask(behind, "pin")
    assert behind.baseline is behind.variant
    ask(behind, "unpin")
    held.release.set()
    over(behind)
    assert behind.payload["timing"]["stale"]
    assert behind.payload["timing"]["config"] == "c.optimize(fuse=False)"


def test_a_cell_ends_it_and_it_begins_anew_behind_that(behind: Explorer, held: Held, events: EventManager) -> None:
    held.began.clear()

    def cell() -> None:
        assert not held.began.wait(5 * tasks.POLL_S)
        assert held.runs == 1
        assert behind.status["text"] == "waiting for the cell that runs"

    run_cell(events, cell)
    assert held.began.wait(PATIENCE_S)
    assert held.runs == 2
    held.release.set()
    over(behind)
    assert behind.status == IDLE


def test_what_was_enough_when_a_cell_came_is_kept(
    explorer: Explorer, events: EventManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, runs = threading.Event(), []

    def measure(variant: Variant, is_cancelled: Callable[[], bool], **_: Any) -> None:
        runs.append(variant)
        began.set()
        until(is_cancelled)
        variant.timing = TIMING

    monkeypatch.setattr(Variant, "measure", measure)
    run_cell(events, explorer.measure_behind)
    assert began.wait(PATIENCE_S)
    run_cell(events, lambda: None)
    over(explorer)
    assert len(runs) == 1
    assert explorer.timeline is not None
    assert not explorer.payload["timing"]["stale"]


def test_an_interrupt_does_not_let_the_cell_run_beside_it(
    behind: Explorer, monkeypatch: pytest.MonkeyPatch, events: EventManager, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = []

    def interrupted(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 1:
            raise KeyboardInterrupt

    at_work = []
    monkeypatch.setattr(tasks, "time", SimpleNamespace(sleep=interrupted, monotonic=time.monotonic))
    run_cell(events, lambda: at_work.append(tasks.is_unasked_timed()))
    assert at_work == [False]
    assert "make_way" in capsys.readouterr().out  # IPython says that, and goes on with the cell


def test_cancel_ends_it_for_good_and_that_is_no_error(behind: Explorer, held: Held) -> None:
    ask(behind, "cancel")
    over(behind)
    assert behind.status == IDLE | {"text": "Not measured: cancelled. Press Measure."}
    assert held.runs == 1


def test_it_can_be_cancelled_while_it_waits(explorer: Explorer, held: Held, events: EventManager) -> None:
    def cell() -> None:
        explorer.measure_behind()
        until(lambda: explorer.status["text"] == "waiting for the cell that runs")
        explorer.cancel()
        over(explorer)

    run_cell(events, cell)
    assert explorer.status == IDLE | {"text": "Not measured: cancelled. Press Measure."}
    assert held.runs == 0


def test_what_is_asked_for_comes_first_and_it_goes_on_behind_that(behind: Explorer, held: Held) -> None:
    files: list[str] = []
    behind.send = lambda content, **_: files.append(content["type"])  # type: ignore[method-assign]
    ask(behind, "take", what="python")
    behind.wait()
    assert files == ["file"]
    assert behind.status["error"] is None
    assert held.runs == 1
    until(lambda: behind.status["progress"] is None or behind.status["busy"] == "")
    held.release.set()
    over(behind)
    assert behind.payload["timing"] is not None


@pytest.mark.parametrize("way", ["view", "Python"])
def test_times_that_are_asked_for_come_in_its_place(behind: Explorer, held: Held, way: str) -> None:
    held.began.clear()
    threading.Thread(target=lambda: held.began.wait(PATIENCE_S) and held.release.set()).start()
    if way == "view":
        ask(behind, "measure")
        behind.wait()
    else:
        behind.measure()
    over(behind)
    assert held.runs == 2
    assert behind.status == IDLE


def test_times_that_another_view_asks_for_come_first(
    explorer: Explorer, events: EventManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, began, let_go = [], threading.Event(), threading.Event()

    def replays() -> None:
        began.set()
        until(let_go.is_set)

    def measure(variant: Variant, **_: Any) -> None:
        asked = explorer._unasked._task._timing != threading.get_ident()
        if asked:
            log.append("asked")
            let_go.set()
        else:
            alone.whole(replays, in_reach=True)
            log.append("unasked")
        variant.timing = TIMING

    monkeypatch.setattr(Variant, "measure", measure)
    run_cell(events, explorer.measure_behind)
    assert began.wait(PATIENCE_S)
    other = Explorer(explorer.variant)
    ask(other, "measure")
    other.wait()
    over(explorer)
    assert log == ["asked", "unasked"]


def test_nothing_is_measured_for_a_view_that_is_closed(behind: Explorer, held: Held) -> None:
    behind.close()
    over(behind)
    assert held.runs == 1


def test_it_is_given_up_in_time_also_within_a_replay(
    explorer: Explorer, events: EventManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "UNASKED_S", 0.05)
    monkeypatch.setattr(
        Variant, "measure", lambda variant, **_: alone.whole(lambda: until(lambda: False), in_reach=True)
    )
    run_cell(events, explorer.measure_behind)
    over(explorer)
    assert re.fullmatch(r"Not measured: this takes longer than \d+ s\. Press Measure\.", explorer.status["text"])
    assert explorer.payload["timing"] is None


def test_an_error_is_shown(explorer: Explorer, events: EventManager, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(variant: Variant, **_: Any) -> None:
        raise ValueError("no such luck")

    monkeypatch.setattr(Variant, "measure", fails)
    run_cell(events, explorer.measure_behind)
    over(explorer)
    assert explorer.status["busy"] == ""
    assert explorer.status["error"]["panel"] == "timing"
    assert "no such luck" in explorer.status["error"]["message"]


def test_what_else_the_kernel_runs_comes_first_and_draws_its_own_numbers(
    explorer: Explorer, events: EventManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As handlers of somebody's widgets do."""
    began, let_go = threading.Event(), threading.Event()

    def replays() -> None:
        torch.manual_seed(7)
        began.set()
        while not let_go.is_set():
            torch.rand(1)

    def measure(variant: Variant, **_: Any) -> None:
        alone.whole(replays, in_reach=True)
        variant.timing = TIMING

    monkeypatch.setattr(Variant, "measure", measure)
    torch.manual_seed(1)
    expected = [torch.rand(2) for _ in range(2)]
    torch.manual_seed(1)
    run_cell(events, explorer.measure_behind)
    drawn = []
    for _ in range(2):
        assert began.wait(PATIENCE_S)
        events.trigger("pre_execute")
        began.clear()
        drawn.append(torch.rand(2))
        assert not began.wait(0.1)
        events.trigger("post_execute")
    let_go.set()
    over(explorer)
    assert all(map(torch.equal, drawn, expected))


def test_what_each_switch_changes_is_made_ready_before_it_and_meanwhile(
    explorer: Explorer, held: Held, events: EventManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, may_end = [], threading.Event()

    def foresee(is_stale: Callable[[], bool]) -> None:
        log.append(f"foresees, {held.runs} runs")
        may_end.wait(PATIENCE_S)

    explorer._foreseer = keeping.Keeper(foresee)
    explorer._foreseer.touch(0.0)
    run_cell(events, explorer.measure_behind)
    until(lambda: explorer.status["text"] == "first: what each switch changes")
    assert not held.began.wait(5 * tasks.POLL_S)
    may_end.set()
    assert held.began.wait(PATIENCE_S)
    assert tasks.is_unasked_timed()
    assert not explorer._is_busy()
    with tasks.idle_turn():
        pass
    held.release.set()
    over(explorer)
    assert log == ["foresees, 0 runs"]
