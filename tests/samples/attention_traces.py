"""Traces of a GPU's attention backward, without a GPU."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tracefuse.optimizers.cat.packed_attention import KINDS
from tracefuse.optimizers.ops import op_name
from tracefuse.optimizers.trace import Input, Output, Trace

PACKED = ModuleType("cudnn")
"""A module of that name that is not cuDNN's frontend."""


def attention_trace(
    kind: str,
    dtype: torch.dtype = torch.bfloat16,
    head: int = 64,
    dropout: float = 0.0,
    bias: bool = False,
    order: tuple[int, ...] = (0, 2, 1, 3),
) -> Trace:
    """The complaint's program on fake CUDA tensors: dq, dk, dv, permuted to `order`, reshaped, concatenated; view and sum.

    A random number is drawn behind attention, of which dead code elimination must not make a reason to keep it.
    """
    batch, heads, length = 2, 3, 16
    operator = next(op for op, name in KINDS.items() if name == kind)

    def rows(x: torch.Tensor) -> torch.Tensor:
        return x.permute(order).reshape(batch, length, heads * head)

    def cell(grad, q, k, v, out, stats, seed, offset, mask):  # type: ignore[no-untyped-def]
        mask = mask if bias else None
        if kind == "efficient":
            wanted = [True, True, True, False]
            found = operator(grad, q, k, v, mask, out, stats, seed, offset, dropout, wanted, True)
        elif kind == "flash":
            found = operator(grad, q, k, v, out, stats, None, None, length, length, dropout, True, seed, offset)
        else:
            lengths = (mask, None, None, length, length)
            found = operator(grad, q, k, v, out, stats, seed, offset, *lengths, dropout, True)
        packed = torch.cat([rows(x) for x in found[:3]], -1)
        packed = packed * torch.bernoulli(packed, 0.5)
        flat = packed.view(batch * length, -1)
        return flat, flat.sum(0)

    with FakeTensorMode():
        device = torch.device("cuda:0")
        four = [torch.empty(batch, length, heads, head, dtype=dtype, device=device).transpose(1, 2) for _ in range(5)]
        grad, q, k, v, out = four
        stats = torch.empty(batch, heads, length, 1, device=device)
        seed, offset = (torch.empty((), dtype=torch.int64, device=device) for _ in range(2))
        mask = torch.empty(batch, heads, length, length, dtype=dtype, device=device)
        inputs = (grad, q, k, v, out, stats, seed, offset, mask)
    graph = make_fx(cell, tracing_mode="fake")(*inputs).graph
    return _as_trace(graph)


def _as_trace(graph: fx.Graph) -> Trace:
    entries = tuple(Input(n.name, "input", n.name) for n in graph.nodes if n.op == "placeholder")
    for node in graph.nodes:
        node.meta["phase"] = "forward"
    results = graph.output_node().args[0]
    graph.output_node().args = (tuple(results),)
    names = [op_name(n) for n in results]
    return Trace(graph, entries, tuple(Output("result", name) for name in names))
