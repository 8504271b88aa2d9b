"""Work that a view asks for and that takes seconds runs in a thread of its own, so that the kernel goes on reading messages.

What is timed runs alone in the process. Explorers take turns, and the user's cells come first: while one runs nothing is
timed, and one that starts stops what is being timed at the next round. Two programs at once would be the time of neither,
and replays set the random generators that the user's program draws from.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from IPython.core.getipython import get_ipython

from tracefuse.assembly.draws import undisturbed
from tracefuse.measure.rounds import check_not, turn

POLL_S = 0.1  # How late a cancel may be noticed while waiting for a turn.
ROUND_S = 2.0  # The longest that a switch waits for a round to end; what takes longer is mostly compiling, which is not timed.


class Cells:
    """Whether IPython runs a cell, which a message's handler may meet since kernels have subshells."""

    def __init__(self) -> None:
        self._shell: Any = None
        self._depth = 0

    def watch(self, is_in_cell: bool) -> None:
        """From now on, in the shell that there is; `is_in_cell` says whether a cell is running already."""
        shell = get_ipython()
        if shell is None or shell is self._shell:
            return
        self._shell, self._depth = shell, int(is_in_cell)
        shell.events.register("pre_execute", self._begin)
        shell.events.register("post_execute", self._end)

    def _begin(self) -> None:
        self._depth += 1

    def _end(self) -> None:
        self._depth = max(0, self._depth - 1)

    @property
    def is_running(self) -> bool:
        return self._shell is not None and self._depth > 0


cells = Cells()


class Task:
    """One piece of work, which `cancel` asks to stop, and the clock after `within_s` seconds. It `is_timed` if nothing may
    run beside it."""

    def __init__(self, is_timed: bool, within_s: float = math.inf) -> None:
        self.is_timed = is_timed
        self._until_s = time.monotonic() + within_s
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None
        self._gate = threading.Condition()
        self._guests, self._is_timing = 0, False
        self._timing_thread: threading.Thread | None = None

    def cancel(self) -> None:
        self._cancelled.set()

    def is_cancelled(self) -> bool:
        """Whether it is to stop. What is timed asks between two rounds, and waits here for `between_rounds`."""
        if self._is_timing:
            with self._gate:
                self._is_timing = False
                self._gate.wait_for(lambda: self._guests == 0)
                self._is_timing = True
        return self._cancelled.is_set() or self.is_late

    @property
    def is_late(self) -> bool:
        """Whether it takes longer than it may."""
        return time.monotonic() > self._until_s

    @contextmanager
    def between_rounds(self, wait: Callable[[float], object]) -> Iterator[None]:
        """Do something else while nothing is timed: after the round that runs, before the next one. `wait(seconds)` lets
        others run meanwhile."""
        with self._gate:
            self._guests += 1
        try:
            until_s = time.monotonic() + ROUND_S
            while self._is_timing and not self._is_mine() and time.monotonic() < until_s:
                wait(0.005)
            yield
        finally:
            with self._gate:
                self._guests -= 1
                self._gate.notify_all()

    def _is_mine(self) -> bool:
        """Whether this thread is the one that times."""
        return self._timing_thread is threading.current_thread()

    @property
    def is_running(self) -> bool:
        """Whether its thread is at work."""
        return self._thread is not None and self._thread.is_alive()

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

    def _make_way(self, _: Any = None) -> None:
        self.cancel()
        self.wait()

    def wait(self) -> None:
        """Until its thread has ended."""
        if self._thread is not None and not self.is_this_thread():
            self._thread.join()

    @contextmanager
    def turn(self, inputs: tuple[torch.Tensor, ...], report: Callable[[float, str], None]) -> Iterator[None]:
        """Be the only one that times anything, as the cell that captured `inputs` would: on their GPU, and with the random
        generators left as they are found. Raises `Cancelled` if that happens before its turn comes."""
        in_thread = self._thread is threading.current_thread()
        self._wait_while(lambda: in_thread and cells.is_running, lambda: report(0.0, "waiting for the cell that runs"))
        self._wait_while(
            lambda: not turn.acquire(timeout=POLL_S), lambda: report(0.0, "waiting for another measurement")
        )
        try:
            self._timing_thread, self._is_timing = threading.current_thread(), True
            with _on_gpu_of(inputs), undisturbed(inputs):
                yield
        finally:
            self._is_timing = False
            turn.release()

    def _wait_while(self, is_busy: Callable[[], bool], report: Callable[[], None]) -> None:
        while is_busy():
            check_not(self.is_cancelled)
            report()
            self._cancelled.wait(POLL_S)


@contextmanager
def idle_turn() -> Iterator[None]:
    """Do a short piece of work that nobody waits for, while nothing is timed."""
    with turn:
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
