"""A kernel that ends while a thread of a view publishes leaves no message that is cut short."""

from __future__ import annotations

import json
import threading
import time

import pytest
import zmq
from jupyter_client.manager import start_new_kernel

pytestmark = pytest.mark.slow

PUBLISHING = """
import atexit, threading, time
atexit.register(time.sleep, 0.3)  # what other libraries do when they end, between pyzmq and ipykernel
from tracefuse.widgets.view.answering import IDLE, Answering

view = Answering()

def publish():
    n = 0
    while True:
        n += 1
        view.status = IDLE | {"text": f"{n} " + 200_000 * "a"}
        time.sleep(0.005)

threading.Thread(target=publish, daemon=True).start()
"""


def is_whole(frames: list[bytes]) -> bool:
    """Whether they are a message of Jupyter's: behind the delimiter a signature and four parts in JSON."""
    try:
        for part in frames[frames.index(b"<IDS|MSG>") + 2 :][:4]:
            json.loads(part)
    except ValueError:
        return False
    return len(frames) - frames.index(b"<IDS|MSG>") >= 6


@pytest.mark.parametrize("slow_s", [0.0, 0.02], ids=["at once", "slowly"])
def test_no_message_is_cut_where_a_kernel_ends(slow_s: float) -> None:
    """However fast its messages are read: what waits for its reader is whole, too."""
    manager, client = start_new_kernel(kernel_name="python3")
    published: list[list[bytes]] = []
    is_over = threading.Event()

    def read() -> None:
        with zmq.Context.instance().socket(zmq.SUB) as socket:
            socket.rcvhwm = 1 if slow_s else 0
            socket.subscribe(b"")
            socket.connect(f"tcp://127.0.0.1:{manager.iopub_port}")
            while socket.poll(50) or not is_over.is_set():
                if socket.poll(0):
                    published.append(socket.recv_multipart())
                    time.sleep(slow_s)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        reply = client.execute_interactive(PUBLISHING, timeout=120, output_hook=lambda message: None)
        assert reply["content"]["status"] == "ok"
        while not any(sum(map(len, frames)) > 200_000 for frames in published):
            time.sleep(0.01)
        time.sleep(10 * slow_s)
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
        is_over.set()
        reader.join()
    assert [frames for frames in published if not is_whole(frames)] == []
