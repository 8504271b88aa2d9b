"""Machine code for a GPU that is not there: by several processes, found by launches, and refused without loss."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from kernels import HOPPER_GPU, kernel_of_types
from triton import knobs

import tracefuse
from tracefuse.build import cache, cache_folders, worker, workers
from tracefuse.build import kernels as building
from tracefuse.build.kernels import build, build_all, jitted_text, preload
from tracefuse.build.modules import load, machine_code, module_text
from tracefuse.build.worker import loses_constants
from tracefuse.build.workers import Gpu, Worker, WorkerLost
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.kernels.launch import HEADER
from tracefuse.optimizers.kernels.text import kernel_source, launches
from tracefuse.optimizers.lowering.layouts import GUESS, Tuning
from tracefuse.widgets.payload.program import payload

compiles = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets in this process")
pytestmark = compiles


def some_kernels(count: int) -> list[Kernel]:
    """Different row reductions: they need shared memory."""

    def softmax_after(shift: int) -> Kernel:
        return kernel_of_types(lambda x: torch.softmax(x + shift, -1), ((8, 700), torch.bfloat16))

    return [softmax_after(shift) for shift in range(1, count + 1)]


def launch_path(module: Any, kernel: Kernel) -> list[bool]:
    """Takes the kernel's first launches, up to the launch, on real tensors: one item per look into the disk cache,
    whether it was found there."""
    looks: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_: looks.append(cache_hit)
    try:
        for one in launches(kernel):
            tensors = [torch.empty(8, dtype=dtype) for dtype in one.pointers]
            getattr(module, one.function).warmup(
                *tensors, **one.blocks, grid=(1,), num_warps=one.num_warps, enable_fp_fusion=True
            )
    finally:
        knobs.compilation.listener = None
    return looks


def module_of(kernel: Kernel, mark: object) -> Any:
    return load(f"{HEADER}\n\n# {mark}\n\n{kernel_source(kernel)}")


def load_all(kernels: list[Kernel], mark: object) -> Any:
    return load("\n\n".join([HEADER, f"# {mark}", *map(kernel_source, kernels)]))


def test_several_processes_compile_and_progress_counts(gpu: Path) -> None:
    said: list[tuple[float, str]] = []
    assert build(some_kernels(4), lambda fraction, text: said.append((fraction, text)), jobs=3) == {}
    assert said[0] == (0.0, "compiling 1 of 4 kernels")
    assert (0.5, "compiling 3 of 4 kernels") in said
    assert said[-1][0] == 1.0
    assert len(workers._idle) == 2  # kept for the next build
    assert sum(e.kind == "machine" for e in cache.entries()) == 4


def test_a_launch_finds_what_a_worker_made_and_nothing_of_the_users_is_touched(gpu: Path) -> None:
    (kernel,) = some_kernels(1)
    (task,) = building._tasks(kernel, GUESS)
    folder = cache.machine_code_directory()
    one = Worker(HOPPER_GPU, folder)
    assert (folder / one.ask(task.job)["entry"]).is_dir()
    one.close()
    module = module_of(kernel, gpu)
    with building.kept_in(folder):
        assert launch_path(module, kernel) == [True]
    assert os.environ["TRITON_CACHE_DIR"] == knobs.cache.dir == str(gpu)
    assert not gpu.exists()


def test_after_preload_a_launch_looks_nowhere(gpu: Path) -> None:
    (kernel,) = some_kernels(1)
    build([kernel])
    module = module_of(kernel, gpu)
    preload(module, [kernel])
    assert launch_path(module, kernel) == []
    assert not gpu.exists()


def test_two_processes_make_the_same_kernel_in_one_cache(gpu: Path) -> None:
    (task,) = building._tasks(some_kernels(1)[0], GUESS)
    pair = [Worker(HOPPER_GPU, cache.machine_code_directory()) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda w: w.ask(task.job), pair)
    assert one == two
    assert one["shared_bytes"] > 0
    assert building._known(task, cache.machine_code_directory()) is None  # facts are the parent's to write
    for w in pair:
        w.close()


def test_what_is_in_the_cache_is_not_compiled_again(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = some_kernels(2)
    build(kernels)
    monkeypatch.setattr(building, "_compile", None)
    assert build(kernels) == {}


def column_sum() -> Kernel:
    """Two launches: sums of chunks, then of those."""
    return kernel_of_types(lambda x: (x * 2).sum(0), ((4096, 70), torch.float32))


def test_a_kernel_is_built_under_several_tunings_and_what_they_share_once(gpu: Path) -> None:
    kernel, said = column_sum(), []
    asked = [(kernel, GUESS), (kernel, Tuning(0, 1)), (kernel, Tuning(0, -1))]
    assert build_all(asked, lambda fraction, text: said.append(text)) == {}
    assert said[0] == "compiling 1 of 4 kernels", "three of the first launch, one of the second"
    preloaded = preload(module_of(kernel, gpu), [kernel], {kernel.name: Tuning(0, 1)})
    assert [made.metadata.num_warps for made in preloaded] == [one.num_warps for one in launches(kernel, Tuning(0, 1))]


def test_the_tuning_that_is_refused_is_named(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here its second launch is."""
    kernel, large = column_sum(), Tuning(1, 0)

    def broken(kernel: Kernel, tuning: Tuning) -> str:
        first, second = module_text(kernel, tuning).split(f"def {kernel.name}_finish(")
        second = second.replace("tl.load(", "tl.lode(") if tuning == large else second
        return f"{first}def {kernel.name}_finish({second}"

    monkeypatch.setattr(building, "module_text", broken)
    ((refused, reason),) = build_all([(kernel, GUESS), (kernel, large)]).items()
    assert refused == (kernel, large)
    assert "the compiler refused it" in reason
    assert build([kernel], tunings={kernel.name: large}) == {kernel.name: reason}
    assert build([kernel]) == {}


