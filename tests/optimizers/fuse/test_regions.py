"""Regions: what joins, what does not and why; the pass `fuse` that carves kernels out of them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from fused import fused, kernels
from torch import Tensor, nn
from traces import ops, tried

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.fuse.regions import form_regions
from tracefuse.optimizers.kernels.fusible import refusal
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.ops import op_name
from tracefuse.optimizers.trace import phase


def test_a_chain_becomes_one_kernel_and_its_result_keeps_its_name() -> None:
    result = fused(lambda x: (x * 2).exp() + 1, torch.randn(4, 5))
    (kernel,) = kernels(result)
    assert re.fullmatch(r"fused_mul_exp_add_[0-9a-f]{6}", kernel.name)
    assert result.after.returned[0].name == result.captured.trace.returned[0].name
    assert (kernel.nbytes_read, kernel.nbytes_written) == (80, 80)


def test_a_matmul_is_a_border() -> None:
    result = fused(lambda x: ((x * 2 + 1) @ x).exp() * 2, torch.randn(4, 4))
    assert [len(k.body.ops) for k in kernels(result)] == [2, 2]
    assert "matmul, convolution and attention" in result.reasons("leave")[0]


def test_regions_are_convex() -> None:
    """`a` and `c` must not join: the matmul between them reads `a`."""

    def fn(x: Tensor) -> Tensor:
        a = x.sin() * 2
        return (a @ x) + a.cos()

    result = fused(fn, torch.randn(4, 4))
    graph = result.captured.trace.graph
    for region in form_regions(graph, {n for n in graph.nodes if refusal(n) is None}):
        reached: set = set()
        for node in graph.nodes:
            if any(a in reached or a in region for a in node.all_input_nodes) and node not in region:
                reached.add(node)
            assert not (node in region and any(a in reached for a in node.all_input_nodes))


def test_a_single_op_stays_with_aten() -> None:
    result = fused(lambda x: x.exp(), torch.randn(4, 5))
    assert not kernels(result)
    assert "one op alone" in result.reasons("leave")[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gelu_of_halves_is_a_kernel_alone_where_aten_computes_an_error_function(dtype: torch.dtype) -> None:
    x = torch.randn(4, 5, dtype=dtype)
    backward = torch.ops.aten.gelu_backward
    for op in (F.gelu, lambda x: backward(x, x)):
        assert [len(kernel.body.ops) for kernel in kernels(fused(op, x))] == [1]
    for op in (lambda x: F.gelu(x, approximate="tanh"), lambda x: backward(x, x, approximate="tanh")):
        assert "one op alone" in fused(op, x).reasons("leave")[0]


@pytest.mark.parametrize("rows", [1 << 10, 1 << 6])
def test_an_op_alone_is_a_kernel_where_aten_computes_offsets(rows: int) -> None:
    """Of what is small, ATen's takes no longer than its launch; across memory, a kernel reads no better."""
    x, factor = torch.zeros(rows, 1024, dtype=torch.bfloat16), torch.ones((), dtype=torch.bfloat16)
    for op in (lambda x, _: x[:, :1001].clone(memory_format=torch.contiguous_format), lambda x, factor: x * factor):
        assert len(kernels(fused(op, x, factor))) == (rows == 1 << 10)
    assert not kernels(fused(lambda x, _: x.t().clone(memory_format=torch.contiguous_format), x, factor))


@pytest.mark.parametrize("rows", [1 << 13, 1 << 12])
def test_a_large_cast_of_halves_is_a_kernel_alone(rows: int) -> None:
    """ATen's takes twice as long as memory; where the result fits into a cache, it does not matter."""
    result = fused(lambda x: x.float(), torch.zeros(rows, 1024, dtype=torch.bfloat16))
    assert len(kernels(result)) == (rows == 1 << 13)
    back = fused(lambda x: x.bfloat16(), torch.zeros(rows, 1024))
    assert not kernels(back)


def test_views_alone_are_never_a_kernel() -> None:
    assert not kernels(fused(lambda x: x.t().unsqueeze(0)[:, 1:], torch.randn(4, 5)))


def test_a_view_that_escapes_is_a_view_of_the_kernels_result() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2 + 1
        return y, y.t()

    result = fused(fn, torch.randn(4, 5))
    assert len(kernels(result)) == 1
    y, t = result.after.returned
    assert op_name(t) == "aten.t.default"
    assert t.args == (y,)


def test_a_view_between_two_ops_costs_nothing() -> None:
    (kernel,) = kernels(fused(lambda x: (x * 2).t().reshape(-1).exp(), torch.randn(4, 5)))
    assert kernel.nbytes_read + kernel.nbytes_written == 2 * 4 * 5 * 4


