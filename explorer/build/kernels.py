"""Machine code for this machine's GPU before the first launch: unique kernels, in parallel, kept on disk.

`build` looks up each launch among the cache's facts. What is missing is shared out over lanes: this process, which can
begin at once, and compiling processes (`tracefuse.build.workers`), as many as there are processors and work for. All write to
Triton's disk cache in our folder; a launch itself would look in the user's, so `preload` takes every launch up to the
point of launching while the setting points to ours: its key is found there, read, and kept by the jitted function.

A kernel that the compiler refuses, or that wants more shared memory than a program can have, is no error: it runs as its
ATen ops, and the reason goes into the text and the view.
"""

from __future__ import annotations

import ast
import hashlib
import os
import queue
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tracefuse.build import cache, worker
from tracefuse.build.modules import kept_in, module_text
from tracefuse.build.worker import Job
from tracefuse.build.workers import Gpu, Worker, WorkerLost, give_back, take
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.kernels.text import Launch, launches
from tracefuse.optimizers.lowering.layouts import GUESS, Tuning
from tracefuse.optimizers.trace import human_bytes

IN_PROCESS = 4
"""So few launches this process compiles alone: another one would first have to start."""

Progress = Callable[[float, str], None]
"""Called with the fraction done, 0 to 1, and with what is being done."""

Asked = tuple[Kernel, Tuning]
"""A kernel, and the block sizes under which it is asked for."""

NONE_WITH_NUMBERS: Mapping[str, WithNumbers] = {}

_JITTED = "tracefuse_jitted_"

_refused: dict[tuple[Path, str], str] = {}
"""(folder, fact key) -> the compiler's message: a refusal holds for this session, and the next one tries again."""


@dataclass(frozen=True)
class WithNumbers:
    """A kernel that takes numbers. `jitted` is the text of its functions, which other sizes have too, and `names` are their
    names in it; `source` is the text of what launches them in a module of one size; `launches` are by their names there."""

    jitted: str
    names: Mapping[str, str]
    source: str
    launches: tuple[Launch, ...]
    aligning: Mapping[str, tuple[bool, ...]]
    """Which of each launch's numbers decide on which loads are aligned."""

    def kinds(self, launch: Launch) -> tuple[int, ...]:
        """Integers that are compiled as the launch's numbers are."""
        known = zip(launch.numbers, self.aligning[launch.function], strict=True)
        return tuple(worker.kind_of(number) if aligns else 3 for number, aligns in known)


@dataclass(frozen=True)
class _Task:
    """One launch of a kernel to compile, the text that its file has, and the key of what is known of it, which tunings, and
    sizes that are numbers for it, may share."""

    asked: Asked
    job: Job
    text: str
    key: str


def this_gpu() -> Gpu | None:
    """The current CUDA device as Triton sees it; None where kernels are not compiled: on the CPU, or interpreted."""
    if not torch.cuda.is_available():
        return None
    from triton import knobs
    from triton.runtime import driver

    if knobs.runtime.interpret:
        return None
    target, device = driver.active.get_current_target(), driver.active.get_current_device()
    shared = driver.active.utils.get_device_properties(device)["max_shared_mem"]
    return Gpu(target.backend, target.arch, target.warp_size, shared)


def build(
    kernels: Iterable[Kernel],
    progress: Progress | None = None,
    jobs: int | None = None,
    tunings: Mapping[str, Tuning] | None = None,
    with_numbers: Mapping[str, WithNumbers] = NONE_WITH_NUMBERS,
) -> dict[str, str]:
    """Compile `kernels` for this machine's GPU, `jobs` at a time (all processors by default).

    `tunings` are by the kernels' names; a kernel without one is the guess. So are those `with_numbers`, whose functions take
    some of their sizes. Returns the names of the kernels that cannot run
    on it, with the reason. Without a GPU nothing is compiled and nothing refused. Raises `BuildError` where the cache cannot
    be written.
    """
    asked = [(kernel, (tunings or {}).get(kernel.name, GUESS)) for kernel in kernels]
    return {kernel.name: reason for (kernel, _), reason in build_all(asked, progress, jobs, with_numbers).items()}


