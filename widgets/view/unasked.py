"""What a view times though nobody asked for it: behind the cell, and behind all that anybody asks for.

A cell that starts ends it within an operator's time, and it begins anew when no cell runs. Whatever else the kernel does, such
as a handler of somebody's widget, comes in between two stretches: the generator is the user's there, and nothing runs beside.
So do a switch of a view, and what a view makes ready for the next one. It has a limit of time, in which waiting has no part.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from IPython.core.getipython import get_ipython

from tracefuse.measure.alone import alone
from tracefuse.widgets.view.tasks import POLL_S, Task, until


class Unasked:
    """Calls `work(task)` in a thread each time that nothing is waited for, until it returns how that is told: None where a
    cell came first, behind which another task has `within_s` seconds again. `waits_for()` says what is waited for, which
    `tell` hears; `give_up()` is called where it is cancelled meanwhile."""

    def __init__(
        self,
        work: Callable[[Task], Callable[[], object] | None],
        waits_for: Callable[[], str],
        tell: Callable[[str], None],
        give_up: Callable[[], None],
        within_s: float,
    ) -> None:
        self._work, self._within_s = work, within_s
        self._waits_for, self._tell, self._give_up = waits_for, tell, give_up
        self._cancelled = threading.Event()
        self._task: Task | None = None
        self._thread = threading.Thread(target=self._run, name="tracefuse unasked", daemon=True)
        self._thread.start()

    @property
    def is_on(self) -> bool:
        """Whether it is at work, or waits to be."""
        return self._thread.is_alive() and not self._cancelled.is_set()

    def cancel(self) -> None:
        """For good."""
        self._cancelled.set()
        if (task := self._task) is not None:
            task.cancel()

    def _run(self) -> None:
        told = None
        while told is None:
            told = self._worked() if self._is_free() else self._give_up
        told()

    def _worked(self) -> Callable[[], object] | None:
        task = self._task = Task(is_timed=True, within_s=self._within_s, is_asked=False)
        if self._cancelled.is_set():  # before there was a task to cancel
            return self._give_up
        with _behind_all(task):
            return self._work(task)

    def _is_free(self) -> bool:
        """Wait until nothing else is at work, twice in a row: cells that run one after the other leave gaps. False once it is
        cancelled."""
        free = 0
        while free < 2 and not self._cancelled.wait(POLL_S):
            why = self._waits_for()
            free = 0 if why else free + 1
            self._tell(why)
        return not self._cancelled.is_set()


class _Guests:
    """The threads in which the kernel runs something while a task is at work, which comes first there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = defaultdict[int, list[AbstractContextManager[None]]](list)
        self._is_over = False

    def enter(self) -> None:
        guest = alone.first()
        guest.__enter__()
        with self._lock:
            if not self._is_over:
                self._inside[threading.get_ident()].append(guest)
                return
        guest.__exit__(None, None, None)

    def leave(self) -> None:
        with self._lock:
            guests = self._inside[threading.get_ident()]
            guest = guests.pop() if guests else None  # none for what began before the task
        if guest is not None:
            guest.__exit__(None, None, None)

    def close(self) -> None:
        with self._lock:
            self._is_over = True
            guests = [guest for each in self._inside.values() for guest in each]
        for guest in guests:
            guest.__exit__(None, None, None)


@contextmanager
def _behind_all(task: Task) -> Iterator[None]:
    """Let a cell end `task`, and whatever else the kernel does come first."""
    shell, over, guests = get_ipython(), threading.Event(), _Guests()

    def make_way(_: Any = None) -> None:
        task.cancel()
        until(over.is_set)

    handlers = {"pre_execute": guests.enter, "post_execute": guests.leave, "pre_run_cell": make_way}
    for event, handler in handlers.items():
        shell.events.register(event, handler)
    try:
        yield
    finally:
        for event, handler in handlers.items():
            shell.events.unregister(event, handler)
        guests.close()
        over.set()
