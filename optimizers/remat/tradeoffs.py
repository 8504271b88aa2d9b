"""Tradeoffs of rematerialisation as data: what memory costs in time, and what a weight costs in memory.

`pareto` lists the choices of rematerialisation for budgets and weights:

    point = a budget and a weight, and what they come to: bytes saved, static peak, modelled seconds, ops recomputed

Nothing is rewritten: a point is what `remat` would cut between forward and backward (without a budget it may then compute
more again between regions, `between`), and its peak is a forecast. The cuts of one trace share their network and the
corners already found.

`static_cost` counts what a rewritten trace saves, holds and moves:

    residual chain, 128 layers     saved   forward peak   backward peak   kernels      they move
    weight 1 or 1/2            100.4 KiB        102 KiB         102 KiB   529, 5 unique  912 KiB
    weight 0                   100.0 KiB      101.6 KiB       102.3 KiB   656, 15 unique 1.48 MiB
    weight 0, any chain        100.0 KiB      101.2 KiB       102.3 KiB   657, 19 unique 13.5 MiB

"any chain" is `between_chain=None`. `tests/bench/depth.py` prints these by depth, with the seconds that they take to compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.liveness import peak_bytes, saved_bytes
from tracefuse.optimizers.ops import does_work
from tracefuse.optimizers.remat.budget import Budgeting
from tracefuse.optimizers.remat.forecast import recompute_seconds
from tracefuse.optimizers.remat.forward import Forward, start_of
from tracefuse.optimizers.remat.options import RematOptions
from tracefuse.optimizers.trace import Trace

BUDGETS = tuple(tenth / 10 for tenth in range(10, -1, -1))
WEIGHTS = 1.0, 0.5, 0.0
"""Input weights that are compared, and offered."""


@dataclass(frozen=True)
class Point:
    """One choice. `budget` is as it was given, `weight` the producer input weight; sizes are bytes of the trace before fuse.

    `recompute_seconds` are modelled (`budget.fused_seconds`), `recomputed_ops` counts ops that do work. `met` says whether
    no more is saved than the budget allows; there is no budget where it is None.
    """

    budget: int | float | None
    weight: float
    saved_bytes: int
    peak_bytes: int
    recompute_seconds: float
    recomputed_ops: int
    met: bool


def pareto(
    trace: Trace,
    budgets: Sequence[int | float | None] = BUDGETS,
    weights: Sequence[float] = WEIGHTS,
    options: RematOptions | None = None,
) -> list[Point]:
    """A point for each weight and budget, weights outermost, with the other `options` as they are.

    `trace` is what `remat` would be given: a joint trace without kernels, rematerialised or not.
    """
    start = start_of(trace)
    points: list[Point] = []
    budgeting: Budgeting | None = None
    for weight in weights:
        chosen = replace(options or RematOptions(), producer_input_weight=weight)
        budgeting = Budgeting(start.trace, start.forward, chosen, budgeting)
        points += [_point(start.forward, budgeting, chosen, budget) for budget in budgets]
    return points


def _point(forward: Forward, budgeting: Budgeting, options: RematOptions, budget: float | None) -> Point:
    choice, _ = budgeting.meet(budget)
    return Point(
        budget,
        options.producer_input_weight,
        choice.nbytes,
        budgeting.peak(choice),
        recompute_seconds(forward, choice, options.peaks),
        sum(does_work(n) for n in choice.again),
        budget is None or choice.nbytes <= budgeting.limit(budget),
    )


@dataclass(frozen=True)
class StaticCost:
    """Of a joint trace: bytes that the forward saves for the backward, the most bytes alive in each half, `kernels` and how
    many of them differ, and the bytes that they read and write."""

    ops: int
    saved_nbytes: int
    forward_peak_nbytes: int
    backward_peak_nbytes: int
    kernels: int
    unique_kernels: int
    kernel_nbytes: int


def static_cost(trace: Trace) -> StaticCost:
    """What is known of a trace without running it; of its kernels, after the pass fuse."""
    calls = [node for node in trace.ops if isinstance(node.target, Kernel)]
    forward, backward = trace.split()
    return StaticCost(
        ops=trace.op_count,
        saved_nbytes=saved_bytes(trace),
        forward_peak_nbytes=peak_bytes(forward),
        backward_peak_nbytes=peak_bytes(backward),
        kernels=len(calls),
        unique_kernels=len({node.target for node in calls}),
        kernel_nbytes=sum(node.target.nbytes_for(len(node.args)) for node in calls),
    )