def test_a_value_read_plain_and_transposed_is_written_where_that_is_fewer_bytes() -> None:
    def fn(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        value = a * b + c * d
        return value.sin() + value.t().cos()

    result = fused(fn, *(torch.randn(8, 8) for _ in range(4)))
    assert [(k.nbytes_read, k.nbytes_written) for k in kernels(result)] == [(4 * 256, 256), (2 * 256, 256)]
    assert "in one kernel its ops move 2.25 KiB, in two 2 KiB" in result.reasons("split")[0]


def test_a_value_read_plain_and_transposed_is_computed_twice_where_that_is_fewer_bytes() -> None:
    (kernel,) = kernels(fused(lambda a: (a * 2).sin() + (a * 2 + 1).t(), torch.randn(8, 8)))
    assert (kernel.nbytes_read, kernel.nbytes_written) == (2 * 256, 256)


def test_rows_join_with_what_is_before_and_after() -> None:
    (kernel,) = kernels(fused(lambda x: torch.softmax(x * 0.5, -1).masked_fill(x < 0, 0.0), torch.randn(6, 33)))
    assert {op_name(n).split(".")[1] for n in kernel.body.ops} == {"mul", "_softmax", "lt", "masked_fill"}


def test_different_rows_do_not_join() -> None:
    result = fused(lambda x: (x * 2).sum(-1).exp().sum(-1) + 1, torch.randn(4, 6, 33))
    assert [len(k.body.ops) for k in kernels(result)] == [3, 2]


def test_a_result_read_across_its_rows_splits_the_region() -> None:
    result = fused(lambda x: torch.softmax(x * 2, -1).t() + x.exp(), torch.randn(8, 8))
    assert any("another row" in reason for reason in result.reasons("split"))
    assert len(kernels(result)) == 2


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (lambda a, b: a * F.silu(b))(*F.layer_norm(x, (6,)).chunk(2, -1)),
        lambda x: sum(q.sin() * 2 for q in x.softmax(-1).split(3, -1)),
        lambda x: (lambda a, b: (a * b).sum(-1).exp())(*(x * 2).softmax(-1).unbind(0)),
    ],
    ids=["gated layer norm", "split of a softmax", "unbind, then row sum"],
)
def test_the_parts_of_a_split_below_a_row_reduction_are_a_kernel_of_the_whole(fn) -> None:  # type: ignore[no-untyped-def]
    """A split is free and yields a list: the kernel that reads its parts takes the tensor that is split."""
    x = torch.randn(2, 4, 6, dtype=torch.float64, requires_grad=True)

    def step() -> Tensor:
        loss = fn(x).sum()
        loss.backward()
        return loss

    result = tried(Fuse(), tracefuse.capture(step))
    assert kernels(result)
    for kernel in kernels(result):
        assert all(isinstance(p.meta["val"], Tensor) for p in kernel.body.placeholders)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
@pytest.mark.parametrize("fn", [lambda y: (y.sum(-1) * 2).sum(), lambda y: y.softmax(-1).sum()], ids=["sum", "softmax"])
def test_rows_without_elements_stay_with_aten(fn, shape: tuple[int, int]) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(shape, requires_grad=True)
    result = tried(Fuse(), tracefuse.capture(lambda: fn(x * 3).backward()))
    assert "it reduces no elements" in result.reasons("leave")


def test_results_of_another_size_split_the_region() -> None:
    def fn(x: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
        table = angle.cos() * 2
        return table, x * table + 1

    result = fused(fn, torch.randn(4, 6, 8), torch.randn(8))
    assert len(kernels(result)) == 2
    (split,) = (decision for decision in result.decisions if decision.action == "split")
    assert split.value == "table"
    assert split.reason.startswith("it has 8 elements, where the kernel's programs share out 192; so these 4 ops")


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (
            lambda x: x.softmax(-1),
            "1 op in {}: it reads 256 B and writes 256 B, ATen's own kernel reads that twice, or",
        ),
        (lambda x: (x * 2).softmax(-1), "2 ops in {}: it reads 256 B and writes 256 B, one by one they move 1 KiB"),
        (
            lambda x: torch.ops.aten.slice_backward(x, [16, 8], 0, 0, 8, 1),
            "1 op in {}: it reads 256 B and writes 512 B, ATen fills",
        ),
    ],
)
def test_why_there_is_a_kernel(fn: Callable[[Tensor], Tensor], reason: str) -> None:
    result = fused(fn, torch.randn(8, 8))
    (kernel,) = kernels(result)
    assert result.reasons("fuse")[0].startswith(reason.format(kernel.name))


def test_an_op_sinks_to_its_reader_where_that_costs_no_bytes() -> None:
    """A comparison with a constant, of what the reader loads anyway, is not worth a kernel above the matmul."""

    def fn(x: Tensor, target: Tensor, scale: Tensor) -> Tensor:
        factor = torch.where(target == 0, -scale, 0.0)
        is_target = torch.arange(37) == target[:, None]
        return torch.where(is_target, (x @ x.t() @ x) * factor[:, None], 0.0)

    result = fused(fn, torch.randn(5, 37), torch.arange(5), torch.tensor(2.0))
    assert len(kernels(result)) == 1
    assert ops(result.after) == ["t", "mm", "mm", kernels(result)[0].name]


