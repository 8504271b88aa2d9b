"""Generated text to modules, a kernel to its launcher, and what the compiler makes of it for a chosen GPU.

What the launches of this machine's GPU need is made by `tracefuse.build.kernels`, in parallel.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tracefuse.build import cache
from tracefuse.build.worker import forget_line_numbers, knowing_the_compiler
from tracefuse.device.dropout import support
from tracefuse.errors import BuildError
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.kernels.launch import HEADER
from tracefuse.optimizers.kernels.tables import table_support
from tracefuse.optimizers.kernels.text import Launch, kernel_source, launches
from tracefuse.optimizers.lowering.layouts import GUESS, Tuning

TRITON_TYPE = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip

HOPPER = 90


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


_lock = threading.RLock()


def load(source_text: str) -> ModuleType:
    """The module that `source_text` defines; the same text gives the same module. Raises what the text raises.

    From a file that is named by the text's hash: Triton reads a kernel's source from a file.
    """
    name = f"tracefuse_generated_{hashlib.sha256(source_text.encode()).hexdigest()[:16]}"
    with _lock:  # another thread may not have the module before all of its text has run
        if name in sys.modules:
            return sys.modules[name]
        path = cache.write_module(name, source_text)
        try:
            module = _executed(name, path)
        except Exception:
            if path.exists():
                raise
            # Another process cleared the cache meanwhile.
            module = _executed(name, cache.write_module(name, source_text))
        forget_line_numbers(module)
        return module


def _executed(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def unload(module: ModuleType) -> None:
    """Forget a module that `load` made, so that what it holds, megabytes of machine code, goes with its last user."""
    sys.modules.pop(module.__name__, None)


def launcher(kernel: Kernel, tuning: Tuning = GUESS) -> Callable[..., Any]:
    """The function that runs `kernel`, with the arguments and results of `Kernel.__call__`: on CUDA tensors by Triton, on CPU
    tensors by its ATen reference."""
    return getattr(module_of(kernel, tuning), kernel.name)


def module_of(kernel: Kernel, tuning: Tuning = GUESS) -> ModuleType:
    """A module that defines `kernel` alone."""
    return load(module_text(kernel, tuning))


def module_text(kernel: Kernel, tuning: Tuning = GUESS) -> str:
    """A file with one kernel: all that its text needs, and the text."""
    return with_support(kernel_source(kernel, tuning))


def with_support(*sources: str) -> str:
    """The text of kernels below all that it needs."""
    source = "\n\n".join(sources)
    return "\n\n".join(filter(None, [HEADER, table_support(source), support(source), source]))


# --- kernel to machine code -------------------------------------------------------------------------------------------


@contextmanager
def kept_in(folder: Path, anew: bool = False) -> Iterator[None]:
    """Let Triton keep machine code in `folder` while this lasts, one thread at a time; with `anew`, whatever lies there is
    not read but made again.

    These are settings of the whole process, and so is by what the compiler is known. They are changed for the shortest
    time: a kernel of the user's own that another thread compiles meanwhile works, and is compiled again by the next process.
    `triton.knobs`, seen on 3.6, 3.7 and 3.9, restores the environment too.
    """
    from triton import knobs

    with _lock, knowing_the_compiler(), knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir = str(folder)
        if anew:
            knobs.compilation.always_compile = True
        yield


def resources(kernel: Kernel, arch: int = HOPPER, tuning: Tuning = GUESS) -> Resources:
    """Compile `kernel` under `tuning` for the GPU architecture `arch` (90 is Hopper) and say what it takes. Needs no GPU.

    Of a kernel that is several launches, the first. Raises `BuildError` where Triton refuses the text or runs as an
    interpreter.
    """
    launch = launches(kernel, tuning)[0]
    made = machine_code(kernel, arch, tuning)[0]
    registers, spills = _ptxas_report(made.asm["ptx"], arch)
    return Resources(registers, made.metadata.shared, spills, launch.num_warps, launch.programs)


def machine_code(kernel: Kernel, arch: int = HOPPER, tuning: Tuning = GUESS) -> tuple[Any, ...]:
    """Triton's `CompiledKernel` for `arch` of each of the kernel's launches: `.asm["ptx"]`, `.asm["cubin"]`, `.metadata`.

    Compiled at each call, since only what `tracefuse.build.kernels` keeps is checked for damage. Raises as `resources` does.
    """
    module = module_of(kernel, tuning)
    return tuple(_compiled(module, kernel.name, launch, arch) for launch in launches(kernel, tuning))


def _compiled(module: ModuleType, name: str, launch: Launch, arch: int) -> Any:
    # Here, not above: without kernels `load` works where Triton has no wheel.
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(module, launch.function)
    if not isinstance(function, triton.JITFunction):
        raise BuildError("Triton interprets kernels in this process: unset TRITON_INTERPRET to compile them")
    names = function.arg_names[: len(launch.pointers)]
    signature = {name: f"*{TRITON_TYPE[dtype]}" for name, dtype in zip(names, launch.pointers, strict=True)}
    # torch's allocator aligns to 512 bytes; a launch finds that out by itself, here it must be said, or loads are scalar.
    aligned = {(at,): [["tt.divisibility", 16]] for at in range(len(names))}
    source = ASTSource(function, signature | dict.fromkeys(launch.blocks, "constexpr"), launch.blocks, aligned)
    try:
        with tempfile.TemporaryDirectory() as folder, kept_in(Path(folder)):
            options = {"num_warps": launch.num_warps, "enable_fp_fusion": True}
            return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    except Exception as error:
        raise BuildError(f"Triton refused {name}: {error}; switch it off with fuse=False") from error


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
