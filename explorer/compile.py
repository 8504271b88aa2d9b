"""Building kernels: generated text to a module, a kernel to its launcher, and what the compiler made of it.

    load(text)            the module, from a file named by the text's hash (Triton reads a kernel's source from a file)
    launcher(kernel)      a function that runs the kernel: on CUDA tensors by Triton, on CPU tensors by its ATen reference
    resources(kernel)     registers, shared memory and spills for a chosen GPU, with no GPU in the machine
    build(kernels)        `resources` of many, each distinct kernel once, several at a time
    warm_up(kernels)      the same for this machine's GPU, before the first launches

Triton's own disk cache keeps the machine code, so that a kernel is compiled once per machine whichever way it is asked for.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tracefuse.dropout import support
from tracefuse.errors import TracefuseError
from tracefuse.optimizers.kernel import Kernel
from tracefuse.optimizers.triton import HEADER, Launch, kernel_source, launches

TRITON_TYPE = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip

HOPPER = 90


class BuildError(TracefuseError):
    """A kernel's text that the compiler refused, or a cache that cannot be written."""


@dataclass(frozen=True)
class Resources:
    """What one program of a kernel takes: `registers` per thread, `shared_bytes`, and `spills`, the bytes that it stores to
    local memory because registers ran out. `num_warps` times 32 threads run one program, `programs` of them the kernel."""

    registers: int
    shared_bytes: int
    spills: int
    num_warps: int
    programs: int


# --- text to module ---------------------------------------------------------------------------------------------------


def cache_directory() -> Path:
    """Where generated files lie: $TRACEFUSE_CACHE, else the platform's place for caches."""
    if chosen := os.environ.get("TRACEFUSE_CACHE"):
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "tracefuse"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "tracefuse"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tracefuse"


def load(source_text: str) -> ModuleType:
    """The module that `source_text` defines; the same text gives the same module. Raises what the text raises."""
    name = f"tracefuse_generated_{hashlib.sha256(source_text.encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, _written(name, source_text))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    _forget_line_numbers(module)
    return module


def _forget_line_numbers(module: ModuleType) -> None:
    """Let a kernel keep its compiled code wherever in a file it stands.

    Triton's cache key holds the line at which a function starts (`JITFunction.starting_line_number`, seen on 3.6, 3.7 and
    3.9), which else serves line tables only. Toggling a pass moves the other kernels up or down in the generated file.
    """
    for value in vars(module).values():
        if hasattr(value, "starting_line_number"):
            value.starting_line_number = 0


def _written(name: str, text: str) -> Path:
    """The file `name`.py in the cache; written whole or not at all, as other processes may read it."""
    path = cache_directory() / f"{name}.py"
    try:
        if path.exists() and path.read_text(encoding="utf-8") == text:
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        raise BuildError(
            f"cannot write generated code to {path.parent}: {error}; set TRACEFUSE_CACHE to a folder"
        ) from error
    return path


def launcher(kernel: Kernel) -> Callable[..., Any]:
    """The function that runs `kernel`; its arguments and results are those of `Kernel.__call__`."""
    return getattr(_module(kernel), kernel.name)


def _module(kernel: Kernel) -> ModuleType:
    source = kernel_source(kernel)
    return load("\n\n".join(filter(None, [HEADER, support(source), source])))


# --- kernel to machine code -------------------------------------------------------------------------------------------


def resources(kernel: Kernel, arch: int = HOPPER) -> Resources:
    """Compile `kernel` for the GPU architecture `arch` (90 is Hopper) and say what it takes. Needs no GPU.

    Of a kernel that is several launches, the first. Raises `BuildError` where Triton refuses the text or runs as an
    interpreter.
    """
    launch = launches(kernel)[0]
    made = machine_code(kernel, arch)[0]
    registers, spills = _ptxas_report(made.asm["ptx"], arch)
    return Resources(registers, made.metadata.shared, spills, launch.num_warps, launch.programs)


def machine_code(kernel: Kernel, arch: int = HOPPER) -> tuple[Any, ...]:
    """Triton's `CompiledKernel` for `arch` of each of the kernel's launches: `.asm["ptx"]`, `.asm["cubin"]`, `.metadata`.

    Raises as `resources` does.
    """
    return tuple(_compiled(kernel, launch, arch) for launch in launches(kernel))


def _compiled(kernel: Kernel, launch: Launch, arch: int) -> Any:
    # Here, not above: without kernels `load` works where Triton has no wheel.
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(_module(kernel), launch.function)
    if not isinstance(function, triton.JITFunction):
        raise BuildError("Triton interprets kernels in this process: unset TRITON_INTERPRET to compile them")
    names = function.arg_names[: len(launch.pointers)]
    signature = {name: f"*{TRITON_TYPE[dtype]}" for name, dtype in zip(names, launch.pointers, strict=True)}
    # torch's allocator aligns to 512 bytes; a launch finds that out by itself, here it must be said, or loads are scalar.
    aligned = {(at,): [["tt.divisibility", 16]] for at in range(len(names))}
    source = ASTSource(function, signature | dict.fromkeys(launch.blocks, "constexpr"), launch.blocks, aligned)
    try:
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": launch.num_warps})
    except Exception as error:
        raise BuildError(f"Triton refused {kernel.name}: {error}; switch it off with fuse=False") from error


def _ptxas_report(ptx: str, arch: int) -> tuple[int, int]:
    """(registers per thread, bytes of spill stores), from the assembler's own words."""
    # The wheel of 3.9 brings two assemblers, of which the one called `ptxas` is too old for its own PTX. This function,
    # seen on 3.6, 3.7 and 3.9, names the one that Triton itself takes for an architecture.
    from triton.backends.nvidia.compiler import get_ptxas

    target = f"sm_{arch}a" if arch >= HOPPER else f"sm_{arch}"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.ptx").write_text(ptx)
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={target}", "kernel.ptx", "-o", "kernel.cubin"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    registers = re.search(r"Used (\d+) registers", done.stderr)
    spills = re.search(r"(\d+) bytes spill stores", done.stderr)
    if done.returncode or registers is None or spills is None:
        raise BuildError(f"ptxas failed: {done.stderr.strip()}; reinstall triton, whose wheel brings it")
    return int(registers[1]), int(spills[1])


def build(kernels: Iterable[Kernel], arch: int | None = None, jobs: int | None = None) -> dict[Kernel, Resources]:
    """`resources` of each distinct kernel, `jobs` at a time (all processors by default).

    `arch` defaults to this machine's GPU, for which the launches that follow then find their machine code in Triton's
    cache; without a GPU, to Hopper.
    """
    arch = _arch() if arch is None else arch
    distinct = list(dict.fromkeys(kernels))
    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        return dict(zip(distinct, pool.map(lambda kernel: resources(kernel, arch), distinct), strict=True))


def warm_up(kernels: Iterable[Kernel], jobs: int | None = None) -> None:
    """Compile `kernels` for this machine's GPU, `jobs` at a time, so that their first launches find machine code.

    Does nothing without a GPU. Raises `BuildError` as `resources` does.
    """
    if torch.cuda.is_available():
        with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
            list(pool.map(lambda kernel: machine_code(kernel, _arch()), dict.fromkeys(kernels)))


def _arch() -> int:
    if not torch.cuda.is_available():
        return HOPPER
    major, minor = torch.cuda.get_device_capability()
    return major * 10 + minor
