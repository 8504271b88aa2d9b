"""Merging: kernels beside or after each other become one where that moves fewer bytes, in an order that survives it."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from fused import fused, kernels
from torch import Tensor
from traces import tried

import tracefuse
from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.fuse.merging import MOST_TENSORS, WINDOW
from tracefuse.optimizers.fuse.rebuild import UnitOrder
from tracefuse.optimizers.ops import op_name


def x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (8, 8)), dtype=torch.float64)


def rotation() -> Tensor:
    """A matrix that leaves sizes as they are, however often it is applied."""
    return torch.linalg.qr(x()).Q


def ops_of(kernel) -> set[str]:  # type: ignore[no-untyped-def]
    return {op_name(node).split(".")[1] for node in kernel.body.ops}


def test_two_ops_that_read_one_tensor_read_it_once() -> None:
    result = fused(lambda x: (x.sin(), x.cos()), x())
    (kernel,) = kernels(result)
    assert kernel.nbytes_read == 8 * 8 * 8
    assert "moves 1.5 KiB, apart they move 2 KiB" in result.reasons("merge")[0]


def test_an_activation_computed_again_joins_its_backward() -> None:
    """What rematerialisation leaves in the backward of an MLP: both read what the activation was computed from."""

    def backward(grad: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        again = F.gelu(up)
        return torch.ops.aten.gelu_backward(grad @ down.t(), up), again.t() @ grad

    (kernel,) = kernels(fused(backward, x(), x(), x()))
    assert ops_of(kernel) == {"gelu", "gelu_backward"}
    assert (kernel.nbytes_read, kernel.nbytes_written) == (2 * 512, 2 * 512)


def test_a_value_that_one_kernel_hands_to_the_next_is_not_written() -> None:
    """The adds stand behind different numbers of matmuls, so that regions keep them apart."""

    def fn(x: Tensor) -> Tensor:
        first = x @ x
        second = first @ x
        return (x + first + second).sin()

    result = fused(fn, x())
    (kernel,) = kernels(result)
    assert (kernel.nbytes_read, kernel.nbytes_written) == (3 * 512, 512)


def test_what_needs_the_other_through_a_matmul_stays_apart() -> None:
    result = fused(lambda x: (x.sin() @ x) * x.sin().exp() * x, x())
    assert any("by an op between them" in reason for reason in result.reasons("apart"))


def test_two_calls_of_one_kernel_are_told_apart_by_what_they_yield() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return x.sin() * ((x.sin() * y) @ x)

    (reason,) = fused(fn, x(), x()).reasons("apart")
    assert reason.startswith("two calls of fused_sin_mul_")
    assert ", for mul and " in reason


def test_a_few_long_rows_that_one_kernel_normalises_and_several_programs_sum_stay_apart() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return (x.softmax(-1) - y).sum(-1)

    (reason,) = fused(fn, *(torch.randn(2, 20000, dtype=torch.float64) for _ in range(2))).reasons("apart")
    assert reason.endswith("the one reduces rows of 20000, the other rows of 20000 that several programs share")


def test_other_rows_stay_apart() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.softmax(x, -1), torch.softmax(x.reshape(4, 16), -1)

    assert [len(k.body.returned) for k in kernels(fused(fn, x()))] == [1, 1]


def test_different_numbers_of_elements_stay_apart() -> None:
    assert not kernels(fused(lambda x: (x.sin(), x[:4].cos()), x()))


def test_a_merged_kernel_takes_only_so_many_tensors() -> None:
    def fn(turn: Tensor, y: Tensor, *shared: Tensor) -> list[Tensor]:
        found = []
        for _ in range(MOST_TENSORS):
            y = y @ turn
            found.append(sum(shared, y))
        return found

    result = fused(fn, rotation(), *(x() for _ in range(7)))
    assert 6 < max(len(k.body.placeholders) + len(k.body.returned) for k in kernels(result)) <= MOST_TENSORS
    assert any(f"more than {MOST_TENSORS}" in reason for reason in result.reasons("apart"))


def test_far_apart_in_the_schedule_means_apart() -> None:
    def fn(x: Tensor, turn: Tensor, between: int) -> tuple[Tensor, Tensor]:
        first, y = x.sin(), x
        for _ in range(between):
            y = y @ turn
        return first, x.cos() * y

    near, far = (fused(lambda x, turn, n=n: fn(x, turn, n), x(), rotation()) for n in (2, WINDOW + 2))
    assert len(kernels(near)) == 1
    assert not any("sin" in ops_of(k) for k in kernels(far))


def test_memory_is_not_held_to_save_fewer_bytes() -> None:
    """`a + b` read both for the last time; until the end two tensors would wait, to read `x` once."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b, c, d = (x @ (x * k) for k in (2, 3, 4, 5))
        first = (a + b) + (c * d) + x
        y = first
        for _ in range(4):
            y = y.t() @ x
        return y, x.cos(), first

    result = fused(fn, x())
    assert not any({"add", "cos"} <= ops_of(kernel) for kernel in kernels(result))


