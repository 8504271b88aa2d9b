"""Batch norm of compiled graphs is what eager runs: cuDNN's where that takes it, with running statistics that are right."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import default_partition

import tracefuse
from tracefuse.dynamo.batch_norm import KEY, OP, batch_norm_as_eager_runs_it

aten = torch.ops.aten


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
    with batch_norm_as_eager_runs_it():
        ops = ops_of_cudnn_batch_norm()
    assert {"_batch_norm_with_update_functional", "batch_norm_backward"} <= ops
    assert not [name for name in ops if "native" in name]


def test_without_running_statistics_it_is_as_torch_has_it() -> None:
    with batch_norm_as_eager_runs_it():
        assert "_native_batch_norm_legit" in "".join(ops_of_cudnn_batch_norm(has_statistics=False))


def test_outside_nothing_is_changed_also_after_an_error() -> None:
    theirs = OP.py_kernels[KEY]
    with batch_norm_as_eager_runs_it():
        assert OP.py_kernels[KEY] is not theirs
    assert OP.py_kernels[KEY] is theirs
    with pytest.raises(ZeroDivisionError), batch_norm_as_eager_runs_it():
        _ = 1 / 0
    assert OP.py_kernels[KEY] is theirs
    assert "_native_batch_norm_legit_functional" in ops_of_cudnn_batch_norm()


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
