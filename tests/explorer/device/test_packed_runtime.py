"""How cuDNN's frontend is called, with a frontend that says what it was given and computes on the CPU."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tracefuse.device import packed_runtime
from tracefuse.device.packed_runtime import packed_scaled_dot_product_attention_backward as packed_backward

B, H, T, D = 2, 3, 16, 8
WIDTH = 3 * H * D


class NotSupported(Exception):
    """As in the frontend, no RuntimeError."""


@dataclass
class Described:
    """A tensor of a graph."""

    dim: list[int] = field(default_factory=list)
    stride: list[int] = field(default_factory=list)
    data_type: str = ""
    name: str = ""
    uid: int = -1
    is_output: bool = False

    def set_uid(self, uid: int) -> Described:
        self.uid = uid
        return self

    def set_output(self, is_output: bool) -> Described:
        self.is_output = is_output
        return self

    def set_dim(self, dim: list[int]) -> Described:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> Described:
        self.stride = stride
        return self

    def set_data_type(self, data_type: str) -> Described:
        self.data_type = data_type
        return self


class Graph:
    """One attention backward. `made` are all graphs of a test, `refuses` what the next one's check says."""

    made: list[Graph]
    refuses: str | None = None

    def __init__(self, **options: Any) -> None:
        self.options, self.runs = options, 0
        Graph.made.append(self)

    def tensor(self, **described: Any) -> Described:
        return Described(**described)

    def sdpa_backward(self, **given: Any) -> tuple[Described, ...]:
        self.given, self.gradients = given, (Described(), Described(), Described())
        return self.gradients

    def validate(self) -> None:
        for tensor in (*(self.given[n] for n in ("q", "k", "v", "o", "dO", "stats")), *self.gradients):
            assert len(tensor.dim) == len(tensor.stride) == 4
            assert tensor.stride[3] == 1
            assert all(type(n) is int for n in (*tensor.dim, *tensor.stride))

    def build_operation_graph(self) -> None: ...

    def create_execution_plans(self, modes: list[str]) -> None:
        assert modes == ["A", "FALLBACK"]

    def check_support(self) -> None:
        if Graph.refuses:
            raise NotSupported(Graph.refuses)

    def build_plans(self) -> None: ...

    def get_workspace_size(self) -> int:
        return 64

    def execute(self, buffers: dict[int, Tensor], workspace: Tensor, handle: Any) -> None:
        assert workspace.numel() == 64
        assert handle.stream == torch.cuda.current_stream().cuda_stream
        described = [*(self.given[n] for n in ("q", "k", "v", "o", "dO", "stats")), *self.gradients]
        for tensor in described:
            assert [tensor.stride, tensor.dim[:2]] == [[*buffers[tensor.uid].stride(), 1][:4], [B, H]]
        q, k, v, o, d_o, stats = (buffers[t.uid] for t in described[:6])
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_o, q, k, v, o, stats.view(B, H, T), 0.0, self.given["use_causal_mask"], scale=self.given["attn_scale"]
        )
        for gradient, values in zip(self.gradients, found, strict=True):
            assert gradient.is_output
            buffers[gradient.uid].copy_(values)
        self.runs += 1


def frontend() -> ModuleType:
    module = ModuleType("cudnn")
    module.pygraph, module.cudnnGraphNotSupportedError = Graph, NotSupported
    module.create_handle = mock.Mock(side_effect=lambda: SimpleNamespace(stream=None))
    module.set_stream = mock.Mock(side_effect=lambda handle, stream: setattr(handle, "stream", stream))
    module.data_type = SimpleNamespace(BFLOAT16="bf16", HALF="f16", FLOAT="f32")
    module.heur_mode = SimpleNamespace(A="A", FALLBACK="FALLBACK")
    return module


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    module = frontend()
    monkeypatch.setitem(sys.modules, "cudnn", module)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # what the index of the CPU is
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    # What runs instead is a CPU's, whatever its name.
    backward = packed_runtime.attention_backward
    monkeypatch.setattr(packed_runtime, "attention_backward", lambda kind, *rest: backward("cpu", *rest))
    Graph.made, Graph.refuses = [], None
    packed_runtime._packing.__dict__.clear()
    packed_runtime._told.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="gradients of attention are copied")
        yield module
    packed_runtime._packing.__dict__.clear()


def operands(causal: bool = True, scale: float | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """What the operator takes, and the packed gradient from attention by hand in float64."""
    projected = torch.randn(B, T, WIDTH, dtype=torch.bfloat16)
    q, k, v = (p.view(B, T, H, D).transpose(1, 2) for p in projected.chunk(3, -1))
    out, stats = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    grad = torch.randn(B, T, H, D, dtype=torch.bfloat16).transpose(1, 2)
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    scores = wide[0] @ wide[1].transpose(-2, -1) * (D**-0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), float("-inf"))
    exact = torch.autograd.grad(scores.softmax(-1) @ wide[2], wide, grad.double())
    return [grad, q, k, v, out, stats], [g.transpose(1, 2).flatten(2) for g in exact]


