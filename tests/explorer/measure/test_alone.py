"""Nothing runs beside what is timed: whoever cannot wait ends the stretch that runs, and it begins anew behind that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import pytest
import torch
from fake_clock import FakeClock
from forks import run_python

from tracefuse.errors import Cancelled
from tracefuse.measure.alone import Alone, Disturbed, alone, turn
from tracefuse.measure.rounds import MIN_ROUNDS, check_not, measure

PATIENCE_S = 20


class Timing:
    """A thread in which stretches run: each is a Python program that goes on until it is let go, or somebody ends it."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.raised: BaseException | None = None
        self.found: object = None
        self._run = run
        self.thread = threading.Thread(target=self._noted, daemon=True)
        self.thread.start()

    def _noted(self) -> None:
        try:
            self.found = self._run()
        except BaseException as error:
            self.raised = error

    def ended(self) -> Timing:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        return self


class Work:
    """What is replayed; `begun` counts how often it began, `at_work` says that it runs."""

    def __init__(self) -> None:
        self.begun, self.at_work, self.let_go = 0, threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun += 1
        self.at_work.set()
        deadline = time.monotonic() + PATIENCE_S
        while not self.let_go.is_set() and time.monotonic() < deadline:
            time.sleep(0.001)
        return "done"


@pytest.fixture
def work() -> Iterator[Work]:
    made = Work()
    yield made
    made.let_go.set()


def test_whoever_comes_first_ends_the_stretch_and_it_begins_anew(work: Work) -> None:
    timing = Timing(lambda: alone.whole(work, in_reach=True))
    assert work.at_work.wait(PATIENCE_S)
    with alone.first():
        begun = work.begun
        work.let_go.set()
        time.sleep(0.1)
        assert (begun, work.begun) == (1, 1)  # nothing is timed meanwhile
    assert timing.ended().found == "done"
    assert work.begun == 2


def test_a_stretch_that_has_to_run_to_its_end_is_waited_for(work: Work) -> None:
    timing = Timing(lambda: alone.whole(work, in_reach=False))
    assert work.at_work.wait(PATIENCE_S)
    threading.Timer(0.1, work.let_go.set).start()
    with alone.first():
        assert work.let_go.is_set()
    assert timing.ended().found == "done"
    assert work.begun == 1


