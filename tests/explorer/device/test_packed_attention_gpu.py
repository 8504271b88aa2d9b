"""Attention's backward into one buffer on a GPU: cuDNN writes every element, on any stream, in CUDA graphs, in threads."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from kernels import poisoned
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tracefuse
from tracefuse.device import packed_runtime
from tracefuse.device.packed_attention import TEXT, cat_options
from tracefuse.optimizers.cat import Cat
from tracefuse.optimizers.cat.packed_attention import GPU_KINDS, PACKED_BACKWARD, Packing
from tracefuse.optimizers.passes import run_pipeline
from tracefuse.optimizers.trace import Trace

pytestmark = pytest.mark.gpu
f16, bf16 = torch.float16, torch.bfloat16
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@pytest.fixture(autouse=True)
def frontend() -> Iterator[None]:
    """Where cuDNN's frontend is; a warning, that gradients are copied after all, is an error."""
    pytest.importorskip("cudnn", reason="pip install nvidia-cudnn-frontend")
    torch.cuda.init()
    torch.manual_seed(0)
    packed_runtime._told.clear()
    assert packed_runtime.why_no_frontend() is None
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="gradients of attention are copied")
        yield


def projection(length: int, heads: int, kv_heads: int, head: int, dtype: torch.dtype) -> Tensor:
    width = (heads + 2 * kv_heads) * head
    return torch.randn(3, length, width, device="cuda", dtype=dtype, requires_grad=True)


def step(x: Tensor, heads: int, kv_heads: int, head: int, causal: bool, loss_of: Callable[[Tensor], Tensor]) -> Tensor:
    """The loss of attention on q, k and v as split leaves them, strided; its gradient."""
    sizes = [n * head for n in (heads, kv_heads, kv_heads)]
    q, k, v = (p.view(x.shape[0], x.shape[1], -1, head).transpose(1, 2) for p in x.split(sizes, -1))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=kv_heads != heads)
    loss = loss_of(y.transpose(1, 2))
    loss.backward()
    return loss


def squares(y: Tensor) -> Tensor:
    return y.square().sum()


def packed(capture: tracefuse.Capture) -> Trace:
    after = run_pipeline(capture.trace, [Cat(Packing(GPU_KINDS))])[-1].after
    assert [n for n in after.ops if n.target is PACKED_BACKWARD]
    return after


def in_float64(x: Tensor, *options: object) -> Tensor:
    wide = x.detach().double().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        step(wide, *options)  # type: ignore[arg-type]
    assert wide.grad is not None
    return wide.grad


def check(kind: str, dtype: torch.dtype, length: int, kv_heads: int, head: int, causal: bool, loss_of=squares) -> None:
    """As near to float64 as eager is; what is not written is NaN."""
    options = (4, kv_heads, head, causal, loss_of)
    x = projection(length, 4, kv_heads, head, dtype)
    with sdpa_kernel(BACKENDS[kind]):
        capture = tracefuse.capture(lambda x: step(x, *options), x)
    eager, exact = x.grad, in_float64(x, *options)
    assert eager is not None
    after = packed(capture)
    (node,) = (n for n in after.ops if n.target is PACKED_BACKWARD)
    assert node.kwargs["kind"] == kind
    with poisoned():
        outputs = tracefuse.replay(after, capture.example_inputs, capture.rng_states)
    (found,) = (t for out, t in zip(after.outputs, outputs, strict=True) if out.kind == "gradient")
    assert (found.shape, found.stride(), found.dtype) == (eager.shape, eager.stride(), eager.dtype)
    allowed = 2 * (eager.double() - exact).abs().max().item() + torch.finfo(dtype).eps
    assert (found.double() - exact).abs().max().item() <= allowed


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [bf16, f16], ids=str)
@pytest.mark.parametrize("head", [64, 96, 128])
@pytest.mark.parametrize("length", [77, 128, 130])
@pytest.mark.parametrize("kind", GPU_KINDS)
def test_gradients_are_as_good_as_eagers(kind, length, head, dtype, causal):
    check(kind, dtype, length, 4, head, causal)


@pytest.mark.parametrize(("kind", "causal"), itertools.product(["cudnn", "flash"], [False, True]))
def test_grouped_queries(kind, causal):
    check(kind, bf16, 130, 2, 64, causal)


def test_the_gradient_of_a_sum_is_one_number_for_all():
    check("cudnn", bf16, 77, 4, 64, True, loss_of=Tensor.sum)


def test_a_gradient_whose_rows_are_in_pieces():
    check("cudnn", bf16, 77, 4, 64, True, loss_of=lambda y: (y.transpose(-1, -2).contiguous() ** 2).sum())


# --- the operator -----------------------------------------------------------------------------------------------------


