"""Long sums: which adds become one kernel, what bounds them, and that the kernel adds.

The numbers are checked in the process that `test_triton.test_numbers_under_the_interpreter` starts for this file too.
"""

from __future__ import annotations

import re

import pytest
import torch
from kernels import check_kernel, triton_ir
from programs import summed_chain
from shaped import INTERPRETED, interpreted
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from traces import Tried, captured, tried

from tracefuse.build.modules import launcher
from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.fuse.long_sums import SHORTEST, WAITING
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.kernels.long_sum import LongSum, long_sum
from tracefuse.optimizers.kernels.text import kernel_source, launches
from tracefuse.optimizers.trace import Trace

f32, f64, bf16, f16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


def sum_kernel(*shape: int, dtype: torch.dtype = f32) -> LongSum:
    node = fx.Graph().placeholder("add")
    with FakeTensorMode():
        node.meta["val"] = torch.empty(shape, dtype=dtype)
    return long_sum(node)


def calls(trace: Trace) -> list[fx.Node]:
    return [node for node in trace.ops if isinstance(node.target, LongSum)]


def summed(operands: list[Tensor]) -> Tensor:
    """The sum, read by a matmul, so that nothing else could take part."""
    total = operands[0]
    for operand in operands[1:]:
        total = total + operand
    return total @ total


def tried_sum(count: int, fn=summed, **options) -> Tried:  # type: ignore[no-untyped-def]
    operands = [torch.randn(4, 4, dtype=f64, **options) for _ in range(count)]
    return tried(Fuse(), captured(lambda: fn(operands)))


# --- the kernel -------------------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("dtype", [f64, f32, bf16, f16], ids=["f64", "f32", "bf16", "f16"])
@pytest.mark.parametrize(("shape", "count"), [((17, 101), 2), ((17, 101), 30), ((2, 1024), 9), ((1,), 8), ((), 8)])
def test_it_adds(shape: tuple[int, ...], count: int, dtype: torch.dtype) -> None:
    kernel = sum_kernel(*shape, dtype=dtype)
    exact = [torch.randn(shape, dtype=dtype).mul_(4).round_().div_(4) for _ in range(count)]
    check_kernel(kernel, exact)


@interpreted
def test_operands_in_other_memory_orders_and_at_odd_addresses_are_copied() -> None:
    kernel = sum_kernel(6, 10)
    odd = torch.randn(61)[1:].view(6, 10)
    assert odd.data_ptr() % 16
    check_kernel(kernel, [torch.randn(6, 10), torch.randn(10, 6).t(), odd, torch.randn(6, 1).expand(6, 10)])


@interpreted
def test_halves_are_added_in_f32() -> None:
    """ATen's chain of f16 adds loses every one of these quarters of a unit in the last place."""
    operands = [torch.full((4,), 2048.0, dtype=f16), *[torch.full((4,), 0.5, dtype=f16)] * 16]
    kernel = sum_kernel(4, dtype=f16)
    assert kernel(*operands).tolist() == [2048.0] * 4
    assert launcher(kernel)(*operands).tolist() == [2056.0] * 4


def test_on_the_cpu_aten_adds() -> None:
    operands = [torch.randn(5, dtype=f64) for _ in range(9)]
    torch.testing.assert_close(launcher(sum_kernel(5, dtype=f64))(*operands), torch.stack(operands).sum(0))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("dtype", [f64, f32, bf16], ids=["f64", "f32", "bf16"])
def test_the_compiler_takes_it_and_knows_that_addresses_are_aligned(dtype: torch.dtype) -> None:
    kernel = sum_kernel(64, 100, dtype=dtype)
    assert re.search(r"tt.int_to_ptr.*tt.divisibility = (dense<)?16", triton_ir(kernel))
    (launch,) = launches(kernel)
    assert launch.programs == 7
    assert f"def {launch.function}(table_ptr, total_ptr" in kernel_source(kernel)


def test_the_type_is_its_key() -> None:
    assert sum_kernel(4, 5) == sum_kernel(4, 5)
    others = [sum_kernel(5, 4), sum_kernel(4, 5, dtype=bf16)]
    assert sum_kernel(4, 5).key not in {k.key for k in others}