def test_a_kernel_that_the_assembler_gets_wrong_is_refused(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its indices are known to be below 125, `index // 5 % 5 - 2` becomes a packed addition of 16 bits."""
    padded = kernel_of_types(
        lambda g, x: torch.ops.aten.slice_backward.default(g * x, [5, 5, 5], 1, 2, 4, 1),
        ((), torch.float32), ((5, 2, 5), torch.float32),
    )  # fmt: skip
    assert build([padded]) == {}
    made = building.module_text
    monkeypatch.setattr(building, "module_text", lambda *of: made(*of).replace("tl.program_id(0) * COLS + ", ""))
    refused = build([padded])
    if not refused:
        pytest.skip(f"the compiler of Triton {triton.__version__} makes no such addition, or gets it right")
    assert "packed 16-bit addition" in refused[padded.name]


def of_16_bits(x: torch.Tensor) -> torch.Tensor:
    return (x * 3 - 2).clamp(-5, 7) + x


@pytest.mark.parametrize("shape", [(32, 64), (3, 5, 7)])
def test_packed_additions_that_the_assembler_gets_right_are_no_reason(gpu: Path, shape: tuple[int, ...]) -> None:
    """Both halves of a pair of 16-bit numbers are read."""
    kernel = kernel_of_types(of_16_bits, (shape, torch.int16))
    (made,) = machine_code(kernel)
    assert "add.s16x2" in made.asm["ptx"] or shape != (32, 64)
    assert build([kernel]) == {}


@pytest.mark.parametrize(
    ("ptx", "sass", "is_lost"),
    [
        ("add.s16x2 %r3, %r1, %r2;", "--:-:-:-:1\tVIADD.16x2 R0, R2, 0x0;", True),
        ("add.u16x2 %r3, %r1, %r2;", "--:-:-:-:1\tVIADD.16x2 R0, R2.reuse, 0x0;", True),
        ("add.s16x2 %r3, %r1, %r2;", "--:-:-:-:1\tVIADD.16x2 R0, R2, 0x60006;", False),
        ("add.s16x2 %r3, %r1, %r2;", "--:-:-:-:1\tVIADD.16x2 R0, R2, RZ;", False),
        ("min.s16x2 %r3, %r1, %r2;", "--:-:-:-:1\tVIMNMX.S16x2 R0, R2, 0x60006, PT;", False),
    ],
)
def test_what_the_machine_code_of_a_lost_constant_looks_like(ptx: str, sass: str, is_lost: bool) -> None:
    assert loses_constants({"ptx": ptx, "sass": sass}) is is_lost


def test_only_kernels_with_packed_additions_are_disassembled() -> None:
    assert not loses_constants({"ptx": "add.s32 %r3, %r1, 5;"})


def test_machine_code_that_was_removed_is_made_again(gpu: Path) -> None:
    kernels = some_kernels(1)
    build(kernels)
    for entry in cache.entries():
        if entry.kind == "machine":
            cache.remove(entry.path)
    build(kernels)
    assert sum(e.kind == "machine" for e in cache.entries()) == 1


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    """One bit, which neither a size nor Triton shows."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture
def same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the same text: the assembler notes when its file was modified, which in the cache is when it was used."""
    monkeypatch.setattr(cache, "touch", lambda path: None)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.usefixtures("same_bytes")
@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
@pytest.mark.parametrize("name", ["*.cubin", "*_kernel.json", "__grp__*", "*.ptx"])
def test_damaged_machine_code_is_compiled_again(gpu: Path, damage: Callable[[Path], None], name: str) -> None:
    (kernel,) = some_kernels(1)
    build([kernel])
    (entry,) = cache.machine_code_directory().iterdir()
    whole = contents(entry)
    (damaged,) = (path for path in entry.glob(name) if name[0] == "_" or path.name[0] != "_")
    damage(damaged)
    assert build([kernel]) == {}
    assert contents(entry) == whole
    (made,) = preload(module_of(kernel, (gpu, damage, name)), [kernel])
    assert made.asm["cubin"] == whole[f"{kernel.name}_kernel.cubin"]


@pytest.mark.usefixtures("same_bytes")
@pytest.mark.parametrize("jobs", [1, 2], ids=["here", "by a worker"])
def test_damaged_machine_code_of_which_nothing_is_known_is_compiled_again(gpu: Path, jobs: int) -> None:
    """Else half of a file would be noted as what the compiler made."""
    kernels = some_kernels(3)
    build(kernels)
    cache.remove(cache_folders.versioned() / "facts")
    damaged = list(cache.machine_code_directory().glob("*/*.cubin"))
    whole = [path.read_bytes() for path in damaged]
    for path in damaged:
        truncate(path)
    assert build(kernels, jobs=jobs) == {}
    assert [path.read_bytes() for path in damaged] == whole


@pytest.mark.parametrize("value", [7, {"entry": "ABC"}, {"entry": 1, "shared_bytes": 2, "digest": "x"}])
def test_a_fact_that_is_none_is_found_again(gpu: Path, value: object) -> None:
    (kernel,) = some_kernels(1)
    (task,) = building._tasks(kernel, GUESS)
    cache.write_json(task.key, value)
    assert build([kernel]) == {}
    assert building._known(task, cache.machine_code_directory()) is not None


@pytest.mark.parametrize("what", ["modules", "machine"])
def test_what_another_process_clears_while_it_is_needed_is_made_again(
    gpu: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    from triton.runtime.cache import FileCacheManager

    put, left = FileCacheManager.put, ["*.cubin"]

    def clearing_put(self: Any, data: Any, filename: str, **options: Any) -> str:
        path = put(self, data, filename, **options)
        if left and Path(path).match(left[0]):
            left.clear()
            cache.remove(cache_folders.versioned() / what)
        return path

    monkeypatch.setattr(FileCacheManager, "put", clearing_put)
    kernels = some_kernels(2)
    assert build(kernels) == {}
    assert left == []
    assert sum(e.kind == "machine" for e in cache.entries()) == 2


def test_machine_code_that_vanishes_while_it_is_read_is_made_again(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = some_kernels(1)
    build(kernels)
    read, left = Path.read_bytes, [cache.machine_code_directory()]

    def clearing_read(path: Path) -> bytes:
        if left and path.suffix == ".cubin":
            cache.remove(left.pop())
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", clearing_read)
    (made,) = preload(load_all(kernels, gpu), kernels)
    assert left == []
    assert made.asm["cubin"]


def test_half_an_entry_is_made_again_when_it_is_read(gpu: Path) -> None:
    """As a process leaves it that writes an entry while another one clears the cache."""
    kernels = some_kernels(1)
    build(kernels)
    (cubin,) = cache.machine_code_directory().glob("*/*.cubin")
    cubin.unlink()
    (made,) = preload(load_all(kernels, gpu), kernels)
    assert made.asm["cubin"] == cubin.read_bytes()


def test_a_worker_that_dies_is_said_and_its_work_done_here(
    gpu: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "dies.py").write_text("raise SystemExit('out of memory')")
    monkeypatch.setattr(worker, "__file__", str(tmp_path / "dies.py"))
    with pytest.warns(UserWarning, match=r"a compiling process was lost: .*this process compiles instead"):
        assert build(some_kernels(3), jobs=2) == {}
    assert sum(e.kind == "machine" for e in cache.entries()) == 3
    assert workers._idle == []


def test_a_worker_that_hangs_is_killed(gpu: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text("import sys\nprint('stuck', file=sys.stderr, flush=True)\nsys.stdin.read()")
    monkeypatch.setattr(worker, "__file__", str(tmp_path / "hangs.py"))
    one = Worker(HOPPER_GPU, tmp_path)
    (task,) = building._tasks(some_kernels(1)[0], GUESS)
    with pytest.raises(WorkerLost, match="it did not answer in time"):
        one.ask(task.job, timeout_s=0.0)
    assert not one.is_alive


def test_a_worker_gets_jitted_functions_and_their_constants_only() -> None:
    text = f"{HEADER}\n\nSCALE: tl.constexpr = tl.constexpr(2)\nplan = torch.empty(3)\n\n"
    text += kernel_source(some_kernels(1)[0])
    kept = jitted_text(text)
    assert "torch" not in kept.replace("torch.float", "")
    assert "SCALE: tl.constexpr" in kept
    assert kept.count("@triton.jit") == 1
    assert "_reference" not in kept


# --- nothing is lost --------------------------------------------------------------------------------------------------


def captured() -> tuple[tracefuse.Capture, torch.Tensor, torch.Tensor]:
    """A softmax and its backward, which are row reductions, the input and its gradient."""
    x = torch.randn(8, 700, requires_grad=True)
    with tracefuse.capture() as c:
        (torch.softmax(x * 2, -1) ** 2).sum().backward()
    assert x.grad is not None
    return c, x, x.grad.clone()


def check_unfused(variant: tracefuse.Variant, x: torch.Tensor, gradient: torch.Tensor, reason: str) -> None:
    """The variant's refused kernels are ATen ops in its text; its numbers are those of the captured program."""
    x.grad = None
    variant.compile()().backward()
    torch.testing.assert_close(x.grad, gradient)
    assert variant.fallbacks
    for name, why in variant.fallbacks.items():
        assert reason in why
        assert f"def {name}(" in variant.source
        assert f"def {name}_kernel(" not in variant.source
        said = " ".join(variant.source.replace("\n#", "").split())
        assert f"Runs as ATen ops, unfused: {' '.join(why.split())}" in said
    shown = payload(variant)
    assert any(reason in note["text"] for note in shown["notes"])
    sources = {k["name"]: k["source"] for k in shown["kernels"]}
    assert all("Runs as ATen ops, unfused" in sources[name] for name in variant.fallbacks)


def test_a_kernel_that_exceeds_shared_memory_runs_as_its_ops(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "this_gpu", lambda: Gpu("cuda", 90, 32, 0))
    c, x, gradient = captured()
    check_unfused(c.optimize(), x, gradient, "of shared memory, and this GPU has 0 B")


def test_a_kernel_that_does_not_compile_runs_as_its_ops(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = lambda kernel, tuning: module_text(kernel, tuning).replace("tl.load(", "tl.lode(")  # noqa: E731
    monkeypatch.setattr(building, "module_text", broken)
    c, x, gradient = captured()
    variant = c.optimize()
    check_unfused(variant, x, gradient, "the compiler refused it")
    assert set(variant.fallbacks) == {k.name for k in variant.kernels}


def test_an_exported_file_of_refused_kernels_runs(gpu: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(building, "this_gpu", lambda: Gpu("cuda", 90, 32, 0))
    c, _, _ = captured()
    text = c.optimize().export(tmp_path / "step.py").read_text()
    assert "Runs as ATen ops, unfused" in text
    scope: dict[str, Any] = {"__name__": "step"}
    exec(compile(text.replace("@triton.jit", ""), "step.py", "exec"), scope)
    scope["run"](*scope["example_inputs"]())


def test_a_measurement_says_what_is_being_compiled(gpu: Path) -> None:
    c, _, _ = captured()
    said: list[tuple[float, str]] = []
    c.optimize().measure(progress=lambda fraction, text: said.append((fraction, text)), budget_s=0.01)
    assert said[0][0] == 0.0
    assert said[0][1].startswith("compiling 1 of ")


def test_without_a_gpu_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(building, "_compile", None)
    assert build(some_kernels(1)) == {}
