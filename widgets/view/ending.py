"""Nothing is published once Python ends, though the threads of a view go on until the process is gone.

pyzmq gives up its sends without a copy at exit, before the thread of ipykernel that publishes ends. A message of 64 KiB or
more then fails behind its first frames, and the next one is taken for its rest: JupyterLab says "Kernel message validation
error" where a kernel is restarted while a view computes (seen on pyzmq 27.3 with ipykernel 7.4).
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable

if "ipykernel" in sys.modules:
    import zmq.utils.garbage  # noqa: F401 (it registers its own end, and the last to register is the first to end)

_sending = threading.RLock()
_over = threading.Event()


def publish(send: Callable[[], object]) -> None:
    """Call `send`, unless Python is ending."""
    with _sending:
        if not _over.is_set():
            send()


@atexit.register
def _end() -> None:
    with _sending:
        _over.set()
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()  # a kernel's returns once what was published before is sent
