"""A widget that answers its view: at once, or by a task in a thread, with whatever is raised as the answer's error."""

from __future__ import annotations

import math
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import anywidget
import traitlets

from tracefuse.measure.alone import alone
from tracefuse.optimizers.errors import TracefuseError
from tracefuse.widgets.view.ending import publish
from tracefuse.widgets.view.tasks import POLL_S, Task, cells

IDLE: dict[str, Any] = {"busy": "", "progress": None, "text": "", "error": None}
HAS_PROGRESS = ("timing", "findings", "board")
"""What can be cancelled."""


class Answering(anywidget.AnyWidget):
    """The trait `status` says what the view waits for, how far that is, and which panel's wish ended with which error. Its
    text is what is being done, and of what nobody asked for, while nothing is done, why it was given up. What nobody asked for
    keeps nothing `busy`, and has a progress."""

    status = traitlets.Dict(IDLE).tag(sync=True)

    def _begin(self) -> None:
        """Called before the widget is made, whose traits are observed from then on."""
        self._task = Task(is_timed=False)
        cells.watch(is_in_cell=True)  # where there is IPython, views are made by cells
        self._lock = threading.RLock()  # Traits are set by the view, by cells and by a task's thread.
        self._others = threading.Condition(self._lock)

    def _send(self, msg: Any, buffers: Any = None) -> None:
        """What ipywidgets (8.1) sends traits and messages with; threads of a view set traits, too."""
        publish(lambda: super(Answering, self)._send(msg, buffers))

    def cancel(self) -> None:
        """Stop what is being measured at the next round; what was measured so far is kept if it is enough."""
        self._task.cancel()

    def wait(self) -> None:
        """Until what the view asked for is done, or waits for the cell that runs, which may be this one."""
        while self._task.is_running and not self._task.is_this_thread():
            if self._task.waits_for_cells and cells.is_running:
                return
            self._let_others(POLL_S)
        self._task.wait()

    def _let_others(self, seconds: float) -> None:
        """Wait without the lock, however often this thread has taken it: a task needs it to go on, and to end."""
        with self._others:
            self._others.wait(seconds)

    @property
    def _is_at_work(self) -> bool:
        """Whether the status tells how far something is."""
        return self._task.is_running

    def _start(self, panel: str, work: Callable[[Task], None], is_timed: bool = False, at: str = "") -> None:
        """Begin `work` in a thread, if nothing else is at work."""
        if self._task.is_running:
            message = "something else is running: wait for it, or cancel it"
            self._tell(error={"panel": panel, "at": at, "message": message})
            return
        self._task = task = Task(is_timed)
        self._tell(**_busy(panel))  # before the next message is read

        def act() -> None:
            if is_timed:
                task.behind_cells(lambda: work(task), self._progress)
                return
            with alone.first():
                work(task)

        task.start(lambda: self._answer(panel, act, at, is_main=True))

    def _run(self, panel: str, work: Callable[[Task], None], within_s: float = math.inf) -> None:
        """Do `work` here and now: whoever asks in Python can interrupt it, and comes before what the view asked for."""
        self._task.cancel()
        self.wait()
        self._task = task = Task(is_timed=True, within_s=within_s)
        self._answer(panel, lambda: work(task), is_main=True)

    def _answer(self, panel: str, act: Callable[[], None], at: str = "", is_main: bool = False) -> None:
        """Run `act` for `panel`, at the pass called `at`, and show what it raises. While a task is at work the view goes on
        showing that one's progress: only the task itself `is_main` then."""
        is_main = is_main or not self._is_at_work
        self._tell(**(_busy(panel) if is_main else {"error": None}))
        error = None
        try:
            with self._between_rounds() if panel == "passes" else nullcontext():
                act()
        except Exception as problem:
            error = {"panel": panel, "at": at, "message": sentence(problem)}
        except BaseException:  # an interrupt: leave, but not with a view that says it is busy
            error = {"panel": panel, "at": at, "message": "interrupted"}
            raise
        finally:
            # Without an error of its own, a task leaves that of a switch meanwhile.
            said = {"error": error} if error else {}
            self._tell(**({**IDLE, "error": self.status["error"]} if is_main else {}) | said)

    def _between_rounds(self) -> AbstractContextManager[None]:
        """What a switch sets off would be in the times of what is being measured, which waits for it."""
        return alone.first(self._let_others)

    def _tell(self, **status: Any) -> None:
        with self._lock:
            self.status = {**self.status, **status}

    def _progress(self, fraction: float, text: str) -> None:
        """Said by who times, which does not wait for long: others may have the lock while they wait for it."""
        if self._lock.acquire(timeout=POLL_S):
            self._tell(progress=fraction, text=text)
            self._lock.release()


def _busy(panel: str) -> dict[str, Any]:
    return {**IDLE, "busy": panel, "progress": 0.0 if panel in HAS_PROGRESS else None}


def sentence(error: Exception) -> str:
    """What a view says of an error: our own say what to do; of any other, the traceback's end says where it happened."""
    if isinstance(error, TracefuseError):
        return str(error)
    return "".join(traceback.format_exception(error)[-3:]).rstrip()
