"""Matmuls over unaligned rows are padded where the model says that it pays, and compute the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from padded import PADS_ALL, PadAll
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from traces import tried

import tracefuse
from tracefuse.config.configuration import Config
from tracefuse.optimizers.costs.alignment import rounded, unaligned
from tracefuse.optimizers.costs.cost import H100_SXM_DATASHEET, LAUNCH_S, roofline_seconds
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.ops import does_work, op_name
from tracefuse.optimizers.pad import Pad
from tracefuse.optimizers.passes import Decision, PassRecord, run_pipeline
from tracefuse.optimizers.simplify import Simplify
from tracefuse.optimizers.trace import Input, Output, Trace, nbytes, origin, phase, val

aten = torch.ops.aten


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


# --- the same numbers -------------------------------------------------------------------------------------------------


def linear() -> Tensor:
    return F.linear(leaf(8, 32), leaf(61, 32), leaf(61)) * torch.randn(8, 61, dtype=torch.float64)


def of_odd_rows() -> Tensor:
    return (leaf(7, 32) @ leaf(61, 32).t()).sin()


def batched() -> Tensor:
    return torch.bmm(leaf(3, 8, 5), leaf(3, 5, 7)).sin()


def batched_and_added() -> Tensor:
    return torch.baddbmm(leaf(3, 1, 7), leaf(3, 8, 5), leaf(3, 5, 7), beta=0.5, alpha=2.0).sin()


def attention() -> Tensor:
    q, k, v = (leaf(2, 3, 7, 5) for _ in range(3))
    scores = (q @ k.transpose(-2, -1)).masked_fill(torch.ones(7, 7).tril() == 0, float("-inf"))
    return torch.softmax(scores, -1) @ v


def chained() -> Tensor:
    return leaf(4, 5) @ leaf(5, 7) @ leaf(7, 3) @ leaf(3, 9)


def of_permuted_batches() -> Tensor:
    return torch.bmm(leaf(8, 3, 5).permute(1, 0, 2), leaf(7, 5, 3).permute(2, 1, 0)).sin()


def of_nothing() -> Tensor:
    return torch.cat([leaf(5, 0) @ leaf(0, 7), leaf(0, 3) @ leaf(3, 7)])


@pytest.mark.parametrize(
    "program",
    [linear, of_odd_rows, batched, batched_and_added, attention, chained, of_permuted_batches, of_nothing],
    ids=lambda program: program.__name__,
)
def test_padded_matmuls_compute_the_same(program: Callable[[], Tensor]) -> None:
    torch.manual_seed(0)
    capture = tracefuse.capture(lambda: program().sum().backward())
    found = tried(PadAll(), capture)
    assert not any(map(unaligned, found.after.ops))
    assert bool(found.reasons("pad")) == (program is not of_nothing)
    assert not found.reasons("leave")


@pytest.mark.parametrize("shape", [(), (1,), (13,), (1, 13), (5, 1), (5, 13)])
def test_a_bias_that_is_broadcast_is_added_to_padded_rows_and_columns_too(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    b, x, w = leaf(*shape), leaf(5, 7), leaf(7, 13)
    found = tried(PadAll(), tracefuse.capture(lambda: torch.addmm(b, x, w).square().sum().backward()))
    assert found.reasons("pad")


def test_a_value_that_is_infinite_stays_in_its_row() -> None:
    x, w = torch.randn(4, 5, dtype=torch.float64), torch.randn(5, 7, dtype=torch.float64)
    x[1, 2] = float("inf")
    found = tried(PadAll(), tracefuse.capture(lambda: x @ w))
    (y,) = tracefuse.replay(found.after, found.captured.example_inputs)
    assert y.isinf().all(1).tolist() == [False, True, False, False]
    assert not y.isnan().any()


def test_a_result_that_is_returned_keeps_its_strides_and_its_name() -> None:
    x, w = torch.randn(8, 32), torch.randn(32, 61)
    found = tried(PadAll(), tracefuse.capture(lambda: x @ w))
    assert found.ops == ["constant_pad_nd", "mm", "slice", "clone"]
    assert found.after.returned[0].name == found.captured.trace.returned[0].name


# --- who copies what --------------------------------------------------------------------------------------------------


def head(vocabulary: int = 5003) -> tracefuse.Capture:
    """A language model's head: hidden states to logits to the mean cross-entropy."""
    torch.manual_seed(0)
    x, w, targets = leaf(64, 32), leaf(vocabulary, 32), torch.randint(vocabulary, (64,))
    return tracefuse.capture(lambda: F.cross_entropy(x @ w.t(), targets).backward())


