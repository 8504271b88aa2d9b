"""What memory costs in time: the choices of rematerialisation for a list of budgets and weights, as data.

    point = a budget and a weight, and what they come to: bytes saved, static peak, modelled seconds, ops recomputed

Nothing is rewritten: a point is what `remat` would cut between forward and backward (without a budget it may then compute
more again between regions, `between`), and its peak is a forecast. The cuts of one trace share their network and the
corners already found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tracefuse.optimizers.remat.budget import Budgeting, Frontier, recompute_seconds
from tracefuse.optimizers.remat.cut import Remat, forgotten
from tracefuse.optimizers.remat.dropout_products import expose_products
from tracefuse.optimizers.remat.forecast import Forecast
from tracefuse.optimizers.remat.forward import Forward, is_free
from tracefuse.optimizers.trace import Trace

BUDGETS = tuple(tenth / 10 for tenth in range(10, -1, -1))


@dataclass(frozen=True)
class Point:
    """One choice. `budget` is as it was given, `weight` the producer input weight; sizes are bytes of the trace before fuse.

    `recompute_seconds` are modelled (`budget.fused_seconds`), `recomputed_ops` counts ops that do work. `met` says whether
    no more is saved than the budget allows; None is no budget.
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
    weights: Sequence[float] = (1.0, 0.5, 0.0),
    options: Remat | None = None,
) -> list[Point]:
    """A point for each weight and budget, weights outermost, with the other `options` as they are.

    `trace` is what `remat` would be given: a joint trace without kernels, rematerialised or not.
    """
    new = forgotten(trace)
    expose_products(new.graph)
    forward = Forward(new)
    options = options or Remat()
    # Neither knows the weight: it counts where no budget does.
    shared = Frontier(forward, options), Forecast(new)
    points: list[Point] = []
    for weight in weights:
        chosen = replace(options, producer_input_weight=weight)
        budgeting = Budgeting(new, forward, chosen, *shared)
        points += [_point(forward, budgeting, chosen, budget) for budget in budgets]
    return points


def _point(forward: Forward, budgeting: Budgeting, options: Remat, budget: float | None) -> Point:
    choice, _ = budgeting.meet(budget)
    return Point(
        budget,
        options.producer_input_weight,
        choice.nbytes,
        budgeting.peak(choice),
        recompute_seconds(forward, choice, options.peaks),
        sum(not is_free(n) for n in choice.again),
        budget is None or choice.nbytes <= budgeting.limit(budget),
    )
