"""Launching from generated text: which machine code serves again, when Triton is asked anew, what the launch is handed."""

from __future__ import annotations

import inspect
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from kernels import kernel_of, kernel_of_types
from torch import Tensor

from tracefuse.build.across_sizes import AcrossSizes
from tracefuse.build.modules import kept_in, launcher, load
from tracefuse.build.worker import warm
from tracefuse.optimizers.kernels.launch import LAUNCH

compiles = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets in this process")


@dataclass
class Compiled:
    """Stands for a `CompiledKernel`: notes what it is run with."""

    function: int = 7
    packed_metadata: tuple[int, int, int] = (4, 1, 0)
    runs: list[tuple[Any, ...]] = field(default_factory=list)
    scratch: int = 0

    @property
    def run(self) -> Any:
        return Run(self)


@dataclass
class Run:
    """Stands for Triton's `CudaLauncher`, which calls a function in C with more arguments."""

    of: Compiled
    launch_cooperative_grid: bool = False
    launch_pdl: bool = False
    profile_scratch_size: int = 0

    @property
    def global_scratch_size(self) -> int:
        return self.of.scratch

    def __call__(self, *arguments: Any) -> None:
        self.of.runs.append(arguments)

    def launch(self, *arguments: Any) -> None:
        self.of.runs.append(("in C", *arguments))


@dataclass
class Kernel:
    """Stands for a `JITFunction`: compiles at each public launch, and notes it."""

    made: list[Compiled] = field(default_factory=list)
    given: list[tuple[Any, ...]] = field(default_factory=list)
    scratch: int = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def public(*tensors: Tensor, **options: Any) -> Compiled:
            self.given.append(tensors)
            self.made.append(Compiled(scratch=self.scratch))
            return self.made[-1]

        return public


@pytest.fixture
def text() -> dict[str, Any]:
    """What `LAUNCH` defines, on a Triton that it knows, with a stream that needs no GPU and hooks of its own."""
    names: dict[str, Any] = {"torch": torch, "triton": triton}
    exec(LAUNCH, names)
    hooks = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=SimpleNamespace(calls=[]))
    names.update(_stream=lambda device: 99, _knobs=hooks, _is_known=True, _is_flat=False)
    return names


def aligned(count: int = 8) -> Tensor:
    return torch.zeros(count)


def misaligned(count: int = 8) -> Tensor:
    return torch.zeros(count + 1)[1:]


def test_the_second_launch_hands_addresses_and_constants_to_the_same_machine_code(text) -> None:
    kernel, x, y = Kernel(), aligned(), aligned()
    launch = text["launcher"](kernel, num_warps=4, ROWS=2, COLS=4)
    for programs in (5, 5, 6):
        launch(programs, x, y)
    (compiled,) = kernel.made
    expected = (1, 1, 99, 7, (4, 1, 0), None, None, None, x.data_ptr(), y.data_ptr(), 2, 4)
    assert compiled.runs == [(5, *expected), (6, *expected)]


@pytest.mark.parametrize("scratch", [0, 8])
def test_where_it_is_known_the_function_in_c_is_called_unless_it_needs_scratch_memory(text, scratch: int) -> None:
    text["_is_flat"] = True
    kernel, x = Kernel(scratch=scratch), aligned()
    launch = text["launcher"](kernel, num_warps=4, COLS=4)
    for _ in range(2):
        launch(5, x)
    between = ("in C", 5, 1, 1, 99, 7, False, False, None, None) if scratch == 0 else (5, 1, 1, 99, 7)
    assert kernel.made[0].runs == [(*between, (4, 1, 0), None, None, None, x.data_ptr(), 4)]


@pytest.mark.parametrize("is_flat", [False, True], ids=["run", "in C"])
def test_numbers_are_handed_over_between_addresses_and_constants(text, is_flat: bool) -> None:
    text["_is_flat"] = is_flat
    kernel, x, y = Kernel(), aligned(), aligned()
    launch = text["launcher"](kernel, num_warps=4, numbers=(25, 1, 19200), ROWS=2, COLS=4)
    for _ in range(2):
        launch(5, x, y)
    assert kernel.given == [(x, y, 25, 1, 19200)]
    assert kernel.made[0].runs[0][-7:] == (x.data_ptr(), y.data_ptr(), 25, 1, 19200, 2, 4)


@compiles
def test_that_is_the_order_of_tritons_own_launch(gpu: Path) -> None:
    """What `JITFunction.run` hands to the compiled kernel: all parameters in the order of the signature, a number of 1 too."""
    kernels = [kernel_of_types(lambda x: x.sum(0), ((rows, 640), torch.float32)) for rows in (1000, 1001)]
    across = AcrossSizes()
    across.with_numbers(kernels[:1], {})
    (one,) = across.with_numbers(kernels[1:], {}).values()
    assert any(launch.numbers for launch in one.launches)
    for launch in one.launches:
        function = getattr(load(one.jitted), one.names[launch.function])
        count = len(launch.pointers)
        assert function.arg_names[count : count + len(launch.numbers)] == [f"n{i}" for i in range(len(launch.numbers))]
        assert function.arg_names[count + len(launch.numbers) :] == list(launch.blocks)
        with kept_in(gpu):
            made = warm(function, tuple(map(str, launch.pointers)), launch.blocks, launch.num_warps, launch.numbers)
        kinds = [kind for kind in made.src.signature.values() if not kind.startswith("*")]
        assert kinds == [*["i32"] * len(launch.numbers), *["constexpr"] * len(launch.blocks)]