def test_operands_are_padded_once_for_all_that_read_them() -> None:
    found = tried([Simplify(), PadAll()], head())
    pads = [n for n in found.after.ops if n.target is aten.constant_pad_nd.default]
    assert [tuple(val(n).shape) for n in pads] == [(5008, 32), (64, 5008)]
    assert [phase(n) for n in pads] == ["forward", "backward"]


def test_with_kernels_the_logits_and_their_gradient_are_written_once() -> None:
    """By the matmul and by the loss's kernel, padded; the weight's copy is the only one that is made of anything."""
    capture = head()
    steps = run_pipeline(capture.trace, Config().passes(PADS_ALL))
    after = steps[-1].after
    large = [n for n in after.ops if does_work(n) and nbytes(n) >= 64 * 5003 * 8]
    assert [tuple(val(n).shape) for n in large] == [(64, 5008)] * 2
    logits, gradient = large
    assert logits.target is aten.mm.default
    assert isinstance(gradient.target, Kernel)
    assert logits in gradient.all_input_nodes, "read as it lies"
    copies = [n for n in after.ops if op_name(n).startswith("fused_constant_pad_nd_")]
    assert {tuple(val(n).shape) for n in copies} == {(5008, 32)}
    assert "mask" not in next(line for line in gradient.target.source.splitlines() if "tl.load(mm_ptr" in line)
    for mine, theirs in zip(tracefuse.replay(after, capture.example_inputs), capture.replay(), strict=True):
        torch.testing.assert_close(mine, theirs)


# --- what is worth it -------------------------------------------------------------------------------------------------


def matmul(
    rows: int, inner: int, columns: int, dtype: torch.dtype, transposed: tuple[bool, bool] = (False, False)
) -> Trace:
    """`x @ w` of those sizes, without memory; `transposed` says which factor lies the other way round."""
    graph, mode = fx.Graph(), FakeTensorMode()
    found = []
    with mode:
        for name, shape, turned in zip("xw", ((rows, inner), (inner, columns)), transposed, strict=True):
            node = graph.placeholder(name)
            node.meta["val"] = torch.empty(shape[::-1], dtype=dtype).t() if turned else torch.empty(shape, dtype=dtype)
            found.append(node)
        y = graph.call_function(aten.mm.default, tuple(found))
        y.meta |= {"val": torch.mm(*map(val, found)), "phase": "forward"}
        z = graph.call_function(aten.sum.default, (y,))
        z.meta |= {"val": torch.sum(val(y)), "phase": "forward"}
    graph.output((z,))
    return Trace(graph, tuple(Input(n.name, "input", n.name) for n in found), (Output("result", "z"),))


def step(trace: Trace, **options: bool) -> PassRecord:
    (found,) = run_pipeline(trace, [Pad(**options)])
    return found


def decision(trace: Trace, **options: bool) -> Decision:
    (found,) = step(trace, **options).decisions
    return found


def test_a_vocabulary_is_padded_and_the_reason_has_sizes_times_and_bytes() -> None:
    found = decision(matmul(8192, 768, 50257, torch.bfloat16, (False, True)))
    assert found.action == "pad"
    assert found.nbytes == 2 * 768 * (50257 + 50304), "the weight's copy"
    assert found.reason.startswith("columns 50,257 → 50,304: modelled ")
    assert "copies of 147.3 MiB included" in found.reason


@pytest.mark.parametrize(
    ("sizes", "dtype", "options", "reason"),
    [
        ((8192, 768, 50257), torch.float32, {}, "but float32 without TF32 runs on no tensor cores"),
        ((8192, 768, 50257), torch.float64, {"tf32": True}, "but f64 runs on no tensor cores"),
        ((64, 64, 61), torch.bfloat16, {}, "µs padded"),
        ((8192, 768, 3), torch.bfloat16, {}, "µs padded"),
    ],
)
def test_what_would_gain_nothing_is_left_and_says_why(
    sizes: tuple[int, int, int], dtype: torch.dtype, options: dict[str, bool], reason: str
) -> None:
    trace = matmul(*sizes, dtype)
    found = decision(trace, **options)
    assert found.action == "leave"
    assert reason in found.reason
    assert step(trace, **options).is_unchanged


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tensor_cores_take_all_of_them(dtype: torch.dtype) -> None:
    assert decision(matmul(8192, 768, 50257, dtype), tf32=True).action == "pad"


