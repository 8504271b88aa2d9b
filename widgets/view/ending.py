"""Nothing is published once Python ends, though the threads of a view go on until the process is gone.

pyzmq gives up its sends without a copy at exit, before the thread of ipykernel that publishes ends. A message of 64 KiB or
more then fails behind its first frames, and the next one is taken for its rest; one that is on its way loses its memory.
JupyterLab says "Kernel message validation error" where a kernel is restarted while a view computes (seen on pyzmq 27.3 with
ipykernel 7.4).
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable
from functools import cache

LIMIT_S = 2.0
"""How long an end waits for each: a thread that publishes, messages that are queued, and what is on its way."""

_sending = threading.RLock()
_over = threading.Event()


def publish(send: Callable[[], object]) -> None:
    """Call `send`, unless Python is ending."""
    _end_before_pyzmq()
    with _sending:
        if not _over.is_set():
            send()


@cache
def _end_before_pyzmq() -> None:
    if "ipykernel.kernelapp" in sys.modules:
        import zmq.utils.garbage  # noqa: F401 (it registers its own end, and the last to register is the first to end)

        atexit.register(_end)


def _end() -> None:
    if not _sending.acquire(timeout=LIMIT_S):  # in a fork the thread that published is gone
        return
    _over.set()
    _sending.release()
    from ipykernel.kernelapp import IPKernelApp
    from zmq.utils.garbage import gc

    if not IPKernelApp.initialized():
        return
    is_queued = threading.Event()
    IPKernelApp.instance().iopub_thread.schedule(is_queued.set)
    is_queued.wait(LIMIT_S)
    until = time.monotonic() + LIMIT_S
    while gc.refs and time.monotonic() < until:  # memory of messages that are on their way
        time.sleep(0.01)
