"""How many launches of a GPU a step's ops are, also where a CPU makes an optimizer's update tensor by tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tracefuse
from tracefuse.measure.launches import HOST_US, launches, launching_us
from tracefuse.optimizers.trace import phase
from tracefuse.widgets.payload.program import payload


def whole_step(**options: Any) -> tracefuse.Capture:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    x = torch.randn(4, 8)
    with tracefuse.capture() as c:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return c


def by_phase(capture: tracefuse.Capture) -> tuple[dict[str, float], dict[str, int]]:
    """The launches, and the ops, of the captured step's halves and of its update."""
    variant = capture.optimize().baseline
    assert variant.program.update is not None
    each = launches(variant.whole, variant.program.update.stepped)
    counts: dict[str, float] = {}
    ops: dict[str, int] = {}
    for node in variant.whole.ops:
        if node.name in each:
            counts[phase(node)] = counts.get(phase(node), 0.0) + each[node.name]
            ops[phase(node)] = ops.get(phase(node), 0) + 1
    return counts, ops


def test_an_update_that_a_gpu_makes_list_by_list_is_as_many_launches_as_lists() -> None:
    counts, ops = by_phase(whole_step())
    assert counts["update"] == pytest.approx(ops["update"] / 10)
    assert counts["forward"] == ops["forward"]
    assert counts["backward"] == ops["backward"]


@pytest.mark.parametrize("options", [{"foreach": False}, {"fused": True}, {"fused": False}])
def test_an_op_is_one_launch_where_it_was_asked_for(options: dict[str, Any]) -> None:
    counts, ops = by_phase(whole_step(**options))
    assert counts == ops


def test_each_group_of_an_optimizer_has_lists_of_its_own() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    weights, biases = ([p for p in model.parameters() if p.ndim == ndim] for ndim in (2, 1))
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}])
    with tracefuse.capture() as c:
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    counts, ops = by_phase(c)
    assert counts["update"] == pytest.approx(ops["update"] / 5)


@pytest.mark.parametrize("foreach", [None, False])
def test_optimizers_that_one_line_steps_are_counted_together(foreach: bool | None) -> None:
    """Their ops are told apart by their line alone: where one of them works tensor by tensor, all count so."""
    few, many = (nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(count)]) for count in (2, 20))
    optimizers = [torch.optim.SGD(few), torch.optim.SGD(many, foreach=foreach)]
    with tracefuse.capture() as c:
        sum(p.square().sum() for p in (*few, *many)).backward()
        for one in optimizers:
            one.step()
    counts, ops = by_phase(c)
    assert counts["update"] == pytest.approx(ops["update"] / (11 if foreach is None else 1))


def test_the_view_tells_of_such_an_update_what_a_gpu_launches() -> None:
    capture = whole_step()
    counts, _ = by_phase(capture)
    shown = payload(capture.optimize())
    assert shown["clock"]["launches"][0] == round(sum(counts.values()))
    (finding,) = [one for one in shown["findings"] + shown["small"] if one["id"] == "optimizer-not-fused"]
    assert finding["launches"] == pytest.approx(counts["update"])
    assert f"launches {counts['update']:.0f} lists on a GPU, which updates list by list by default" in finding["worth"]


def test_a_launch_takes_the_host_so_long() -> None:
    assert launching_us({"a": 1.0, "b": 0.5}) == 1.5 * HOST_US