def test_laws_hold_for_pairs_in_both_phases() -> None:
    leaf = x().requires_grad_()

    def step() -> Tensor:
        loss = ((leaf.sin() @ leaf.cos()) * leaf.tanh()).sum()
        loss.backward()
        return loss

    result = tried(Fuse(), tracefuse.capture(step))
    assert result.reasons("merge")


def test_what_reads_the_other_through_a_view_of_another_kind_stays_apart() -> None:
    """No kernel computes the diagonal, so that a kernel of all would read its own result."""

    def fn(x: Tensor) -> Tensor:
        scaled = (x @ x) / 3
        root = scaled.diagonal().sqrt()
        return scaled / root[:, None] / root[None]

    assert "diagonal" in fused(lambda x: fn(x.abs()), x(3, 3)).ops


# --- the order ----------------------------------------------------------------------------------------------------------

Needs = dict[int, set[int]]


def random_needs(choose: random.Random, count: int) -> Needs:
    return {unit: {one for one in range(max(0, unit - 6), unit) if choose.random() < 0.3} for unit in range(count)}


def reaches(needs: Needs, first: int, second: int) -> bool:
    """Whether a path leads from `first` to `second` through others."""
    stack, seen = [one for one in needs[second] if one != first], set()
    while stack:
        unit = stack.pop()
        if unit == first:
            return True
        if unit not in seen:
            seen.add(unit)
            stack += needs[unit]
    return False


@pytest.mark.parametrize("seed", range(20))
def test_it_merges_what_makes_no_cycle_and_stays_an_order(seed: int) -> None:
    choose = random.Random(seed)
    order = UnitOrder(random_needs(choose, 30), place=lambda unit: unit)
    merges = 0
    for merged in range(30, 60):
        first, second = sorted(choose.sample(sorted(order.at), 2), key=order.at.__getitem__)
        below = order.between(first, second)
        assert (below is None) == reaches(order.needs, first, second)
        if below is not None:
            order.merge(first, second, merged, below)
            merges += 1
        for unit, operands in order.needs.items():
            assert all(order.at[one] < order.at[unit] and unit in order.readers[one] for one in operands)
        assert order.at.keys() == order.needs.keys() == order.readers.keys()
    assert merges > 3


def test_of_what_could_be_next_the_least_place_is() -> None:
    order = UnitOrder({3: set(), 1: set(), 2: {3}}, place=lambda unit: unit)
    assert sorted(order.at, key=order.at.__getitem__) == [1, 3, 2]


def test_a_cycle_is_no_order() -> None:
    with pytest.raises(ValueError, match="each other in a cycle: group ops so that"):
        UnitOrder({1: {2}, 2: {1}}, place=lambda unit: unit)
