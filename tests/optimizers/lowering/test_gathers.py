"""Gathers in kernels: embeddings, `gather`, `index_select` and indexing by one tensor, against ATen under the interpreter.

`test_numbers_under_the_interpreter` in `test_triton` runs this file with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreter import INTERPRETED, interpreted
from kernels import check_kernel, kernel_of, kernel_of_types, run_poisoned, triton_ir
from torch import Tensor

import tracefuse
from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.kernels.functions import lower
from tracefuse.optimizers.kernels.fusible import refusal
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.kernels.text import kernel_source
from tracefuse.optimizers.lowering.gathers import index_bound
from tracefuse.optimizers.passes import Decision

aten = torch.ops.aten
compiled = pytest.mark.skipif(INTERPRETED, reason="Triton interprets in this process")
f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16


def rand(*shape: int, dtype: torch.dtype = f32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=f64).to(dtype)


def ids(below: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(below)).to(dtype)


GATHERED: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "embedding": (lambda w, i: aten.embedding(w, i) * 2, [rand(11, 33), ids(11, 3, 5)]),
    "embedding of one id": (lambda w, i: aten.embedding(w, i) * 2, [rand(11, 33), ids(11)]),
    "embedding of one row": (lambda w, i: aten.embedding(w, i) * 2, [rand(1, 33), ids(1, 7)]),
    "embedding, ids of 32 bits": (lambda w, i: aten.embedding(w, i) * 2, [rand(11, 33), ids(11, 7, dtype=torch.int32)]),
    "embedding of computed ids": (lambda w, i: aten.embedding(w, i + 3) * 2, [rand(14, 33), ids(11, 7)]),
    "embedding of a view": (lambda w, i: aten.embedding(w.t()[1:], i.t()) * 2, [rand(33, 12), ids(11, 7, 3)]),
    "two embeddings and a norm": (
        lambda w, p, i: torch.native_layer_norm(aten.embedding(w, i) + p, [33], None, None, 1e-5),
        [rand(11, 33), rand(5, 33), ids(11, 3, 5)],
    ),
    "gather along the last": (lambda x, i: x.gather(-1, i).exp(), [rand(3, 4, 9), ids(9, 3, 4, 2)]),
    "gather along the first": (lambda x, i: x.gather(0, i) * 2, [rand(7, 9), ids(7, 13, 4)]),
    "gather in the middle": (lambda x, i: x.gather(1, i) + 1, [rand(3, 6, 5), ids(6, 2, 8, 5)]),
    "gather from a computed row": (
        lambda x, i: (x * 2).log_softmax(-1).gather(1, i).squeeze(1) * -1.0,
        [rand(5, 37), ids(37, 5, 1)],
    ),
    "gather beside its row": (
        lambda x, i: ((x * 2).sum(-1, keepdim=True), (x * 2).gather(1, i)),
        [rand(5, 37), ids(37, 5, 1)],
    ),
    "gather in one part of a cat": (lambda x, i: torch.cat([x.gather(1, i), x * 2], 1), [rand(5, 9), ids(9, 5, 3)]),
    "index_select": (lambda x, i: x.index_select(1, i) * x[:, :1], [rand(4, 6, 5), ids(6, 9)]),
    "index": (lambda x, i: x[i] * 2, [rand(6, 5), ids(6, 4, 3)]),
    "index in the middle": (lambda x, i: x[:, i] * 2, [rand(3, 6, 5), ids(6, 4, 2)]),
    "index from the end": (lambda x, i: x[i - 6] * 2, [rand(6, 5), ids(6, 7)]),
    "scatter of one a row": (lambda z, i, g: z.scatter(1, i, g) * 2, [rand(5, 9), ids(9, 5, 1), rand(5, 1)]),
    "scatter of one a channel": (
        lambda i, g: torch.zeros(3, 6, 4, 5).scatter(1, i, g.exp()) * 2 + 1,
        [ids(6, 3, 1, 4, 5), rand(3, 1, 4, 5)],
    ),
    "scatter of a number": (lambda z, i: (z * 2).scatter(0, i, 1.5) * 2, [rand(7, 5), ids(7, 1, 5)]),
    "logsumexp": (lambda x: (x * 3).logsumexp(-1), [rand(5, 33)]),
    "logsumexp over two": (lambda x: x - x.logsumexp((1, 2), keepdim=True), [rand(5, 3, 7)]),
    "logsumexp of infinities": (
        lambda x: (x * 1).logsumexp(-1),
        [torch.tensor([[-torch.inf] * 3, [1.0, torch.inf, 2.0], [1.0, -torch.inf, 2.0], [torch.nan, 1.0, 2.0]])],
    ),
}  # fmt: skip


@interpreted
@pytest.mark.parametrize("name", GATHERED)
def test_numbers(name: str) -> None:
    fn, inputs = GATHERED[name]
    check_kernel(*kernel_of(fn, *inputs))


@interpreted
@pytest.mark.parametrize("dtype", [bf16, f64], ids=["bf16", "f64"])
@pytest.mark.parametrize(
    "name", ["embedding", "gather from a computed row", "index in the middle", "scatter of one a row"]
)
def test_other_types(name: str, dtype: torch.dtype) -> None:
    fn, inputs = GATHERED[name]
    check_kernel(*kernel_of(fn, *(t.to(dtype) if t.is_floating_point() else t for t in inputs)))


@interpreted
def test_an_index_out_of_range_reads_nothing_and_gives_nan() -> None:
    """Eager raises here (on the GPU, by an assertion); a wrong row would be worse than NaN."""
    kernel, (x, _) = kernel_of(lambda x, i: x[i] * 2, rand(6, 5), ids(6, 4))
    (found,) = run_poisoned(kernel, [x, torch.tensor([5, 6, -6, -7])])
    expected = torch.stack([x[5] * 2, torch.full((5,), torch.nan), x[0] * 2, torch.full((5,), torch.nan)])
    torch.testing.assert_close(found, expected, equal_nan=True)
    kernel, (w, _) = kernel_of(lambda w, i: aten.embedding(w, i) * 2, rand(6, 5), ids(6, 4))
    (found,) = run_poisoned(kernel, [w, torch.tensor([0, -1, 10**12, 3])])
    assert found.isnan().any(1).tolist() == [False, True, True, False]


# --- what fuses, and what it costs ------------------------------------------------------------------------------------


def fused(fn: Callable[..., Any], *inputs: Tensor) -> tuple[list[Kernel], list[Decision]]:
    decisions: list[Decision] = []
    trace = Fuse().run(tracefuse.capture(fn, *inputs).trace, decisions.append)
    return [n.target for n in trace.ops if isinstance(n.target, Kernel)], decisions


def test_an_embedding_shares_a_kernel_with_what_reads_it() -> None:
    (kernel,), _ = fused(lambda w, i: torch.layer_norm(aten.embedding(w, i) * 3, [33]), rand(500, 33), ids(500, 6))
    assert kernel.name.startswith("fused_embedding_mul_native_layer_norm")


def test_only_the_rows_that_are_taken_count_as_read() -> None:
    kernel, _ = kernel_of(lambda w, i: aten.embedding(w, i) * 2, rand(1000, 32), ids(1000, 5))
    assert kernel.nbytes_read == 5 * 32 * 4 + 5 * 8
    kernel, _ = kernel_of(lambda w, i: aten.embedding(w, i) * 2, rand(3, 32), ids(3, 500))
    assert kernel.nbytes_read == 3 * 32 * 4 + 500 * 8


REFUSED: dict[str, tuple[Callable[..., Any], list[Tensor], str]] = {
    "two indices": (lambda x, i: x[i, i], [rand(4, 4), ids(4, 3)], "2 index tensors"),
    "a mask": (lambda x, i: x[i > 1], [rand(4), ids(4, 4)], "torch.bool"),
    "integers": (lambda x, i: x.gather(0, i), [ids(9, 4), ids(4, 3)], "integers"),
    "a scalar": (lambda x, i: x.gather(0, i), [rand(), ids(1)], "scalar"),
    "a scatter": (lambda x, i: x.scatter(0, i, x), [rand(4), ids(4, 4)], "scatter writes"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_others_stay_with_aten(name: str) -> None:
    fn, inputs, reason = REFUSED[name]
    trace = tracefuse.capture(fn, *inputs).trace
    reasons = [found for node in trace.ops if (found := refusal(node))]
    assert len(reasons) == 1
    assert reason in reasons[0]


def test_the_backward_of_an_extremum_writes_no_zeros_first() -> None:
    x = rand(3, 6, 4).requires_grad_()
    with tracefuse.capture() as capture:
        (x * 2).max(1).values.backward(rand(3, 4))
    trace = Fuse().run(capture.trace, lambda decision: None)
    (kernel,) = [n.target for n in trace.ops if isinstance(n.target, Kernel) and "scatter" in n.target.name]
    assert kernel.nbytes_read == 3 * 4 * 4 + 3 * 4 * 8
    assert not [n for n in trace.ops if "zeros" in str(n.target)]
    assert index_bound(kernel.body) == 6


def test_addresses_in_a_large_table_are_64_bit() -> None:
    """The table has 2**33 elements, and its ids 32 bits: their product with the row's length has more."""
    kernel = kernel_of_types(lambda w, i: aten.embedding(w, i) * 2, ((2**23, 1024), bf16), ((7,), torch.int32))
    source = kernel_source(kernel)
    assert "chosen = tl.where(is_inside, i, 0).to(tl.int64)" in source
    assert "w_ptr + (chosen * 1024 + index % 1024)" in source


@compiled
@pytest.mark.parametrize("name", GATHERED)
def test_triton_takes_the_text(name: str) -> None:
    fn, inputs = GATHERED[name]
    kernel, _ = kernel_of(fn, *inputs)
    assert "tt.load" in triton_ir(kernel)
    assert lower(kernel).functions[0].bodies
