"""Garbage collection pauses for as long as anybody makes graphs, in whichever thread."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from tracefuse.optimizers.gc_pause import uncollected


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    is_enabled = gc.isenabled()
    yield
    (gc.enable if is_enabled else gc.disable)()


def test_it_begins_again_behind_the_last_of_several_threads() -> None:
    gc.enable()
    is_inside, may_end = threading.Event(), threading.Event()

    def other() -> None:
        with uncollected():
            is_inside.set()
            may_end.wait()

    thread = threading.Thread(target=other)
    with uncollected():
        thread.start()
        is_inside.wait()
    assert not gc.isenabled()
    may_end.set()
    thread.join()
    assert gc.isenabled()


def test_it_stays_off_where_the_program_has_switched_it_off() -> None:
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()


def test_it_begins_again_behind_an_error() -> None:
    gc.enable()
    with pytest.raises(ZeroDivisionError), uncollected():
        1 / 0  # noqa: B018
    assert gc.isenabled()
