"""Compiled graphs hold the operators that eager runs: cuDNN's batch norm where that takes it, resizing in one piece."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import default_partition

import tracefuse
from tracefuse.dynamo.eager_operators import BATCH_NORM, operators_as_eager_runs_them

aten = torch.ops.aten
KEY = torch._C.DispatchKey.Autograd


def ops_of_cudnn_batch_norm(has_statistics: bool = True) -> set[str]:
    """The ops of AOTAutograd's joint graph of the op that eager runs on a GPU; the graph is traced, and run on the CPU."""
    seen: set[str] = set()

    def program(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        known = (mean, var) if has_statistics else (None, None)
        return aten.cudnn_batch_norm(x, weight, bias, *known, True, 0.1, 1e-5)[0].square().sum()

    def partition(joint: Any, inputs: Any, **rest: Any) -> Any:
        targets = [node.target for node in joint.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
        seen.update(target.overloadpacket.__name__ for target in targets)
        return default_partition(joint, inputs, **rest)

    x, weight = torch.randn(4, 3, 5, 5, requires_grad=True), torch.ones(3, requires_grad=True)
    run = aot_function(program, fw_compiler=lambda graph, _: graph.forward, partition_fn=partition)
    run(x, weight, torch.zeros(3, requires_grad=True), torch.zeros(3), torch.ones(3)).backward()
    assert x.grad is not None
    return seen


def test_torch_itself_decomposes_it_into_the_native_one() -> None:
    assert "_native_batch_norm_legit_functional" in ops_of_cudnn_batch_norm()


def test_inside_it_is_the_one_that_cudnn_runs_and_so_is_its_backward() -> None:
    with operators_as_eager_runs_them():
        ops = ops_of_cudnn_batch_norm()
    assert {"_batch_norm_with_update_functional", "batch_norm_backward"} <= ops
    assert not [name for name in ops if "native" in name]


def test_without_running_statistics_it_is_as_torch_has_it() -> None:
    with operators_as_eager_runs_them():
        assert "_native_batch_norm_legit" in "".join(ops_of_cudnn_batch_norm(has_statistics=False))


def test_outside_nothing_is_changed_also_after_an_error() -> None:
    operators = BATCH_NORM, aten.upsample_nearest2d.default, aten.hardshrink.default
    theirs = [operator.py_kernels[KEY] for operator in operators]
    with operators_as_eager_runs_them():
        assert not [mine for mine, other in zip(operators, theirs, strict=True) if mine.py_kernels.get(KEY) is other]
    assert [operator.py_kernels[KEY] for operator in operators] == theirs
    with pytest.raises(ZeroDivisionError), operators_as_eager_runs_them():
        _ = 1 / 0
    assert [operator.py_kernels[KEY] for operator in operators] == theirs
    assert "_native_batch_norm_legit_functional" in ops_of_cudnn_batch_norm()


def test_two_threads_may_be_inside() -> None:
    theirs = BATCH_NORM.py_kernels[KEY]
    first, second = operators_as_eager_runs_them(), operators_as_eager_runs_them()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert BATCH_NORM.py_kernels[KEY] is not theirs
    second.__exit__(None, None, None)
    assert BATCH_NORM.py_kernels[KEY] is theirs


RESIZED: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "upsample_nearest1d": (lambda x: F.interpolate(x, scale_factor=2.0), (2, 3, 5)),
    "upsample_nearest2d": (lambda x: F.interpolate(x, scale_factor=2.0), (2, 3, 5, 4)),
    "upsample_nearest3d": (lambda x: F.interpolate(x, size=(4, 6, 7)), (2, 3, 2, 3, 4)),
    "_upsample_nearest_exact2d": (lambda x: F.interpolate(x, scale_factor=1.5, mode="nearest-exact"), (2, 3, 4, 4)),
    "upsample_linear1d": (lambda x: F.interpolate(x, scale_factor=2.0, mode="linear"), (2, 3, 5)),
    "upsample_bilinear2d": (lambda x: F.interpolate(x, size=(7, 9), mode="bilinear", align_corners=True), (2, 3, 4, 4)),
    "_upsample_bilinear2d_aa": (lambda x: F.interpolate(x, size=(3, 2), mode="bilinear", antialias=True), (2, 3, 6, 5)),
    "upsample_bicubic2d": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bicubic"), (2, 3, 4, 4)),
    "upsample_trilinear3d": (lambda x: F.interpolate(x, scale_factor=2.0, mode="trilinear"), (1, 2, 3, 3, 3)),
    "hardshrink": (F.hardshrink, (4, 5)),
    "softshrink": (F.softshrink, (4, 5)),
    "multi_margin_loss": (lambda x: F.multi_margin_loss(x, torch.arange(len(x))), (3, 5)),
    "multilabel_margin_loss_forward": (lambda x: F.multilabel_margin_loss(x, torch.zeros(x.shape).long()), (3, 5)),
}


@pytest.mark.parametrize("name", RESIZED)
@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
def test_the_backend_runs_the_operator_of_eager_and_its_backward(name: str, is_dynamic: bool) -> None:
    torch._dynamo.reset()
    operator, shape = RESIZED[name]

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return (operator(x * self.weight) * 1.25).square().sum()

    model, x = Scaled(), torch.randn(shape, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(model(x), [x, model.weight])
    compiled = torch.compile(model, backend="tracefuse", dynamic=is_dynamic, options={"decompose": False})
    found = torch.autograd.grad(compiled(x), [x, model.weight])
    torch.testing.assert_close(found, expected)
    ops = [n for graph in tracefuse.compiled(model) for n in graph.trace.ops]
    ran = {n.target.overloadpacket.__name__ for n in ops if isinstance(n.target, torch._ops.OpOverload)}
    assert name in ran
    assert not ran & {"_unsafe_index", "index", "_unsafe_index_put", "index_put", "gather"}
    assert [each for each in ran if each.endswith("backward") and name.removesuffix("_forward") in each]


@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_compiled_model_runs_cudnns_batch_norm(channels_last: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).cuda()
    x = torch.randn(4, 3, 9, 9, device="cuda")
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="tracefuse", options={"fuse": False})
    for _ in range(2):
        compiled(x).square().mean().backward()
        eager(x).square().mean().backward()
    (graph,) = tracefuse.compiled(model)
    names = " ".join(str(node.target) for node in graph.trace.ops)
    assert "_batch_norm_with_update_functional" in names
    assert "native_batch_norm" not in names
    for mine, theirs in zip(model.state_dict().values(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs)
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)