def operands(scale: float = 1.0) -> tuple[tuple[Tensor, ...], dict]:
    """Of the packed operator, for 2 x 4 heads, length 96, width 64."""
    batch, heads, length, width = 2, 4, 96, 64
    shape = (batch, length, heads, width)
    g, q, k, v = (torch.randn(shape, device="cuda", dtype=bf16).transpose(1, 2) * scale for _ in range(4))
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)
    row = 3 * heads * width
    part = [length * row, width, row, 1]
    layout = {
        "kind": "cudnn", "is_causal": True, "scale": None,
        "size": [batch, length, row], "stride": [length * row, row, 1],
        "offsets": [0, heads * width, 2 * heads * width],
        "query_stride": part, "key_stride": part, "value_stride": part,
    }  # fmt: skip
    return (g, q, k, v, found[0], found[1], found[6], found[7]), layout


def copied(tensors: tuple[Tensor, ...]) -> Tensor:
    g, q, k, v, out, stats, *seeds = tensors
    gradients = packed_runtime.attention_backward("cudnn", (q, k, v, out, g, stats), seeds, True, None)
    return torch.cat([t.transpose(1, 2).flatten(2) for t in gradients], -1)


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_on_another_stream():
    tensors, layout = operands()
    expected, side = copied(tensors), torch.cuda.Stream()
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(3):
        grad = torch.zeros_like(tensors[0])
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(20):
                busy = busy @ busy.softmax(-1)
            grad.copy_(tensors[0])
            found = PACKED_BACKWARD(grad, *tensors[1:], **layout)
        torch.cuda.current_stream().wait_stream(side)
        assert_near(found, expected)
        assert_near(PACKED_BACKWARD(*tensors, **layout), expected)


def test_in_a_cuda_graph_that_is_replayed_with_other_numbers():
    tensors, layout = operands()
    PACKED_BACKWARD(*tensors, **layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = PACKED_BACKWARD(*tensors, **layout)
    others, _ = operands(0.5)
    for tensor, other in zip(tensors, others, strict=True):
        tensor.copy_(other)
    found.fill_(float("nan"))
    graph.replay()
    assert_near(found, copied(others))


def test_a_graph_that_is_recorded_before_the_first_run_copies_and_says_so():
    tensors, layout = operands()
    expected = copied(tensors)  # ATen's own graph is built
    packed_runtime._packing.graphs.clear()
    graph = torch.cuda.CUDAGraph()
    with pytest.warns(UserWarning, match="run it once before"), torch.cuda.graph(graph):
        found = PACKED_BACKWARD(*tensors, **layout)
    graph.replay()
    assert_near(found, expected)
    assert_near(PACKED_BACKWARD(*tensors, **layout), expected)


def test_in_threads_at_once():
    cases = [operands() for _ in range(4)]
    expected = [copied(tensors) for tensors, _ in cases]
    torch.cuda.synchronize()
    found: dict[int, list[Tensor]] = {}

    def run(index: int) -> None:
        tensors, layout = cases[index]
        with torch.cuda.stream(torch.cuda.Stream()):
            found[index] = [PACKED_BACKWARD(*tensors, **layout) for _ in range(10)]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for index, results in found.items():
        for result in results:
            assert_near(result, expected[index])
    assert sorted(found) == [0, 1, 2, 3]


@pytest.mark.parametrize("reason", ["deterministic", "missing"])
def test_what_is_not_packed_is_copied_and_said_once(reason):
    tensors, layout = operands()
    expected = copied(tensors)
    missing = mock.patch.object(packed_runtime, "why_no_frontend", return_value="not installed: pip install it")
    strict = mock.patch("torch.are_deterministic_algorithms_enabled", return_value=True)
    with missing if reason == "missing" else strict:
        with pytest.warns(UserWarning, match="copied into one tensor"):
            found = PACKED_BACKWARD(*tensors, **layout)
        again = PACKED_BACKWARD(*tensors, **layout)
    assert_near(found, expected)
    assert_near(again, expected)


def test_the_host_waits_for_nothing():
    tensors, layout = operands()
    PACKED_BACKWARD(*tensors, **layout)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        PACKED_BACKWARD(*tensors, **layout)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- programs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuda_graph", [False, True], ids=["plain", "cuda graph"])
def test_a_compiled_program(cuda_graph):
    """On this machine the default passes pack; eager and compiled gradients are as near to float64."""
    assert cat_options() == {"packing": Packing(GPU_KINDS)}
    options = (4, 4, 64, True, squares)
    x = projection(128, 4, 4, 64, bf16)
    with sdpa_kernel(BACKENDS["cudnn"]):
        capture = tracefuse.capture(lambda x: step(x, *options), x)
    eager, exact = x.grad, in_float64(x, *options)
    assert eager is not None
    variant = capture.optimize().check()
    assert f"def {TEXT.name}(" in variant.source
    program = variant.compile(cuda_graph=cuda_graph)
    for _ in range(2):
        x.grad = None
        program().backward()
        assert x.grad is not None
        allowed = 2 * (eager.double() - exact).abs().max().item() + torch.finfo(bf16).eps
        assert (x.grad.double() - exact).abs().max().item() <= allowed
