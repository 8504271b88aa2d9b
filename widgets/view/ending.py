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


def published() -> None:
    """Wait until what was published is on its way: one thread sends it all, and waits while others compute."""
    if "ipykernel.kernelapp" in sys.modules:
        _wait_until_sent()


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
    if not _wait_until_sent():
        return
    from zmq.utils.garbage import gc

    until = time.monotonic() + LIMIT_S
    while gc.refs and time.monotonic() < until:  # memory of messages that are on their way
        time.sleep(0.01)


def _wait_until_sent() -> bool:
    """Whether there is a kernel, whose messages up to now have left Python then, or waited too long."""
    from ipykernel.kernelapp import IPKernelApp

    if not IPKernelApp.initialized():
        return False
    is_sent = threading.Event()
    IPKernelApp.instance().iopub_thread.schedule(is_sent.set)
    is_sent.wait(LIMIT_S)
    return True
