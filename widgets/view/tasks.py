"""Work that a view asks for and that takes seconds runs in a thread of its own, so that the kernel goes on reading messages.

What is timed runs alone in the process. Explorers take turns, and the user's cells come first: while one runs nothing is
timed, and one that starts stops what is being timed, on a CPU within an operator's time, on a GPU at the next round; behind
that it begins anew, once. Two programs at once would be the time of neither, and replays set the random generators that the
user's program draws from.
"""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from IPython.core.getipython import get_ipython

from tracefuse.assembly.draws import undisturbed_gpu
from tracefuse.errors import Cancelled
from tracefuse.measure.alone import Disturbed, alone, turn
from tracefuse.measure.rounds import check_not

LIMIT_S = 2.0
"""How long the end of Python waits for what is timed."""
POLL_S = 0.1  # How late a cancel may be noticed while waiting for a turn.
MOST_TURNS = 2
"""How often what is asked for begins to be timed: a cell that ends it the last time ends it for good."""
WAITS_FOR_CELL = "waiting for the cell that runs"


class Cells:
    """Whether IPython runs a cell, which a message's handler may meet since kernels have subshells: those count it too, each
    in a thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shell: Any = None
        self._depth = self._runs = 0

    def watch(self, is_in_cell: bool) -> None:
        """From now on, in the shell that there is; `is_in_cell` says whether a cell is running already."""
        shell = get_ipython()
        if shell is None or shell is self._shell:
            return
        self._shell, self._depth, self._runs = shell, int(is_in_cell), int(is_in_cell)
        shell.events.register("pre_execute", self._begin)
        shell.events.register("post_execute", self._end)
        shell.events.register("pre_run_cell", self._begin_run)
        shell.events.register("post_run_cell", self._end_run)

    def _begin(self) -> None:
        with self._lock:
            self._depth += 1

    def _end(self) -> None:
        with self._lock:
            self._depth = max(0, self._depth - 1)

    def _begin_run(self, _: Any = None) -> None:
        with self._lock:
            self._runs += 1

    def _end_run(self, _: Any = None) -> None:
        """Behind the outermost cell nothing runs. A handler of a message that was interrupted has told no end."""
        with self._lock:
            self._runs = max(0, self._runs - 1)
            if not self._runs:
                self._depth = 0

    @property
    def is_running(self) -> bool:
        return self._shell is not None and self._depth > 0


cells = Cells()


class Task:
    """One piece of work, which `cancel` asks to stop, and the clock after `within_s` seconds of its turn. It `is_timed` if
    nothing may run beside it; what nobody `is_asked` for lets all else come first."""

    def __init__(self, is_timed: bool, within_s: float = math.inf, is_asked: bool = True) -> None:
        self.is_timed, self.is_asked = is_timed, is_asked
        self._within_s = within_s
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._timing = 0
        self._since_s, self._lost_s, self._is_late = 0.0, 0.0, False
        self._alarm: threading.Timer | None = None
        self._turns = 0
        self._is_in_way, self._made_way, self._is_stirred = threading.Event(), threading.Event(), threading.Event()
        self._is_set_aside = False

    def cancel(self) -> None:
        self._cancelled.set()
        self._is_stirred.set()
        self._stop()

    def is_cancelled(self) -> bool:
        """Whether it is to stop."""
        return self._cancelled.is_set() or self._is_in_way.is_set() or self.is_late

    @property
    def is_late(self) -> bool:
        """Whether it takes longer than it may, without what it waited for others."""
        self._is_late = self._is_late or self._left_s() < 0
        return self._is_late

    def take_its_time(self) -> None:
        """From now on it may take as long as it takes."""
        self._within_s = math.inf

    @property
    def is_running(self) -> bool:
        """Whether its thread is at work."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def waits_for_cells(self) -> bool:
        """Whether it begins behind the cells that run, if nobody cancels it."""
        return self._is_set_aside and not self._cancelled.is_set()

    def is_this_thread(self) -> bool:
        return self._thread is threading.current_thread()

    def start(self, work: Callable[[], None]) -> None:
        """Run `work` in a thread; here and now where there is no IPython to tell when a cell starts."""
        shell = get_ipython()
        if shell is None:
            work()
            return

        def run() -> None:
            try:
                work()
            finally:
                if self.is_timed:
                    shell.events.unregister("pre_run_cell", self._make_way)

        if self.is_timed:
            shell.events.register("pre_run_cell", self._make_way)
        self._thread = threading.Thread(target=run, name="tracefuse view", daemon=True)
        self._thread.start()

    def behind_cells(self, work: Callable[[], None], report: Callable[[float, str], None]) -> None:
        """Do `work` behind the cells that run, and anew behind the one that ends it, once. Until its turn it waits for any
        number of them."""
        self._is_set_aside = cells.is_running
        while True:
            try:
                if self._is_set_aside:
                    self._wait_for_cells(report)
                return work()
            except Cancelled:
                if self._cancelled.is_set() or not self._is_in_way.is_set() or self._turns >= MOST_TURNS:
                    raise
            self._set_aside()

    def _set_aside(self) -> None:
        self._is_set_aside = True
        self._is_in_way.clear()
        self._is_stirred.clear()
        if self._cancelled.is_set():  # meanwhile
            self._is_stirred.set()
        self._made_way.set()

    def _wait_for_cells(self, report: Callable[[float, str], None]) -> None:
        """Cells that run one after the other leave gaps: none runs twice in a row."""
        free = 0
        while free < 2:
            self._wait(report, WAITS_FOR_CELL)
            free = 0 if cells.is_running else free + 1
        self._is_set_aside = False

    def _make_way(self, _: Any = None) -> None:
        self._made_way.clear()
        self._is_in_way.set()
        self._is_stirred.set()
        self._stop()
        until(lambda: self._made_way.is_set() or not self.is_running)

    def wait(self) -> None:
        """Until its thread has ended."""
        if self._thread is not None and not self.is_this_thread():
            self._thread.join()

    # --- its turn -----------------------------------------------------------------------------------------------------

    @contextmanager
    def turn(self, inputs: tuple[torch.Tensor, ...], report: Callable[[float, str], None]) -> Iterator[None]:
        """Be the only one that times anything, as the cell that captured `inputs` would: on their GPU, and with the random
        generators left as they are found. Raises `Cancelled` if that happens before its turn comes, or ends it."""
        self._wait_for_turn(report)
        try:
            self._begin()
            check_not(self.is_cancelled)
            self._turns += 1
            with _on_gpu_of(inputs), undisturbed_gpu(inputs):
                yield
        except Disturbed:
            check_not(self.is_cancelled)
            raise
        finally:
            self._end()
            turn.release()

    def _wait_for_turn(self, report: Callable[[float, str], None]) -> None:
        while self.is_this_thread() and cells.is_running:
            self._wait(report, WAITS_FOR_CELL)
        with ExitStack() as before:
            is_first = False
            while not turn.acquire(timeout=POLL_S):
                self._wait(report, "waiting for another measurement")
                if not is_first and self.is_asked and is_unasked_timed():
                    before.enter_context(alone.first())
                    is_first = True

    def _wait(self, report: Callable[[float, str], None], why: str) -> None:
        check_not(self.is_cancelled)
        report(0.0, why)
        self._is_stirred.wait(POLL_S)

    def _begin(self) -> None:
        with self._lock:
            self._timing, self._since_s = threading.get_ident(), time.monotonic()
            self._lost_s = alone.lost_s()
        _timed.add(self)
        if _is_ending.is_set():
            self._cancelled.set()
        self._set_alarm()

    def _end(self) -> None:
        _timed.discard(self)
        with self._lock:
            alone.forget(self._timing)
            self._timing = 0
        if self._alarm is not None:
            self._alarm.cancel()

    def _stop(self) -> None:
        with self._lock:
            if self._timing:
                alone.stop(self._timing)

    def _left_s(self) -> float:
        if not self._timing:
            return self._within_s
        lost_s = alone.lost_s(self._timing) - self._lost_s
        return self._within_s - (time.monotonic() - self._since_s - lost_s)

    def _set_alarm(self) -> None:
        """A replay may take longer than all may take."""
        if self.is_late:
            self._stop()
        elif self._timing and (left_s := self._left_s()) < math.inf:
            self._alarm = threading.Timer(max(left_s, 0.0) + POLL_S, self._set_alarm)
            self._alarm.daemon = True
            self._alarm.start()


