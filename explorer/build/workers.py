"""Compiling processes, kept for the session: started when there is work for them, asked one job at a time.

Compiling is two thirds Python, which one process does in one thread at a time. Triton's disk cache is what the processes
share; a worker's answer is a line of text. A worker that ends or does not answer is killed and reported by `WorkerLost`: it
is for the caller to do the job itself. An idle worker ends by itself, and all do with their parent.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracefuse.build import worker
from tracefuse.build.worker import Job

ANSWER_S = 180.0  # Longer than any kernel seen took, chains of unrolled layers among them.


class WorkerLost(Exception):
    """A compiling process that ended or did not answer; the message says what it left on stderr."""


@dataclass(frozen=True)
class Gpu:
    """What kernels are compiled for, in Triton's terms; `shared_limit` is the bytes of shared memory of one program."""

    backend: str
    arch: int
    warp_size: int
    shared_limit: int


class Worker:
    """One process that compiles for `gpu` into `folder`."""

    def __init__(self, gpu: Gpu, folder: Path) -> None:
        self.gpu, self.folder, self.parent = gpu, folder, os.getpid()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process runs)
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        # -P: the script's own folder must not lead the path, as modules of ours are named like the standard library's.
        self._process = subprocess.Popen(
            [sys.executable, "-P", worker.__file__, gpu.backend, str(gpu.arch), str(gpu.warp_size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            # What is asked for is missing or damaged, so that nothing in the folder is to be taken for it.
            env=environment | {"TRITON_CACHE_DIR": str(folder), "TRITON_ALWAYS_COMPILE": "1"},
        )

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked: it runs, and it is this process's own, not that of a parent which forked."""
        return self.parent == os.getpid() and self._process.poll() is None

    def ask(self, job: Job, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """What `tracefuse.build.worker.answer` says of `job`. Raises `WorkerLost` if it ends or takes longer than
        `timeout_s`."""
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(worker.line(job))
            self._process.stdin.flush()
            return json.loads(self._line(time.monotonic() + timeout_s))
        except (OSError, ValueError) as error:
            raise self._lost(str(error)) from error

    def _line(self, deadline_s: float) -> bytes:
        assert self._process.stdout is not None
        out, text = self._process.stdout.fileno(), b""
        while not text.endswith(b"\n"):
            ready, _, _ = select.select([out], [], [], max(deadline_s - time.monotonic(), 0.0))
            if not ready:
                raise self._lost("it did not answer in time")
            part = os.read(out, 1 << 16)
            if not part:
                raise self._lost("it ended")
            text += part
        return text

    def _lost(self, how: str) -> WorkerLost:
        self.close()
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace").strip().splitlines()[-3:]
        status = self._process.returncode
        return WorkerLost(f"{how} (exit status {status}){': ' if said else ''}{' | '.join(said)}")

    def close(self) -> None:
        """End the process now."""
        self._process.kill()
        self._process.communicate()


_idle: list[Worker] = []
_lock = threading.Lock()


def take(gpu: Gpu, folder: Path) -> Worker:
    """A worker for `gpu` and `folder`: an idle one, else a new one. Raises `WorkerLost` if none can be started."""
    with _lock:
        _idle[:] = [one for one in _idle if one.is_alive]
        fitting = [one for one in _idle if (one.gpu, one.folder) == (gpu, folder)]
        if fitting:
            _idle.remove(fitting[0])
            return fitting[0]
    try:
        return Worker(gpu, folder)
    except OSError as error:
        raise WorkerLost(f"it did not start: {error}") from error


def give_back(one: Worker) -> None:
    """Keep a worker for the next build."""
    with _lock:
        _idle.append(one)


@atexit.register
def close_all() -> None:
    """End the idle workers of this process."""
    with _lock:
        for one in _idle:
            if one.is_alive:
                one.close()
        _idle.clear()
