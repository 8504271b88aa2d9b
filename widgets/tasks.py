"""Work that a view asked for and that takes seconds: in a thread of its own, so that the kernel goes on reading messages.

What is timed runs alone in the process. Explorers take turns, and the user's cells come first: while one runs nothing is
timed, and one that starts stops what is being timed at the next round. Two programs at once would be the time of neither,
and replays set the random generators that the user's program draws from.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from IPython.core.getipython import get_ipython

from tracefuse.draws import undisturbed
from tracefuse.measure import check_not

POLL_S = 0.1  # How late a cancel may be noticed while waiting for a turn.
_turn = threading.Lock()


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
    """One piece of work, which `cancel` asks to stop. It `is_timed` if nothing may run beside it."""

    def __init__(self, is_timed: bool) -> None:
        self.is_timed = is_timed
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None

    def cancel(self) -> None:
        self._cancelled.set()

    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    @property
    def is_running(self) -> bool:
        """Whether its thread is at work."""
        return self._thread is not None and self._thread.is_alive()

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
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    @contextmanager
    def turn(self, inputs: tuple[torch.Tensor, ...], report: Callable[[float, str], None]) -> Iterator[None]:
        """Be the only one that times anything, as the cell that captured `inputs` would: on their GPU, and with the random
        generators left as they are found. Raises `Cancelled` if that happens before its turn comes."""
        in_thread = self._thread is threading.current_thread()
        self._wait_while(lambda: in_thread and cells.is_running, lambda: report(0.0, "waiting for the cell that runs"))
        self._wait_while(
            lambda: not _turn.acquire(timeout=POLL_S), lambda: report(0.0, "waiting for another measurement")
        )
        try:
            with _on_gpu_of(inputs), undisturbed(inputs):
                yield
        finally:
            _turn.release()

    def _wait_while(self, is_busy: Callable[[], bool], report: Callable[[], None]) -> None:
        while is_busy():
            check_not(self.is_cancelled)
            report()
            self._cancelled.wait(POLL_S)


def _on_gpu_of(inputs: tuple[torch.Tensor, ...]) -> AbstractContextManager[Any]:
    """The current GPU is a thread's own affair: that of the first input, as in the thread that captured."""
    found = next((t.device for t in inputs if t.is_cuda), None)
    return nullcontext() if found is None else torch.cuda.device(found)
