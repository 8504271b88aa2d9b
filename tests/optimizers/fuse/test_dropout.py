"""Dropout in kernels, on traces as of a GPU: what is drawn, stored and saved; the numbers, under Triton's interpreter."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from cuda_traces import H100_THREADS, FusedOnCuda, fused_on_cuda, mask_by_aten, on_cuda
from interpreter import INTERPRETED, interpreted
from kernels import run_poisoned
from torch import Tensor, fx, nn

import tracefuse
from tracefuse.assembly.draws import draws
from tracefuse.build.modules import launcher, load, machine_code
from tracefuse.device.dropout import SUPPORT, support
from tracefuse.optimizers.formulas import philox
from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.kernels.text import kernel_source, launches
from tracefuse.optimizers.lowering.random_ops import DRAW, MASK
from tracefuse.optimizers.ops import op_name
from tracefuse.optimizers.trace import Trace, origin

aten = torch.ops.aten
f64, f32, bf16 = torch.float64, torch.float32, torch.bfloat16
compiled = pytest.mark.skipif(INTERPRETED, reason="compiles, which the interpreter cannot")


def drop(x: Tensor, p: float = 0.1, train: bool = True) -> Tensor:
    return torch.native_dropout(x, p, train)[0]


def residual(x: Tensor, y: Tensor) -> Tensor:
    return drop(x * 2) + y


def training(layers: int = 1) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    weights = [nn.Parameter(torch.randn(64, 64) / 8) for _ in range(layers)]

    def step(x: Tensor) -> Tensor:
        for w in weights:
            x = drop((x @ w).tanh()) + x
        x.sum().backward()
        return x

    return step, torch.randn(8, 64)


def kernels(trace: Trace) -> list[Kernel]:
    return [n.target for n in trace.ops if isinstance(n.target, Kernel)]


def names(trace: Trace) -> list[str]:
    return [op_name(n).removeprefix("aten.").removeprefix("tracefuse.").split(".")[0] for n in trace.ops]


# --- what the trace becomes -------------------------------------------------------------------------------------------


def test_the_mask_is_neither_stored_nor_saved() -> None:
    fused = fused_on_cuda(*training())
    assert "native_dropout" in names(fused.before)
    assert "native_dropout" not in names(fused.after)
    assert not any(n.target is MASK for n in fused.after.ops)
    forward, backward = fused.after.split()
    assert torch.bool not in {n.meta["val"].dtype for n in [*forward.returned, *backward.placeholders]}
    assert "dropout_state" in [out.of for out in forward.outputs if out.kind == "saved"]
    assert [sum(MASK in [n.target for n in k.body.ops] for k in kernels(half)) for half in (forward, backward)] == [
        1,
        1,
    ]


def test_values_keep_their_names_and_the_draw_its_place() -> None:
    fused = fused_on_cuda(*training())
    before = {n.name for n in fused.before.ops}
    assert {n.name for n in fused.after.ops if not n.name.startswith(("results", "dropout_state"))} <= before
    (draw,) = (n for n in fused.after.ops if n.target is DRAW)
    (dropout,) = (n for n in fused.before.ops if n.target is aten.native_dropout.default)
    assert origin(draw) == origin(dropout), "replay draws from the state that was captured"
    assert draws(draw)
    assert draw.args == ([philox.increment(8 * 64, 512)],)


def test_a_second_run_changes_nothing() -> None:
    once = fused_on_cuda(*training(layers=2)).after
    assert Fuse(H100_THREADS).run(once, lambda decision: None).code == once.code


def test_dropouts_in_a_row_are_drawn_at_once_and_equal_layers_share_a_kernel() -> None:
    fused = fused_on_cuda(*training(layers=4))
    (draw,) = (n for n in fused.after.ops if n.target is DRAW)
    assert draw.args == ([4] * 4,)
    assert len(set(kernels(fused.after))) < len(kernels(fused.after))
    few, many = (set(kernels(fused_on_cuda(*training(layers=n)).after)) for n in (4, 8))
    assert few == many, "unique kernels do not depend on depth"


def test_another_draw_ends_the_row_and_the_order_stays() -> None:
    def fn(x: Tensor) -> Tensor:
        y = drop(x * 2) + 1
        y = y * torch.rand_like(x)
        return drop(y * 3) + y

    fused = fused_on_cuda(fn, torch.randn(8, 64))
    assert [n for n in names(fused.after) if "rand" in n or "draw" in n] == [
        "draw_dropout", "rand_like", "draw_dropout",
    ]  # fmt: skip


def test_draws_stay_in_order_though_a_kernel_holds_what_lies_around_them() -> None:
    """`rand_like` waits for a kernel that ends after the dropout, which waits for nothing: it must not run first."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        a = x * 2 + 1
        noise = torch.rand_like(a)
        b = drop(y * 3) + y
        return noise, b, a * 5

    fused = fused_on_cuda(fn, torch.randn(8, 64), torch.randn(8, 64))
    order = names(fused.after)
    assert order.index("rand_like") < order.index("draw_dropout")