def run(tensors: list[Tensor], causal: bool = True, scale: float | None = None) -> Tensor:
    part = [T * WIDTH, D, WIDTH, 1]
    return packed_backward(
        *tensors, None, None, kind="cudnn", is_causal=causal, scale=scale, size=[B, T, WIDTH], stride=[T * WIDTH, WIDTH, 1],
        offsets=[0, H * D, 2 * H * D], query_stride=part, key_stride=part, value_stride=part,
    )  # fmt: skip


def assert_exact(found: Tensor, exact: list[Tensor]) -> None:
    torch.testing.assert_close(found.double(), torch.cat(exact, -1), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("causal", "scale"), [(True, None), (False, 0.4)])
def test_gradients_are_written_where_they_belong(cudnn, causal, scale):
    tensors, exact = operands(causal, scale)
    assert_exact(run(tensors, causal, scale), exact)
    (graph,) = Graph.made
    assert graph.runs == 1
    assert graph.options["io_data_type"] == graph.gradients[0].data_type == "bf16"
    assert graph.given["stats"].data_type == "f32"
    assert graph.given["stats"].dim == [B, H, T, 1]


def test_what_the_forward_padded_is_cut_off(cudnn):
    tensors, exact = operands()
    padded = torch.full((B, H, T + 3), torch.nan)
    padded[..., :T] = tensors[5].reshape(B, H, T)
    tensors[5] = padded
    assert_exact(run(tensors), exact)
    assert Graph.made[0].given["stats"].stride == [H * T, T, 1, 1]


def test_a_graph_is_built_once_for_a_layout_and_takes_other_numbers(cudnn):
    for _ in range(3):
        tensors, exact = operands()
        assert_exact(run(tensors), exact)
    assert [graph.runs for graph in Graph.made] == [3]
    run(operands(causal=False)[0], causal=False)
    run(operands(scale=0.4)[0], scale=0.4)
    tensors, exact = operands()
    tensors[1] = tensors[1].contiguous()
    assert_exact(run(tensors), exact)
    assert [graph.runs for graph in Graph.made] == [3, 1, 1, 1]
    assert cudnn.create_handle.call_count == cudnn.set_stream.call_count == 1


def test_another_stream_is_told_to_the_handle(cudnn, monkeypatch):
    tensors, _ = operands()
    run(tensors)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=8))
    run(tensors)
    run(tensors)
    assert [call.kwargs["stream"] for call in cudnn.set_stream.call_args_list] == [7, 8]
    assert cudnn.create_handle.call_count == 1


def test_an_expanded_gradient_is_written_out_before(cudnn):
    tensors, _ = operands()
    tensors[0] = torch.ones(1, 1, 1, 1, dtype=torch.bfloat16).expand(B, H, T, D)
    expected = packed_runtime.attention_backward(
        "cpu", [*tensors[1:5], tensors[0], tensors[5]], (None, None), True, None
    )
    packed = torch.cat([g.transpose(1, 2).flatten(2) for g in expected], -1)
    torch.testing.assert_close(run(tensors), packed)


# --- copied instead ---------------------------------------------------------------------------------------------------


def assert_copied(tensors: list[Tensor], exact: list[Tensor], reason: str) -> None:
    """The same numbers, and one warning however often it runs."""
    with pytest.warns(UserWarning, match=reason) as told:
        found = [run(tensors) for _ in range(2)]
    for packed in found:
        assert_exact(packed, exact)
    assert len(told) == 1
    assert not any(graph.runs for graph in Graph.made)


def test_what_cudnn_refuses_is_asked_once(cudnn):
    Graph.refuses = "no engine"
    assert_copied(*operands(), r"cuDNN refuses it \(no engine\): a newer")
    assert len(Graph.made) == 1


def test_without_the_frontend(cudnn, monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    assert_copied(*operands(), "cuDNN's frontend is not installed: pip install nvidia-cudnn-frontend")


def test_deterministic_algorithms(cudnn, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert_copied(*operands(), "deterministic algorithms are asked for")


def test_in_a_cuda_graph_nothing_is_built(cudnn, monkeypatch):
    tensors, exact = operands()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert_copied(tensors, exact, "run it once before")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert_exact(run(tensors), exact)
    assert [graph.runs for graph in Graph.made] == [1]


def test_memory_that_begins_at_no_multiple_of_16_bytes(cudnn):
    tensors, exact = operands()
    memory = torch.empty(tensors[0].numel() + 1, dtype=torch.bfloat16)
    odd = memory[1:].view(B, T, H, D).transpose(1, 2)
    tensors[0] = odd.copy_(tensors[0])
    assert_copied(tensors, exact, "does not begin at a multiple of 16 bytes")
