"""Garbage collection pauses for as long as anybody makes graphs, in whichever thread."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator

import pytest

from tracefuse.optimizers.gc_pause import uncollected


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    is_enabled, thresholds = gc.isenabled(), gc.get_threshold()
    gc.enable()
    yield
    (gc.enable if is_enabled else gc.disable)()
    gc.set_threshold(*thresholds)


def is_paused() -> bool:
    return gc.get_threshold()[0] == 0


def test_it_begins_again_behind_the_last_of_several_threads() -> None:
    is_inside, may_end = threading.Event(), threading.Event()

    def other() -> None:
        with uncollected():
            is_inside.set()
            may_end.wait()

    thread = threading.Thread(target=other)
    with uncollected():
        thread.start()
        is_inside.wait()
    assert is_paused()
    may_end.set()
    thread.join()
    assert not is_paused()


def test_nothing_is_collected_inside() -> None:
    class Cycle:
        pass

    with uncollected():
        found = Cycle()
        found.itself = found  # type: ignore[attr-defined]
        gone = weakref.ref(found)
        del found
        made = [[] for _ in range(10_000)]
        assert gone() is not None
    made += [[] for _ in range(100_000)]
    assert gone() is None


def test_what_the_program_itself_asks_for_stands() -> None:
    with uncollected():
        gc.disable()
    assert not gc.isenabled()
    assert not is_paused()
    before = gc.get_threshold()
    with uncollected():
        gc.set_threshold(5, 6, 7)
    assert gc.get_threshold() == (5, 6, 7)
    gc.set_threshold(*before)


def test_it_begins_again_behind_an_error() -> None:
    with pytest.raises(ZeroDivisionError), uncollected():
        1 / 0  # noqa: B018
    assert not is_paused()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_process_that_is_forked_meanwhile_collects() -> None:
    with uncollected():
        child = os.fork()
        if not child:
            os._exit(int(is_paused()))
        _, status = os.waitpid(child, 0)
    assert status == 0