def test_constants_are_made_again_in_every_kernel() -> None:
    def fn(x: Tensor) -> Tensor:
        two = torch.full((4,), 2.0)
        return ((x * two + 1) @ x) * two - two

    for kernel in kernels(fused(fn, torch.randn(4, 4))):
        assert len(kernel.body.inputs) == 1


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x: (x * 2).repeat(300, 1).amax(0) + 1, "by more than a sum"),
        (lambda x: (x * 2).view(-1).cumprod(0) + 1, "no Triton form"),
        (lambda x: F.dropout(x * 2 + 1, 0.5), "random"),
        (lambda x: torch.scatter(x + 1, 0, torch.tensor([[1, 2]]), x * 2), "addresses that are data"),
        (lambda x: torch.complex(x * 2, x).abs(), "c64"),
    ],
)
def test_what_stays_with_aten_says_why(fn, reason: str) -> None:  # type: ignore[no-untyped-def]
    assert any(reason in r for r in fused(fn, torch.randn(5, 7)).reasons("leave"))


def test_devices_do_not_mix() -> None:
    """On fake tensors, since there is no GPU here: a CPU scalar is not handed to a kernel."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    graph = torch.fx.Graph()
    big, scalar = graph.placeholder("big"), graph.placeholder("scalar")
    node = graph.call_function(torch.ops.aten.mul.Tensor, (big, scalar))
    with FakeTensorMode():
        big.meta["val"], scalar.meta["val"] = torch.empty(4, device="meta"), torch.empty(())
        node.meta["val"] = torch.empty(4, device="meta")
    assert "values on cpu and meta" in str(refusal(node))


def test_no_kernel_spans_both_phases() -> None:
    x = torch.randn(4, 5, requires_grad=True)

    def step() -> None:
        (x.exp() * 2).sum().backward()

    trace = tried(Fuse(), tracefuse.capture(step)).after
    graph = {n.name: phase(n) for n in trace.ops}
    assert {"forward", "backward"} == set(graph.values())
    trace.split()


def test_a_layer_norms_backward_is_one_kernel() -> None:
    """The gradient of its input is by rows, those of its weight and bias are sums down columns of the same elements."""
    torch.manual_seed(0)
    norm, x = nn.LayerNorm(33), torch.randn(5, 33, requires_grad=True)

    def step() -> Tensor:
        loss = (norm(x.tanh()) * 2).sum()
        loss.backward()
        return loss

    result = tried(Fuse(), tracefuse.capture(step))
    (kernel,) = [k for k in kernels(result) if "native_layer_norm_backward" in k.name]
    assert len(kernel.body.returned) == 3
    assert not [n for n in result.after.ops if op_name(n) == "aten.native_layer_norm_backward.default"]


def test_a_sum_down_columns_joins_what_it_sums_and_what_reads_it() -> None:
    """The bias gradient of `x * 2 + b`, scaled: one kernel writes the product and the sum."""
    (kernel,) = kernels(fused(lambda x: ((y := x * 2), y.sum(0) * 3), torch.randn(50, 7)))
    assert [tuple(n.meta["val"].shape) for n in kernel.body.returned] == [(50, 7), (7,)]


def test_what_needs_the_total_of_a_column_among_the_rows_is_another_kernel() -> None:
    result = fused(lambda x: (x * 2 - (x * 2).sum(0)).exp(), torch.randn(50, 7))
    assert len(kernels(result)) == 2


# --- identical layers -------------------------------------------------------------------------------------------------


@functools.cache
def gpt_kernels(layers: int) -> tuple[int, frozenset[Kernel]]:
    torch.manual_seed(0)
    model = GPT(layers=layers, width=32, heads=2, vocab=61, length=16, dropout=0.1)
    tokens, targets = batch(61, 2, 12)
    capture = tracefuse.capture(lambda: model(tokens, targets).backward())
    found = [n.target for n in Fuse().run(capture.trace, lambda decision: None).ops if isinstance(n.target, Kernel)]
    return len(found), frozenset(found)


def test_identical_layers_share_one_kernel() -> None:
    few, many = gpt_kernels(2), gpt_kernels(6)
    assert many[0] > 2 * few[0]
    assert many[1] == few[1]
    assert len(few[1]) < 14


def test_shared_kernels_are_one_object_in_a_trace() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Tanh()) for _ in range(3)))
    result = fused(model, torch.randn(4, 8))
    assert len(kernels(result)) == 3
    assert len({id(k) for k in kernels(result)}) == 1
