"""A dropout's result from its saved mask: one byte per element is kept, and nothing is drawn again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cuda_traces import H100_THREADS, on_cuda
from rematerialised import leaf, remat, saved
from torch import Tensor
from traces import captured, tried

import tracefuse
from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.liveness import saved_bytes, saved_values
from tracefuse.optimizers.ops import is_random, op_name
from tracefuse.optimizers.remat import Remat
from tracefuse.optimizers.remat.schedule import expose_products, restore_products
from tracefuse.optimizers.simplify import Simplify
from tracefuse.optimizers.trace import Trace, recomputes

aten = torch.ops.aten


def step(dtype: torch.dtype = torch.float64) -> tracefuse.Capture:
    """A dropout between two matmuls: the second's weight gradient reads its result."""
    x, w, v = (leaf(16, 16).detach().to(dtype).requires_grad_() for _ in range(3))

    def run() -> Tensor:
        loss = (torch.native_dropout(F.gelu(x @ w), 0.25, True)[0] @ v).square().sum()
        loss.backward()
        return loss

    return captured(run)


def simplified(capture: tracefuse.Capture) -> Trace:
    return Simplify().run(capture.trace, lambda _: None)


@pytest.mark.parametrize(
    "options", [{"recompute_materialized": True}, {"producer_input_weight": 0.0}, {"memory_budget": 0.6}], ids=str
)
def test_the_mask_is_kept_and_the_result_is_not(options: dict[str, float]) -> None:
    capture = step()
    trace = simplified(capture)
    after = tried([Simplify(), Remat(**options)], capture).after  # type: ignore[arg-type]
    (again,) = [n for n in after.ops if n.target is aten.native_dropout_backward.default and recomputes(n)]
    mask = again.args[1]
    assert {s.name: s.nbytes for s in saved_values(after)}[mask.name] == 16 * 16
    assert recomputes(again) not in saved(after)
    assert saved_bytes(after) < saved_bytes(trace)
    assert sum(is_random(n) and "getitem" not in op_name(n) for n in after.ops) == 1, "one draw"


def test_without_need_the_forward_is_as_it_was() -> None:
    trace = simplified(step())
    after, _ = remat(trace, save=("*",))
    assert [op_name(n) for n in after.ops] == [op_name(n) for n in trace.ops]
    copy = trace.copy()
    restore_products(expose_products(copy.graph))
    assert copy.code == trace.code


@pytest.mark.parametrize("arguments", [(0.25, False), (0.0, True), (1.0, True)])
def test_a_dropout_that_drops_nothing_or_all_is_no_product(arguments: tuple[float, bool]) -> None:
    x = leaf(4, 4)
    trace = captured(lambda: torch.native_dropout(x.exp(), *arguments)[0].square().sum().backward()).trace.copy()
    assert expose_products(trace.graph) == []


def test_fused_on_a_gpu_the_forward_keeps_16_bytes_for_the_mask() -> None:
    x, w = (torch.randn(64, 64, requires_grad=True) for _ in range(2))

    def run() -> Tensor:
        loss = torch.native_dropout(F.gelu(x @ w), 0.25, True)[0].sin().sum()
        loss.backward()
        return loss

    trace = on_cuda(simplified(captured(run)))
    after, _ = remat(trace)
    assert any(n.target is aten.native_dropout_backward.default and recomputes(n) for n in after.ops)
    kept = saved_values(Fuse(H100_THREADS).run(after, lambda _: None))
    assert sorted(s.nbytes for s in kept) == [16, 64 * 64 * 4]