_timed = set[Task]()
"""Those that have a turn: one, or one more for which what nobody asked for is set aside."""
_is_ending = threading.Event()


def is_unasked_timed() -> bool:
    """Whether what is timed now is what nobody asked for."""
    return any(not one.is_asked for one in list(_timed))


@atexit.register
def _stop_all() -> None:
    """A thread that Python ends while it computes takes the process with it: C++ calls that an error."""
    _is_ending.set()
    for task in list(_timed):
        task.cancel()
    until_s = time.monotonic() + LIMIT_S
    while _timed and time.monotonic() < until_s:
        time.sleep(0.002)


def until(is_over: Callable[[], bool]) -> None:
    """Wait, through interrupts too, one of which is raised then: what is timed may not go on beside a cell."""
    interrupt = None
    while not is_over():
        try:
            time.sleep(0.002)
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


@contextmanager
def idle_turn() -> Iterator[None]:
    """Do a short piece of work that nobody waits for, while nothing is timed that anybody asked for."""
    with alone.first() if is_unasked_timed() else nullcontext(), turn:
        yield


def is_timed_elsewhere() -> bool:
    """Whether another thread has its turn."""
    is_mine = turn.acquire(blocking=False)
    if is_mine:
        turn.release()
    return not is_mine


def _on_gpu_of(inputs: tuple[torch.Tensor, ...]) -> AbstractContextManager[Any]:
    """The current GPU is a thread's own affair: that of the first input, as in the thread that captured."""
    found = next((t.device for t in inputs if t.is_cuda), None)
    return nullcontext() if found is None else torch.cuda.device(found)