def test_a_kernel_does_not_wait_for_a_draw_that_waits_for_it() -> None:
    """What is before a draw and what is after one that must follow it would be one kernel, were draws not in order."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        a = x * 2 + 1
        noise = torch.rand_like(a)
        return drop(a * 3) + a, noise

    fused = fused_on_cuda(fn, torch.randn(8, 64))
    assert [n for n in names(fused.after) if n in ("rand_like", "draw_dropout")] == ["rand_like", "draw_dropout"]


def test_a_dropout_alone_stays_with_aten() -> None:
    w = torch.randn(64, 64)
    fused = fused_on_cuda(lambda x: drop(x @ w) @ w, torch.randn(8, 64))
    assert "native_dropout" in names(fused.after)
    assert "one op alone" in fused.reason("native_dropout")


def test_a_mask_that_someone_else_reads_stays_stored() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y, mask = torch.native_dropout(x * 2, 0.1, True)
        return drop(y + 1) * 3, mask

    fused = fused_on_cuda(fn, torch.randn(8, 64))
    assert names(fused.after).count("native_dropout") == 1, "the other one still fuses"
    assert "must be stored" in fused.reason("native_dropout")
    assert sum(n.target is DRAW for n in fused.after.ops) == 1


def test_without_a_gpu_that_was_asked_dropout_stays_with_aten() -> None:
    fused = fused_on_cuda(residual, torch.randn(8, 64), torch.randn(8, 64), threads=0)
    assert "native_dropout" in names(fused.after)
    assert "was not asked" in fused.reason("native_dropout")


def test_on_the_cpu_nothing_changes() -> None:
    decisions: list[Any] = []
    capture = fused_on_cuda(residual, torch.randn(8, 64), torch.randn(8, 64)).capture
    after = Fuse(H100_THREADS).run(capture.trace, decisions.append)
    assert "native_dropout" in names(after)
    assert any("Mersenne Twister" in d.reason for d in decisions)


@interpreted
@pytest.mark.parametrize(("p", "train"), [(0.3, False), (1.0, True)])
def test_what_draws_nothing_is_a_copy_or_zeros(p: float, train: bool) -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y, mask = torch.native_dropout(x * 2, p, train)
        return y + 1, mask

    fused = fused_on_cuda(fn, torch.randn(8, 64), threads=0)
    assert not any("dropout" in op_name(n) for n in fused.after.ops)
    assert {"native_dropout", "draw_dropout"}.isdisjoint(names(fused.after))
    x = fused.capture.example_inputs[0]
    y, mask = run(fused.after, [x], [])
    torch.testing.assert_close(y, x * 2 * (not train) + 1)
    assert torch.equal(mask, torch.full((8, 64), not train))


def test_probability_zero_is_drawn_as_any_other() -> None:
    fused = fused_on_cuda(lambda x: drop(x * 2, 0.0) + x, torch.randn(8, 64))
    (kernel,) = kernels(fused.after)
    assert f"< {2**32 - 128}" in kernel_source(kernel)


# --- what a kernel costs ----------------------------------------------------------------------------------------------


@compiled
@pytest.mark.parametrize(("dtype", "per_call"), [(f32, 4), (bf16, 4), (f64, 2)])
def test_philox_runs_once_for_four_elements(dtype: torch.dtype, per_call: int) -> None:
    """Two high products a round, ten rounds; some of the first and last rounds fall away, some divisions come on top."""
    x = torch.empty(512, 4096, dtype=dtype)
    fused = fused_on_cuda(residual, x, x)
    (kernel,) = kernels(fused.after)
    (launch,), (code,) = launches(kernel), machine_code(kernel)
    elements = launch.blocks["COLS"] // (32 * launch.num_warps)
    calls = elements / per_call
    assert 16 * calls < len(re.findall(r"mul\.(?:hi|wide)\.u32", code.asm["ptx"])) <= 20 * calls + elements


# --- text -------------------------------------------------------------------------------------------------------------


def test_a_file_gets_the_functions_that_it_calls_and_no_others() -> None:
    (kernel,) = kernels(fused_on_cuda(residual, torch.randn(8, 64), torch.randn(8, 64)).after)
    text = support(kernel_source(kernel))
    assert set(re.findall(r"^def (\w+)", text, re.M)) == SUPPORT.keys() - {"draw_dropout"}
    assert support("x = torch.nn.functional.dropout_mask(y)  # dropout_mask(x)") == ""


def test_the_functions_need_only_torch() -> None:
    fused = fused_on_cuda(residual, torch.randn(8, 64), torch.randn(8, 64))
    (kernel,) = kernels(fused.after)
    import math

    module = {"math": math, "torch": torch}
    exec(support("dropout_mask( apply_dropout("), module)
    reference = re.search(r"^def \w+_reference\(.*?\n\n", kernel_source(kernel), re.S | re.M)
    assert reference is not None
    exec(reference[0], module)
    inputs = [
        torch.tensor([7, 4]) if n.name == "dropout_state" else torch.randn(8, 64) for n in kernel.body.placeholders
    ]
    torch.testing.assert_close(module[f"{kernel.name}_reference"](*inputs), kernel(*inputs))


def test_a_printed_trace_calls_the_functions_by_name() -> None:
    code = fused_on_cuda(residual, torch.randn(8, 64), torch.randn(8, 64)).after.code
    assert "dropout_states = draw_dropout([4], device=torch.device('cuda:0'))" in code


@compiled
def test_an_exported_file_runs_with_what_it_brings() -> None:
    """On the CPU, where kernels run as their references; only the states, which need a GPU's generator, are given."""
    capture = tracefuse.capture(*training(layers=2))
    options = {"dropout_threads": H100_THREADS}
    moved = on_cuda(capture.trace)
    capture.program = replace(capture.program, trace=moved)
    with mock.patch("tracefuse.config.configuration.fuse_options", return_value=options):
        source = capture.optimize().source
    assert [source.count(f"\ndef {name}(") for name in SUPPORT] == [1] * len(SUPPORT)
    module, states = load(source), [(17, 4), (17, 8)]
    module.draw_dropout = lambda increments, device: tuple(map(torch.tensor, states[: len(increments)]))
    inputs = [t.detach() for t in capture.example_inputs]
    results, _, gradients, _ = module.replay(
        module.forward, module.backward, inputs[:-1], module.READ_AGAIN, module.MUTATED
    )
    expected = run_with_masks(moved, inputs, states, H100_THREADS)
    for ours, theirs in zip([*results, *gradients], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


# --- numbers ----------------------------------------------------------------------------------------------------------


def run(trace: Trace, inputs: list[Tensor], states: list[tuple[int, int]]) -> list[Tensor]:
    """The outputs of a fused trace on CPU tensors: kernels interpreted, each dropout from its own of `states`."""
    rows = iter(states)

    class Interpreter(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if target is DRAW:
                return [torch.tensor(next(rows)) for _ in args[0]]
            if isinstance(target, Kernel):
                results = run_poisoned(target, list(args))
                return results if len(results) > 1 else results[0]
            kwargs = {k: torch.device("cpu") if k == "device" else v for k, v in kwargs.items()}
            return super().call_function(target, args, kwargs)

    with torch.no_grad():
        return list(Interpreter(fx.GraphModule(nn.Module(), trace.graph)).run(*inputs))


def run_with_masks(trace: Trace, inputs: list[Tensor], states: list[tuple[int, int]], threads: int) -> list[Tensor]:
    """The same of the trace before fusion, each dropout with the mask that ATen's loop writes."""
    rows = iter(states)

    class Interpreter(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if target is not aten.native_dropout.default:
                kwargs = {k: torch.device("cpu") if k == "device" else v for k, v in kwargs.items()}
                return super().call_function(target, args, kwargs)
            x, p, _ = args
            vector, keep = philox.vector_size(x), float(torch.tensor(1 - p, dtype=f64 if x.dtype is f64 else f32))
            mask = mask_by_aten(x.numel(), philox.launched_threads(x.numel(), threads), vector, keep, next(rows))
            mask = mask.as_strided(x.shape, x.stride()) if vector > 1 else mask.view(x.shape)
            return aten.native_dropout_backward(x, mask, philox.scale_of(p, x.dtype)), mask

    with torch.no_grad():
        return list(Interpreter(fx.GraphModule(nn.Module(), trace.graph)).run(*inputs))


def check_numbers(fused: FusedOnCuda, states: list[tuple[int, int]], threads: int) -> None:
    inputs = [t.detach() for t in fused.capture.example_inputs]
    found, expected = run(fused.after, inputs, states), run_with_masks(fused.before, inputs, states, threads)
    for ours, theirs in zip(found, expected, strict=True):
        tolerance = 2e-2 if ours.dtype is bf16 else 1e-5
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        if ours.dim():
            assert torch.equal(ours == 0, theirs == 0), "the dropped elements"


@interpreted
@pytest.mark.parametrize("dtype", [f64, f32, bf16], ids=str)
@pytest.mark.parametrize("shape", [(6, 100), (7, 33), (3, 1000), (1, 8), (5, 1)])
def test_a_kernel_draws_atens_mask(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def fn(x: Tensor) -> Tensor:
        return drop(x * 2, 0.3) * 3

    fused = fused_on_cuda(fn, torch.rand(shape).to(dtype) + 1, threads=512)
    assert kernels(fused.after)
    check_numbers(fused, [(2**40 + 5, 2**35 + 8)], 512)


@interpreted
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: drop(x.t() * 2, 0.3) * 3,
        lambda x: drop((x * 2).sum(-1, keepdim=True) + 1, 0.3) * x,
        lambda x: torch.softmax(drop(x, 0.3) * 2, -1),
        lambda x: drop(torch.softmax(x, -1), 0.3) * 2,
        lambda x: torch.cat([drop(x, 0.3) * 2, x], -1),
        lambda x: (drop(x, 0.3) * 2).t().contiguous(),
        lambda x: drop((x * 2)[:, 1:], 0.3) * 3,
        lambda x: drop(x * 2, 0.3)[:, 4:] + 1,
    ],
)
def test_masks_follow_views_reductions_and_placements(fn: Callable[[Tensor], Tensor]) -> None:
    fused = fused_on_cuda(fn, torch.rand(12, 40) + 1, threads=256)
    check_numbers(fused, [(99, 12)], 256)


@interpreted
def test_forward_and_backward_draw_the_same_masks() -> None:
    fused = fused_on_cuda(*training(layers=3), threads=256)
    assert operator.countOf(names(fused.after), "native_dropout") == 0
    check_numbers(fused, [(3, 0), (3, 4), (3, 8)], 256)


@interpreted
def test_the_last_of_the_words_too() -> None:
    """A state whose blocks carry from the low to the high word of the counter."""
    fused = fused_on_cuda(lambda x: drop(x * 2, 0.5) * 3, torch.rand(4, 1000) + 1, threads=256)
    check_numbers(fused, [(2**63 - 1, (2**32 - 1) * 4)], 256)
    assert launcher(kernels(fused.after)[0])
