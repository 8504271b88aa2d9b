"""The inside of a compiling process: one job per line on stdin, one answer per line on stdout, both JSON.

Run as a script, so that a process starts in the time of `import triton`: nothing here imports torch or the rest of the
package, and no driver of a GPU is opened. The machine code goes to Triton's disk cache ($TRITON_CACHE_DIR of the process);
the answer only says under which hash, or what the compiler said.

A launch finds that machine code if Triton computes the same key for it, a hash of the function's text, the types and
alignment of its arguments, constants, options, target and the compiler itself. So a job goes through `JITFunction.warmup`,
the very path of a launch up to the launch, with arguments that are only types; and the compiler is known by `compiler_key`
wherever our machine code is written or read. Private to Triton, seen on 3.6, 3.7 and 3.9: `MockTensor`,
`driver.set_active`, `triton.runtime.cache.triton_key`, `starting_line_number`. The disassembly of a `CompiledKernel`,
`asm["sass"]`: seen on 3.6 and 3.7.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

IDLE_S = 300


@dataclass(frozen=True)
class Job:
    """One jitted function to compile: the file that defines it, its name, its pointers' element types as torch calls them
    (`torch.float32`), the constants that follow, warps per program, and the integers between pointers and constants."""

    path: str
    function: str
    pointers: tuple[str, ...]
    blocks: dict[str, int]
    num_warps: int
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True)
class _ElementType:
    """What Triton reads of a torch dtype, its name, without torch."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class _NoGpu:
    """The driver's part in compiling, which is to name the GPU."""

    target: Any

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(job: Job) -> Any:
    """Triton's `CompiledKernel` of `job` for the active driver's GPU; raises what the compiler raises."""
    return warm(getattr(_load(Path(job.path)), job.function), job.pointers, job.blocks, job.num_warps, job.numbers)


def warm(
    function: Any, pointers: tuple[str, ...], blocks: dict[str, int], num_warps: int, numbers: tuple[int, ...] = ()
) -> Any:
    """Let a jitted function find or make its machine code, as its first launch would with pointers aligned to 16 bytes, and
    with `numbers` or others of the same kinds: see `kind_of`."""
    from triton.runtime.jit import MockTensor

    tensors = [MockTensor(_ElementType(name)) for name in pointers]
    return function.warmup(*tensors, *numbers, **blocks, grid=(1,), num_warps=num_warps, enable_fp_fusion=True)


def kind_of(number: int) -> int:
    """The integer that stands for all of 31 bits which Triton compiles the same for: 1 is a constant, and of others it knows
    whether 16 divides them."""
    return 1 if number == 1 else 16 if number % 16 == 0 else 3


def answer(job: Job) -> dict[str, Any]:
    """What the compiler made of `job`: `entry`, its folder's name in the cache, and `shared_bytes`; or `error`."""
    try:
        made = compiled(job)
        is_wrong = loses_constants(made.asm)
    except Exception as error:  # the compiler's own, of any type: it is the answer
        return {"error": f"{type(error).__name__}: {error}"}
    if is_wrong:
        return {"error": "ptxas adds 0 for the constant of a packed 16-bit addition (seen with CUDA 12.8 and 13.1)"}
    return {"entry": Path(next(iter(made.metadata_group.values()))).parent.name, "shared_bytes": made.metadata.shared}


def loses_constants(asm: Mapping[str, str]) -> bool:
    """Whether an `add.s16x2`, which LLVM makes where it knows that integers are small, lost a constant, so that an index or a
    number is off by it.

    Where only one half of the sum is read, ptxas of CUDA 12.8 and 13.1, for sm_90, sm_100 and sm_120, narrows the addition and
    encodes what it knows of the other operand as 0 (`VIADD.16x2 R0, R2, 0x0`; a true 0 is `RZ`). Which operand it knows is in
    its hands, so it is the machine code that tells. The other packed integer operations, minima and maxima, come out right.
    """
    is_packed = re.search(r"\badd\.[su]16x2\b", asm["ptx"]) is not None
    return is_packed and re.search(r"VIADD\.16x2 [^;]*, 0x0\b", asm["sass"]) is not None


@functools.cache
def compiler_key() -> str:
    """The compiler's part in the keys of our machine code: its version, and the size and time of each of its files.

    Triton's own, `triton_key`, is a hash of what is in them: each session's first kernel would wait until all is read.
    """
    import triton

    found = [triton.__version__]
    # Links, as an editable installation has its backends elsewhere.
    for folder, _, names in os.walk(Path(triton.__file__).parent, followlinks=True):
        paths = [os.path.join(folder, name) for name in names if name.endswith((".py", ".so", ".pyd"))]
        found += [f"{path} {(stat := os.stat(path)).st_size} {stat.st_mtime_ns}" for path in paths]
    return "\n".join([found[0], *sorted(found[1:])])


@contextmanager
def knowing_the_compiler() -> Iterator[None]:
    """Let Triton use `compiler_key` while this lasts."""
    import triton.runtime.cache

    its_own = triton.runtime.cache.triton_key
    triton.runtime.cache.triton_key = compiler_key
    try:
        yield
    finally:
        triton.runtime.cache.triton_key = its_own


def forget_line_numbers(module: ModuleType) -> None:
    """Let a kernel keep its machine code wherever in a file it stands.

    Triton's key holds the line at which a function starts, which else serves line tables only. Toggling a pass moves the
    other kernels up or down in the generated file.
    """
    for value in vars(module).values():
        if hasattr(value, "starting_line_number"):
            value.starting_line_number = 0


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    forget_line_numbers(module)
    return module


# --- the process ------------------------------------------------------------------------------------------------------


class _NoTorch(importlib.abc.MetaPathFinder):
    """Triton 3.6 and 3.7 import torch, if there is one, to look at launched tensors, and none is launched here."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname == "torch":
            raise ModuleNotFoundError("a compiling process does without torch", name=fullname)


def serve(backend: str, arch: int, warp_size: int) -> None:
    """Answer jobs until stdin closes, as it does when the parent ends, or until none has come for `IDLE_S` seconds."""
    sys.meta_path.insert(0, _NoTorch())
    # Whatever the compiler prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    driver.set_active(_NoGpu(GPUTarget(backend, arch, warp_size)))
    with knowing_the_compiler():
        while line := _next_line():
            answers.write(json.dumps(answer(Job(**json.loads(line)))) + "\n")
            answers.flush()


def _next_line() -> str:
    """The next line of stdin, "" at its end; the alarm's default action ends a process that waits too long."""
    signal.alarm(IDLE_S)
    line = sys.stdin.readline()
    signal.alarm(0)
    return line


def line(job: Job) -> bytes:
    """A job as `serve` reads it."""
    return (json.dumps(asdict(job)) + "\n").encode()


if __name__ == "__main__":
    # Ctrl-C in a terminal reaches all processes of the group; it is the parent that decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
