"""What a cell of the magic still does once it has run: said below it with the time since, until the view stands there."""

from __future__ import annotations

import contextvars
import threading
import time
from types import TracebackType

from IPython.display import DisplayHandle, display

from tracefuse.widgets.view.ending import publish
from tracefuse.widgets.view.explorer import Explorer

QUIET_S = 0.5
"""For what takes no longer, nothing is said."""
EVERY_S = 1.0
CANCEL = "Interrupt the kernel (\N{BLACK SQUARE}) to cancel; the cell itself has run."


class Notice:
    """A context in which `doing` is done, and then what `next` says; the view that `show` is given takes its place."""

    def __init__(self, doing: str) -> None:
        self._doing, self._start_s = doing, time.monotonic()
        self._handle: DisplayHandle | None = None
        self._over = threading.Event()
        # By its context ipykernel knows whose output it is.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._tell,), name="tracefuse notice", daemon=True)

    def __enter__(self) -> Notice:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if (handle := self._taken()) is not None:
            handle.update({}, raw=True)

    def next(self, doing: str) -> None:
        self._doing = doing

    def show(self, explorer: Explorer) -> None:
        """Display the view, where the notice stands if there is one."""
        if (handle := self._taken()) is None:
            display(explorer)
        else:
            explorer.display_at(handle)

    def _taken(self) -> DisplayHandle | None:
        """The output that holds the notice, which says nothing more; None where there is none or it was taken."""
        self._over.set()
        self._thread.join()
        handle, self._handle = self._handle, None
        return handle

    def _tell(self) -> None:
        while not self._over.wait(EVERY_S if self._handle else QUIET_S):
            publish(self._say)

    def _say(self) -> None:
        text = f"tracefuse: {self._doing} \N{HORIZONTAL ELLIPSIS} {time.monotonic() - self._start_s:.0f} s. {CANCEL}"
        bundle = {"text/plain": text}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)
