"""The board of one rank's step: times of a machine of several GPUs, and sweeps of what becomes of gathered parameters."""

from __future__ import annotations

import pytest
import torch
from ranks import fake_ranks, gathering_graph, needs_gloo, sharded
from torch import nn

import tracefuse
from tracefuse.config import Config
from tracefuse.errors import MeasureError, OptionError, TracefuseError
from tracefuse.measure.frontier import MOVED
from tracefuse.widgets.view.boarding import MOST_SWEPT, swept
from tracefuse.widgets.view.explorer import Explorer

pytestmark = needs_gloo
MACHINE = "4xH200,nvlink"


@pytest.fixture
def capture() -> tracefuse.Capture:
    """A rank of four, of a group that exchanges nothing."""
    with fake_ranks(4):
        model = sharded(nn.Sequential(*[nn.Linear(32, 32) for _ in range(3)]))
        c = tracefuse.capture(lambda: model(torch.randn(8, 32)).tanh().sum().backward())
        _ = c.trace
    return c


@pytest.fixture
def explorer(capture: tracefuse.Capture) -> Explorer:
    return capture.explore()


def test_the_view_tells_times_of_a_machine_of_several_gpus(explorer: Explorer) -> None:
    assert "8xH100,nvlink" in dict(explorer.payload["clock"]["choices"])
    explorer.show_times_of(MACHINE)
    clock = explorer.payload["clock"]
    assert (clock["device"], clock["chosen"]) == (MACHINE, MACHINE)
    assert MACHINE in dict(clock["choices"])
    assert tracefuse.target().name == "H200"
    found = explorer.variant.baseline.overlap(MACHINE).steps[0]
    assert clock["step_us"][0] == pytest.approx(found.step_us)


def test_a_sweep_of_what_becomes_of_parameters_gives_the_points_of_the_frontier(explorer: Explorer) -> None:
    explorer.show_times_of(MACHINE)
    assert explorer.board["gathers"]
    explorer.sweep(budgets=[None, 0.5], reshards=[None, True, False])
    assert explorer.status["error"] is None
    frontier = explorer.variant.frontier(MACHINE, budgets=[None, 0.5])
    rows = {Config().changed(**row["config"]): row for row in explorer.board["rows"]}
    for point in frontier.points:
        row = rows[point.config]
        assert (row["call"], row["device"]) == (point.call, MACHINE)
        assert row["step_us"] == pytest.approx(point.step_us)
        assert row["peak_bytes"] == point.peak_nbytes
    best = {Config().changed(**row["config"]) for row in rows.values() if row["is_best"]}
    assert best & {point.config for point in frontier.best}
    assert min(rows[one]["step_us"] for one in best) == pytest.approx(frontier.best[0].step_us)


def test_a_graph_that_starts_its_collectives_itself_is_said_to_exchange_tensors() -> None:
    with gathering_graph() as graph:
        explorer = graph.optimize().explore()
        needs = next(one["needs"] for one in explorer.payload["passes"] if one["name"] == "overlap")
        assert needs == "off"
        assert MACHINE not in str(explorer.payload["clock"]["choices"])
        with pytest.raises(MeasureError, match="capture_step"):
            explorer.show_times_of(MACHINE)


def test_what_is_no_machine_is_refused_with_what_one_is(explorer: Explorer) -> None:
    with pytest.raises(TracefuseError, match="write 8xH100,nvlink"):
        explorer.show_times_of("8xH100,string")


def test_a_step_of_one_process_has_no_such_machine() -> None:
    x = torch.randn(4, requires_grad=True)
    explorer = tracefuse.capture(lambda: x.sin().sum().backward()).explore()
    assert not explorer.board["gathers"]
    assert MACHINE.partition(",")[0] not in str(explorer.payload["clock"]["choices"])
    with pytest.raises(OptionError, match="choose from"):
        explorer.show_times_of(MACHINE)


def test_each_choice_is_a_configuration_once() -> None:
    found = swept(Config(), budgets=[None, 0.5], passes=["overlap"], reshards=[None, True, False])
    assert len(found) == len(set(found)) == 6
    assert {dict(one.overlap or ()).get("reshard") for one in found} == {None, True, False}


def test_a_sweep_keeps_the_options_that_are_there() -> None:
    own = Config.of(overlap={"bucket_mb": 50.0})
    found = [dict(one.overlap or ()) for one in swept(own, reshards=[None, True, False])]
    assert [one.pop("bucket_mb") for one in found] == [50.0] * 3
    assert found == [{}, {**MOVED, "reshard": True}, {**MOVED, "reshard": False}]


def test_where_gathered_parameters_are_asked_for_overlap_is_not_switched() -> None:
    passes = [name for name in Config().names if name not in ("remat", "overlap")][:6]
    asked = {"reshards": [None, True, False], "weights": [1.0]}
    found = swept(Config(), passes=[*passes, "overlap"], **asked)
    assert found == swept(Config(), passes=passes, **asked)
    assert len(found) == 3 * 2**6 <= MOST_SWEPT < 3 * 2**7
    assert len(swept(Config(), passes=["overlap"])) == 2
