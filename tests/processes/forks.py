"""Python programs in processes of their own that need not import torch first: forks of one process which has.

What such a program finds differs from a fresh process in what is imported already, and it ends before Python takes its
objects apart. Where there is a CUDA GPU, which a fork cannot use, each is a fresh process.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

IMPORTED = (
    "torch", "torch._dynamo", "torch._dynamo.aot_compile", "torch._meta_registrations", "torch.distributed.fsdp", "sympy",
    "scipy.sparse.csgraph", "tracefuse.captures", "tracefuse.variant", "tracefuse.backend", "tracefuse.measure.rounds",
)  # fmt: skip


# --- for tests --------------------------------------------------------------------------------------------------------


SERVER = "TRACEFUSE_TESTS_FORKS"
"""The variable with the address of the server of forks, in programs whose own Python programs are forks too."""


def run_python(
    arguments: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 600,
    with_its_own: bool = False,
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run([sys.executable, *arguments], …)` gives with its output as text, and raises after `timeout`
    seconds; `arguments` begin with `-c`, `-m` or a path. `with_its_own`: what it runs so itself is a fork as well."""
    import torch

    environment = os.environ if env is None else env
    if torch.cuda.is_available():
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(
            command, cwd=cwd, env=environment, timeout=timeout, capture_output=True, text=True, check=False
        )
    if with_its_own:
        environment = {**environment, SERVER: _server()}
    return _captured(arguments, cwd, environment, timeout)


def _captured(
    arguments: Sequence[str], cwd: Path | None, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        status = first_failure([start(arguments, cwd, env, out.fileno(), err.fileno())], timeout)
        said = [text_of(file.fileno()) for file in (out, err)]
    return subprocess.CompletedProcess([sys.executable, *map(str, arguments)], status, *said)


def run_ranks(
    arguments: Sequence[str], processes: int, folder: Path | None, environment: Mapping[str, str], timeout: float = 280
) -> subprocess.CompletedProcess[str]:
    """`arguments` as `torchrun` runs them on so many ranks: with one store, and the first rank that fails ends the others, and
    then the status is 1."""
    import torch.distributed as dist

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        forks = []
        for rank in range(processes):
            its = {**environment, **variables_of(rank, processes, store.port)}
            forks.append(start(arguments, folder, its, out.fileno(), err.fileno()))
        status = first_failure(forks, timeout)
        said = [text_of(file.fileno()) for file in (out, err)]
    return subprocess.CompletedProcess(arguments, int(status != 0), *said)


def variables_of(rank: int, processes: int, port: int) -> dict[str, str]:
    """The variables that `torchrun` gives a rank, with the port of a store that is there."""
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    common |= {"TORCHELASTIC_RUN_ID": "forks", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
    common |= {f"{kind}WORLD_SIZE": str(processes) for kind in ("", "LOCAL_", "ROLE_")} | {"GROUP_WORLD_SIZE": "1"}
    common |= {f"{kind}RANK": str(rank) for kind in ("", "LOCAL_", "ROLE_")}
    return common | {"GROUP_RANK": "0", "ROLE_NAME": "default"}


GRACE_S = 2.0
"""What others may still take where one has failed: ranks that tell of the same failure are about to write what they found."""


def first_failure(forks: Sequence[Fork], timeout: float) -> int:
    """The exit status of the first that fails, which ends the others a little later, or 0; raises after `timeout` seconds."""
    until, failed = time.monotonic() + timeout, 0
    try:
        while running := [fork for fork in forks if fork.status is None]:
            ready, _, _ = select.select([fork.told for fork in running], [], [], max(until - time.monotonic(), 0))
            if not ready and not failed:
                raise subprocess.TimeoutExpired(f"forks {[fork.pid for fork in running]}", timeout)
            if not ready:
                break
            for fork in running:
                if fork.told in ready and fork.wait() != 0 and not failed:
                    failed, until = fork.wait(), min(until, time.monotonic() + GRACE_S)
        return failed
    finally:
        for fork in forks:
            fork.end()


def text_of(file: int) -> str:
    return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace").replace("\r\n", "\n")


@dataclass
class Fork:
    pid: int
    told: socket.socket
    """Where the server says how the process ended."""
    status: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, negative for a signal; raises `TimeoutError`."""
        if self.status is None:
            self.told.settimeout(timeout)
            said = self.told.recv(64)
            self.told.close()
            assert said, "the server of forks has ended"
            self.status = int(said)
        return self.status

    def poll(self) -> int | None:
        """Its exit status, as `wait` has it, or None while it runs."""
        has_ended = self.status is not None or bool(select.select([self.told], [], [], 0)[0])
        return self.wait() if has_ended else None

    def end(self) -> None:
        """Where it still runs: by what it can handle, and then by what it cannot, with what it started."""
        for signal_ in (signal.SIGTERM, signal.SIGKILL):
            if self.status is None:
                with suppress(ProcessLookupError):  # it has ended, and nobody was told yet
                    os.killpg(self.pid, signal_)
                with suppress(TimeoutError):
                    self.wait(10)


def start(arguments: Sequence[str], cwd: Path | None, env: Mapping[str, str], out: int, err: int) -> Fork:
    """A process that runs `python *arguments` and writes to the files `out` and `err`."""
    told = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    told.connect(_server())
    wanted = {"arguments": list(map(str, arguments)), "cwd": str(cwd or os.getcwd()), "env": dict(env)}
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(wanted).encode())
        file.flush()
        socket.send_fds(told, [b"run"], [file.fileno(), out, err])
        return Fork(int(told.recv(64)), told)


class Kernel(Fork):
    """What Jupyter asks of the `subprocess.Popen` of a kernel; signals go to its group, and to itself where that is gone."""

    stdin = stdout = stderr = None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_kernel(command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str], **_: Any) -> Kernel:
    """In place of `jupyter_client.launcher.launch_kernel`: the Python programs that the kernel runs are forks too."""
    environment = {**env, SERVER: _server()}
    with open(os.devnull, "w") as nowhere:
        fork = start(command[command.index("-m") :], cwd, environment, nowhere.fileno(), nowhere.fileno())
    return Kernel(fork.pid, fork.told)


@cache
def _server() -> str:
    """The address of this process's server of forks, which ends with this process, or of the one whose fork this is."""
    if address := os.environ.get(SERVER):
        return address
    folder = tempfile.mkdtemp(prefix="forks")
    address = f"{folder}/socket"
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, __file__, address, str(theirs.fileno())]
        server = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    @atexit.register
    def end() -> None:
        ours.close()
        server.wait(30)
        os.unlink(address)
        os.rmdir(folder)

    assert ours.recv(8) == b"ready", "the server of forks did not start"
    return address


# --- the server -------------------------------------------------------------------------------------------------------


def _serve(address: str, life: socket.socket) -> list[str] | None:
    """In the server until its test process ends: None. In a fork: the arguments of its program."""
    import importlib

    for name in IMPORTED:
        importlib.import_module(name)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind(address)
    server.listen(64)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, socket.socket] = {}
    life.send(b"ready")
    while True:
        ready, _, _ = select.select([server, life, woken], [], [])
        if life in ready:
            for pid in running:
                os.killpg(pid, signal.SIGKILL)
            return None
        if woken in ready:
            os.read(woken, 4096)
            _tell_of_ended(running)
        if server in ready:
            asked, _ = server.accept()
            _, files, _, _ = socket.recv_fds(asked, 16, 3)
            pid = os.fork()
            if pid == 0:
                os.setsid()  # before anybody can signal to its group
                asked.send(str(os.getpid()).encode())
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for one in (server, life, asked, *running.values()):
                    one.close()
                os.close(woken)
                os.close(wake)
                return _become(*files)
            for file in files:
                os.close(file)
            running[pid] = asked


