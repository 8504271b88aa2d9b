"""Nothing runs beside what is timed: it is one stretch after the other, and whoever cannot wait comes in between.

    turn                      held by the thread that times, from its first stretch to its last
    with alone.stretch():     replays that count as a whole; the generator of the CPU is left as it is found
    with alone.first():       what somebody waits for, as a switch of a view: the stretch that runs ends at once, without
                              a result, and begins anew behind it
    alone.stop(thread)        ends what a thread times, for good

On a CPU a replay may take seconds. It ends behind the operator that runs, by an exception that another thread raises in it, as
interrupting the kernel raises one in the main thread; only replays, and what is compiled for them, are within its reach. On a
GPU a stretch is over in milliseconds, and runs to its end.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")

turn = threading.RLock()
"""Held by the thread that times: it runs alone in the process, without what a view does ahead."""

WAIT_S = 0.01
"""How often who waits to time looks whether it may."""
STRETCH_S = 2.0
"""The longest that `first` waits for a stretch to end; what takes longer is not timed, such as comparing large results."""


class Disturbed(BaseException):
    """A stretch that was ended, or a thread that was stopped. No `Exception`: what is replayed may catch those."""


class Alone:
    """Who times, and who comes in between. There is one, `alone`, as there is one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = threading.Condition(turn)
        self._guests = Counter[int]()
        self._stopped = set[int]()
        self._within_reach = set[int]()
        self._thread, self._is_ended = 0, False  # of the stretch that runs
        self._lost_s = defaultdict[int, float](float)

    # --- timing -------------------------------------------------------------------------------------------------------

    @contextmanager
    def stretch(self) -> Iterator[None]:
        """Run what counts as a whole, once nobody is `first`; meanwhile others may have the turn. Raises `Disturbed` where
        this thread is to stop."""
        me = threading.get_ident()
        with turn:
            while not self._begins():
                start_s = time.monotonic()
                self._free.wait(WAIT_S)
                self._lost_s[me] += time.monotonic() - start_s
            start_s = time.monotonic()
            try:
                with torch.random.fork_rng([]):
                    yield
            except Disturbed:
                self._lost_s[me] += time.monotonic() - start_s
                raise
            finally:
                self._thread = 0

    def _begins(self) -> bool:
        """Whether a stretch of this thread begins now: nobody comes first."""
        me = threading.get_ident()
        with self._lock:
            if me in self._stopped:
                raise Disturbed
            if self._guests.keys() - {me}:
                return False
            self._thread, self._is_ended = me, False
            return True

    def whole(self, run: Callable[[], T], in_reach: bool, check: Callable[[], object] = lambda: None) -> T:
        """What `run()` returns in a stretch that nobody ended: else it is run again. Before each, `check()` may raise. Raises
        `Disturbed` where this thread is to stop."""
        while True:
            check()
            try:
                with self.stretch():
                    return self.within_reach(run, in_reach)
            except Disturbed:
                if self.is_stopped:
                    check()
                    raise

    def within_reach(self, run: Callable[[], T], in_reach: bool = True) -> T:
        """What `run()` returns. `Disturbed` is raised in it as soon as the stretch is ended or this thread stopped; not where
        it has to run to its end."""
        if not in_reach:
            return run()
        try:
            try:
                self._open()
                return run()
            finally:
                self._close()
        finally:
            self._close()  # once more, where the exception came before the first had begun: there is never a second one

    def lost_s(self, thread: int | None = None) -> float:
        """What a thread (default: this one) lost to stretches that were ended, and to its waiting for who came first."""
        return self._lost_s[thread or threading.get_ident()]

    @property
    def is_stopped(self) -> bool:
        """Whether this thread is to time nothing more."""
        return threading.get_ident() in self._stopped

    def _open(self) -> None:
        me = threading.get_ident()
        with self._lock:
            if me in self._stopped or (self._thread == me and self._is_ended):
                raise Disturbed
            self._within_reach.add(me)

    def _close(self) -> None:
        me = threading.get_ident()
        with self._lock:
            self._within_reach.discard(me)
            if me in self._stopped or (self._thread == me and self._is_ended):
                _let_come(me)

    # --- coming in between --------------------------------------------------------------------------------------------

    @contextmanager
    def first(self, wait: Callable[[float], object] = time.sleep) -> Iterator[None]:
        """Do something while nothing is timed: the stretch that runs ends, the next one waits. `wait(seconds)` lets others run
        meanwhile. What this thread itself times goes on."""
        me = threading.get_ident()
        with self._lock:
            self._guests[me] += 1
            self._end(self._thread if self._thread != me else 0)
        try:
            until_s = time.monotonic() + STRETCH_S
            while self._thread not in (0, me) and time.monotonic() < until_s:
                wait(WAIT_S / 2)
            yield
        finally:
            with self._lock:
                self._guests[me] -= 1
                self._guests += Counter()  # without those that are 0

    def stop(self, thread: int) -> None:
        """Let a thread time nothing more, until `forget`."""
        with self._lock:
            if thread in self._stopped:
                return
            self._stopped.add(thread)
            if self._thread == thread:
                self._end(thread)
            else:
                self._reach(thread)

    def forget(self, thread: int) -> None:
        """A thread that was stopped is over, and another one may be called the same."""
        with self._lock:
            self._stopped.discard(thread)

    def _end(self, thread: int) -> None:
        """End the stretch that runs, which is that of `thread`; 0 where there is none."""
        if thread and not self._is_ended:
            self._is_ended = True
            self._reach(thread)

    def _reach(self, thread: int) -> None:
        if thread in self._within_reach:
            _raise_in(thread, Disturbed)


def _raise_in(thread: int, error: type[BaseException]) -> None:
    """Raise `error` in a thread before its next step, in place of what is to be raised there and has not come yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def _let_come(me: int) -> None:
    """Let `Disturbed` that was raised in this thread come now, since nobody expects it later. To take it back by raising
    nothing in its place would leave Python 3.11 looking for it for good, and in a loop without end where a function begins
    under a profiler or a debugger."""
    try:
        _raise_in(me, Disturbed)  # also where it has come already: there is one for sure, and no other
        while True:
            pass
    except Disturbed:
        pass


alone = Alone()
