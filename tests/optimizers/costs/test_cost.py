"""Costs by hand, and FLOPs against torch's own counter."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import tracefuse
from tracefuse.optimizers.costs.convolutions import copied_bytes
from tracefuse.optimizers.costs.cost import (
    H100_SXM_DATASHEET,
    Peaks,
    bytes_moved,
    bytes_read,
    bytes_written,
    flops,
    op_class,
    roofline_seconds,
    touched_bytes,
)
from tracefuse.optimizers.costs.datasheets import TARGETS

aten = torch.ops.aten


def op(target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """`target` as a node; tensors among `args` become placeholders."""
    graph, mode = fx.Graph(), FakeTensorMode()
    with mode:
        fakes = fx.node.map_aggregate(args, lambda a: mode.from_tensor(a) if isinstance(a, torch.Tensor) else a)
        placed = fx.node.map_aggregate(fakes, lambda a: _placeholder(graph, a) if isinstance(a, torch.Tensor) else a)
        node = graph.call_function(target, placed, kwargs)
        node.meta["val"] = target(*fakes, **kwargs)
    return node


def _placeholder(graph: fx.Graph, fake: torch.Tensor) -> fx.Node:
    node = graph.placeholder(f"x{len(graph.nodes)}")
    node.meta["val"] = fake
    return node


def item(node: fx.Node, index: int) -> fx.Node:
    taken = node.graph.call_function(operator.getitem, (node, index))
    taken.meta["val"] = node.meta["val"][index]
    return taken


x = torch.zeros(4, 6)
CLASSES = [
    (op(aten.view.default, x, [24]), "view"),
    (op(aten._unsafe_view.default, x, [24]), "view"),
    (op(aten.expand.default, x, [2, 4, 6]), "view"),
    (op(aten.tanh.default, x), "pointwise"),
    (op(aten._to_copy.default, x, dtype=torch.bfloat16), "pointwise"),
    (op(aten.cat.default, [x, x]), "pointwise"),
    (op(aten.gelu_backward.default, x, x), "pointwise"),
    (op(aten.sum.dim_IntList, x, [1]), "reduction"),
    (op(aten._softmax.default, x, 1, False), "reduction"),
    (op(aten.native_layer_norm.default, x, [6], None, None, 1e-5), "reduction"),
    (op(aten.bernoulli.p, x, 0.5), "random"),
    (op(aten.mm.default, x, x.t().contiguous()), "heavy"),
    (op(aten.embedding.default, x, torch.zeros(3, dtype=torch.int64)), "heavy"),
    (op(aten.sort.default, x), "heavy"),
]


@pytest.mark.parametrize(("node", "expected"), CLASSES, ids=str)
def test_class(node: fx.Node, expected: str) -> None:
    assert op_class(node) == expected


def test_an_item_has_the_class_of_its_producer() -> None:
    norm = op(aten.native_layer_norm.default, x, [6], None, None, 1e-5)
    assert op_class(item(norm, 1)) == "reduction"
    assert op_class(item(op(aten.split.Tensor, x, 2), 0)) == "view"


def test_bytes_are_those_of_distinct_elements() -> None:
    assert touched_bytes(torch.zeros(3, 1).expand(3, 100)) == 12
    assert touched_bytes(torch.zeros(0, 5)) == 0
    add = op(aten.add.Tensor, torch.zeros(4, 6), torch.zeros(6))
    assert (bytes_read(add), bytes_written(add), bytes_moved(add)) == (96 + 24, 96, 216)


def test_views_and_items_move_nothing() -> None:
    assert bytes_moved(op(aten.view.default, x, [24])) == 0
    assert bytes_moved(item(op(aten.sort.default, x), 0)) == 0


def test_one_storage_is_read_once() -> None:
    mode, graph = FakeTensorMode(), fx.Graph()
    whole = _placeholder(graph, mode.from_tensor(torch.zeros(10)))
    part = graph.call_function(aten.slice.Tensor, (whole, 0, 0, 6))
    both = graph.call_function(aten.cat.default, ([whole, part],))
    with mode:
        part.meta["val"] = aten.slice.Tensor(whole.meta["val"], 0, 0, 6)
        both.meta["val"] = aten.cat.default([whole.meta["val"], part.meta["val"]])
    assert bytes_read(both) == 40
    assert bytes_written(both) == 64


def test_a_gather_reads_the_rows_it_takes_and_the_indices() -> None:
    embedding = op(aten.embedding.default, torch.zeros(1000, 8), torch.zeros(3, dtype=torch.int64))
    assert bytes_read(embedding) == 3 * 8 * 4 + 3 * 8


IMAGE, WEIGHT, STATISTICS = torch.zeros(2, 8, 4, 4), torch.zeros(8), torch.zeros(2, 4)
TURNED = IMAGE.to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("grad", "x", "result", "copies"),
    [
        (None, IMAGE, IMAGE, 0),
        (None, TURNED, TURNED, 0),
        (None, TURNED, IMAGE, 1),
        (IMAGE, TURNED, TURNED, 1),
        (TURNED, TURNED, IMAGE, 2),
        (TURNED, TURNED, None, 0),
    ],
)
def test_a_group_norm_copies_what_does_not_lie_as_its_result(
    grad: torch.Tensor | None, x: torch.Tensor, result: torch.Tensor | None, copies: int
) -> None:
    """Whatever the torch here makes of these strides: they are those of GPUs, with 2.14 and with later ones."""
    sizes = 2, 8, 16, 4
    if grad is None:
        node = op(aten.native_group_norm.default, x, WEIGHT, WEIGHT, *sizes, 1e-5)
        node.meta["val"] = result, STATISTICS, STATISTICS
    else:
        mask = [result is not None, True, True]
        node = op(aten.native_group_norm_backward.default, grad, x, STATISTICS, STATISTICS, WEIGHT, *sizes, mask)
        node.meta["val"] = result, WEIGHT, WEIGHT
    assert bytes_moved(node) == bytes_read(node) + bytes_written(node) + copies * 2 * IMAGE.nbytes


def trained(model: nn.Module, *args: torch.Tensor) -> Callable[[], None]:
    return lambda: model(*args).sum().backward()


class Attention(nn.Module):
    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, q * 2, q * 3)


a, b = torch.ones(3, 4, 5, requires_grad=True), torch.ones(3, 5, 6, requires_grad=True)
WITH_MATMULS = {
    "linear": trained(nn.Linear(5, 7), torch.randn(3, 5, requires_grad=True)),
    "linear 3d": trained(nn.Linear(5, 7, bias=False), torch.randn(2, 3, 5, requires_grad=True)),
    "bmm": lambda: torch.baddbmm(torch.ones(3, 4, 6), a, b).sum().backward(),
    "conv": trained(nn.Conv2d(4, 6, 3, stride=2), torch.randn(2, 4, 9, 8, requires_grad=True)),
    "conv, no input gradient": trained(nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)),
    "transposed conv": trained(nn.ConvTranspose2d(4, 6, 3, stride=2), torch.randn(2, 4, 5, 5, requires_grad=True)),
}


@pytest.mark.parametrize("name", WITH_MATMULS)
def test_flops_are_those_of_torchs_counter(name: str) -> None:
    run = WITH_MATMULS[name]
    with FlopCounterMode(display=False) as counter:
        run()
    with tracefuse.capture() as captured:
        run()
    assert sum(flops(node) for node in captured.trace.ops) == counter.get_total_flops() > 0


def test_a_grouped_convolution_multiplies_within_its_groups() -> None:
    """By hand: torch's counter leaves the groups out of the weight's gradient."""
    with tracefuse.capture() as captured:
        trained(nn.Conv2d(4, 6, 3, stride=2, groups=2), torch.randn(2, 4, 9, 8, requires_grad=True))()
    one = 2 * (2 * 6 * 4 * 3) * (4 // 2 * 3 * 3)
    assert [f for n in captured.trace.ops if (f := flops(n))] == [one, 2 * one]


@pytest.mark.parametrize("packet", ["flash_attention_for_cpu", "efficient_attention"])
def test_attention_forward_is_two_matmuls(packet: str) -> None:
    q, k = torch.zeros(2, 3, 5, 8), torch.zeros(2, 3, 7, 8)
    target = getattr(aten, f"_scaled_dot_product_{packet}").default
    node = op(target, q, k, k) if "cpu" in packet else op(target, q, k, k, None, True)
    assert flops(node) == 2 * (2 * 2 * 3 * 5 * 7 * 8)


def test_attention_backward_is_five_matmuls() -> None:
    q = torch.randn(2, 3, 5, 8, requires_grad=True)
    with tracefuse.capture() as captured:
        trained(Attention(), q)()
    one = 2 * 2 * 3 * 5 * 5 * 8
    assert sorted(f for n in captured.trace.ops if (f := flops(n))) == [2 * one, 5 * one]


def test_roofline_is_the_slower_of_bandwidth_and_arithmetic() -> None:
    big = op(aten.mm.default, torch.zeros(512, 512), torch.zeros(512, 512))
    assert roofline_seconds(big, Peaks(1e30, 1e9, "slow arithmetic")) == pytest.approx(2 * 512**3 / 1e9)
    assert roofline_seconds(big, Peaks(1e9, 1e30, "slow memory")) == pytest.approx(3 * 512 * 512 * 4 / 1e9)
    assert roofline_seconds(op(aten.view.default, x, [24]), H100_SXM_DATASHEET) == 0


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_what_is_copied_around_a_convolution_comes_on_top_of_its_arithmetic(memory_format: torch.memory_format) -> None:
    images, weight = torch.zeros(2, 8, 16, 16).to(memory_format=memory_format), torch.zeros(8, 8, 3, 3)
    node = op(aten.convolution.default, images, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    copied = 2 * images.nbytes if memory_format is torch.contiguous_format else 0  # of as many bytes it yields
    assert copied_bytes(node) == copied
    slow = Peaks(1e9, 1e6, "slow arithmetic")
    assert roofline_seconds(node, slow) == pytest.approx(flops(node) / 1e6 + 2 * copied / 1e9)


def test_nothing_is_copied_around_a_convolution_that_tensor_cores_do_not_run() -> None:
    model, x = nn.Conv2d(16, 16, 3, padding=1), torch.randn(8, 16, 32, 32)
    (node,) = (n for n in tracefuse.capture(lambda: model(x)).trace.ops if n.target is aten.convolution.default)
    with_tf32, without = (TARGETS["H100"].peaks(tf32=False, convolutions=on) for on in (True, False))
    moved_s = (bytes_moved(node) - 2 * copied_bytes(node)) / without.bytes_per_s
    assert roofline_seconds(node, without) == max(moved_s, flops(node) / without.flops_rate(torch.float32, True))
    assert roofline_seconds(node, with_tf32) >= moved_s + 2 * copied_bytes(node) / with_tf32.bytes_per_s