def test_its_bytes_are_those_of_its_operands_and_its_result() -> None:
    assert sum_kernel(4, 5).nbytes_for(9) == 10 * 80


# --- the sums ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [SHORTEST, 40])
def test_a_chain_is_one_call(count: int) -> None:
    result = tried_sum(count)
    (call,) = calls(result.after)
    assert [a.name for a in call.args] == [p.name for p in result.after.placeholders]
    assert "add" not in result.ops


def test_any_number_of_operands_has_one_kernel() -> None:
    (few,), (many,) = calls(tried_sum(9).after), calls(tried_sum(33).after)
    assert few.target == many.target


def test_a_short_chain_is_an_ordinary_kernel() -> None:
    result = tried_sum(SHORTEST - 1)
    assert not calls(result.after)
    assert [type(n.target) for n in result.after.ops if isinstance(n.target, Kernel)] == [Kernel]


def test_a_tree_is_one_call() -> None:
    def tree(operands: list[Tensor]) -> Tensor:
        while len(operands) > 1:
            operands = [a + b for a, b in zip(operands[::2], operands[1::2], strict=True)]
        return operands[0] @ operands[0]

    (call,) = calls(tried_sum(16, tree).after)
    assert len(call.args) == 16


def test_a_value_that_others_read_is_an_operand() -> None:
    def fn(operands: list[Tensor]) -> tuple[Tensor, Tensor]:
        first = summed(operands[:9])
        half = sum(operands[1:9], operands[0])
        return first, half @ half, summed([half, *operands[9:]])

    first, half, whole = sorted(calls(tried_sum(17, fn).after), key=lambda n: len(n.args))
    assert len(first.args) == len(half.args) == len(whole.args) == 9
    assert half in whole.args or first in whole.args


def test_doubling_is_no_sum() -> None:
    def doubled(operands: list[Tensor]) -> Tensor:
        (x,) = operands
        for _ in range(20):
            x = x + x
        return x @ x

    assert not calls(tried_sum(1, doubled).after)


@pytest.mark.parametrize("change", ["broadcast", "dtype", "alpha", "transposed"])
def test_operands_of_another_type_are_not_summed(change: str) -> None:
    def fn(operands: list[Tensor]) -> Tensor:
        total = operands[0]
        for x in operands[1:]:
            other = {"broadcast": x[0], "dtype": x.float(), "alpha": x, "transposed": x.t()}[change]
            total = torch.add(total, other, alpha=2 if change == "alpha" else 1)
        return total @ total

    assert not calls(tried_sum(12, fn).after)


def test_ops_that_would_have_to_write_their_values_keep_a_sum_ordinary() -> None:
    result = tried_sum(12, lambda operands: summed([x.sin() for x in operands]))
    assert not calls(result.after)
    assert "a sum of 12: as a kernel of its own it would cost" in result.reasons("unroll")[0]


def test_operands_that_would_wait_for_the_others_cut_the_sum() -> None:
    """Each product is made, added and freed: as one call, all 60 would be in memory."""

    def fn(operands: list[Tensor]) -> Tensor:
        (x,) = operands
        total = x @ x
        for _ in range(59):
            x = x @ x.t()
            total = total + x @ x
        return total @ total

    result = tried_sum(1, lambda operands: fn([operands[0] / 4]))
    counts = [len(c.args) for c in calls(result.after)]
    assert len(counts) == 4
    assert max(counts) <= WAITING + 2
    assert sum(counts) == 60 + 3
    assert "in 4 parts so that at most 16 wait" in " ".join(result.reasons("fuse"))


# --- the chain of layers that each sum the stream anew ----------------------------------------------------------------


def chain_kernels(layers: int) -> set[Kernel]:
    trace = captured(summed_chain(f64, layers=layers).run).trace
    return {n.target for n in Fuse().run(trace, lambda decision: None).ops if isinstance(n.target, Kernel)}


def test_unique_kernels_do_not_grow_with_depth() -> None:
    few, many = chain_kernels(24), chain_kernels(48)
    assert few == many
    assert len([k for k in few if isinstance(k, LongSum)]) == 1