def _tell_of_ended(running: dict[int, socket.socket]) -> None:
    for pid in list(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with running.pop(pid) as asked, suppress(BrokenPipeError):  # nobody waits for it any more
                asked.send(str(os.waitstatus_to_exitcode(status)).encode())


def _become(wanted: int, out: int, err: int) -> list[str]:
    with open(wanted) as file:
        file.seek(0)
        given = json.load(file)
    for file, to in ((out, 1), (err, 2)):
        os.dup2(file, to)
        os.close(file)
    os.chdir(given["cwd"])
    os.environ.clear()
    os.environ.update(given["env"])
    time.tzset()
    if os.environ.get("PYTHONFAULTHANDLER"):
        import faulthandler

        faulthandler.enable()
    return given["arguments"]


def _run(arguments: list[str]) -> None:
    """As Python does it, whose own `__main__` is this file."""
    import runpy

    kind, *rest = arguments
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folder = os.getcwd() if kind == "-m" else "" if kind == "-c" else str(Path(kind).resolve().parent)
    if SERVER in os.environ:
        subprocess.run = partial(_run_as_fork, subprocess.run)  # type: ignore[assignment]
    sys.path[0:1] = [folder, *(path for path in paths if path and path not in sys.path)]
    if kind == "-m":
        sys.argv = rest
        runpy._run_module_as_main(rest[0])
        return
    sys.argv = ["-c", *rest[1:]] if kind == "-c" else arguments
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    if kind == "-c":
        code = compile(rest[0], "<string>", "exec")
    else:
        main.__file__ = os.path.join(os.getcwd(), kind)
        code = compile(Path(kind).read_bytes(), main.__file__, "exec")
    exec(code, vars(main))


LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def _run_as_fork(
    run: Callable[..., Any],
    command: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    check: bool = False,
    capture_output: bool = False,
    text: bool = False,
    **options: Any,
) -> Any:
    """`subprocess.run`: of Python programs whose output is text or nobody's."""
    program, *arguments = map(str, command)
    environment = os.environ if env is None else env
    if options or capture_output != text or program != sys.executable:
        options |= {"cwd": cwd, "env": env, "timeout": timeout, "capture_output": capture_output, "text": text}
        return run(command, check=check, **options)
    until = threading.TIMEOUT_MAX if timeout is None else timeout
    if arguments[: len(LAUNCHER)] == LAUNCHER:
        count, *rest = arguments[len(LAUNCHER) :]
        done = run_ranks(rest, int(count), cwd, environment, until)
        if not capture_output:
            print(done.stdout, end="")
            print(done.stderr, end="", file=sys.stderr)
    elif capture_output:
        done = _captured(arguments, cwd, environment, until)
    else:
        sys.stdout.flush()
        done = subprocess.CompletedProcess(command, first_failure([start(arguments, cwd, environment, 1, 2)], until))
    if check:
        done.check_returncode()
    return done


def _status_of(arguments: list[str]) -> int:
    try:
        _run(arguments)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        ours = error.__traceback__
        assert ours is not None
        its = ours.tb_next and ours.tb_next.tb_next  # the frames of this file come first
        sys.excepthook(type(error), error.with_traceback(its), its)
        return 1
    return 0


def _end(status: int) -> None:
    """As Python ends, but for objects, which are left as they are: taking those of torch apart takes long."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    given = _serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
    _end(0 if given is None else _status_of(given))
