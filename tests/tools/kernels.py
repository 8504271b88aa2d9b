"""What the tests of kernels share: the kernel of a small function, and running it with results that start out poisoned."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

import tracefuse
from tracefuse.build.modules import HOPPER, TRITON_TYPE, launcher
from tracefuse.build.workers import Gpu
from tracefuse.optimizers.kernels import blocking
from tracefuse.optimizers.kernels.kernel import Kernel, make_kernel
from tracefuse.optimizers.kernels.text import launches
from tracefuse.optimizers.lowering import geometry
from tracefuse.optimizers.lowering.geometry import SCANS, SUMMED
from tracefuse.optimizers.lowering.layouts import GUESS, Tuning
from tracefuse.optimizers.trace import Trace, tensors, val

HOPPER_GPU = Gpu("cuda", HOPPER, 32, 232448)
"""What Triton knows of an H100."""

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}

MOST_SPREAD = 2.0
"""The standard deviation of what the tests' sums add up is at most that of `x * 2`, of normal numbers x."""
DEVIATIONS = 6.0


def kernel_of(fn: Callable[..., Any], *inputs: Tensor) -> tuple[Kernel, list[Tensor]]:
    """All ops of `fn` as one kernel, and its arguments among `inputs`."""
    graph = make_fx(fn, tracing_mode="fake")(*inputs).graph
    outputs = graph.output_node().args[0]
    outputs = [outputs] if isinstance(outputs, fx.Node) else list(outputs)
    kernel, stands_for = make_kernel(outputs, {n for n in graph.nodes if n.op == "call_function"})
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    return kernel, [inputs[placeholders.index(n)] for n in stands_for[: len(kernel.body.inputs)]]


def kernel_of_types(fn: Callable[..., Any], *types: tuple[tuple[int, ...], torch.dtype], device: str = "cpu") -> Kernel:
    """The kernel of `fn` on tensors that exist only as types: any size costs nothing, and a GPU may be missing."""
    with FakeTensorMode():
        inputs = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in types]
    return kernel_of(fn, *inputs)[0]


