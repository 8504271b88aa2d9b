"""Blocks under `torch.utils.checkpoint`: recomputed as the program does it, whatever the passes choose."""

from __future__ import annotations

import functools
import operator

import pytest
import torch
import torch.nn.functional as F
from cuda_traces import H100_THREADS, DropoutOfGpu, on_cuda
from rematerialised import remat
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from traces import captured, ops, tried

import tracefuse
from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.liveness import saved_bytes, saved_values
from tracefuse.optimizers.ops import is_view
from tracefuse.optimizers.passes import run_pipeline
from tracefuse.optimizers.remat import Remat
from tracefuse.optimizers.remat.forward import doubles
from tracefuse.optimizers.simplify import Simplify
from tracefuse.optimizers.trace import phase
from tracefuse.optimizers.verify import verify

OPTIONS = {
    **{f"weight {weight}": Remat(weight) for weight in (1.0, 0.5, 0.0)},
    **{f"budget {budget}": Remat(memory_budget=budget, stop_at_lowest_peak=False) for budget in (0.9, 0.5, 0.0)},
    "written again": Remat(recompute_materialized=True),
    "pinned": Remat(recompute=("*",)),
    "short chains": Remat(0.0, longest_chain=1),
}


@functools.cache
def stack(reentrant: bool) -> tracefuse.Capture:
    """Three checkpointed blocks with dropout and a norm."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(32), nn.Linear(32, 8))
        for _ in range(3)
    ]
    model = nn.ModuleList(blocks).double()
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)

    def step() -> Tensor:
        h = x.sin()
        for block in model:
            h = h + checkpoint(block, h, use_reentrant=reentrant)
        loss = h.square().mean()
        loss.backward()
        return loss

    return captured(step)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_drops_is_never_saved(reentrant: bool, options: str) -> None:
    capture = stack(reentrant)
    inside = {first.name for first in doubles(capture.trace).values() if not is_view(first)}
    kept = {s.name for s in saved_values(capture.trace)}
    assert {"addmm", "gelu"} <= inside - kept
    for passes in ([OPTIONS[options]], [Simplify(), OPTIONS[options]]):
        result = tried(passes, capture)
        assert {s.name for s in saved_values(result.after)}.isdisjoint(inside - kept)
        assert saved_bytes(result.after) <= saved_bytes(capture.trace)


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_second_computation_stays_and_is_told(reentrant: bool) -> None:
    trace = run_pipeline(stack(reentrant).trace, [Simplify()])[-1].after
    after, decisions = remat(trace, between_regions=False)
    assert [ops(t, "backward").count("gelu") for t in (stack(reentrant).trace, after)] == [3, 3]
    dropped = {d.value: d.reason for d in decisions if d.action == "drop"}
    assert {"gelu", "addmm"} <= dropped.keys()
    assert all("torch.utils.checkpoint" in reason for reason in dropped.values())
    assert ("recomputed by torch.utils.checkpoint" in dropped["gelu"]) == reentrant


def test_the_numbers_of_the_compiled_step_are_those_of_eager() -> None:
    capture = stack(False)
    for options in ({"remat": 1.0}, {"remat": 0.5}, {"remat": 0.0}):
        capture.optimize(**options).check()


def test_a_program_that_recomputes_nothing_has_no_doubles_but_views() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    trace = captured(lambda: model(torch.ones(2, 8)).sum().backward()).trace
    assert all(is_view(n) and phase(n) == "backward" for n in doubles(trace))


def test_doubles_have_equal_constants() -> None:
    x = torch.randn(3, requires_grad=True)
    trace = captured(
        lambda: checkpoint(lambda t: F.softplus(t.pow(3)), x.exp(), use_reentrant=False).sum().backward()
    ).trace
    pairs = {first.args[1] for second, first in doubles(trace).items() if "pow" in str(second.target)}
    assert pairs == {3}


def test_a_checkpoint_whose_input_is_overwritten_later_can_be_pinned() -> None:
    """It cannot be computed again after the write, so it is no longer one that must be."""
    w, counter, x = torch.randn(4, 4), torch.ones(4), torch.randn(3, 4, requires_grad=True)

    def step() -> Tensor:
        h = checkpoint(lambda t: torch.tanh(t * counter) @ w, x, use_reentrant=False).sin()
        h.sum().backward()
        counter.add_(1.0)
        return h

    found = tracefuse.capture(step)
    for options in ({"recompute": ["*"]}, {"recompute": ["*"], "memory_budget": 0.0}):
        found.optimize(fuse=False, **options).check()


BLOCK = nn.Sequential(nn.Linear(5, 9), DropoutOfGpu(0.4), nn.GELU(), nn.Linear(9, 5)).double()
LAYERS = nn.Sequential(*[nn.Sequential(nn.Linear(5, 5), DropoutOfGpu(0.1), nn.Tanh()) for _ in range(4)]).double()
CHECKPOINTS = {
    "reentrant": lambda x: checkpoint(BLOCK, x, use_reentrant=True),
    "sequential": lambda x: checkpoint_sequential(LAYERS, 2, x, use_reentrant=False),
    "nested": lambda x: checkpoint(lambda t: checkpoint(BLOCK, t, use_reentrant=False) * 2, x, use_reentrant=False),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_gpu_s_dropout_in_a_checkpoint_is_drawn_once_and_its_result_not_kept(kind: str) -> None:
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)

    def step() -> Tensor:
        loss = CHECKPOINTS[kind](x).square().sum()
        loss.backward()
        return loss

    capture = captured(step)
    drawn = ops(capture.trace).count("native_dropout")
    assert drawn == (len(LAYERS) if kind == "sequential" else 1)
    for weight in (1.0, 0.5, 0.0):
        capture.optimize(remat=weight).check()
    after = run_pipeline(on_cuda(capture.trace), [Simplify(), Remat()])[-1].after
    checkpointed = {first.name for first in doubles(capture.trace).values() if not is_view(first)}
    assert checkpointed
    assert {s.name for s in saved_values(after)}.isdisjoint(checkpointed)
    verify(Fuse(H100_THREADS).run(after, lambda _: None))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_in_a_checkpoint_read_the_mask_that_the_forward_drew(reentrant: bool) -> None:
    """Each inner block is computed three times, by one draw."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), DropoutOfGpu(0.2)) for _ in range(2))
    again = functools.partial(checkpoint, use_reentrant=reentrant)
    x = torch.randn(4, 8, requires_grad=True)

    def inside(x: Tensor) -> Tensor:
        for block in blocks:
            x = x + again(block, x)
        return x

    c = captured(lambda: again(inside, x.sin()).cos().sum().backward())
    assert ops(c.trace).count("native_dropout") == 2
    items = [n for n in c.trace.ops if n.target is operator.getitem and "native_dropout" in n.args[0].name]
    assert {phase(n) for n in items} == {"forward"}
    tried(Remat(), c)
