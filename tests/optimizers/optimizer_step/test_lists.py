"""Kernels over lists: their keys and texts, what the compiler makes of them, tables of addresses, and the ATen reference."""

from __future__ import annotations

import re

import pytest
import torch
from interpreter import INTERPRETED, interpreted
from kernels import triton_ir
from torch import Tensor, nn
from updates import (
    SHAPES,
    Update,
    check_exactness,
    check_overwritten,
    copy_of,
    make,
    parameters,
    run_launched,
    steps_of,
    tried,
)

from tracefuse.build.kernels import build, preload
from tracefuse.build.modules import launcher, machine_code, module_of, resources
from tracefuse.execution.in_place import in_place
from tracefuse.optimizers.kernels.lists import ListKernel, ListTotal, overwritten
from tracefuse.optimizers.kernels.text import kernel_source

f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16

compiled = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")


def adamw(dtype: torch.dtype = f32, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> Update:
    return tried(steps_of(make("adamw", fused=True), dtype, shapes=shapes))


def clipped_sum(grads: list[Tensor]) -> Update:
    weights = [nn.Parameter(torch.zeros_like(g)) for g in grads]
    for weight, grad in zip(weights, grads, strict=True):
        weight.grad = grad.clone()
    return tried(lambda: nn.utils.clip_grad_norm_(weights, 1.0))


# --- identity ---------------------------------------------------------------------------------------------------------


def test_neither_the_number_nor_the_sizes_of_tensors_are_in_the_text() -> None:
    few, many = adamw(shapes=((4, 5), (3,))), adamw(shapes=tuple((n,) for n in range(1, 30)))
    assert [k.key for k in few.kernels] == [k.key for k in many.kernels]
    assert [kernel_source(k) for k in few.kernels] == [kernel_source(k) for k in many.kernels]


def test_the_types_are_in_the_key() -> None:
    assert not {k.key for k in adamw(f32).kernels[::2]} & {k.key for k in adamw(bf16).kernels[::2]}


def test_the_number_of_launches_is_that_of_one_parameter() -> None:
    assert len(adamw(shapes=((4, 5), (3,))).kernels) == len(adamw(shapes=((4, 5),) * 40).kernels) == 3


# --- the compiler -----------------------------------------------------------------------------------------------------


@compiled
@pytest.mark.parametrize("dtype", [f32, bf16], ids=["f32", "bf16"])
def test_whole_parts_are_read_16_bytes_at_a_time_and_nothing_spills(dtype: torch.dtype) -> None:
    for kernel in adamw(dtype).kernels:
        found = resources(kernel)
        assert found.spills == 0
        assert found.registers <= 80
        if kernel.element_inputs and kernel.body.placeholders[0].meta["val"].dim():
            assert re.search(r"ld\.global(\.\w+)*\.v4", machine_code(kernel)[0].asm["ptx"])


@compiled
def test_a_part_that_is_not_aligned_is_not_said_to_be() -> None:
    """Of the two calls of the part, only the one for whole parts knows of 16 bytes."""
    kernel = adamw().kernels[-1]
    text = triton_ir(kernel)
    assert text.count("tt.int_to_ptr") == 2 * sum(not s for s in kernel.shared)
    assert 0 < text.count("tt.divisibility = dense<16>") + text.count("tt.divisibility = 16") <= text.count("tt.addptr")


@compiled
@pytest.mark.usefixtures("gpu")
def test_they_are_compiled_and_loaded_before_the_first_launch() -> None:
    kernels = adamw().kernels
    assert build(kernels, jobs=1) == {}
    assert [len(preload(module_of(k), [k])) for k in kernels] == [2, 1, 1]


# --- tables -----------------------------------------------------------------------------------------------------------


@interpreted
def test_kernels_compute_at_any_address() -> None:
    update = adamw()
    inputs = [
        torch.empty(t.numel() + 1, dtype=t.dtype)[1:].as_strided(t.shape, t.stride(), 1).copy_(t) for t in update.inputs
    ]
    assert any(t.data_ptr() % 16 for t in inputs)
    check_exactness(update, run_launched(update.after, inputs), f32)


@interpreted
def test_kernels_compute_with_other_sizes() -> None:
    """The same text serves other tensors: nothing of those it was made for is left in it."""
    update = clipped_sum([torch.randn(5000, dtype=f64), torch.randn(3, 7, dtype=f64)])
    (total,) = (k for k in update.kernels if isinstance(k, ListTotal))
    for shapes in ([(1,)], [(9000,), (8192,), (0,)], [(0,)]):
        grads = [torch.randn(shape, dtype=f64) for shape in shapes]
        torch.testing.assert_close(launcher(total)(grads), sum(g.square().sum() for g in grads))


@interpreted
def test_kernels_compute_from_tables_that_were_made_before() -> None:
    update = tried(steps_of(make("sgd momentum", fused=True), f32, clip=False))
    inputs, (kernel,) = [copy_of(t) for t in update.inputs], update.kernels
    first = [t.clone() for t in run_launched(update.after, inputs)]
    tables = module_of(kernel)._tables
    known = list(tables.values())
    for tensor, captured in zip(inputs, update.inputs, strict=True):
        tensor.copy_(captured)
    torch.testing.assert_close(run_launched(update.after, inputs), first, rtol=0, atol=0)
    assert list(map(id, tables.values())) == list(map(id, known))
    run_launched(update.after, [copy_of(t) for t in update.inputs])
    assert len(tables) == len(known) + 1


# --- meaning ----------------------------------------------------------------------------------------------------------


@compiled
def test_on_the_cpu_aten_runs_and_overwrites_the_same() -> None:
    update = adamw(f64)
    found, inputs = update.launched()
    torch.testing.assert_close(found, update.expected(), rtol=1e-11, atol=1e-12)
    check_overwritten(update, found, inputs)


@compiled
def test_what_runs_in_place_copies_nothing_at_the_end() -> None:
    update = adamw(f64)
    run = in_place(update.after)
    assert not [n for n in run.ops if n.target is torch.ops.aten._foreach_copy_.default]
    assert all(node.op == "placeholder" for node in run.returned)


def test_what_is_overwritten_are_parameters_gradients_and_state() -> None:
    update = adamw()
    mutated = {out.of for out in update.after.outputs if out.kind == "mutation"}
    assert overwritten(update.after) == mutated


def test_a_refused_kernel_runs_as_aten_ops() -> None:
    for kernel in adamw(f64).kernels:
        text = kernel_source(kernel, refused="the compiler refused it")
        assert "# Runs as ATen ops, unfused: the compiler refused it" in text
        assert "@triton.jit" not in text
        assert f"def {kernel.name}(" in text


def test_halves_are_summed_in_float32() -> None:
    grads = [torch.full((4096,), 0.5, dtype=bf16), torch.full((100,), 0.5, dtype=bf16)]
    update = clipped_sum(grads)
    (total,) = (k for k in update.kernels if isinstance(k, ListTotal))
    assert total(grads).dtype is f32
    assert total(grads) == 4196 * 0.25


def test_gradients_of_several_types_are_summed_by_type() -> None:
    update = clipped_sum([torch.randn(64), torch.randn(32, dtype=bf16), torch.randn(16)])
    assert len([k for k in update.kernels if isinstance(k, ListTotal)]) == 2


def test_every_kernel_is_one_over_lists() -> None:
    assert all(isinstance(k, ListKernel) for k in adamw().kernels)
    assert parameters(f32)[0].stride() == (1, 17)
