"""Duplicating: cheap values that several kernels read are computed in each where that moves fewer bytes."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from fused import fused, kernels
from torch import Tensor
from traces import captured

from tracefuse.optimizers.fuse.duplicating import _Way
from tracefuse.optimizers.kernels.text import kernel_source

bf16 = torch.bfloat16


def x(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*(shape or (8, 4)), dtype=dtype)


def rows_of(value: Tensor) -> Tensor:
    """A kernel that no merge joins with one whose rows are the columns."""
    return torch.softmax(value, -1) * 2


def test_a_cast_that_two_kernels_read_is_computed_in_both() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        wide = x.double()
        return rows_of(wide), rows_of(wide.t())

    result = fused(fn, x(dtype=torch.float32))
    assert "_to_copy" not in result.ops
    assert [k.nbytes_read for k in kernels(result)] == [8 * 4 * 4] * 2
    assert "computed in each kernel that reads it: that saves" in result.reasons("duplicate")[0]


def test_a_sum_of_two_tensors_is_written_once() -> None:
    """Computed in each kernel it would be read twice as often, and keep two tensors in memory instead of one."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total = x + y
        return rows_of(total), rows_of(total.t())

    result = fused(fn, x(), x())
    assert not result.reasons("duplicate")
    assert sum(k.nbytes for k in kernels(result)) <= 7 * 8 * 4 * 8


def test_a_value_that_a_matmul_reads_is_written_and_computed_again_where_that_reads_less() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        wide = x.double()
        return wide @ wide.t(), rows_of(wide.t()), rows_of(wide)

    result = fused(fn, x(dtype=torch.float32))
    assert any("computed again in" in reason for reason in result.reasons("duplicate"))
    assert "_to_copy" in result.ops or any("to_copy" in op for op in result.ops)
    assert min(k.nbytes_read for k in kernels(result)) == 8 * 4 * 4


def test_costly_ops_are_not_computed_twice() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        value = x.double().sin()
        return rows_of(value), rows_of(value.t())

    result = fused(fn, x(dtype=torch.float32))
    assert not result.reasons("duplicate")


def test_what_the_backward_reads_is_left_to_remat() -> None:
    leaf = torch.randn(8, 8, dtype=torch.float32, requires_grad=True)

    def step() -> Tensor:
        wide = leaf.double()
        loss = (wide @ wide.tanh()).sum()
        loss.backward()
        return loss

    assert not fused(step).reasons("duplicate")


def test_a_narrower_value_is_written_in_place_of_its_cast() -> None:
    """Computed from the three inputs it would read more than is written; in float64 it would write twice the bytes."""

    def fn(x: Tensor, y: Tensor, u: Tensor) -> Tensor:
        wide = torch.where(x > 0, y + u, y).double()
        return wide - wide.sum(0)

    result = fused(fn, *(x(64, 4, dtype=torch.float32) for _ in range(3)))
    narrow, column = 64 * 4 * 4, 4 * 8
    moved = {(k.nbytes_read, k.nbytes_written) for k in kernels(result)}
    assert moved == {(3 * narrow, narrow + column), (narrow + column, 2 * narrow)}
    assert any("computed from where" in reason for reason in result.reasons("duplicate")), result.reasons("duplicate")


def test_what_its_readers_read_anyway_does_not_count_against_computing_it_there() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        product = x * y
        return (product - product.sum(0)) * x / y

    result = fused(fn, x(64, 4), x(64, 4))
    size, column = 64 * 4 * 8, 4 * 8
    moved = {(k.nbytes_read, k.nbytes_written) for k in kernels(result)}
    assert moved == {(2 * size, column), (2 * size + column, size)}


def test_what_is_written_in_a_narrower_type_is_summed_as_it_is_written() -> None:
    """Else the mean that is taken from it would be that of other numbers."""

    def fn(x: Tensor, y: Tensor, u: Tensor) -> Tensor:
        wide = torch.where(x > 0, y + u, y).float()
        return wide - wide.sum(0)

    result = fused(fn, *(x(64, 4, dtype=bf16) for _ in range(3)))
    (writing,) = [k for k in kernels(result) if any(op.target is torch.ops.aten.sum.dim_IntList for op in k.body.ops)]
    assert any(node.meta["val"].dtype is bf16 for node in writing.body.returned)
    lines = kernel_source(writing).splitlines()
    (summed,) = {line.split("+=")[1].strip() for line in lines if "_sums +=" in line and "tl.load" not in line}
    assert any(f"{summed} = " in line and line.endswith(".to(tl.bfloat16).to(tl.float32)") for line in lines), lines


def test_an_attempt_is_made_where_what_its_home_no_longer_reads_could_pay() -> None:
    """The value has 32 bytes: with those that it would spare its readers, not a sixteenth of what the two move."""
    value = captured(lambda x: x * 2, x(4)).trace.ops[0]
    home, reader = (SimpleNamespace(effort=1000, nbytes=1000) for _ in range(2))
    for spared, may_pay in ((0, False), (900, True)):
        assert _Way([value], None, "", spared).may_pay(value, home, [reader]) is may_pay  # type: ignore[arg-type,list-item]
