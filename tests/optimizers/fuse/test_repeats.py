"""Repeats: a value that a kernel would compute again for each block of rows is a table of another kernel where that pays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from programs import apply_rope
from torch import Tensor

import tracefuse
from tracefuse.optimizers.fuse.repeats import repeated_nbytes
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.lowering.expressions import PERIODIC, TRANSCENDENTAL

LARGE, SMALL = (1280, 10, 32, 128), (64, 2, 4, 32)


def rotated(shape: tuple[int, ...], fn: Callable[[Tensor, Tensor], Tensor] = apply_rope) -> tracefuse.Variant:
    t = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
    angles = torch.rand(shape[0], 1, 1, shape[-1])

    def step() -> Tensor:
        turned = fn(t, angles)
        turned.backward(torch.ones_like(turned))
        return turned

    return tracefuse.capture(step).optimize()


def tables(kernel: Kernel) -> int:
    return sum(node.target in PERIODIC for node in kernel.body.ops)


def test_a_large_kernel_reads_sines_and_cosines_from_a_table() -> None:
    variant = rotated(LARGE)
    assert sorted(map(tables, variant.kernels)) == [0, 0, 2, 2]
    large = [kernel for kernel in variant.kernels if not tables(kernel)]
    assert all(repeated_nbytes(kernel.body) == 0 for kernel in large)
    (fuse,) = [one for one in variant.passes if one.name == "fuse"]
    said = [decision.reason for decision in fuse.decisions if decision.action == "split"]
    assert any("reads each element of to_copy_1 10 times, and would have it computed as often" in one for one in said)


def test_a_small_kernel_makes_them_itself() -> None:
    """Another launch would take longer."""
    assert [tables(kernel) for kernel in rotated(SMALL).kernels] == [2, 2]


@pytest.mark.parametrize("fn", [lambda t, angles: t * angles.exp(), lambda t, angles: t * angles.sqrt()])
def test_what_takes_no_branch_is_computed_while_memory_is_waited_for(fn: Callable[[Tensor, Tensor], Tensor]) -> None:
    """In the kernel that reads it, however large that is."""
    variant = rotated(LARGE, fn)
    assert all(repeated_nbytes(kernel.body) == 0 for kernel in variant.kernels)
    (fuse,) = [one for one in variant.passes if one.name == "fuse"]
    assert not any(decision.action == "split" for decision in fuse.decisions)
    assert any(node.target in TRANSCENDENTAL for kernel in variant.kernels for node in kernel.body.ops)
