"""The points of memory against time: each is what the pass does, and a forecast peak is the peak."""

from __future__ import annotations

import dataclasses
import itertools
import math

import programs
import pytest
from rematerialised import program, remat

from tracefuse.optimizers.liveness import peak_bytes, saved_bytes
from tracefuse.optimizers.ops import does_work
from tracefuse.optimizers.remat import Remat
from tracefuse.optimizers.remat.tradeoffs import pareto
from tracefuse.optimizers.simplify import Simplify
from tracefuse.optimizers.trace import recomputes

BUDGETS = (None, 1.0, 0.7, 0.4, 0.1, 0.0)
OPTIONS = {
    "all": Remat(recompute=("*",), between_regions=False),
    "none": Remat(save=("*",), between_regions=False),
    "free": Remat(0.0, between_regions=False),
    "literal": Remat(stop_at_lowest_peak=False, between_regions=False),
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_every_point_is_what_the_pass_does(name: str, options: str) -> None:
    trace = program(name).trace
    for point in pareto(trace, BUDGETS, (1.0, 0.5), OPTIONS[options]):
        asked = dataclasses.replace(OPTIONS[options], producer_input_weight=point.weight, memory_budget=point.budget)
        after = asked.run(trace, lambda _: None)
        assert (point.saved_bytes, point.peak_bytes) == (saved_bytes(after), peak_bytes(after))
        assert point.recomputed_ops == sum(does_work(n) for n in after.ops if recomputes(n))
        assert (point.recompute_seconds > 0) == (point.recomputed_ops > 0)
        limit = math.inf if point.budget is None else int(point.budget * saved_bytes(trace))
        assert point.met == (point.saved_bytes <= limit)


def test_less_memory_takes_more_time_and_no_higher_peak() -> None:
    trace = Simplify().run(program("gpt").trace, lambda _: None)
    points = pareto(trace, weights=(0.5,))
    assert [p.budget for p in points] == [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]
    for more, less in itertools.pairwise(points):
        assert less.peak_bytes <= more.peak_bytes
        assert less.saved_bytes <= more.saved_bytes
        assert less.recompute_seconds >= more.recompute_seconds
    assert points[-1].recompute_seconds > points[0].recompute_seconds


def test_the_trace_stays_as_it_was_and_what_it_recomputes_does_not_matter() -> None:
    trace = program("gpt").trace
    text = trace.code
    again = remat(trace, memory_budget=0.3)[0]
    assert pareto(again, (0.5,), (0.5,)) == pareto(trace, (0.5,), (0.5,))
    assert trace.code == text