def build_all(
    asked: Iterable[Asked],
    progress: Progress | None = None,
    jobs: int | None = None,
    with_numbers: Mapping[str, WithNumbers] = NONE_WITH_NUMBERS,
) -> dict[Asked, str]:
    """As `build`, of kernels under given tunings: which of `asked` cannot run, with the reason."""
    gpu = this_gpu()
    if gpu is None:
        return {}
    tasks = [task for one in dict.fromkeys(asked) for task in _tasks(*one, with_numbers.get(one[0].name))]
    folder = cache.machine_code_directory()
    facts: dict[str, Any] = {task.key: _known(task, folder) for task in tasks}
    missing = {task.key: task for task in tasks if facts[task.key] is None}
    if missing:
        facts |= _compile(list(missing.values()), gpu, folder, progress, jobs or os.cpu_count() or 1)
        cache.trim()
    refused: dict[Asked, str] = {}
    for task in tasks:
        if (reason := _reason(facts[task.key], gpu)) is not None:
            refused.setdefault(task.asked, reason)
    return refused


def _reason(fact: dict[str, Any], gpu: Gpu) -> str | None:
    if "error" in fact:
        return f"the compiler refused it: {fact['error']}"
    if fact["shared_bytes"] > gpu.shared_limit:
        needs, has = human_bytes(fact["shared_bytes"]), human_bytes(gpu.shared_limit)
        return f"a program needs {needs} of shared memory, and this GPU has {has}"
    return None


def preload(
    module: ModuleType,
    kernels: Iterable[Kernel],
    tunings: Mapping[str, Tuning] | None = None,
    with_numbers: Mapping[str, WithNumbers] = NONE_WITH_NUMBERS,
) -> list[Any]:
    """Give the jitted functions of a loaded module the machine code of `kernels`, so that their launches compile nothing.

    It is that of the current GPU and of aligned pointers; for others Triton compiles at the launch. Triton also compiles a
    stub in C for each new list of arguments: many at a time, here. Does nothing without a GPU. The kernels must have
    passed `build`, under the same `tunings` and `with_numbers`. Returns Triton's `CompiledKernel` of each launch. Raises
    `triton.OutOfResources` where the GPU cannot hold a program.
    """
    if this_gpu() is None:
        return []
    device, found = torch.cuda.current_device(), []
    with kept_in(cache.machine_code_directory()), ThreadPoolExecutor() as pool:
        loading = []
        for launch in [
            one
            for kernel in kernels
            for one in _launches(kernel, (tunings or {}).get(kernel.name, GUESS), with_numbers.get(kernel.name))
        ]:
            found.append(made := _read(getattr(module, launch.function), launch))
            loading.append(pool.submit(_make_ready, made, device))
        for one in loading:
            one.result()
    return found


def _read(function: Any, launch: Launch) -> Any:
    """The machine code of a launch, in the folder that is set; made again where another process clears that meanwhile, or
    has left half of an entry by it."""
    arguments = (tuple(map(str, launch.pointers)), launch.blocks, launch.num_warps, launch.numbers)
    try:
        return worker.warm(function, *arguments)
    except Exception:  # of many types; what is wrong with the kernel itself raises again
        with kept_in(cache.machine_code_directory(), anew=True):
            return worker.warm(function, *arguments)


def _make_ready(made: Any, device: int) -> None:
    """Load machine code on the GPU. `CompiledKernel.run` does that when first asked for; seen on triton 3.6, 3.7 and 3.9."""
    torch.cuda.set_device(device)
    _ = made.run


# --- what there is to compile -----------------------------------------------------------------------------------------


def _launches(kernel: Kernel, tuning: Tuning, taking: WithNumbers | None) -> tuple[Launch, ...]:
    return launches(kernel, tuning) if taking is None else taking.launches


def _tasks(kernel: Kernel, tuning: Tuning, taking: WithNumbers | None = None) -> list[_Task]:
    text = jitted_text(module_text(kernel, tuning) if taking is None else taking.jitted)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = _written(name, text)
    jobs = [_job(path, one, taking) for one in _launches(kernel, tuning, taking)]
    # Without the path: a cache may be moved, and the text is in the name.
    keys = [f"build checked {name} {j.function} {j.pointers} {sorted(j.blocks.items())} {j.num_warps}" for j in jobs]
    keys = [f"{key} {job.numbers}" if job.numbers else key for key, job in zip(keys, jobs, strict=True)]
    return [_Task((kernel, tuning), job, text, key) for job, key in zip(jobs, keys, strict=True)]


def _job(path: str, one: Launch, taking: WithNumbers | None) -> Job:
    function = one.function if taking is None else taking.names[one.function]
    kinds = taking.kinds(one) if taking is not None else ()
    return Job(path, function, tuple(map(str, one.pointers)), one.blocks, one.num_warps, kinds)