@compiles
def test_the_function_in_c_is_known_where_it_is_called() -> None:
    """What `CudaLauncher` of triton 3.6 hands to it, and in which order."""
    if not triton.__version__.startswith("3.6."):
        pytest.skip("another triton")
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    called = inspect.getsource(driver.CudaLauncher.__call__)
    handed = "self.launch(gridX, gridY, gridZ, stream, function, self.launch_cooperative_grid, self.launch_pdl, "
    assert " ".join(called.split()).endswith(handed + "global_scratch, profile_scratch, *args)")


def test_machine_code_is_kept_by_alignment_of_each_tensor(text) -> None:
    kernel, one, other = Kernel(), aligned(), misaligned()
    launch = text["launcher"](kernel, num_warps=4, COLS=4)
    for pair in ((one, one), (other, one), (one, other), (other, other)) * 2:
        launch(5, *pair)
    assert [len(compiled.runs) for compiled in kernel.made] == [1, 1, 1, 1]


@pytest.mark.parametrize("change", [{"num_warps": 8}, {"COLS": 8}])
def test_machine_code_is_kept_by_configuration(text, change) -> None:
    kernel, options = Kernel(), {"num_warps": 4, "COLS": 4}
    launches = [text["launcher"](kernel, **options), text["launcher"](kernel, **options | change)] * 2
    for launch in launches:
        launch(5, aligned())
    assert [len(compiled.runs) for compiled in kernel.made] == [1, 1]


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_hook_sees_every_launch(text, hook) -> None:
    """A profiler that is switched on later: Triton's own launch calls it."""
    kernel, x = Kernel(), aligned()
    launch = text["launcher"](kernel, num_warps=4)
    launch(5, x)
    getattr(text["_knobs"], hook).calls.append(print)
    launch(5, x)
    setattr(text["_knobs"], hook, print)
    launch(5, x)
    setattr(text["_knobs"], hook, None)
    launch(5, x)
    assert [len(compiled.runs) for compiled in kernel.made] == [0, 0, 1]


def test_an_unknown_triton_is_launched_the_public_way(text) -> None:
    text["_is_known"] = False
    kernel = Kernel()
    launch = text["launcher"](kernel, num_warps=4)
    for _ in range(3):
        launch(5, aligned())
    assert len(kernel.made) == 3


def test_this_triton_is_known() -> None:
    names: dict[str, Any] = {"torch": torch, "triton": triton}
    exec(LAUNCH, names)
    assert names["_is_known"]


@compiles
def test_what_the_text_uses_of_triton_is_there() -> None:
    """`CompiledKernel` and the hooks, of the version that is installed."""
    from triton.compiler import CompiledKernel

    assert isinstance(CompiledKernel.run, property)
    assert isinstance(triton.knobs.runtime.launch_enter_hook.calls, list)
    assert isinstance(triton.knobs.runtime.launch_exit_hook.calls, list)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def double() -> Any:
    kernel, _ = kernel_of(lambda x: x * 2 + 1, torch.zeros(33, 8, device="cuda"))
    return launcher(kernel)


@pytest.mark.gpu
def test_misaligned_inputs(double) -> None:
    memory = torch.randn(33 * 8 + 3, device="cuda")
    for offset in (0, 1, 2, 3, 0):
        x = memory[offset : offset + 33 * 8].view(33, 8)
        torch.testing.assert_close(double(x), x * 2 + 1)


@pytest.mark.gpu
def test_the_launch_is_on_the_streams_of_its_thread(double) -> None:
    """What is queued behind a slow kernel of the same stream reads what that wrote."""
    x, stream = torch.zeros(33, 8, device="cuda"), torch.cuda.Stream()
    double(x)
    torch.cuda.synchronize()
    results: list[Tensor] = []

    def other_thread() -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            x.fill_(3)
            results.append(double(x))

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    torch.testing.assert_close(results[0], torch.full_like(x, 7))


@pytest.mark.gpu
def test_a_tensor_on_the_cpu_is_refused_and_the_gpu_lives_on() -> None:
    x, y = torch.randn(33, 8, device="cuda"), torch.randn(33, 8, device="cuda")
    kernel, _ = kernel_of(lambda x, y: x * 2 + y, x, y)
    add = launcher(kernel)
    add(x, y)
    with pytest.raises(ValueError, match="cpu tensor"):
        add(x, y.cpu())
    torch.testing.assert_close(add(x, y), x * 2 + y)


@pytest.mark.gpu
def test_triton_hooks_see_the_launches(double) -> None:
    x, seen = torch.randn(33, 8, device="cuda"), []
    double(x)
    hook = lambda metadata: seen.append(metadata.get()["name"])  # noqa: E731
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        double(x)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    double(x)
    assert len(seen) == 1


@pytest.mark.gpu
def test_the_kernel_runs_on_the_gpu_of_its_tensors(double) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.cuda.set_device(0)
    for _ in range(2):
        for device in ("cuda:1", "cuda:0"):
            x = torch.randn(33, 8, device=device)
            torch.testing.assert_close(double(x), x * 2 + 1)
            assert torch.cuda.current_device() == 0