@contextlib.contextmanager
def small_gpu() -> Iterator[None]:
    """Kernels are shared out as on an eighth of a GPU, so that an eighth of the rows or lines fill it: what takes steps, or
    reads long rows of which there are not few, takes that of fewer elements, as the interpreter needs them."""
    sums, beside = (replace(grain, programs=grain.programs // 8) for grain in (blocking.SUMS, blocking.BESIDE))
    with (
        mock.patch.object(blocking, "SUMS", sums),
        mock.patch.object(blocking, "BESIDE", beside),
        mock.patch.object(geometry, "FEW_ROWS", geometry.FEW_ROWS // 8),
    ):
        yield


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Memory that a program allocates for results is full of what no kernel computes, so that an element left out is seen."""
    guards = torch._C._dynamo.guards
    with (
        mock.patch("torch.empty_strided", _filled(torch.empty_strided)),
        mock.patch.object(guards, "_empty_strided_cuda", _filled(guards._empty_strided_cuda)),
    ):
        yield


def _filled(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*layout: Any, **options: Any) -> Tensor:
        empty = allocate(*layout, **options)
        return empty.fill_(float("nan") if empty.is_floating_point() else 1 if empty.dtype is torch.bool else 113)

    return made


def run_poisoned(kernel: Kernel, inputs: list[Tensor], tuning: Tuning = GUESS) -> tuple[Tensor, ...]:
    with poisoned():
        results = launcher(kernel, tuning)(*inputs)
    return results if isinstance(results, tuple) else (results,)


def summation_error(terms: int, dtype: torch.dtype) -> float:
    """What two sums of the same normal terms, each added up in its own tree, may differ by where the terms cancel to about 0.

    At each of the log2(n) levels of a tree the partial sums have together n * spread² as their squares, and each is rounded by
    up to u = eps / 2 of itself, on average u² / 3 of its square. The errors of two trees are independent.
    """
    levels = 2 * math.log2(max(terms, 1))
    return DEVIATIONS * torch.finfo(dtype).eps / 2 * MOST_SPREAD * math.sqrt(terms * levels / 3)


def _absolute(kernel: Kernel, dtype: torch.dtype) -> float:
    """The absolute tolerance of a kernel's results: that of their dtype, or of the longest sum in it if that is more."""
    sums = [node for node in kernel.body.ops if node.target in SUMMED]
    terms = max((val(node.args[0]).numel() // max(1, _results(node)) for node in sums), default=1)
    errors = [summation_error(terms, dtype)] if sums and dtype.is_floating_point else []
    return max([TOLERANCE.get(dtype, 0.0), *errors])


def _results(node: fx.Node) -> int:
    return max(tensor.numel() for tensor in tensors(node))


def _expected(kernel: Kernel, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """What its ATen ops yield. Cumulative sums of half precision come from a CPU, which adds them up in float32 as the kernel
    does: a GPU's ATen rounds after each addition."""
    are_rounded = any(
        node.target in SCANS and val(node).dtype in (torch.bfloat16, torch.float16) for node in kernel.body.ops
    )
    made = kernel(*(one.cpu() for one in inputs)) if are_rounded else kernel(*inputs)
    made = made if isinstance(made, tuple) else (made,)
    return tuple(one.to(inputs[0].device) for one in made) if are_rounded else made


def check_kernel(kernel: Kernel, inputs: list[Tensor], absolute: float | None = None, tuning: Tuning = GUESS) -> None:
    """The launched kernel yields the numbers, strides and dtypes of its ATen ops; `absolute` is the absolute tolerance."""
    expected = _expected(kernel, inputs)
    for found, wanted in zip(run_poisoned(kernel, inputs, tuning), expected, strict=True):
        assert (found.stride(), found.dtype) == (wanted.stride(), wanted.dtype)
        tolerance = TOLERANCE.get(wanted.dtype, 0.0)
        torch.testing.assert_close(
            found,
            wanted,
            rtol=tolerance,
            atol=_absolute(kernel, wanted.dtype) if absolute is None else absolute,
            equal_nan=True,
        )


def check_trace(trace: Trace, capture: tracefuse.Capture, tolerance: float) -> None:
    """With its kernels launched, `trace` yields what the captured program did."""
    launched = trace.copy()
    for node in launched.ops:
        node.target = launcher(node.target) if isinstance(node.target, Kernel) else node.target
    found = tracefuse.replay(launched, capture.example_inputs, capture.rng_states)
    for value, expected in zip(found, capture.replay(), strict=True):
        torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def triton_ir(kernel: Kernel) -> str:
    """The kernel in Triton's IR for Hopper, before any optimisation: a few milliseconds, and no GPU.

    Private to Triton, seen on 3.6, 3.7 and 3.9: `ASTSource.make_ir` and what `triton.compile` hands it.
    """
    target, (launch, *_) = GPUTarget("cuda", HOPPER, 32), launches(kernel)
    function = launcher(kernel).__globals__[launch.function]
    pointers = {n: f"*{TRITON_TYPE[t]}" for n, t in zip(function.arg_names, launch.pointers, strict=False)}
    source = ASTSource(function, pointers | dict.fromkeys(launch.blocks, "constexpr"), launch.blocks)
    backend, context = make_backend(target), ir.context()
    options = backend.parse_options({"num_warps": launch.num_warps, "enable_fp_fusion": True})
    ir.load_dialects(context)
    backend.load_dialects(context)
    implementation, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    return str(source.make_ir(target, options, implementation, modules, context))


def kernel_of_op(op: Any, arguments: list[Any], results: tuple[Tensor | None, ...]) -> tuple[Kernel, list[Tensor]]:
    """The kernel of one multi-output op whose results have the types of `results`; for ops that CPUs only decompose."""
    graph, mode, tensors = fx.Graph(), FakeTensorMode(), {}
    placed = []
    for at, argument in enumerate(arguments):
        if isinstance(argument, Tensor):
            node = graph.placeholder(f"x{at}")
            node.meta["val"], tensors[node], argument = mode.from_tensor(argument), argument, node
        placed.append(argument)
    call = graph.call_function(op, tuple(placed))
    call.meta["val"] = tuple(None if r is None else mode.from_tensor(r) for r in results)
    parts = [graph.call_function(operator.getitem, (call, at)) for at, r in enumerate(results) if r is not None]
    for part in parts:
        part.meta["val"] = call.meta["val"][part.args[1]]
    kernel, stands_for = make_kernel(parts, {call, *parts})
    return kernel, [tensors[n] for n in stands_for[: len(kernel.body.inputs)]]