def _written(name: str, text: str) -> str:
    return str(cache.write_module(f"{_JITTED}{name}", text))


def jitted_text(source: str) -> str:
    """What a compiling process needs of generated text: `@triton.jit` functions, their constants and imports, no torch."""
    kept = [n for n in ast.parse(source).body if _is_for_triton(n)]
    return "\n\n\n".join(_segment(source, node) for node in kept) + "\n"


def _is_for_triton(node: ast.stmt) -> bool:
    if isinstance(node, ast.FunctionDef):
        return any(ast.unparse(one).startswith("triton.jit") for one in node.decorator_list)
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return "torch" not in ast.unparse(node)
    return isinstance(node, (ast.Assign, ast.AnnAssign)) and "tl." in ast.unparse(node)


def _segment(source: str, node: ast.stmt) -> str:
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
    return "\n".join(source.splitlines()[first - 1 : node.end_lineno])


def _known(task: _Task, folder: Path) -> dict[str, Any] | None:
    """What is known of a task, if its machine code is still there and whole: Triton would send half of a file to the GPU."""
    if (folder, task.key) in _refused:
        return {"error": _refused[folder, task.key]}
    fact = cache.read_record(task.key, {"entry": str, "shared_bytes": int, "digest": str})
    if fact is None:
        return None
    entry = folder / fact["entry"]
    if cache.digest(entry) != fact["digest"]:
        # Triton's list of the entry's files, to which it would add. The others may be another process's, which writes them.
        for path in entry.glob("__grp__*"):
            path.unlink(missing_ok=True)
        return None
    cache.touch(entry)
    return fact


# --- lanes ------------------------------------------------------------------------------------------------------------


def _compile(
    tasks: Sequence[_Task], gpu: Gpu, folder: Path, progress: Progress | None, jobs: int
) -> dict[str, dict[str, Any]]:
    """What the compiler says of each task, by its key. The lane `None` is this process."""
    total, found = len(tasks), {}
    report = progress or (lambda fraction, text: None)
    report(0.0, _compiling(0, total))
    lanes: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()
    started = _start(gpu, folder, min(jobs, total) - 1 if total > IN_PROCESS else 0)
    for lane in (None, *started):
        lanes.put(lane)
    with kept_in(folder, anew=True), ThreadPoolExecutor(1 + len(started)) as pool:
        futures = {pool.submit(_on_a_lane, task, lanes): task for task in tasks}
        try:
            for future in as_completed(futures):
                found[futures[future].key] = fact = future.result()
                _keep(futures[future], folder, fact)
                report(len(found) / total, _compiling(len(found), total))
        finally:  # after Ctrl-C, only what has begun is finished
            pool.shutdown(cancel_futures=True)
            while not lanes.empty():
                if (lane := lanes.get()) is not None:
                    give_back(lane)
    return found


def _compiling(done: int, total: int) -> str:
    return f"compiling {min(done + 1, total)} of {total} kernels"


def _start(gpu: Gpu, folder: Path, count: int) -> list[Worker]:
    started: list[Worker] = []
    try:
        while len(started) < count:
            started.append(take(gpu, folder))
    except WorkerLost as error:
        _warn(error)
    return started


def _on_a_lane(task: _Task, lanes: queue.SimpleQueue[Worker | None]) -> dict[str, Any]:
    lane = lanes.get()
    try:
        fact = _ask(lane, task.job)
        if "error" in fact:  # Another process may have cleared the cache meanwhile: once more, from the text on.
            _written(Path(task.job.path).stem.removeprefix(_JITTED), task.text)
            fact = _ask(lane, task.job)
        return fact
    except WorkerLost as error:
        lane = None
        _warn(error)
        return worker.answer(task.job)
    finally:
        lanes.put(lane)


def _ask(lane: Worker | None, job: Job) -> dict[str, Any]:
    return worker.answer(job) if lane is None else lane.ask(job)


def _warn(error: WorkerLost) -> None:
    warnings.warn(f"a compiling process was lost: {error}; this process compiles instead", stacklevel=2)


def _keep(task: _Task, folder: Path, fact: dict[str, Any]) -> None:
    if "error" in fact:
        _refused[folder, task.key] = fact["error"]
    else:
        cache.write_json(task.key, fact | {"digest": cache.digest(folder / fact["entry"])})