def test_a_stretch_that_does_not_end_is_not_waited_for_any_longer(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracefuse.measure.alone.STRETCH_S", 0.05)
    timing = Timing(lambda: alone.whole(work, in_reach=False))
    assert work.at_work.wait(PATIENCE_S)
    with alone.first():
        assert timing.thread.is_alive()
        work.let_go.set()
    timing.ended()


def test_a_thread_that_is_stopped_times_nothing_more(work: Work) -> None:
    def timed() -> None:
        try:
            alone.whole(work, in_reach=True)
        except Disturbed:
            alone.whole(work, in_reach=True)

    timing = Timing(timed)
    assert work.at_work.wait(PATIENCE_S)
    alone.stop(timing.thread.ident)
    alone.stop(timing.thread.ident)
    assert isinstance(timing.ended().raised, Disturbed)
    assert work.begun == 1
    alone.forget(timing.thread.ident)


def test_a_thread_that_waits_for_who_came_first_can_be_stopped(work: Work) -> None:
    with alone.first():
        timing = Timing(lambda: alone.whole(work, in_reach=True))
        time.sleep(0.05)
        alone.stop(timing.thread.ident)
        assert isinstance(timing.ended().raised, Disturbed)
    alone.forget(timing.thread.ident)
    assert work.begun == 0


def test_what_is_compiled_for_replays_is_within_reach_of_a_stop_alone(work: Work) -> None:
    timing = Timing(lambda: alone.within_reach(work))
    assert work.at_work.wait(PATIENCE_S)
    with alone.first():
        assert timing.thread.is_alive()
    alone.stop(timing.thread.ident)
    assert isinstance(timing.ended().raised, Disturbed)
    alone.forget(timing.thread.ident)


def test_who_comes_first_may_time_something_itself() -> None:
    with alone.first():
        assert alone.whole(lambda: "done", in_reach=True) == "done"


def test_while_somebody_comes_first_the_turn_is_free(work: Work) -> None:
    def timed() -> str:
        with turn:
            return alone.whole(work, in_reach=True)

    timing = Timing(timed)
    assert work.at_work.wait(PATIENCE_S)
    with alone.first():
        assert turn.acquire(timeout=PATIENCE_S)
        turn.release()
        work.let_go.set()
    assert timing.ended().found == "done"


def test_no_exception_comes_late() -> None:
    """Whenever a stretch is ended: what comes behind it is never within reach."""
    ended, finished = [], []

    def outside() -> None:
        for _ in range(200):
            pass

    def timed() -> None:
        while len(ended) < 20:
            try:
                with alone.stretch():
                    alone.within_reach(outside)
                finished.append(1)
            except Disturbed:
                ended.append(1)
            outside()

    timing = Timing(timed)
    deadline = time.monotonic() + 3 * PATIENCE_S
    while timing.thread.is_alive() and time.monotonic() < deadline:
        with alone.first():
            pass
    assert timing.ended().raised is None
    assert len(ended) == 20
    assert finished


PROFILED = """
import sys, threading
from tracefuse.measure.alone import Disturbed, alone

def replay():
    alone.stop(threading.get_ident())

for _ in range(2):
    try:
        alone.within_reach(replay)
        raise SystemExit("it went on")
    except Disturbed:
        alone.forget(threading.get_ident())
begun = []
sys.setprofile(lambda frame, event, _: begun.append(event))
replay()
sys.setprofile(None)
assert "call" in begun
"""


def test_behind_what_was_ended_a_profiler_works() -> None:
    """Python 3.11 begins no function under a profiler while it looks for an exception, though there is none any more."""
    ended = run_python(["-c", PROFILED], timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_generator_is_left_as_it_is_found_also_by_what_is_ended(work: Work) -> None:
    def drawing() -> str:
        torch.manual_seed(7)
        return work()

    before = torch.get_rng_state()
    timing = Timing(lambda: alone.whole(drawing, in_reach=True))
    assert work.at_work.wait(PATIENCE_S)
    with alone.first():
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(3)
        after = torch.get_rng_state()
        work.let_go.set()
    timing.ended()
    assert torch.equal(torch.get_rng_state(), after)


def test_what_was_lost_is_told_by_thread(work: Work) -> None:
    timing = Timing(lambda: (alone.whole(work, in_reach=True), alone.lost_s())[1])
    assert work.at_work.wait(PATIENCE_S)
    with alone.first():
        time.sleep(0.2)
        work.let_go.set()
    assert float(timing.ended().found) >= 0.2  # type: ignore[arg-type]
    assert Alone().lost_s() == 0.0


# --- rounds that are disturbed ----------------------------------------------------------------------------------------


@contextmanager
def disturbing(at: set[int]) -> Iterator[Callable[[], float]]:
    """A program's time in ms, which is disturbed in its replays of these numbers."""
    replays = count()

    def took_ms() -> float:
        if next(replays) in at:
            raise Disturbed
        return 4.0

    yield took_ms


def test_a_round_that_was_disturbed_is_none() -> None:
    clock = FakeClock()
    with disturbing({0, 3, 7, 8}) as took_ms:
        programs = {"a": clock.program("a", took_ms), "b": clock.program("b", 4.0)}
        timing = measure(programs, clock=clock, budget_s=10)
    assert timing.rounds == MIN_ROUNDS
    assert [one.step_ms.samples for one in timing.programs] == [MIN_ROUNDS, MIN_ROUNDS]
    assert {one.step_ms.median for one in timing.programs} == {4.0}


def test_a_measurement_that_is_stopped_keeps_what_is_enough() -> None:
    clock, me = FakeClock(), threading.get_ident()

    def stopped_at(number: int) -> Callable[[], float]:
        replays = count()

        def took_ms() -> float:
            if next(replays) == number:
                alone.stop(me)
                raise Disturbed
            return 4.0

        return took_ms

    try:
        with pytest.raises(Cancelled):
            measure({"a": clock.program("a", stopped_at(5))}, clock=clock)
        alone.forget(me)
        drift = count(4.0, 0.1)
        programs = {"a": clock.program("a", stopped_at(30)), "b": clock.program("b", lambda: next(drift))}
        timing = measure(programs, clock=clock)
    finally:
        alone.forget(me)
    assert timing.stopped == "cancelled"
    assert timing.rounds >= MIN_ROUNDS


def test_nothing_asks_whether_it_is_cancelled_where_nobody_can() -> None:
    check_not(None)
    with pytest.raises(Cancelled):
        check_not(lambda: True)