def test_aligned_matmuls_are_not_mentioned() -> None:
    assert step(matmul(8192, 768, 50304, torch.bfloat16)).decisions == ()


def test_copies_are_worth_what_all_their_readers_gain() -> None:
    """The gradient of these logits is no gain to pad for one of the two matmuls that read it, but for both."""
    torch.manual_seed(0)
    x, w = (leaf(n, 256, dtype=torch.bfloat16) for n in (2048, 5003))
    *_, head = run_pipeline(tracefuse.capture(lambda: F.linear(x, w).sin().sum().backward()).trace, [Simplify(), Pad()])
    assert [one.action for one in head.decisions] == ["pad"] * 3
    assert sum(n.target is aten.constant_pad_nd.default for n in head.after.ops) == 2
    assert modelled_s(head.after) < modelled_s(head.before)
    x.requires_grad_(False)
    *_, alone = run_pipeline(
        tracefuse.capture(lambda: F.linear(x, w).sin().sum().backward()).trace, [Simplify(), Pad()]
    )
    assert [one.action for one in alone.decisions] == ["pad", "leave"]


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 20_000) | st.sampled_from([2, 3, 64, 1001, 1024, 50257])] * 3),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    transposed=st.tuples(st.booleans(), st.booleans()),
)
def test_no_program_gets_slower_by_the_model(
    sizes: tuple[int, int, int], dtype: torch.dtype, transposed: tuple[bool, bool]
) -> None:
    found = step(matmul(*sizes, dtype, transposed))
    assert modelled_s(found.after) <= modelled_s(found.before) * (1 + 1e-9)
    assert found.is_unchanged == all(one.action == "leave" for one in found.decisions)


def modelled_s(trace: Trace) -> float:
    """The roofline of every op that moves something, and a launch for each."""
    work = [n for n in trace.ops if does_work(n)]
    return sum(roofline_seconds(n, H100_SXM_DATASHEET) for n in work) + LAUNCH_S * len(work)


# --- what is aligned --------------------------------------------------------------------------------------------------


def test_the_distance_between_rows_counts_not_their_length() -> None:
    whole = torch.randn(64, 64, dtype=torch.bfloat16)
    capture = tracefuse.capture(lambda: (whole[:, :61] @ whole[:61]) + (whole[:, :61].contiguous() @ whole[:61]))
    first, second = (n for n in capture.trace.ops if n.target is aten.mm.default)
    assert unaligned(first) is None
    assert unaligned(second) == (64, rounded(61, 2), 64)


def test_a_vector_has_no_rows_to_align() -> None:
    capture = tracefuse.capture(lambda: leaf(64, 1001, dtype=torch.bfloat16) @ leaf(1001, 1, dtype=torch.bfloat16))
    found = tried(PadAll(), capture)
    (product,) = (n for n in found.after.ops if n.target is aten.mm.default)
    assert [tuple(val(a).shape) for a in product.args] == [(64, 1024), (1024, 1)]


@pytest.mark.parametrize(
    ("count", "size", "width"),
    [
        (50257, 2, 50304),
        (50257, 4, 50272),
        (77, 2, 80),
        (1001, 2, 1024),
        (1003, 4, 1024),
        (61, 2, 64),
        (3, 4, 4),
        (5, 8, 6),
    ],
)
def test_rows_are_rounded_to_whole_tiles_where_that_adds_little(count: int, size: int, width: int) -> None:
    assert rounded(count, size) == width


def test_the_modelled_time_knows_that_unaligned_matmuls_are_slow() -> None:
    times = {n: modelled_s(matmul(8192, 8192, n, torch.bfloat16)) for n in (8191, 8192)}
    assert 3 < times[8191] / times[8192] < 4.1


def test_what_is_padded_says_where_it_comes_from() -> None:
    found = tried(PadAll(), head())
    assert all(origin(n).source is not None for n in found.after.ops if n.target is aten.constant_pad_nd.default)
